"""The findings and notes on gradients that are exactly zero."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from clipgrad._diagnose.causes import DETACHED, EXCUSED, SILENT, Cause, cause_of, is_at_each_step
from clipgrad._diagnose.findings import function_finding, operation_finding
from clipgrad._diagnose.guilty import Found, cuts, results_of
from clipgrad._diagnose.judge import tape_of
from clipgrad._diagnose.levels import wide
from clipgrad._diagnose.loops import InScan
from clipgrad._diagnose.measure import Measured
from clipgrad._diagnose.records import GradientFinding
from clipgrad._diagnose.tape import OperationRaised, Tape
from clipgrad._errors import docs_page, first_few, first_line
from clipgrad._losses import TracedLoss
from clipgrad._names import sources_of_results
from clipgrad._programs import Back, equations, is_scan

SHOWN_NAMES = 4  # names of leaves, places and steps in a message
ExplainedCut = tuple[Found, Cause]
# Operations whose result has the axis of the layers that an operand has.
_STEP_BY_STEP = (Back.MOVED, Back.MULTIPLIED, Back.DIVIDED)


def zero_findings(given: TracedLoss, measured: Measured) -> tuple[list[GradientFinding], list[str]]:
    """The findings and notes on leaves, and layers of a scan, without a gradient."""
    of = dict(zip(given.chosen, measured.grads, strict=True))
    zero = [i for i, grad in of.items() if np.all(grad.zeros == 1)]
    read = sources_of_results(given.program)[0] if zero else ()
    unread = [given.names[i] for i in zero if i not in read]
    if len(unread) == len(given.chosen):
        return [_unread_finding(given, unread)], []
    notes = [f"the loss does not depend on {first_few(unread, SHOWN_NAMES)}"] if unread else []
    is_all = len(zero) == len(given.chosen) and measured.loss == 0
    zero = [i for i in zero if i in read]
    if not zero and not any(_may_have_lost_layers(given, i, of[i].zeros) for i in given.chosen):
        return [], notes
    try:
        findings, more = _told(given, tape_of(given), zero, is_all)
    except (TypeError, ValueError, NotImplementedError, OperationRaised) as error:
        return [], [*notes, f"diagnose did not look for zero gradients: {first_line(error)}"]
    return findings, [*notes, *more]


def _unread_finding(given: TracedLoss, unread: Sequence[str]) -> GradientFinding:
    """The finding on a loss that reads nothing of what it is differentiated by."""
    names = first_few(unread, SHOWN_NAMES)
    what = f"the gradient of {names} is 0: the loss depends on nothing that it is differentiated by"
    step = f"check what it reads, or choose other argnums ({docs_page('zero')})"
    finding = function_finding("zero", f"{what}; {step}", given)
    return dataclasses.replace(finding, leaf=", ".join(unread), cause="unused")


def _may_have_lost_layers(given: TracedLoss, number: int, zeros: float) -> bool:
    """Whether a leaf has as many zeros as one layer of a scan in the program."""
    lengths = {e.params["length"] for e in equations(given.program) if is_scan(e)}
    return any(n in lengths and n * zeros > 1 - 1e-3 for n in np.shape(given.inputs[number]))


def _told(
    given: TracedLoss, tape: Tape, zero: Sequence[int], is_all: bool
) -> tuple[list[GradientFinding], list[str]]:
    """``zero`` are the inputs without a gradient; ``is_all``: all of them, at a loss of 0."""
    names = given.names
    rows = [(names[i], "", cuts(tape, tape.jaxpr.invars[i])) for i in zero]
    for i in given.chosen:
        for inside, k, steps in _lost_layers(tape, tape.jaxpr.invars[i]) if i not in zero else ():
            step = inside.step(steps[0])
            layers = f" in layer {_few(steps)} of {inside.length}"
            rows.append((names[i], layers, cuts(step, step.jaxpr.invars[k])))
    groups: dict[tuple, tuple[list[ExplainedCut], list[str]]] = {}
    for leaf, layers, found in rows:
        best = _best(given, zero, found)
        place = _line_and_cause(best[0]) if best else ""
        groups.setdefault((place, layers), (best, []))[1].append(leaf)
    findings, notes = [], []
    order = lambda own: own[1][0][0][0].entry.order if own[1][0] else ()  # noqa: E731
    for (_, layers), (best, leaves) in sorted(groups.items(), key=order):
        subject = f"the gradient of {first_few(leaves, SHOWN_NAMES)}{layers}"
        if not best:
            notes.append(f"{subject} is 0; diagnose did not find where it is cut")
            continue
        finding, cause = _finding(subject, leaves, _in_steps(best, layers, given)), best[0][1]
        if not (cause.is_note or (is_all and cause.name in EXCUSED)):
            message = f"{finding.message} ({docs_page('zero')})"
            findings.append(dataclasses.replace(finding, message=message))
        elif cause.name != SILENT:
            notes.append(finding.message + ("; the loss itself is 0" if is_all else ""))
    return findings, notes


def _best(given: TracedLoss, zero: Sequence[int], found: Sequence[Found]) -> list[ExplainedCut]:
    """The cuts of the first rank, the best first, and behind them those that detach."""
    own = [(cut, cause_of(cut, given, zero)) for cut in found]
    own.sort(key=lambda e: (e[1].rank, e[1].is_note))
    return [e for e in own if e[1].rank in (own[0][1].rank, DETACHED)]


def _in_steps(best: list[ExplainedCut], layers: str, given: TracedLoss) -> list[ExplainedCut]:
    """The cuts, the best without a step if it is one at each, or if several layers are named."""
    (cut, cause), *others = best
    is_at_each = cut.step is not None and ("," in layers or is_at_each_step(cut, cause, given))
    return [(cut._replace(is_everywhere=is_at_each), cause), *others]


def _line_and_cause(explained: ExplainedCut) -> str:
    """The line, and the cause."""
    cut, cause = explained
    return f"{cut.entry.place.location} ({cause.name})"


# -- Layers that a scan takes one by one.


def _lost_layers(tape: Tape, atom: Any) -> Iterator[tuple[InScan, int, list[int]]]:
    """The scans that take a value step by step, and the steps without a gradient, if not all."""
    for entry, k in tape.uses[atom]:
        inside = entry.inside
        if isinstance(inside, InScan) and k >= inside.split and entry.back[k] is not None:
            axes = tuple(a for a in range(entry.ins[k].ndim) if a != tape.runs.axes)
            steps = np.flatnonzero(~np.any(wide(entry.back[k]) != 0, axis=axes))
            if 0 < len(steps) < inside.length:
                yield inside, k, [int(t) for t in steps]
        elif inside and not isinstance(inside, InScan):
            way = inside.operand(k, is_zero=True) if entry.alive else None
            yield from _lost_layers(*way) if way else ()
        elif entry.numeric.back in _STEP_BY_STEP:
            yield from _lost_layers(tape, entry.equation.outvars[0])
    if tape.within:
        for j in results_of(tape, atom):
            yield from _lost_layers(*tape.within.entry.inside.output(tape, j, True))


# -- Words.


def _few(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:SHOWN_NAMES])) + ", ..." * (len(values) > SHOWN_NAMES)


def _finding(subject: str, leaves: Sequence[str], best: Sequence[ExplainedCut]) -> GradientFinding:
    cut, cause = best[0]
    also = list(dict.fromkeys(map(_line_and_cause, best)))[1 : 1 + SHOWN_NAMES]
    rest = f"; also cut at {', '.join(also)}" if also else ""
    rest += f"; {cause.step}" if cause.step else ""
    finding = operation_finding("zero", cut, f"{subject} is 0: {cause.text}", rest)
    return dataclasses.replace(finding, leaf=", ".join(leaves), cause=cause.name)
