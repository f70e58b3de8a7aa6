"""Gradients that grow or shrink steadily on their way back, and why some may shrink."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import Literal

import clipgrad._jaxpr as _jaxpr
from clipgrad._diagnose.cotangents import Summary
from clipgrad._diagnose.records import GradientFinding, GradientRow
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._diagnose.units import SCAN, Unit
from clipgrad._jaxpr import holds_floats
from clipgrad._program import active_variables, has_fixed_factors

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
# Scans inside of scans have one trend if the innermost's is so near to the trend of all.
_EVEN = 0.5


STATED = "the factor is fixed, not learned, as in a moving average"
REPEATED = "each step gets the same inputs, as in an iteration to a fixed point"
GATED = "a gate learns how much each step keeps"


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
        steady = self.steadiness >= _STEADY
        if steady and self.factor >= _GROWS and self.total >= FAR_IN_ALL:
            return self.factor
        if steady and self.factor <= _SHRINKS and self.total <= 1 / FAR_IN_ALL:
            return self.factor
        return self.factor if self.is_gone else None

    @property
    def is_gone(self) -> bool:
        """Whether nothing is left at the end of a decay, however slow."""
        is_decay = self.steadiness >= _STEADY and self.factor < 1
        return is_decay and (self.total <= _GONE or self.is_rounded)

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
    pairs: Sequence[tuple[Unit, GradientRow]],
    given: DiagnosisSubject,
    gradients: Sequence[Summary],
    parameters: Sequence[Summary],
) -> Iterator[GradientFinding | str]:
    """A finding for each scan, and one for the depth of the model, if they grow or shrink.

    A decay from step to step is a note if there is a reason for it. One of depth is a finding if
    layers, or the parameters in them, have lost their gradient.
    """
    explained, rows = [], [row for _, row in pairs]
    for i, (unit, row) in enumerate(pairs):
        if row.operation != SCAN or any(row is other for other in explained):
            continue
        holders = _holders(rows, i)
        for nest in (holders[:depth] for depth in range(len(holders), -1, -1)):
            found = trend(over_steps(row, nest)[::-1])
            if found and found.growth_in_time and (not nest or _is_even(row, found)):
                explained += nest
                where = f"at each of the {found.entries} steps of the scan"
                where += f"s, {' x '.join(map(str, row.scans[~len(nest) :]))}" if nest else ""
                why = _reason(unit, row, given, gradients) if found.factor < 1 else None
                finding = _trend_finding(row, found, found.growth_in_time, where)
                if why is None or (why == GATED and found.is_gone):
                    yield finding
                elif why != GATED:
                    yield f"{finding.message.partition('; ')[0]}; {why}"
                break
    deep = layers(rows)
    found = trend([float(finite_norm(row)) for row in reversed(deep)])
    if found and found.growth and (found.growth > 1 or _has_vanished(deep, parameters)):
        all_layers = all(row.is_layer for row in deep)
        entries = "modules with a matrix product" if all_layers else "parts of the model"
        where = f"at each of the {found.entries} {entries}"
        yield _trend_finding(deep[0], found, found.growth, where)


def layers(rows: Sequence[GradientRow]) -> list[GradientRow]:
    """The rows of the depth of a model: its layers, or all if it has none."""
    outside = [row for row in rows if not row.scans]
    deep = [row for row in outside if row.is_layer]
    return deep if len(deep) >= _MANY else outside


def over_steps(row: GradientRow, holders: Sequence[GradientRow] = ()) -> np.ndarray:
    """The norm at each step of the innermost scan and of holders around it, in order of time."""
    norms = finite_norm(row)
    for axis, scan in enumerate([row, *holders], start=1):
        norms = np.flip(norms, -axis) if scan.reverse else norms
    steps = math.prod(row.scans[~len(holders) :])
    return np.sqrt(np.sum(np.square(norms.reshape(-1, steps)), axis=0))


def _holders(rows: Sequence[GradientRow], i: int) -> list[GradientRow]:
    """The scans around a scan, the innermost first, as far as they carry something."""
    found: list[GradientRow] = []
    scans = rows[i].scans[:-1]
    for row in rows[i + 1 :]:
        if row.operation == SCAN and row.scans == scans and scans:
            found.append(row)
            scans = scans[:-1]
        elif row.operation == SCAN and len(row.scans) < len(scans):
            break
    return found


def _is_even(row: GradientRow, whole: Trend) -> bool:
    """Whether the innermost scan by itself has the trend of the whole nest."""
    inner = finite_norm(row).reshape(-1, row.scans[-1])
    inner = inner[np.all(np.isfinite(inner) & (inner > 0), axis=1)]
    if not inner.size or inner.shape[1] < 2:
        return False
    logs = np.log(inner[:, ::-1] if not row.reverse else inner).mean(axis=0)
    own = np.polyfit(np.arange(len(logs)), logs, 1)[0] / np.log(whole.factor)
    return bool(_EVEN <= own <= 1 / _EVEN)


def finite_norm(row: GradientRow) -> np.ndarray:
    """The norm, NaN where there are elements that are not finite."""
    return np.where(row.nonfinite > 0, np.nan, row.norm)


def _trend_finding(row: GradientRow, found: Trend, factor: float, where: str) -> GradientFinding:
    kind = "grows" if factor > 1 else "shrinks"
    cures = {
        "grows": "clip the cotangent with cg.error_clip or cg.error_clip_by_name, and the gradient "
        "with cg.clip_by_global_norm",
        "shrinks": "use gates, residual connections, normalization or larger initial weights",
    }
    message = (
        f"{row.location}: the norm of the cotangent changes by a factor of {factor:.3g} {where}, "
        f"{found.ratio:.2g} in all"
        + (f", in module {row.module}" if row.module else "")
        + f"; {cures[kind]}"
    )
    return GradientFinding(
        kind, row.file, row.line, row.operation, row.module, None, message, factor
    )


# What reads another part of an array at each step.
_INDEXED = frozenset({"dynamic_slice", "gather"})
_SIGMOIDS = frozenset({"logistic", "exp"})


def _reason(
    unit: Unit, row: GradientRow, given: DiagnosisSubject, gradients: Sequence[Summary]
) -> str | None:
    """Why the decay in a scan is no disease; None if it may be.

    A part of what is differentiated has to keep a gradient: one that is not smaller by four orders
    of magnitude than the largest cotangent of what the scan carries.
    """
    largest = max((float(g.norm) for g in gradients), default=0.0)
    if not unit.inside or not largest * FAR_IN_ALL >= finite_norm(row).max():
        return None
    body, equation = unit.inside[0].jaxpr, unit.place.equation
    active = active_variables(given.program, given.chosen)
    constants, carried = _jaxpr.scan_counts(equation)
    names = {e.primitive.name for e in _jaxpr.equations(body)}
    elements = [v for v in body.invars[constants + carried :] if holds_floats(v)]
    if not elements and not names & _INDEXED:
        return REPEATED
    moved = [i for i in range(constants, constants + carried) if holds_floats(body.invars[i])]
    if has_fixed_factors(body, moved, [i - constants for i in moved], active):
        return STATED
    products = [e.invars for e in _jaxpr.equations(body) if e.primitive.name == "mul"]
    has_gate = any(
        a is not b and all(type(v) is not Literal and v in active for v in (a, b))
        for a, b in products
    )
    return GATED if names & _SIGMOIDS and has_gate else None


def _has_vanished(layers: Sequence[GradientRow], parameters: Sequence[Summary]) -> bool:
    """Whether the first layer, and the gradient of a parameter, are smaller by four orders."""
    norms = [float(finite_norm(row)) for row in layers]
    least = min((float(g.norm) for g in parameters if np.any(g.reached)), default=0.0)
    return norms[0] * FAR_IN_ALL <= norms[-1] and least * FAR_IN_ALL <= max(norms)
