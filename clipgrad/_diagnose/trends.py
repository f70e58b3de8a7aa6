"""Cotangents that grow or shrink steadily on their way back."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from clipgrad._diagnose.measure import Measured
from clipgrad._diagnose.program_units import SCAN, Unit, ancestors
from clipgrad._diagnose.records import GradientFinding, GradientRow
from clipgrad._diagnose.state_products import state_products
from clipgrad._errors import first_few
from clipgrad._losses import TracedLoss
from clipgrad._names import Place, dependence
from clipgrad._programs import scan_counts

# Measured on MLPs, CNNs, LSTMs, GRUs and transformers of flax in float32 and bfloat16, at their
# initialization and after 15 steps of Adam: a factor of 0.52 (GELU, 12 layers: 4e-4 in all) or
# 0.70 (ReLU) to 1.04 per layer, of 0.71 (LSTM, GRU, loss at the last step) to 1.01 per step.
# A plain RNN of spectral radius 0.5 has 0.5.
# The bound holds for exactly 0.6 a step, which float32 makes 0.60000002 of.
_GROWS, _SHRINKS = 1.05, 0.6 * (1 + 1e-3)
FAR_IN_ALL = 1e4  # and four orders of magnitude in all
# However slow, a decay by so much in all leaves nothing of the first steps: with a loss at the last
# step LSTMs and GRUs of flax at their initialization have 3e-10 to 2e-9 in all over 50 steps, 6e-20
# to 4e-18 over 100, and less than this, or zero in float32, over 200.
_GONE = 1e-30
_MANY = 6  # layers or steps: a trend of fewer is not one
_STEADY = 0.8  # the share of the variance that a trend explains; the models above: 0.5 to 1
# Sums of equal contributions of T steps grow T-fold at most, so that more than that is a factor;
# LSTMs and GRUs with a loss at each step reach 3, the demo's `char-rnn` 50 to 2000 of 40 steps.
_LONG = 16
_SHOWN_LINES = 3


class Trend(NamedTuple):
    """The growth of a series of norms in the order of the backward pass."""

    factor: float  # per entry, of the line through the logarithms
    total: float  # along this line from the first entry to the last
    ratio: float  # of the last entry to the first
    steadiness: float  # the share of the variance of the logarithms that the line explains
    entries: int
    is_rounded: bool  # to zero: the entry behind the last, which is smaller than `_GONE`

    @property
    def growth(self) -> float | None:
        """The factor per entry if the series grows or shrinks too far, else None."""
        if self.steadiness < _STEADY:
            return None
        is_gone = self.factor < 1 and (self.total <= _GONE or self.is_rounded)
        grows = self.factor >= _GROWS and self.total >= FAR_IN_ALL
        shrinks = self.factor <= _SHRINKS and self.total <= 1 / FAR_IN_ALL
        return self.factor if grows or shrinks or is_gone else None

    @property
    def growth_in_time(self) -> float | None:
        """The growth for the state of a scan, which adds up contributions of its steps."""
        outgrows = self.entries >= _LONG and self.ratio > self.entries and self.factor >= _GROWS
        return self.growth or (self.ratio ** (1 / (self.entries - 1)) if outgrows else None)


def trend(norms: Sequence[float] | np.ndarray) -> Trend | None:
    """The trend of norms in backward order, as far as they are positive and finite."""
    array = np.asarray(norms, np.float64)
    usable = np.isfinite(array) & (array > 0)
    end = len(array) if usable.all() else int(np.argmin(usable))
    is_rounded = 0 < end < len(array) and array[end] == 0 and array[end - 1] <= _GONE
    array = array[:end]
    if len(array) < _MANY:
        return None
    logs, places = np.log(array), np.arange(len(array))
    slope, start = np.polyfit(places, logs, 1)
    spread = np.sum((logs - logs.mean()) ** 2)
    steadiness = 1 - np.sum((logs - start - slope * places) ** 2) / spread if spread else 0.0
    factor, ratio = np.exp(slope), np.exp(logs[-1] - logs[0])
    total = np.exp(slope * (len(array) - 1))
    return Trend(
        float(factor), float(total), float(ratio), float(steadiness), len(array), bool(is_rounded)
    )


def trend_findings(
    pairs: Sequence[tuple[Unit, GradientRow]], traced: TracedLoss, measured: Measured
) -> Iterator[GradientFinding | str]:
    """A finding for each scan, and one for the depth of the model, if they grow or shrink.

    A decay is a note while all leaves keep a gradient.
    """
    all_keep = not any(np.all(grad.zeros == 1) for grad in measured.grads)
    for unit, row in pairs:
        series = trend(over_steps(row)[::-1]) if row.operation == SCAN else None
        if series and series.growth_in_time:
            where = f"at each of the {series.entries} steps of the scan"
            finding = _trend_finding(row, series, series.growth_in_time, where, unit.place)
            leaves = _begins_with(unit, traced) if series.factor < 1 else []
            largest = float(np.nanmax(row.norm))
            is_lost = _has_lost(traced, measured, leaves, row.scans[-1], largest)
            yield finding if series.factor > 1 or is_lost else _note(finding, all_keep)
    deep = layers(pairs, traced.program)
    series = trend([float(row.norm) for row in reversed(deep)])
    if series and series.growth:
        all_layers = all(row.is_layer for row in deep)
        entries = "modules with a matrix product" if all_layers else "parts of the model"
        where = f"at each of the {series.entries} {entries}"
        finding = _trend_finding(deep[0], series, series.growth, where)
        largest = max(float(row.norm) for row in deep)
        is_lost = _has_lost(traced, measured, traced.chosen, len(deep), largest)
        yield finding if series.growth > 1 or is_lost else _note(finding, all_keep)


def _products(scan: Place) -> str:
    """The lines inside of a scan that multiply its state, if they are other lines than its own."""
    lines = dict.fromkeys(map(str, state_products(scan)))
    others = [line for line in lines if line != str(scan.location)]
    return f"; its state is multiplied at {first_few(others, _SHOWN_LINES)}" if others else ""


def _note(finding: GradientFinding, all_keep: bool) -> str:
    end = "; all leaves keep a gradient" if all_keep else ""
    return f"{finding.message.partition('; ')[0]}{end}"


def layers(pairs: Sequence[tuple[Unit, GradientRow]], program: Any) -> list[GradientRow]:
    """The rows of the depth of a model: each is computed from the one before.

    They are those of its layers, or of all parts if it has none. Parts beside each other, such as
    the heads of a model, are no depth.
    """
    outside = [(unit, row) for unit, row in pairs if not row.scans]
    deep = [(unit, row) for unit, row in outside if row.is_layer]
    deep = deep if len(deep) >= _MANY else outside
    if len(deep) < _MANY:
        return []
    above = ancestors(program, [unit for unit, _ in deep])
    chain = [len(deep) - 1]
    for i in reversed(range(len(deep) - 1)):
        if i in above[chain[-1]]:
            chain.append(i)
    return [deep[i][1] for i in reversed(chain)]


def over_steps(row: GradientRow) -> np.ndarray:
    """The norm at each step of the innermost scan, in order of time."""
    norms = row.norm
    norms = np.flip(norms, -1) if row.reverse else norms
    return np.sqrt(np.sum(np.square(norms.reshape(-1, row.scans[-1])), axis=0))


def _begins_with(unit: Unit, traced: TracedLoss) -> list[int]:
    """The leaves that what a scan carries begins with, or that it takes step by step.

    Those that each step reads get a gradient from the last steps, where nothing has decayed.
    """
    fixed, _ = scan_counts(unit.place.equation)
    sources = dependence(traced.program, traced.chosen)[unit.place.key]
    return sorted(frozenset().union(*sources[fixed:]))


def _has_lost(
    traced: TracedLoss,
    measured: Measured,
    leaves: Sequence[int],
    count: int,
    largest: float,
) -> bool:
    """Whether the gradient of a leaf is smaller by four orders, or that of its first layers."""
    grads = dict(zip(traced.chosen, measured.grads, strict=True))
    norms = [float(grads[i].norm) for i in leaves if np.any(grads[i].reached)]
    is_lost = any(norm * FAR_IN_ALL <= largest for norm in norms)
    return is_lost or any(np.shape(traced.inputs[i])[:1] == (count,) for i in leaves)


def _trend_finding(
    row: GradientRow, series: Trend, factor: float, where: str, scan: Place | None = None
) -> GradientFinding:
    kind = "grows" if factor > 1 else "shrinks"
    cures = {
        "grows": "clip the cotangent with cg.error_clip or cg.error_clip_by_name, and the gradient "
        "with cg.clip_by_global_norm",
        "shrinks": "use gates, residual connections, normalization or larger initial weights",
    }
    message = (
        f"{row.location}: the norm of the cotangent changes by a factor of {factor:.3g} {where}, "
        f"{series.ratio:.2g} in all"
        + (f", in module {row.module}" if row.module else "")
        + (_products(scan) if scan and factor > 1 else "")
        + f"; {cures[kind]}"
    )
    return GradientFinding(
        kind, row.file, row.line, row.operation, row.module, None, message, factor
    )
