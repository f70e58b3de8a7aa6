"""The kinds of findings, in the order in which a report has them.

A new kind is one row here, one test, and one line of `docs/nan.md` or `docs/zero.md`.
"""

from typing import NamedTuple

BROKEN, SIZE, MISSING = "broken", "size", "missing"  # a NaN or an error, a wrong size, no gradient


class FindingKind(NamedTuple):
    """A kind of finding.

    Attributes:
      name: the kind of a finding.
      head: the line that a report begins the finding with.
      severity: `BROKEN`, `SIZE` or `MISSING`; behind a broken gradient no missing one is looked
        for.
    """

    name: str
    head: str
    severity: str


_ROWS = (
    FindingKind("value", "the value is not finite", BROKEN),
    FindingKind("raises", "an operation raises an error", BROKEN),
    FindingKind("vjp", "the backward pass creates NaN or inf", BROKEN),
    FindingKind("sum", "finite cotangents have a sum that is not finite", BROKEN),
    FindingKind("underflow", "the gradient underflows", SIZE),
    FindingKind("grows", "the gradient grows in the backward pass", SIZE),
    FindingKind("shrinks", "the gradient shrinks in the backward pass", SIZE),
    FindingKind("zero", "the gradient is exactly zero", MISSING),
)
FINDING_KINDS = {kind.name: kind for kind in _ROWS}
_ORDER = {kind.name: i for i, kind in enumerate(_ROWS)}


def order_of(name: str) -> int:
    """The place of a kind in a report."""
    return _ORDER[name]
