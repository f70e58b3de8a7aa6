"""Slices of inputs that scans take layer by layer."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._diagnose.cuts import ZeroCut
from clipgrad._diagnose.edges import OPERAND
from clipgrad._diagnose.reach import Reach
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._jaxpr import differentiated_programs, opened, scan_counts
from clipgrad._names import Place

# The elements of a result of these are made of the same elements of the operands.
_BY_ELEMENT = frozenset("add sub mul div neg select_n round tanh exp max min sign".split())
_BY_ELEMENT |= {"convert_element_type", "copy", "name", "reduce_precision", "sharding_constraint"}
_BY_ELEMENT |= {"optimization_barrier", "pvary", "pcast", "stop_gradient"}


class Layers(NamedTuple):
    """The axes of an input along which scans take it, of nested scans the outermost first.

    Attributes:
      argument: the input.
      axes: its axes.
      lengths: the numbers of layers.
      scans: the scans, for each of the places where it is taken so.
    """

    argument: int
    axes: tuple[int, ...]
    lengths: tuple[int, ...]
    scans: tuple[tuple[Place, ...], ...]


class _Slice(NamedTuple):
    """The part of an input in a value: for each axis that of the input, and what scans took."""

    argument: int
    axes: tuple[int | None, ...]
    taken: tuple[tuple[int, Place], ...] = ()


def layers_of_scans(given: DiagnosisSubject) -> list[Layers]:
    """The axes of the chosen inputs that scans take layer by layer, also inside of programs."""
    program = opened(given.program)[0]
    shapes: list[Any] = [v.aval for v in program.invars]
    known = {program.invars[i]: [_Slice(i, tuple(range(shapes[i].ndim)))] for i in given.chosen}
    found: dict[tuple[int, tuple[int, ...]], list[tuple[Place, ...]]] = {}
    for own in _taken(program, known, None):
        axes, scans = zip(*own.taken, strict=True)
        found.setdefault((own.argument, axes), []).append(scans)
    return [
        Layers(i, axes, tuple(shapes[i].shape[axis] for axis in axes), tuple(scans))
        for (i, axes), scans in sorted(found.items(), key=lambda own: (own[0][0], len(own[0][1])))
    ]


def _taken(program: Any, known: dict[Var, list[_Slice]], parent: Place | None) -> Iterator[_Slice]:
    """The slices that scans take; ``known`` gets those of all values of the program."""
    for equation in program.eqns:
        place, inside = Place(equation, parent), differentiated_programs(equation)
        for own in inside:
            inner = opened(own)[0]
            deeper = dict(_entering(place, inner, known))
            if equation.primitive.name == "scan":
                taken = inner.invars[sum(scan_counts(equation)) :]
                yield from (s for v in taken for s in deeper.get(v, []))
            yield from _taken(inner, deeper, place)
            if equation.primitive.name not in ("scan", "cond", "shard_map"):
                ends = zip(equation.outvars, inner.outvars, strict=True)
                known.update({v: _slices_of(deeper, end) for v, end in ends})
        if not inside:
            found = [s for v in equation.invars for s in _slices_of(known, v)]
            kept = [s for own in found if (s := _slice_after(equation, own)) is not None]
            known.update(dict.fromkeys(equation.outvars, kept) if kept else {})


def _slices_of(known: dict[Var, list[_Slice]], atom: Any) -> list[_Slice]:
    return [] if type(atom) is Literal else known.get(atom, [])


def _entering(
    place: Place, inner: Any, known: dict[Var, list[_Slice]]
) -> Iterator[tuple[Var, list[_Slice]]]:
    """The inputs of a program inside of an equation that have slices."""
    name, operands = place.equation.primitive.name, place.equation.invars
    operands = operands[len(operands) - len(inner.invars) :]
    constants, carried = scan_counts(place.equation) if name == "scan" else (0, 0)
    for k, (v, atom) in enumerate(zip(inner.invars, operands, strict=True)):
        own = _slices_of(known, atom)
        if name == "shard_map":  # an axis that is split over devices is none of layers
            same = [m == n for m, n in zip(_shape_of(v), _shape_of(atom), strict=True)]
            axes = [tuple(a if is_same else None for a, is_same in zip(s.axes, same, strict=True))
                    for s in own]  # fmt: skip
            own = [s._replace(axes=a) for s, a in zip(own, axes, strict=True)]
        if name == "scan" and k >= constants + carried:
            own = [_Slice(s.argument, s.axes[1:], (*s.taken, (s.axes[0], place)))
                   for s in own if s.axes[0] is not None]  # fmt: skip
        if own and not constants <= k < constants + carried:
            yield v, own


def _slice_after(equation: JaxprEqn, own: _Slice) -> _Slice | None:
    """The part of an input in the results of an operation."""
    name, shape = equation.primitive.name, _shape_of(equation.outvars[0])
    if name == "transpose":
        return own._replace(axes=tuple(own.axes[p] for p in equation.params["permutation"]))
    if name == "reshape":
        before = _shape_of(equation.invars[0])
        pairs = zip(before, shape, strict=False)
        same = next((i for i, (m, n) in enumerate(pairs) if m != n), min(len(before), len(shape)))
        return own._replace(axes=own.axes[:same] + (None,) * (len(shape) - same))
    return own if name in _BY_ELEMENT and len(own.axes) == len(shape) else None


def _shape_of(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


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
    walk = Reach(lambda own, i, k: own.values.cotangent(i, OPERAND, k) is not None, states)
    walk.follow(body)
    return walk.has(cut.variable)
