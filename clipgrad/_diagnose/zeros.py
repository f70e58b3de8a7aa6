"""The findings and notes on gradients that are exactly zero."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from clipgrad._diagnose.causes import DETACHED, Cause, cause_of, is_at_each_step
from clipgrad._diagnose.finding_texts import function_finding, operation_finding
from clipgrad._diagnose.guilty import cuts, results_of
from clipgrad._diagnose.levels import wide
from clipgrad._diagnose.measure import Measured
from clipgrad._diagnose.nan_judge import tape_of
from clipgrad._diagnose.opened_loops import InScan
from clipgrad._diagnose.origins import Cut
from clipgrad._diagnose.records import GradientFinding
from clipgrad._diagnose.tape import OperationRaised, Tape
from clipgrad._errors import docs_page, first_few, first_line
from clipgrad._losses import TracedLoss
from clipgrad._names import sources_of_results
from clipgrad._programs import Back, equations, is_scan

SHOWN_NAMES = 4  # names of leaves, places and steps in a message
ExplainedCut = tuple[Cut, Cause]
# Operations whose result has the axis of the layers that an operand has.
_STEP_BY_STEP = (Back.MOVED, Back.MULTIPLIED, Back.DIVIDED)


def zero_findings(
    traced: TracedLoss, measured: Measured
) -> tuple[list[GradientFinding], list[str]]:
    """The findings and notes on leaves, and layers of a scan, without a gradient."""
    grads = dict(zip(traced.chosen, measured.grads, strict=True))
    zero = [i for i, grad in grads.items() if np.all(grad.zeros == 1)]
    read = sources_of_results(traced.program)[0] if zero else ()
    unread = [traced.names[i] for i in zero if i not in read]
    if len(unread) == len(traced.chosen):
        return [_unread_finding(traced, unread)], []
    notes = [f"the loss does not depend on {first_few(unread, SHOWN_NAMES)}"] if unread else []
    is_all = len(zero) == len(traced.chosen) and measured.loss == 0
    zero = [i for i in zero if i in read]
    if not zero and not any(
        _may_have_lost_layers(traced, i, grads[i].zeros) for i in traced.chosen
    ):
        return [], notes
    try:
        findings, more = _explained(traced, tape_of(traced), zero, is_all)
    except (TypeError, ValueError, NotImplementedError, OperationRaised) as error:
        return [], [*notes, f"diagnose did not look for zero gradients: {first_line(error)}"]
    return findings, [*notes, *more]


def _unread_finding(traced: TracedLoss, unread: Sequence[str]) -> GradientFinding:
    """The finding on a loss that reads nothing of what it is differentiated by."""
    names = first_few(unread, SHOWN_NAMES)
    what = f"the gradient of {names} is 0: the loss depends on nothing that it is differentiated by"
    step = f"check what it reads, or choose other argnums ({docs_page('zero')})"
    finding = function_finding("zero", f"{what}; {step}", traced)
    return dataclasses.replace(finding, leaf=", ".join(unread), cause="unused")


def _may_have_lost_layers(traced: TracedLoss, number: int, zeros: float) -> bool:
    """Whether a leaf has as many zeros as one layer of a scan in the program."""
    lengths = {e.params["length"] for e in equations(traced.program) if is_scan(e)}
    return any(n in lengths and n * zeros > 1 - 1e-3 for n in np.shape(traced.inputs[number]))


def _explained(
    traced: TracedLoss, tape: Tape, zero: Sequence[int], is_all: bool
) -> tuple[list[GradientFinding], list[str]]:
    """``zero`` are the inputs without a gradient; ``is_all``: all of them, at a loss of 0."""
    findings, notes = [], []
    for (_, layers), (best, leaves) in _by_place(traced, tape, zero):
        subject = f"the gradient of {first_few(leaves, SHOWN_NAMES)}{layers}"
        if not best:
            notes.append(f"{subject} is 0; diagnose did not find where it is cut")
            continue
        finding, cause = _finding(subject, leaves, _in_steps(best, layers, traced)), best[0][1]
        if not (cause.is_note or (is_all and cause.is_excused)):
            message = f"{finding.message} ({docs_page('zero')})"
            findings.append(dataclasses.replace(finding, message=message))
        elif not cause.is_silent:
            notes.append(finding.message + ("; the loss itself is 0" if is_all else ""))
    return findings, notes


def _by_place(
    traced: TracedLoss, tape: Tape, zero: Sequence[int]
) -> list[tuple[tuple[str, str], tuple[list[ExplainedCut], list[str]]]]:
    """By the place of the best cut, and the layers: its cuts, and the leaves; in program order."""
    names = traced.names
    rows = [(names[i], "", cuts(tape, tape.jaxpr.invars[i])) for i in zero]
    for i in traced.chosen:
        for inside, k, steps in _lost_layers(tape, tape.jaxpr.invars[i]) if i not in zero else ():
            step = inside.step(steps[0])
            layers = f" in layer {_few(steps)} of {inside.length}"
            rows.append((names[i], layers, cuts(step, step.jaxpr.invars[k])))
    groups: dict[tuple[str, str], tuple[list[ExplainedCut], list[str]]] = {}
    for leaf, layers, of_leaf in rows:
        best = _best(traced, zero, of_leaf)
        place = _line_and_cause(best[0]) if best else ""
        groups.setdefault((place, layers), (best, []))[1].append(leaf)
    order = lambda group: group[1][0][0][0].entry.order if group[1][0] else ()  # noqa: E731
    return sorted(groups.items(), key=order)


def _best(traced: TracedLoss, zero: Sequence[int], of_leaf: Sequence[Cut]) -> list[ExplainedCut]:
    """The cuts of the first rank, the best first, and behind them those that detach."""
    explained = [(cut, cause_of(cut, traced, zero)) for cut in of_leaf]
    explained.sort(key=lambda pair: (pair[1].rank, pair[1].is_note))
    return [pair for pair in explained if pair[1].rank in (explained[0][1].rank, DETACHED)]


def _in_steps(best: list[ExplainedCut], layers: str, traced: TracedLoss) -> list[ExplainedCut]:
    """The cuts, the best without a step if it is one at each, or if several layers are named."""
    (cut, cause), *others = best
    is_at_each = cut.step is not None and ("," in layers or is_at_each_step(cut, cause, traced))
    return [(dataclasses.replace(cut, is_at_each_step=is_at_each), cause), *others]


def _line_and_cause(explained: ExplainedCut) -> str:
    """The line, and the cause."""
    cut, cause = explained
    return f"{cut.entry.place.location} ({cause.name})"


# -- Layers that a scan takes one by one.


def _lost_layers(tape: Tape, atom: Any) -> Iterator[tuple[InScan, int, list[int]]]:
    """The scans that take a value step by step, and the steps without a gradient, if not all."""
    for entry, k in tape.uses[atom]:
        inside = entry.inside
        if isinstance(inside, InScan) and k >= inside.split and entry.in_cotangents[k] is not None:
            axes = tuple(a for a in range(entry.ins[k].ndim) if a != tape.runs.axes)
            steps = np.flatnonzero(~np.any(wide(entry.in_cotangents[k]) != 0, axis=axes))
            if 0 < len(steps) < inside.length:
                yield inside, k, [int(t) for t in steps]
        elif inside and not isinstance(inside, InScan):
            inner = inside.operand(k, is_zero=True) if entry.alive else None
            yield from _lost_layers(*inner) if inner else ()
        elif entry.numeric.back in _STEP_BY_STEP:
            yield from _lost_layers(tape, entry.equation.outvars[0])
    if tape.within:
        for j in results_of(tape, atom):
            yield from _lost_layers(*tape.within.entry.inside.output(tape, j, True))


# -- Words.


def _few(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:SHOWN_NAMES])) + ", ..." * (len(values) > SHOWN_NAMES)


def _detaches_there(explained: ExplainedCut, first: Cut) -> bool:
    """Whether this is a `stop_gradient` in the line of the first cut, as in a softmax."""
    cut, cause = explained
    return cause.rank == DETACHED and cut.entry.place.location == first.entry.place.location


def _finding(subject: str, leaves: Sequence[str], best: Sequence[ExplainedCut]) -> GradientFinding:
    cut, cause = best[0]
    others = [pair for pair in best if not _detaches_there(pair, cut)]
    also = list(dict.fromkeys(map(_line_and_cause, [best[0], *others])))[1 : 1 + SHOWN_NAMES]
    advice = f"; also cut at {', '.join(also)}" if also else ""
    advice += f"; {cause.step}" if cause.step else ""
    finding = operation_finding("zero", cut, f"{subject} is 0: {cause.text}", advice)
    return dataclasses.replace(finding, leaf=", ".join(leaves), cause=cause.name)
