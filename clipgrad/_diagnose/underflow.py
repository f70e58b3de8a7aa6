"""Cotangents in half precision that are zero, but not in float32."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clipgrad._diagnose.cotangents import LOSS_SCALE, Summary
from clipgrad._diagnose.diagnosis import GradientFinding, GradientRow
from clipgrad._diagnose.findings import function_finding
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
    zeros = [row.zeros for row in rows if row.dtype in _HALF_NAMES]
    pairs = zip(given.chosen, gradients, strict=True)
    zeros += [g.zeros for i, g in pairs if str(given.inputs[i].dtype) in _HALF_NAMES]
    return any(np.max(share, initial=0) >= _LOST for share in zeros)


def underflow_finding(
    rows: Sequence[GradientRow], others: Sequence[Sequence[GradientRow]]
) -> list[GradientFinding]:
    """A finding for the first part in backward order with zeros that others have not.

    The others are the same in float32, and with a scaled loss: what a scale does not bring back is
    no cotangent that underflows, as where the probabilities of a softmax have rounded to 0 and 1.
    """
    for row, *same in zip(reversed(rows), *map(reversed, others), strict=True):
        lost = _lost_share(row, *same)
        if row.dtype not in _HALF_NAMES or np.max(lost) < _LOST:
            continue
        step = int(np.unravel_index(np.argmax(lost), lost.shape)[-1]) if row.scans else None
        message = (
            f"{row.location}: {np.max(lost):.0%} of the cotangent of {row.operation} is "
            f"zero in {row.dtype} but not in float32"
            + (f", in module {row.module}" if row.module else "")
            + (f", at step {step} of {row.scans[-1]}" if row.scans else "")
            + f"; {_underflow_advice(row.dtype)}"
        )
        where = row.file, row.line, row.operation, row.module
        return [GradientFinding("underflow", *where, step, message)]
    return []


def _lost_share(own: Any, wide: Any, scaled: Any) -> Any:
    """The share of zeros that neither float32 nor a scaled loss has, if the scale cures them."""
    lost = own.zeros - np.maximum(wide.zeros, scaled.zeros)
    is_cured = np.asarray(scaled.largest) / LOSS_SCALE >= _CURED * np.asarray(wide.largest)
    return np.where(is_cured | (np.asarray(scaled.nonfinite) > 0), lost, 0)


def underflow_of_arguments(
    given: DiagnosisSubject, gradients: Sequence[Summary], others: Sequence[Sequence[Summary]]
) -> list[GradientFinding]:
    """Findings of underflow in the gradients of arguments."""
    lost = {}
    for i, gradient, *same in zip(given.chosen, gradients, *others, strict=True):
        share, dtype = float(_lost_share(gradient, *same)), str(given.inputs[i].dtype)
        if dtype in _HALF_NAMES and share >= _LOST:
            lost[given.names[i]] = share, dtype
    if not lost:
        return []
    name = max(lost, key=lambda name: lost[name])
    share, dtype = lost[name]
    more = f" ({len(lost)} arguments like it in all)" if len(lost) > 1 else ""
    what = f"{share:.0%} of the gradient of {name} is zero in {dtype} but not in float32{more}"
    return [function_finding("underflow", f"{what}; {_underflow_advice(dtype)}", given)]


def _underflow_advice(dtype: str) -> str:
    other = "bfloat16" if dtype == "float16" else "float32"
    return (
        "scale the loss, for example by 2 ** 15, and divide the gradient by the scale; or use "
        + other
    )
