"""Cotangents in half precision that are zero, but not in float32."""

from collections.abc import Sequence

import numpy as np

from clipgrad._diagnose.diagnosis import GradientFinding, GradientRow

_HALF = ("float16", "bfloat16")
# The share of zeros more than in float32; transformers, MLPs and LSTMs in bfloat16 have 0.004.
_LOST = 0.1


def may_underflow(rows: Sequence[GradientRow]) -> bool:
    """Whether there are so many zeros in half precision that a second look is due."""
    return any(row.dtype in _HALF and np.max(row.zeros) >= _LOST for row in rows)


def underflow_finding(
    rows: Sequence[GradientRow], wide: Sequence[GradientRow]
) -> list[GradientFinding]:
    """A finding for the first part in backward order with zeros that float32 has not."""
    for row, other in zip(reversed(rows), reversed(wide), strict=True):
        lost = row.zeros - other.zeros
        if row.dtype not in _HALF or np.max(lost) < _LOST:
            continue
        step = int(np.unravel_index(np.argmax(lost), lost.shape)[-1]) if row.scans else None
        message = (
            f"{row.file}:{row.line}: {np.max(lost):.0%} of the cotangent of {row.operation} are "
            f"zero in {row.dtype} and not in float32"
            + (f", in module {row.module}" if row.module else "")
            + (f", at step {step} of {row.scans[-1]}" if row.scans else "")
            + "; multiply the loss by a scale such as 2 ** 15 and divide the gradient by it, or "
            "use " + ("bfloat16" if row.dtype == "float16" else "float32")
        )
        where = row.file, row.line, row.operation, row.module
        return [GradientFinding("underflow", *where, step, message)]
    return []
