"""The kinds of findings, in the order in which a report has them.

A new kind is one row here, one test, and one line of `docs/nan.md` or `docs/zero.md`.
"""

# By kind the line that a report begins the finding with.
FINDING_KINDS = {
    "value": "the value is not finite",
    "raises": "an operation raises an error",
    "vjp": "the backward pass creates NaN or inf",
    "sum": "finite cotangents have a sum that is not finite",
    "underflow": "the gradient underflows",
    "grows": "the gradient grows in the backward pass",
    "shrinks": "the gradient shrinks in the backward pass",
    "zero": "the gradient is exactly zero",
}
BROKEN = frozenset(("value", "raises", "vjp", "sum"))  # behind these no missing one is looked for
