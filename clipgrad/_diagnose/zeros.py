"""The findings on gradients that are exactly zero."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from clipgrad._diagnose.blocks import Block
from clipgrad._diagnose.causes import EXCUSED, SILENT, STRUCTURAL, Cause, cause_of
from clipgrad._diagnose.cotangents import Summary
from clipgrad._diagnose.cuts import ZeroCut, carry_cuts, inside_of_loop, zero_cuts
from clipgrad._diagnose.edges import edge_values
from clipgrad._diagnose.findings import inside_of
from clipgrad._diagnose.layers import Layers, cuts_of_layers, layers_of_scans
from clipgrad._diagnose.partial_cuts import remainder
from clipgrad._diagnose.pieces import cut_pieces, may_have_cut_pieces
from clipgrad._diagnose.records import GradientFinding
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._docs import docs_page
from clipgrad._errors import first_few, first_line
from clipgrad._names import Place
from clipgrad._program import sources_of_results

_SHOWN = 4  # names of leaves in a message
_LIKELY = 4  # the rank of what lies behind a value that has a gradient from elsewhere


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


class _Row(NamedTuple):
    """A leaf without a gradient, or a part of one, and what cuts it; () if that is not known."""

    leaf: str
    part: str
    layers: str
    best: list[_Explained]


def zero_findings(
    given: DiagnosisSubject,
    block: Block,
    loss: float,
    grads: Sequence[Summary],
    slices: Sequence[Sequence[Summary]],
    data: frozenset[int],
) -> tuple[list[GradientFinding], list[str]]:
    """The findings and notes on gradients that are zero: of a leaf, a layer, or all but a penalty.

    A second program runs only if there is a zero that needs it.

    ``slices`` are the gradients of the slices of each input, if it is read in no other way. What
    only a penalty trains is looked for if there are inputs that are ``data``.
    """
    of = dict(zip(given.chosen, grads, strict=True))
    zero = [i for i, grad in of.items() if not np.any(grad.nonfinite) and np.all(grad.zeros == 1)]
    layers = layers_of_scans(given, block) if any(np.any(grad.zeros) for grad in grads) else []
    is_partly = any(np.max(of[x.argument].zeros) * math.prod(x.lengths) > 1 - 1e-3 for x in layers)
    each = zip(grads, slices, strict=True)
    # A part of a gradient is not looked for where slices that are read have a gradient each.
    shares = [0.0 if own and not any(np.all(x.zeros == 1) for x in own) else np.max(grad.zeros)
              for grad, own in each]  # fmt: skip
    read = sources_of_results(given.program)[0] if zero else ()
    unread = [_path_of(given.names[i]) for i in zero if i not in read]
    notes = [f"the loss does not depend on {first_few(unread, _SHOWN)}"] if unread else []
    zero = [i for i in zero if i in read]
    if not (zero or is_partly or data or may_have_cut_pieces(block, given, shares)):
        return [], notes
    try:
        axes = [(own.argument, own.axes) for own in layers]
        values = edge_values(given.program, given.inputs, given.chosen, axes)
    except (TypeError, ValueError, NotImplementedError) as error:
        return [], [*notes, f"diagnose did not look for zero gradients: {first_line(error)}"]
    search = _Explanations(given, Block(given.program, values), zero, layers)
    search.of_zeros(is_all=len(zero) == len(given.chosen) and loss == 0)
    search.of_layers()
    search.of_remainders(data)
    if loss != 0:
        search.of_pieces()
    return search.findings, [*notes, *search.notes]


class _Explanations:
    """The cuts of a program, explained."""

    def __init__(
        self,
        given: DiagnosisSubject,
        block: Block,
        zero: Sequence[int],
        layers: Sequence[Layers],
    ):
        self._given, self._block, self._zero, self._layers = given, block, zero, layers
        self._names = [_path_of(name) for name in given.names]
        self._cuts = zero_cuts(block)
        self.findings: list[GradientFinding] = []
        self.notes: list[str] = []

    def _tell(
        self, rows: Sequence[_Row], is_finding: Callable[[Cause], bool], then: str = ""
    ) -> None:
        """Tell of all that is cut at one place together."""
        groups: dict[tuple, list[_Row]] = {}
        for row in rows:
            key = row.best[0].place if row.best else (), row.layers
            groups.setdefault(key, []).append(row)
        for own in groups.values():
            _, _, layers, best = own[0]
            leaves = [row.leaf + row.part for row in own]
            subject = f"the gradient of {first_few(leaves, _SHOWN)}{layers}"
            if not best:
                self.notes.append(f"{subject} is 0; diagnose did not find where it is cut")
            elif is_finding(best[0].cause):
                self.findings.append(_zero_finding([row.leaf for row in own], subject, best))
            elif best[0].cause.name != SILENT:
                self.notes.append(_text_of(subject, best) + then)

    def of_zeros(self, is_all: bool) -> None:
        """Tell of leaves without a gradient; all of them, at a loss of 0?"""
        cuts = {i: [cut for cut in self._cuts if i in cut.sources] for i in self._zero}
        self._tell(
            [_Row(self._names[i], "", "", self._best(own)) for i, own in cuts.items()],
            lambda cause: not (cause.is_note or (is_all and cause.name in EXCUSED)),
            then="; the loss itself is 0" if is_all else "",
        )

    def of_layers(self) -> None:
        """Tell of layers without a gradient, of leaves that scans take so."""
        rows, done = [], {*self._zero}
        carried = list(carry_cuts(self._block)) if self._layers else []
        for layers in self._layers:
            i, found = layers.argument, self._block.values.gradients[layers.argument, layers.axes]
            zero = [tuple(map(int, own)) for own in np.argwhere(~found)]
            if i not in done and zero:
                done.add(i)
                best = self._best_of_layers(layers, zero, carried)
                # Such as "layer 0, 2 of 4", or of nested scans "layer (0, 1) of (4, 3)".
                *own, count = (str(t[0] if len(t) == 1 else t) for t in (*zero, layers.lengths))
                which = f" in layer {_first_numbers(own)} of {count}"
                rows.append(_Row(self._names[i], "", which, best))
        self._tell(rows, lambda cause: not cause.is_note)

    def _best_of_layers(
        self, layers: Layers, zero: Sequence[tuple[int, ...]], carried: Sequence[ZeroCut]
    ) -> list[_Explained]:
        """The cuts of layers at their own step, else at a later one, else those of the carry."""
        rows = [(self._cuts, False), (self._cuts, True), (carried, False)]
        groups = (self._best(cuts_of_layers(cuts, layers, zero, late)) for cuts, late in rows)
        found = [best for best in groups if best]
        return next((best for best in found if not best[0].cause.is_note), [*found, []][0])

    def of_remainders(self, data: frozenset[int]) -> None:
        """Tell of leaves whose gradient does not depend on the data."""
        for i in self._given.chosen:
            if i in self._zero or not data:
                continue
            left = remainder(self._given, self._block, self._cuts, i, data)
            best = self._best(left[1] if left else [])
            if left and best and best[0].cause.rank < _LIKELY:
                subject = f"only {left[0].location} trains {self._names[i]}: the rest of it"
                self.findings.append(_zero_finding([self._names[i]], subject, best))

    def of_pieces(self) -> None:
        """Tell of parts of leaves, such as the keys of a fused kernel.

        What a number cuts, as of units that are dead, may be right for these arguments: a note. So
        is a comparison, since a part may be a flag beside the numbers of an argument.
        """
        groups: dict[tuple, tuple[Any, list[_Explained]]] = {}
        for piece in cut_pieces(self._given, self._block, self._cuts, self._zero):
            best = self._best(piece.cuts)
            key = best[0].place, piece.argument, piece.axis
            old, best = groups.get(key, (False, best))
            groups[key] = old | piece.elements, best
        rows = [
            _Row(self._names[i], f"[{':, ' * axis}{_index_of(elements)}]", "", best)
            for (_, i, axis), (elements, best) in groups.items()
        ]
        self._tell(rows, lambda cause: cause.name in STRUCTURAL - {"comparison"})

    def _best(self, cuts: Sequence[ZeroCut]) -> list[_Explained]:
        """Those of the first rank, the best first."""
        own = [_Explained(cut, cause_of(cut, self._given, self._zero)) for cut in cuts]
        own.sort(key=lambda e: (e.cause.rank, e.cause.is_note, -float(e.cut.where.mean())))
        return [e for e in own if e.cause.rank == own[0].cause.rank]


def _path_of(name: str) -> str:
    """The name without what NNX has between a state and its array."""
    return re.sub(r"\.states\[\d+\]|\.value$", "", name)


def _text_of(subject: str, best: Sequence[_Explained]) -> str:
    cut, cause = best[0]
    where = best[0].at.location
    text = f"{where}: {subject} is 0: {cause.text}{inside_of(cut.place, where)}"
    if steps := cut.steps:
        is_span = 1 < len(steps) == steps[-1] - steps[0] + 1
        span = f"{steps[0]} to {steps[-1]}" if is_span else _first_numbers(steps)
        text += f", at step {span} of {cut.place.nest[-1]}"
    own = best[0].place
    others = list(dict.fromkeys(e.place for e in best[1:] if e.place != own))
    also = [next(e for e in best if e.place == place) for place in others[:_SHOWN]]
    if also:
        text += "; also cut at " + ", ".join(f"{e.at.location} ({e.cause.name})" for e in also)
    return text + (f"; {cause.step}" if cause.step else "")


def _index_of(elements: np.ndarray) -> str:
    """Elements of an axis, as in an index."""
    own = np.flatnonzero(elements)
    if len(own) == 1:
        return str(own[0])
    if own[-1] - own[0] + 1 == len(own):
        return f"{own[0]}:{own[-1] + 1}"
    return f"[{_first_numbers(own)}]"


def _first_numbers(values: Any) -> str:
    return ", ".join(map(str, values[:_SHOWN])) + ", ..." * (len(values) > _SHOWN)


def _zero_finding(
    names: Sequence[str], subject: str, best: Sequence[_Explained]
) -> GradientFinding:
    cut, cause = best[0]
    where = best[0].at.location
    return GradientFinding(
        kind="zero",
        file=where.file,
        line=where.line,
        operation=cut.place.operation,
        module=cut.place.module,
        step=cut.steps[-1] if cut.steps else None,
        message=f"{_text_of(subject, best)} ({docs_page('zero')})",
        leaf=", ".join(names),
        cause=cause.name,
    )
