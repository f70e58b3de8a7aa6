"""Two versions of a whole training step: their outputs, by path."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from clipgrad._compare.comparison import (
    ComparisonFinding,
    ComparisonRow,
    GradientComparison,
    undecided,
    unjudged,
)
from clipgrad._compare.differences import Exact, Judgment, judge, judge_exactly, rounding
from clipgrad._compare.ratios import Counts, meaning, ratio
from clipgrad._compare.run_facts import with_facts
from clipgrad._compare.sketches import NUMBERS, judge_sketches
from clipgrad._compare.step_runs import Output, StepRun
from clipgrad._trees import nearest


def compare_steps(first: StepRun, second: StepRun, rtol: float | None) -> GradientComparison:
    own, theirs = first.outputs, second.outputs
    order, floor = first.ages or second.ages, first.floor() if rtol is None else {}
    both = sorted((path for path in own if path in theirs), key=lambda path: order.get(path, 0))
    if not both:
        raise ValueError(
            f"other: got outputs {list(theirs)[:5]}, expected the outputs of fun; "
            f"{nearest('', own)}; return trees with the same paths"
        )
    judged = {p: _output_judgment(own[p], theirs[p], floor.get(p), rtol) for p in both}
    known = first.counts.beside(second.counts)
    findings = [
        _output_finding(path, own[path], theirs[path], found, known)
        for path, found in judged.items()
        if found.differs
    ]
    findings += [] if findings else _no_output_judged(own, judged)
    unmatched = [f"output {p}, only in fun" for p in own if p not in theirs]
    unmatched += [f"output {p}, only in other" for p in theirs if p not in own]
    rows = [
        ComparisonRow(path, None, found.difference, None, found.tolerance, kind="output")
        for path, found in judged.items()
    ]
    notes = _notes_of_runs(first, second, judged, known)
    parts = tuple(findings), tuple(rows), tuple(unmatched), tuple(notes)
    return with_facts(GradientComparison(not findings, *parts), first.facts, second.facts)


def _notes_of_runs(
    first: StepRun, second: StepRun, judged: Mapping[str, Judgment], known: Counts
) -> list[str]:
    notes = [*first.notes, *second.notes]
    if not first.ages and not second.ages:
        notes.append("so outputs are in the order of their paths, not of their computation")
    notes += first.repeats(known)
    notes += [undecided(path) for path, found in judged.items() if not found.is_judged]
    types = {p: (first.outputs[p].dtype, second.outputs[p].dtype) for p in judged}
    return notes + [
        f"{path}: {own} in fun, {other} in other"
        for path, (own, other) in types.items()
        if str(own) != str(other)
    ]


def _no_output_judged(
    own: Mapping[str, Output], judged: Mapping[str, Judgment]
) -> list[ComparisonFinding]:
    """The finding that no output could be judged; where some are floating, none of these."""
    floating = [found for path, found in judged.items() if isinstance(own[path].value, np.ndarray)]
    outputs = floating or list(judged.values())
    if any(found.is_judged for found in outputs):
        return []
    kind = "floating outputs" if floating else "outputs"
    text = f"rounding decides each of {len(outputs)} {kind}, so none is judged; compare "
    text += "with wider arguments and types, or give rtol=, a tolerance of your own"
    return [unjudged(text)]


def _output_judgment(own: Output, other: Output, floor: Any, rtol: float | None) -> Judgment:
    if own.shape != other.shape:
        return Judgment(float("inf"), 0.0)
    values = own.value, other.value
    if all(isinstance(x, np.ndarray) for x in values):
        floor = np.zeros(np.shape(own.value)) if floor is None else floor
        judging = judge_sketches if own.signed else judge
        return judging(*values, floor, rounding(own.dtype, other.dtype), rtol)
    if all(isinstance(x, Exact) for x in values):
        return judge_exactly(values[0].values, values[1].values, floor and floor.values)
    return Judgment(0.0 if values[0] == values[1] else 1.0, 0.0)


def _output_finding(
    path: str, own: Output, other: Output, found: Judgment, known: Counts
) -> ComparisonFinding:
    if own.shape != other.shape:
        text = f"the shape is {list(own.shape)} in fun, {list(other.shape)} in other"
        return ComparisonFinding("output", f"{path}: {text}", path=path)
    factor, text = None, f"{path}: the relative difference is {found.difference:.2g}"
    if isinstance(own.value, np.ndarray) and isinstance(other.value, np.ndarray):
        text += f", of which rounding explains {found.tolerance:.1g}"
        mine, its = (x.value[: 2 * NUMBERS] if x.signed else x.value for x in (own, other))
        factor = ratio(mine, its, found.tolerance)
        if own.shape == ():
            text += f"; it is {own.value:.6g} in fun, {other.value:.6g} in other"
    else:
        share = "some" if own.signed else f"{found.difference:.2g}"
        text = f"{path}: {share} of its numbers differ, which are compared exactly"
    if factor is not None:
        means = meaning(factor, known)
        shown = f"{factor:.2f}" if abs(factor) >= 1 else f"{factor:.3g}"
        text += f"; fun is {shown} times other" + (f": {means}" if means else "")
    return ComparisonFinding("output", text, path=path, ratio=factor)
