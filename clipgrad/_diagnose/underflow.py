"""Cotangents in half precision that are zero, but not with a scaled loss."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from clipgrad._diagnose.finding_texts import function_finding
from clipgrad._diagnose.measure import LOSS_SCALES, Measured, measure, widened_largest
from clipgrad._diagnose.probe import Summary
from clipgrad._diagnose.program_units import Unit, module_sites, units_and_rows
from clipgrad._diagnose.records import GradientFinding, GradientRow
from clipgrad._losses import TracedLoss

_HALF_NAMES = ("float16", "bfloat16")
# The share of zeros that a scale brings back; transformers, MLPs and LSTMs in bfloat16 have 0.004.
_LOST = 0.1
# A scale of the loss cures an underflow: it brings back more than this of the largest element. Of
# a fitted softmax it brings back less: the largest are differences that have rounded to zero.
_CURED = 0.5


def underflow_findings(
    traced: TracedLoss, units: list[Unit], measured: Measured, rows: Sequence[GradientRow]
) -> Iterator[GradientFinding]:
    """A finding for the first part in backward order with zeros that a scaled loss has not.

    If no part of the program has one, the gradient of an argument may.
    """
    if not _may_underflow(traced, measured, rows):
        return
    scale, scaled, cured = _scaled_loss(traced, units)
    scaled_rows = [row for _, row in units_and_rows(units, scaled.sites)]
    if not any(cured):
        return
    for row, other in zip(reversed(rows), reversed(scaled_rows), strict=True):
        lost = np.where(row.dtype in _HALF_NAMES, row.zeros - other.zeros, 0)
        if np.max(lost) >= _LOST:
            is_at_step = bool(row.scans) and not np.all(lost >= _LOST)
            step = int(np.unravel_index(np.argmax(lost), lost.shape)[-1]) if is_at_step else None
            around = f", in module {row.module}" if row.module else ""
            around += f", at step {step} of {row.scans[-1]}" if is_at_step else ""
            what = _lost(np.max(lost), f"cotangent of {row.operation}", row.dtype, around, scale)
            where = row.file, row.line, row.operation, row.module, step
            yield GradientFinding("underflow", *where, f"{row.location}: {what}")
            return
    shares = {}
    for i, grad, other, is_cured in zip(
        traced.chosen, measured.grads, scaled.grads, cured, strict=True
    ):
        dtype, share = str(traced.inputs[i].dtype), float(grad.zeros - other.zeros)
        if is_cured and dtype in _HALF_NAMES and share >= _LOST:
            shares[share, dtype, traced.names[i]] = None
    if shares:
        share, dtype, name = max(shares, key=lambda key: key[:2])
        more = f" ({len(shares)} arguments like it in all)" if len(shares) > 1 else ""
        what = _lost(share, f"gradient of {name}", dtype, more, scale)
        yield function_finding("underflow", what, traced)


def _may_underflow(traced: TracedLoss, measured: Measured, rows: Sequence[GradientRow]) -> bool:
    """Whether there are so many zeros in half precision that a second look is due."""
    zeros = [(row.dtype, row.zeros) for row in rows]
    pairs = zip(traced.chosen, measured.grads, strict=True)
    zeros += [(str(traced.inputs[i].dtype), grad.zeros) for i, grad in pairs]
    return any(dtype in _HALF_NAMES and np.max(x, initial=0) >= _LOST for dtype, x in zeros)


def _scaled_loss(
    traced: TracedLoss, units: list[Unit]
) -> tuple[float | None, Measured, list[bool]]:
    """The first scale of the loss that leaves the gradient finite, and which leaves it brings back.

    If none does, there is no scale, and those that lose elements are told by the largest.
    """
    largest = widened_largest(traced.program, traced.inputs, traced.chosen)
    tried = []
    for scale in LOSS_SCALES:
        sites = module_sites(units)
        scaled = measure(traced.program, traced.inputs, traced.chosen, sites, scale=scale)
        cured = [
            _is_cured(grad, wide, scale) for grad, wide in zip(scaled.grads, largest, strict=True)
        ]
        if not any(np.any(grad.nonfinite) for grad in scaled.grads):
            return scale, scaled, cured
        tried.append((None, scaled, cured))
    return tried[0]


def _is_cured(scaled: Summary, largest: float, scale: float) -> bool:
    """Whether a scaled loss has the gradient of a leaf that float32 has, or one not finite."""
    unscaled = float(scaled.largest) / scale
    is_equal = _CURED * largest <= unscaled <= largest / _CURED
    return largest > 0 and (is_equal or bool(np.any(scaled.nonfinite)))


def _lost(share: Any, of: str, dtype: str, around: str, scale: float | None) -> str:
    other = "bfloat16" if dtype == "float16" else "float32"
    cure = f"use {other}"
    if scale is not None:
        cure = f"scale the loss, for example by 2 ** {np.log2(scale):.0f}, and divide the gradient "
        cure += f"by the scale; or use {other}"
    return f"{share:.0%} of the {of} is zero in {dtype} but not in float32{around}; {cure}"
