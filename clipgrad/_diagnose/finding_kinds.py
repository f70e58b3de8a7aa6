"""The kinds of findings, in the order in which a report has them.

A new kind is a row here, and a call in `_diagnosis` (`diagnose.py`) of what judges it. It needs a
sick program in `tests/diagnose/diagnose_zoo.py`, and a line in the docstrings of `diagnose` and of
`GradientFinding` (`records.py`) and in `docs/nan.md`: a test holds these together.
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
