"""What the outputs of a step are updates of: its arguments."""

import functools

import numpy as np

from clipgrad._arrays import widened_leaf
from clipgrad._compare.judge import CLEAR, EQUAL_ROUNDINGS, Judgment
from clipgrad._compare.record import Record, Row
from clipgrad._compare.sketches import host_sketch
from clipgrad._programs import on_host


class Starts:
    """The arguments of a step, and which of them an output is an update of.

    What Adam makes of a gradient that is zero but for rounding is decided by rounding. The
    parameter hides this: its update is a small part of it.
    """

    def __init__(self, record: Record) -> None:
        self._rows = [] if record.is_loss else [record.rows[i] for i in record.of("argument")]
        self._sketch = functools.cache(lambda i: _sketch_of(self._rows[i]))

    def may_matter(self, judgment: Judgment, row: Row) -> bool:
        """Whether what moves an output as far as its versions are apart could be rounding."""
        near = EQUAL_ROUNDINGS * row.eps, CLEAR * judgment.tolerance
        return judgment.is_judged and near[0] < judgment.difference <= near[1]

    def of(self, output: Row) -> np.ndarray | None:
        """The sketch of the argument, of one shape and dtype, that is nearest to an output."""
        if output.numbers.sketch is None:
            return None
        kind, end = (output.shape, output.dtype), output.numbers.sketch[0]
        alike = [i for i, row in enumerate(self._rows) if (row.shape, row.dtype) == kind]
        starts = [x for i in alike if (x := self._sketch(i)) is not None]
        return min(starts, key=lambda x: float(np.linalg.norm(x - end)), default=None)


def _sketch_of(argument: Row) -> np.ndarray | None:
    _, sketch, _, whole = argument.numbers
    if sketch is not None:
        return sketch[0]
    return None if whole is None else host_sketch(widened_leaf(on_host(whole)))
