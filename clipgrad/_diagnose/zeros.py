"""The findings on gradients that are exactly zero."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from clipgrad._diagnose.blocks import MeasuredBlock
from clipgrad._diagnose.causes import EXCUSED, SILENT, Cause, cause_of
from clipgrad._diagnose.cuts import ZeroCut, inside_of_loop, zero_cuts
from clipgrad._diagnose.edges import edge_values
from clipgrad._diagnose.records import GradientFinding
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._docs import docs_page
from clipgrad._errors import first_line
from clipgrad._names import Place
from clipgrad._program import sources_of_results

_SHOWN = 4  # names of leaves in a message


class _Explained(NamedTuple):
    cut: ZeroCut
    cause: Cause

    @property
    def at(self) -> Place:
        """The operation: of a loop the one inside of it."""
        is_loop = self.cut.place.equation.primitive.name == "while"
        return inside_of_loop(self.cut) if is_loop else self.cut.place

    @property
    def place(self) -> tuple:
        """The line, and the cause."""
        where = self.at.location
        return where.file, where.line, self.cause.name

    @property
    def preference(self) -> tuple:
        """Smaller for what one looks for."""
        return self.cause.rank, self.cause.is_note, -float(self.cut.where.mean())


def zero_findings(
    given: DiagnosisSubject, zero: Sequence[int], loss: float
) -> tuple[list[GradientFinding], list[str]]:
    """The findings and the notes on inputs whose gradients are zero.

    Args:
      given: the loss.
      zero: the positions of these inputs.
      loss: its value.
    """
    reached = sources_of_results(given.program)[0]
    notes = _unread(given, [i for i in zero if i not in reached])
    zero = [i for i in zero if i in reached]
    if not zero:
        return [], notes
    try:
        values = edge_values(given.program, given.inputs, given.chosen)
    except (TypeError, ValueError, NotImplementedError) as error:
        return [], [*notes, f"diagnose did not look for zero gradients: {first_line(error)}"]
    block = MeasuredBlock(given.program, values)
    cuts = zero_cuts(given.program, block, given.chosen)
    every = [_Explained(cut, cause_of(cut, given, zero)) for cut in cuts]
    names = [_path_of(name) for name in given.names]
    groups: dict[tuple, tuple[list[int], list[_Explained]]] = {}
    for i in zero:
        own = sorted((e for e in every if i in e.cut.sources), key=lambda e: e.preference)
        best = [e for e in own if e.cause.rank == own[0].cause.rank]
        key = best[0].place if best else ()
        groups.setdefault(key, ([], best))[0].append(i)
    findings = []
    is_all = len(zero) == len(given.chosen) and loss == 0
    for leaves, best in groups.values():
        own_names = [names[i] for i in leaves]
        if not best:
            notes.append(f"{_subject(own_names)} is 0; diagnose did not find where it is cut")
        elif best[0].cause.is_note or (is_all and best[0].cause.name in EXCUSED):
            if best[0].cause.name != SILENT:
                notes.append(
                    _text_of(own_names, best) + ("; the loss itself is 0" if is_all else "")
                )
        else:
            findings.append(_zero_finding(own_names, best))
    return findings, notes


def _unread(given: DiagnosisSubject, leaves: Sequence[int]) -> list[str]:
    if not leaves:
        return []
    return [f"the loss does not depend on {_list_of([_path_of(given.names[i]) for i in leaves])}"]


def _path_of(name: str) -> str:
    """The name without what NNX has between a state and its array."""
    return re.sub(r"\.states\[\d+\]|\.value$", "", name)


def _list_of(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _subject(names: Sequence[str]) -> str:
    return f"the gradient of {_list_of(names)}"


def _text_of(names: Sequence[str], best: Sequence[_Explained]) -> str:
    cut, cause = best[0]
    where = best[0].at.location
    text = f"{where}: {_subject(names)} is 0: {cause.text}"
    text += f", in {where.package}" if where.package and where.file else ""
    text += f", in module {cut.place.module}" if cut.place.module else ""
    if cut.steps:
        text += f", at step {_span(cut.steps)} of {cut.place.nest[-1]}"
    own = best[0].place
    others = list(dict.fromkeys(e.place for e in best[1:] if e.place != own))
    also = [next(e for e in best if e.place == place) for place in others[:_SHOWN]]
    if also:
        text += "; also cut at " + ", ".join(f"{e.at.location} ({e.cause.name})" for e in also)
    return text + (f"; {cause.step}" if cause.step else "")


def _span(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _zero_finding(names: Sequence[str], best: Sequence[_Explained]) -> GradientFinding:
    cut, cause = best[0]
    where = best[0].at.location
    step = cut.steps[-1] if cut.steps else None
    message = f"{_text_of(names, best)} ({docs_page('zero')})"
    place = cut.place
    return GradientFinding(
        "zero",
        where.file,
        where.line,
        place.operation,
        place.module,
        step,
        message,
        leaf=", ".join(names),
        cause=cause.name,
    )
