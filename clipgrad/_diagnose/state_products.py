"""The lines inside of a scan that multiply its state: there the cotangent grows."""

import functools
from collections.abc import Callable

from clipgrad._names import Location, Place
from clipgrad._programs import (
    BACK_AT_ANY_SIZE,
    Chain,
    called_program,
    flow,
    numeric_of,
    opened,
    scan_counts,
)

# What a value is of the state at the begin of a step: nothing, or this, multiplied at these lines.
_Products = frozenset[Location] | None


def state_products(scan: Place) -> list[Location]:
    """The lines, in their order, at which a step of a scan multiplies its state."""
    constants, carried = scan_counts(scan.equation)
    body = called_program(scan.equation)
    inputs: list[_Products] = [None] * len(opened(body)[0].invars)
    inputs[constants : constants + carried] = [frozenset()] * carried

    def step(chain: Chain, operands: list, inside: Callable[[], list]) -> list[_Products]:
        if numeric_of(chain[0]).back not in BACK_AT_ANY_SIZE:
            return inside()
        place = functools.reduce(lambda around, e: Place(e, around), reversed(chain), scan)
        return [lines if lines is None else lines | {place.location} for lines in inside()]

    lines = _joined(*flow(body, inputs, step, _joined)[:carried]) or ()
    return sorted((line for line in lines if line.file), key=lambda line: line[:2])


def _joined(*each: _Products) -> _Products:
    every = [lines for lines in each if lines is not None]
    return frozenset().union(*every) if every else None
