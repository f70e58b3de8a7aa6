"""Gradients that are not zero, but cut in all but a penalty."""

from collections.abc import Sequence

import numpy as np

from clipgrad._diagnose.blocks import Block, reached
from clipgrad._diagnose.cuts import ZeroCut
from clipgrad._diagnose.probe import OPERAND
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._names import Place
from clipgrad._program import dependence

# The derivative of these does not depend on their operands,
_LINEAR = frozenset({"add", "sub", "neg", "add_any", "reduce_sum", "cumsum", "psum", "copy", "pad"})
_LINEAR |= {"reshape", "transpose", "broadcast_in_dim", "squeeze", "rev", "slice", "concatenate"}
_LINEAR |= {"convert_element_type", "expand_dims", "stack", "pvary", "pcast", "name", "split"}
# and of these on the others alone.
_BY_OTHERS = frozenset({"mul", "dot_general", "conv_general_dilated", "select_n", "gather"})
_BY_OTHERS |= {"dynamic_slice", "scatter-add", "dynamic_update_slice"}


def remainder(
    given: DiagnosisSubject,
    block: Block,
    cuts: Sequence[ZeroCut],
    argument: int,
    data: frozenset[int],
) -> tuple[Place, list[ZeroCut]] | None:
    """The rest of the gradient of an input, if no operation on its way reads the data.

    The first operation on this way, and the cuts on the way to the data.
    """
    read = dependence(given.program)
    own = [c for c in cuts if argument in c.sources and _meets_data(c, read, data)]
    alive: dict[tuple[int, ...], tuple[Place, set[int]]] = {}

    def is_alive(block: Block, i: int, k: int) -> bool:
        found = block.cotangent(i, OPERAND, k)
        if found is None or not np.any(found != 0):
            return False
        if i not in block.children:
            place = block.place(block.jaxpr.eqns[i])
            alive.setdefault(place.key, (place, set()))[1].add(k)
        return True

    if own:
        reached(block, [block.jaxpr.invars[argument]], is_alive)
    reads = any(_reads_data(*used, read[key], data) for key, used in alive.items())
    return (next(iter(alive.values()))[0], own) if alive and not reads else None


def _meets_data(
    cut: ZeroCut, read: dict[tuple, list[frozenset[int]]], data: frozenset[int]
) -> bool:
    """Whether a value that is cut depends on the data, or is multiplied by it afterwards."""
    met = bool(read[cut.place.key][cut.operand] & data)

    def goes_on(block: Block, i: int, k: int) -> bool:
        nonlocal met
        place = block.place(block.jaxpr.eqns[i])
        met = met or _reads_data(place, {k}, read.get(place.key, []), data)
        return not met

    if not met:
        reached(cut.block, cut.place.equation.outvars, goes_on)
    return met


def _reads_data(
    place: Place, operands: set[int], read: Sequence[frozenset[int]], data: frozenset[int]
) -> bool:
    """Whether the derivative of an operation by these operands depends on the data."""
    name, counted = place.equation.primitive.name, set(range(len(read)))
    if name in _BY_OTHERS:
        counted -= operands
    return name not in _LINEAR and any(read[k] & data for k in counted)
