"""Gradients that are not zero, but cut in part: slices of stacked layers, and all but a penalty."""

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal, Var

from clipgrad._diagnose.blocks import MeasuredBlock
from clipgrad._diagnose.cuts import ZeroCut
from clipgrad._diagnose.edge_values import OPERAND
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._jaxpr import opened, scan_counts
from clipgrad._names import Place
from clipgrad._program import dependence

# The derivative of these does not depend on their operands,
_LINEAR = frozenset({"add", "sub", "neg", "add_any", "reduce_sum", "cumsum", "psum", "copy", "pad"})
_LINEAR |= {"reshape", "transpose", "broadcast_in_dim", "squeeze", "rev", "slice", "concatenate"}
_LINEAR |= {"convert_element_type", "expand_dims", "stack", "pvary", "pcast", "name", "split"}
# and of these on the others alone.
_BY_OTHERS = frozenset({"mul", "dot_general", "conv_general_dilated", "select_n", "gather"})
_BY_OTHERS |= {"dynamic_slice", "scatter-add", "dynamic_update_slice"}


def layers_of_scans(given: DiagnosisSubject) -> dict[int, int]:
    """The numbers of layers of the chosen inputs that a scan takes layer by layer."""
    program = opened(given.program)[0]
    numbers, found = {v: i for i, v in enumerate(program.invars)}, {}
    for equation in program.eqns:
        if equation.primitive.name != "scan":
            continue
        for v in equation.invars[sum(scan_counts(equation)) :]:
            if type(v) is not Literal and numbers.get(v) in given.chosen:
                found[numbers[v]] = equation.params["length"]
    return found


def cuts_of_layer(cuts: Sequence[ZeroCut], argument: int, layer: int) -> list[ZeroCut]:
    """The cuts of one layer of an input that a scan takes layer by layer."""
    found = []
    for cut in cuts:
        around = [e.primitive.name for e in reversed(cut.place.chain[1:])]
        axes = [name for name in around if name in ("scan", "shard_map")]
        if argument in cut.sources and axes[:1] == ["scan"] and cut.where.ndim == len(axes):
            where = np.zeros_like(cut.where)
            where[layer] = cut.where[layer]
            if where.any():
                found.append(cut._replace(where=where))
    return found


class Remainder(NamedTuple):
    """The path that is left of a gradient which does not read the data.

    Attributes:
      place: the first operation on it.
      cuts: the cuts on the way to the data.
    """

    place: Place
    cuts: list[ZeroCut]


def remainder(
    given: DiagnosisSubject,
    block: MeasuredBlock,
    cuts: Sequence[ZeroCut],
    argument: int,
    data: frozenset[int],
) -> Remainder | None:
    """The rest of the gradient of an input if no operation on its way reads the data."""
    read = dependence(given.program)
    own = [c for c in cuts if argument in c.sources and read[c.place.key][c.operand] & data]
    if not own:
        return None
    walk = _Alive(read, data)
    start = block.jaxpr.invars[argument]
    walk.reached.add(start)
    walk.follow(block)
    return Remainder(walk.first, own) if walk.first and not walk.reads_data else None


class _Alive:
    """A walk from an input along the edges that are alive."""

    def __init__(self, read: dict, data: frozenset[int]):
        self._read, self._data = read, data
        self.reached: set[Var] = set()
        self.reads_data = False
        self.first: Place | None = None

    def follow(self, block: MeasuredBlock) -> None:
        """Go through a program, again as long as loops carry something new."""
        count = -1
        while count != len(self.reached) and not self.reads_data:
            count = len(self.reached)
            for i in range(len(block.jaxpr.eqns)):
                self._equation(block, i)

    def _equation(self, block: MeasuredBlock, i: int) -> None:
        equation = block.jaxpr.eqns[i]
        alive = [k for k, v in enumerate(equation.invars) if self._is_alive(block, i, k, v)]
        if not alive:
            return
        if i in block.children:
            self._enter(block, i, alive)
            return
        place = block.place(equation)
        self.first = self.first or place
        sources, name = self._read[place.key], equation.primitive.name
        counted = range(len(sources))
        if name in _BY_OTHERS:
            counted = [k for k in counted if k not in alive]
        if name not in _LINEAR and any(sources[k] & self._data for k in counted):
            self.reads_data = True
        self.reached.update(equation.outvars)

    def _is_alive(self, block: MeasuredBlock, i: int, k: int, v: object) -> bool:
        if type(v) is Literal or v not in self.reached:
            return False
        found = block.values.cotangent(i, OPERAND, k)
        return found is not None and bool(np.any(found != 0))

    def _enter(self, block: MeasuredBlock, i: int, alive: Sequence[int]) -> None:
        equation = block.jaxpr.eqns[i]
        first = 1 if equation.primitive.name == "cond" else 0
        constants, carried = scan_counts(equation) if equation.primitive.name == "scan" else (0, 0)
        for inner in (b for b in block.children[i] if b.values.ran):
            self.reached.update(inner.jaxpr.invars[k - first] for k in alive)
            self.follow(inner)
            state = inner.jaxpr.invars[constants : constants + carried]
            pairs = zip(state, inner.jaxpr.outvars, strict=False)
            self.reached.update(own for own, out in pairs if self._has(out))
            self.follow(inner)
            results = zip(equation.outvars, inner.jaxpr.outvars, strict=True)
            self.reached.update(v for v, out in results if self._has(out))

    def _has(self, atom: object) -> bool:
        return type(atom) is not Literal and atom in self.reached


def data_inputs(given: DiagnosisSubject, data: str | int | Sequence[str | int]) -> frozenset[int]:
    """The inputs of the arguments that are data.

    Raises:
      ValueError: there is no such argument.
    """
    wanted: list[Any] = [data] if isinstance(data, str | int) else list(data)
    keys: set[Any] = {key for key, _ in given.paths}
    positions: dict[Any, Any] = {}
    with contextlib.suppress(TypeError, ValueError):  # some functions have no signature
        positions = {name: i for i, name in enumerate(inspect.signature(given.fun).parameters)}
    chosen = {name if name in keys else positions.get(name, name) for name in wanted}
    if missing := [name for name in wanted if not {name, positions.get(name)} & keys]:
        raise ValueError(
            f"data: got {missing[0]!r}, expected the positions or names of arguments with arrays, "
            f"some of {', '.join(map(repr, sorted(keys, key=str)))}"
        )
    return frozenset(i for i, (key, _) in enumerate(given.paths) if key in chosen)
