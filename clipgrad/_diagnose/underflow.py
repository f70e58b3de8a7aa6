"""Cotangents in half precision that are zero, but not in float32."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clipgrad._diagnose.cotangents import LOSS_SCALE, Summary
from clipgrad._diagnose.findings import function_finding
from clipgrad._diagnose.records import GradientFinding, GradientRow
from clipgrad._diagnose.subject import DiagnosisSubject

_HALF_NAMES = ("float16", "bfloat16")
# The share of zeros more than in float32; transformers, MLPs and LSTMs in bfloat16 have 0.004.
_LOST = 0.1
# A scale of the loss cures an underflow: it brings back more than this of the largest element. Of
# a fitted softmax it brings back less: the largest are differences that have rounded to zero.
_CURED = 0.5


def may_underflow(
    rows: Sequence[GradientRow], given: DiagnosisSubject, gradients: Sequence[Summary]
) -> bool:
    """Whether there are so many zeros in half precision that a second look is due."""
    own = [(row.dtype, row.zeros) for row in rows]
    pairs = zip(given.chosen, gradients, strict=True)
    own += [(str(given.inputs[i].dtype), gradient.zeros) for i, gradient in pairs]
    return any(dtype in _HALF_NAMES and np.max(zeros, initial=0) >= _LOST for dtype, zeros in own)


def underflow_findings(
    rows: Sequence[GradientRow],
    others: Sequence[Sequence[GradientRow]],
    given: DiagnosisSubject,
    gradients: Sequence[Sequence[Summary]],
) -> list[GradientFinding]:
    """A finding for the first part in backward order with zeros that others have not.

    The others are the same in float32, and with a scaled loss: what a scale does not bring back is
    no cotangent that underflows, as where the probabilities of a softmax have rounded to 0 and 1.
    If no part of the program has one, the gradient of an argument may.
    """
    for row, *same in zip(reversed(rows), *map(reversed, others), strict=True):
        lost = _lost_share(row.dtype, row, *same)
        if np.max(lost) >= _LOST:
            step = int(np.unravel_index(np.argmax(lost), lost.shape)[-1]) if row.scans else None
            around = f", in module {row.module}" if row.module else ""
            around += f", at step {step} of {row.scans[-1]}" if row.scans else ""
            what = _told(np.max(lost), f"cotangent of {row.operation}", row.dtype, around)
            where = row.file, row.line, row.operation, row.module, step
            return [GradientFinding("underflow", *where, f"{row.location}: {what}")]
    shares = {}
    for i, *same in zip(given.chosen, *gradients, strict=True):
        dtype = str(given.inputs[i].dtype)
        if (share := float(_lost_share(dtype, *same))) >= _LOST:
            shares[share, dtype, given.names[i]] = None
    if not shares:
        return []
    share, dtype, name = max(shares, key=lambda own: own[:2])
    more = f" ({len(shares)} arguments like it in all)" if len(shares) > 1 else ""
    what = _told(share, f"gradient of {name}", dtype, more)
    return [function_finding("underflow", what, given)]


def _lost_share(dtype: str, own: Any, wide: Any, scaled: Any) -> Any:
    """The share of zeros that neither float32 nor a scaled loss has, if the scale cures them."""
    lost = own.zeros - np.maximum(wide.zeros, scaled.zeros)
    is_cured = np.asarray(scaled.largest) / LOSS_SCALE >= _CURED * np.asarray(wide.largest)
    is_cured = (dtype in _HALF_NAMES) & (is_cured | (np.asarray(scaled.nonfinite) > 0))
    return np.where(is_cured, lost, 0)


def _told(share: float, of: str, dtype: str, around: str) -> str:
    other = "bfloat16" if dtype == "float16" else "float32"
    return (
        f"{share:.0%} of the {of} is zero in {dtype} but not in float32{around}; scale the loss, "
        f"for example by 2 ** 15, and divide the gradient by the scale; or use {other}"
    )
