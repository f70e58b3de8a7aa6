"""Slices of inputs that scans take layer by layer."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from clipgrad._diagnose.blocks import Block, reached
from clipgrad._diagnose.cuts import ZeroCut
from clipgrad._diagnose.probe import OPERAND
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._jaxpr import scan_counts
from clipgrad._names import Place
from clipgrad._program import active_dependence


class Layers(NamedTuple):
    """The axes of an input along which scans take it, of nested scans the outermost first."""

    argument: int  # the input
    axes: tuple[int, ...]
    lengths: tuple[int, ...]  # the numbers of layers
    scans: tuple[tuple[Place, ...], ...]  # for each of the places where it is taken so


def layers_of_scans(given: DiagnosisSubject, block: Block) -> list[Layers]:
    """The axes of the chosen inputs that scans take layer by layer, also inside of programs.

    What a scan goes through is an input in another form if it depends on that, and is as large.
    """
    active, taken = active_dependence(given.program, given.chosen), {}
    found: dict[tuple[int, tuple[int, ...]], list[tuple[Place, ...]]] = {}
    scans = [own.place(e) for own in block.blocks() for e in own.jaxpr.eqns
             if e.primitive.name == "scan"]  # fmt: skip
    for place in scans:
        first = sum(scan_counts(place.equation))
        for k, sources in enumerate(active[place.key][first:], first):
            for i in sources:
                axes, around = _taken_around(place, i, taken)
                axis = _axis_of(block.jaxpr.invars[i].aval, axes, place, k)
                if axis is not None:
                    taken[place.key, i] = own = (*axes, axis), (*around, place)
                    found.setdefault((i, own[0]), []).append(own[1])
    return [
        Layers(i, axes, tuple(block.jaxpr.invars[i].aval.shape[axis] for axis in axes), tuple(own))
        for (i, axes), own in sorted(found.items(), key=lambda own: (own[0][0], len(own[0][1])))
    ]


def _taken_around(
    place: Place, argument: int, taken: dict
) -> tuple[tuple[int, ...], tuple[Place, ...]]:
    """The axes of an input that scans around take, and these scans."""
    around = place.parent
    while around is not None and (around.key, argument) not in taken:
        around = around.parent
    return taken[around.key, argument] if around is not None else ((), ())


def _axis_of(whole: Any, axes: tuple[int, ...], place: Place, k: int) -> int | None:
    """The axis of an input that a scan goes through in an operand; None if it is none of it."""
    operand: Any = place.equation.invars[k].aval
    size = operand.size * math.prod(whole.shape[axis] for axis in axes)
    is_shared = any(name == "shard_map" for name, _ in place.axes)
    if whole.size != size and not (is_shared and whole.size % max(size, 1) == 0):
        return None
    left = [a for a, n in enumerate(whole.shape) if n == operand.shape[0] and a not in axes]
    rests = {a: [n for b, n in enumerate(whole.shape) if b not in (*axes, a)] for a in left}
    # Of axes of one length that which leaves the others as they are.
    return min(left, key=lambda a: rests[a] != [*operand.shape[1:]], default=None)


def cuts_of_layers(
    cuts: Sequence[ZeroCut], layers: Layers, zero: Sequence[tuple[int, ...]], is_later: bool = False
) -> list[ZeroCut]:
    """The cuts of some layers of an input, at their own steps or at later ones behind the carry."""
    found = []
    for cut in cuts:
        bodies = {body.key: body for body in cut.block.around()}
        scans = next((own for own in layers.scans if own[-1].key in bodies), None)
        axes = cut.place.parent.axes if cut.place.parent else ()
        if scans is None or layers.argument not in cut.sources or cut.where.ndim != len(axes):
            continue
        at = [len(scan.parent.axes) if scan.parent else 0 for scan in scans]
        indices: list[tuple] = [*zero]
        if is_later:
            own = [n for n, s in enumerate(scans) if _is_from_carry(cut, bodies[s.key])]
            backward = [scan.equation.params["reverse"] for scan in scans]
            indices = [
                (*t[:n], slice(None, t[n]) if backward[n] else slice(t[n] + 1, None))
                for t in zero for n in own
            ]  # fmt: skip
        where = np.zeros_like(cut.where)
        for index in indices:
            taken: list[Any] = [slice(None)] * where.ndim
            for axis, i in zip(at, index, strict=False):
                taken[axis] = i
            where[tuple(taken)] = cut.where[tuple(taken)]
        if where.any():
            found.append(cut._replace(where=where))
    return found


def _is_from_carry(cut: ZeroCut, body: Block) -> bool:
    """Whether the operand is computed from what a scan carries."""
    states = [v for k, v in enumerate(body.jaxpr.invars) if body.is_carry(k)]
    found = reached(body, states, lambda own, i, k: own.cotangent(i, OPERAND, k) is not None)
    return (cut.block, cut.variable) in found
