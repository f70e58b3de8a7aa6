"""The findings and notes on gradients that are exactly zero."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from clipgrad._diagnose.causes import EXCUSED, SILENT, Cause, cause_of
from clipgrad._diagnose.findings import inside_of
from clipgrad._diagnose.guilty import MOVES, Found, cuts, results_of
from clipgrad._diagnose.levels import wide
from clipgrad._diagnose.loops import InScan
from clipgrad._diagnose.records import GradientFinding
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._diagnose.tape import Entry, Tape
from clipgrad._docs import docs_page
from clipgrad._errors import first_few

SHOWN_NAMES = 4  # names of leaves, places and steps in a message


class _Explained(NamedTuple):
    cut: Found
    cause: Cause

    @property
    def place(self) -> tuple:
        """The line, and the cause."""
        where = self.cut.entry.place.location
        return where.file, where.line, self.cause.name


class _Row(NamedTuple):
    """A leaf without a gradient, or layers of one, and what cuts it; () if that is not known."""

    leaf: str
    layers: str
    best: list[_Explained]


def zero_findings(
    given: DiagnosisSubject, tape: Tape, zero: Sequence[int], is_all: bool
) -> tuple[list[GradientFinding], list[str]]:
    """The findings and notes on leaves without a gradient, and on layers of a scan without one.

    ``zero`` are the inputs whose gradients are zero, and ``is_all`` says whether these are all, at
    a loss of 0.
    """
    names = [_path_of(name) for name in given.names]
    rows = [_Row(names[i], "", _best(given, zero, _cuts_of(tape, i))) for i in zero]
    rows += [
        _Row(names[i], f" in layer {_few(steps)} of {len(entry.ins[k])}",
             _best(given, zero, _cuts_of_layers(entry, k, steps)))
        for i in given.chosen if i not in zero
        for entry, k, steps in _lost_layers(tape, tape.jaxpr.invars[i])
    ]  # fmt: skip
    groups: dict[tuple, list[_Row]] = {}
    for row in rows:
        groups.setdefault((row.best[0].place if row.best else (), row.layers), []).append(row)
    findings, notes = [], []
    order = lambda own: own[0].best[0].cut.entry.order if own[0].best else ()  # noqa: E731
    for own in sorted(groups.values(), key=order):
        _, layers, best = own[0]
        leaves = [row.leaf for row in own]
        subject = f"the gradient of {first_few(leaves, SHOWN_NAMES)}{layers}"
        is_excused = is_all and bool(best) and best[0].cause.name in EXCUSED
        if not best:
            notes.append(f"{subject} is 0; diagnose did not find where it is cut")
        elif best[0].cause.is_note or is_excused:
            then = "; the loss itself is 0" if is_all else ""
            notes += [_text_of(subject, best) + then] if best[0].cause.name != SILENT else []
        else:
            findings.append(_zero_finding(leaves, subject, best))
    return findings, notes


def _cuts_of(tape: Tape, number: int) -> list[Found]:
    return cuts(tape, tape.jaxpr.invars[number])


def _best(given: DiagnosisSubject, zero: Sequence[int], found: Sequence[Found]) -> list[_Explained]:
    """The cuts of the first rank, the best first."""
    own = [_Explained(cut, cause_of(cut, given, zero)) for cut in found]
    own.sort(key=lambda e: (e.cause.rank, e.cause.is_note))
    return [e for e in own if e.cause.rank == own[0].cause.rank]


# -- Layers that a scan takes one by one.


def _lost_layers(tape: Tape, atom: Any) -> Iterator[tuple[Entry, int, list[int]]]:
    """The scans that take a value step by step, and the steps without a gradient, if not all."""
    for entry, k in tape.uses[atom]:
        inside = entry.inside
        if isinstance(inside, InScan) and k >= inside.split and entry.back[k] is not None:
            axes = tuple(a for a in range(entry.ins[k].ndim) if a != tape.runs.axes)
            steps = np.flatnonzero(~np.any(wide(entry.back[k]) != 0, axis=axes))
            if 0 < len(steps) < inside.length:
                yield entry, k, [int(t) for t in steps]
        elif inside and not isinstance(inside, InScan):
            way = inside.operand(k, is_zero=True) if entry.alive else None
            yield from _lost_layers(*way) if way else ()
        elif entry.name in MOVES | {"mul", "div"}:
            yield from _lost_layers(tape, entry.equation.outvars[0])
    if tape.within:
        for j in results_of(tape, atom):
            yield from _lost_layers(*tape.within.entry.inside.output(tape, j, True))


def _cuts_of_layers(entry: Entry, k: int, steps: Sequence[int]) -> list[Found]:
    """The cuts of one of these layers: at its step, or behind it."""
    inside = entry.inside
    assert isinstance(inside, InScan)
    tape = inside.step(steps[0])
    return cuts(tape, tape.jaxpr.invars[k])


# -- Words.


def _path_of(name: str) -> str:
    """The name without what NNX has between a state and its array."""
    return re.sub(r"\.states\[\d+\]|\.value$", "", name)


def _few(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:SHOWN_NAMES])) + ", ..." * (len(values) > SHOWN_NAMES)


def _text_of(subject: str, best: Sequence[_Explained]) -> str:
    cut, cause = best[0]
    place = cut.entry.place
    where = place.location
    text = f"{where}: {subject} is 0: {cause.text}{inside_of(place, where)}"
    if cut.step is not None:
        text += f", at step {cut.step} of {place.nest[-1]}"
    own = best[0].place
    others = list(dict.fromkeys(e.place for e in best[1:] if e.place != own))
    also = [next(e for e in best if e.place == place) for place in others[:SHOWN_NAMES]]
    if also:
        names = ", ".join(f"{e.cut.entry.place.location} ({e.cause.name})" for e in also)
        text += f"; also cut at {names}"
    return text + (f"; {cause.step}" if cause.step else "")


def _zero_finding(
    names: Sequence[str], subject: str, best: Sequence[_Explained]
) -> GradientFinding:
    cut, cause = best[0]
    place = cut.entry.place
    where = place.location
    return GradientFinding(
        kind="zero",
        file=where.file,
        line=where.line,
        operation=place.operation,
        module=place.module,
        step=cut.step,
        message=f"{_text_of(subject, best)} ({docs_page('zero')})",
        leaf=", ".join(names),
        cause=cause.name,
    )
