"""The operands of one operation, where its result or its VJP is not finite."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from clipgrad._diagnose.notes import Noting, index_of
from clipgrad._diagnose.origins import Source
from clipgrad._jaxpr import (
    at_first,
    bind,
    evaluate,
    holds_floats,
    jit_for_one_call,
    on_host,
    tracked_programs,
)
from clipgrad._names import Place

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
Record = Callable[[JaxprEqn, list], tuple[Any, Any]]  # whether its result is not finite, and more


class OperandOfVjp(NamedTuple):
    """A floating operand of an operation whose VJP is not finite."""

    is_at_fault: Any  # whether its own cotangent is not finite, see `_record_of_vjp`
    value: Any  # its element where the cotangent is not finite
    is_bad: Any  # whether it is not finite where a cotangent is not finite


def operands_of(program: Any, inputs: Sequence[Any], source: Source) -> tuple[float, ...]:
    """The operands of an operation where its result is not finite.

    Of a gather these are the index that is out of range, and its axis.
    """
    place = source.place
    assert place is not None
    values = _recorded(program, inputs, place, source, _record_of_result)
    pairs = zip(place.equation.invars, values, strict=True)
    is_gather = place.equation.primitive.name == "gather"
    return tuple(float(value) for v, value in pairs if is_gather or holds_floats(v))


def operands_of_vjp(
    program: Any, inputs: Sequence[Any], place: Place, source: Source
) -> list[OperandOfVjp | None]:
    """The operands of an operation where its VJP, at the steps of a source, is not finite."""
    return _recorded(program, inputs, place, source, _record_of_vjp)


def _recorded(
    program: Any, inputs: Sequence[Any], place: Place, source: Source, record: Record
) -> Any:
    @jit_for_one_call(program)
    def run(inputs: list) -> Any:
        recorder = _Recording(place, record)
        evaluate(program, inputs, recorder)
        return recorder.found.taken["operands"]

    index = index_of(place.parent, source.steps, min(source.devices))
    return jax.tree.map(lambda x: x[index], on_host(run(list(inputs))))


class _Recording(Noting):
    """Records what an operation reads."""

    def __init__(self, target: Place, record: Record):
        super().__init__()
        self._target, self._record = target, record

    def enters(self, place: Place) -> bool:
        """Whether the operation is inside."""
        is_around = self._target.key[-len(place.key) :] == place.key != self._target.key
        return is_around and bool(tracked_programs(place.equation))

    def computed(self, place: Place, inputs: list) -> list:
        """The results of an operation, which is recorded if it is the one."""
        if place.key == self._target.key:
            found = self.marked(self._record(place.equation, inputs))
            self.found.values["is bad"], self.found.taken["operands"] = found
        return bind(place.equation, inputs)


def _record_of_result(equation: JaxprEqn, inputs: list) -> tuple[Any, Any]:
    """Whether a result is not finite, and the elements of the operands where it is not."""
    outputs = [y for y in bind(equation, inputs) if holds_floats(y)]
    y = max(outputs, key=lambda y: y.size)
    bad = jnp.where(jnp.isnan(y).any(), jnp.isnan(y), jnp.isinf(y))
    if equation.primitive.name == "gather":
        read = _first_out_of_range(equation, *inputs)
    else:
        read = [at_first(bad, x) if holds_floats(x) else jnp.zeros(()) for x in inputs]
    return bad.any().astype(jnp.int32), jnp.asarray(read, jnp.result_type(float))


def _first_out_of_range(equation: JaxprEqn, array: Any, indices: Any) -> list:
    """The first index of a gather that is out of range, and its axis."""
    params, indices = equation.params, jnp.asarray(indices, jnp.int32)
    axes = params["dimension_numbers"].start_index_map
    last = [array.shape[axis] - params["slice_sizes"][axis] for axis in axes]
    axes, last = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), indices.shape) for x in (axes, last))
    bad = (indices < 0) | (indices > last)
    return [at_first(bad, indices), at_first(bad, axes)]


def _record_of_vjp(equation: JaxprEqn, inputs: list) -> tuple[Any, list]:
    """An `OperandOfVjp` for each operand; None for one that holds no floating numbers.

    The cotangents of the results are ones, or if these give finite ones, as large as they can be.
    """
    chosen = [i for i, x in enumerate(inputs) if holds_floats(x)]

    def run(*given):
        changed = dict(zip(chosen, given, strict=True))
        outputs = bind(equation, [changed.get(i, x) for i, x in enumerate(inputs)])
        return [y for y in outputs if holds_floats(y)]

    outputs, pull_back = jax.vjp(run, *(inputs[i] for i in chosen))
    found: list[OperandOfVjp | None] = [None] * len(inputs)
    of_ones = pull_back([jnp.ones_like(y) for y in outputs])
    of_most = pull_back([jnp.full_like(y, jnp.finfo(y.dtype).max) for y in outputs])
    is_of_ones = jnp.any(jnp.stack([jnp.any(~jnp.isfinite(x)) for x in of_ones]))
    masks = [
        jnp.where(is_of_ones, ~jnp.isfinite(one), ~jnp.isfinite(most))
        for one, most in zip(of_ones, of_most, strict=True)
    ]
    shapes = {jnp.shape(y) for y in [*outputs, *(inputs[i] for i in chosen)]}
    is_elementwise = len(shapes) == 1 and equation.primitive.name not in _PRODUCTS
    there = functools.reduce(jnp.logical_or, masks) if is_elementwise else True
    for i, bad in zip(chosen, masks, strict=True):
        x = inputs[i]
        value = at_first(bad, x).astype(jnp.result_type(float))
        found[i] = OperandOfVjp(bad.any(), value, jnp.any(~jnp.isfinite(x) & there))
    return jnp.int32(0), found
