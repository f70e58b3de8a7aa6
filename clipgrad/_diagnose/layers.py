"""Slices of inputs that scans take layer by layer."""

import functools
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
    return left[0] if left else None


def cuts_of_layers(
    cuts: Sequence[ZeroCut], layers: Layers, zero: Sequence[tuple[int, ...]], is_later: bool = False
) -> list[ZeroCut]:
    """The cuts of some layers of an input, at their own steps or at later ones behind the carry."""
    found = []
    for cut in cuts:
        scans = next((own for own in layers.scans if _is_inside(cut.place, own[-1])), None)
        around = cut.place.parent.axes if cut.place.parent else ()
        if scans is None or layers.argument not in cut.sources or cut.where.ndim != len(around):
            continue
        at = [len(scan.parent.axes) if scan.parent else 0 for scan in scans]
        steps = [
            _later_steps(cut, scans, at, t) if is_later else _steps_at(cut, at, t) for t in zero
        ]
        if (where := cut.where & functools.reduce(np.logical_or, steps)).any():
            found.append(cut._replace(where=where))
    return found


def _is_inside(place: Place, scan: Place) -> bool:
    return place.key[-len(scan.key) :] == scan.key and place.key != scan.key


def _steps_at(cut: ZeroCut, at: Sequence[int], index: Sequence[Any]) -> np.ndarray:
    """The steps with these indices of some axes."""
    steps = np.zeros(cut.where.shape, bool)
    taken: list[Any] = [slice(None)] * steps.ndim
    for axis, i in zip(at, index, strict=False):
        taken[axis] = i
    steps[tuple(taken)] = True
    return steps


def _later_steps(
    cut: ZeroCut, scans: Sequence[Place], at: Sequence[int], index: tuple[int, ...]
) -> np.ndarray:
    """The later steps, if the operand is computed from what a scan carries."""
    steps = np.zeros(cut.where.shape, bool)
    for n, scan in enumerate(scans):
        if _is_from_carry(cut, scan):
            is_back, t = scan.equation.params["reverse"], index[n]
            rest = slice(None, t) if is_back else slice(t + 1, None)
            steps |= _steps_at(cut, at, (*index[:n], rest))
    return steps


def _is_from_carry(cut: ZeroCut, scan: Place) -> bool:
    body = cut.block
    while body.parent is not None and body.parent.key != scan.key:
        assert body.outer is not None
        body = body.outer
    states = [v for k, v in enumerate(body.jaxpr.invars) if body.is_carry(k)]
    found = reached(body, states, lambda own, i, k: own.cotangent(i, OPERAND, k) is not None)
    return (cut.block, cut.variable) in found
