"""Linear operations on gradients behind their products, done to the factors."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from clipgrad._jaxpr import CALLS, JIT, bind, called_program, evaluate
from clipgrad._numerics import accumulator, with_real_dtype
from clipgrad._per_example.follow import follows, gradient_array, is_plain_array, no_products, tie
from clipgrad._per_example.squares import Squares
from clipgrad._per_example.terms import GradientAxis, Products, Term, Unfollowed, reshaped
from clipgrad._per_example.wanted import (
    is_zero,
    want_broadcast,
    want_called,
    want_converted,
    want_padded,
    want_part,
    want_product,
    want_reduced,
    want_selected,
    want_split,
    want_unchanged,
    want_unstacked,
)


def _on_first(change: Any) -> Any:
    """The rule of an equation that changes its first input; arrays and squares pass through."""

    def rule(hook: Any, equation: Any, inputs: list, wants: list) -> list:
        value = inputs[0]
        if isinstance(value, Squares):
            return [value]
        if is_plain_array(value):
            return bind(equation, inputs)
        return [value.map(lambda term: change(equation, inputs, term), equation.outvars[0].aval)]

    return rule


@follows("transpose", wants=want_unchanged)
@_on_first
def _follow_transpose(equation, inputs, term):
    return term.with_axes([term.axes[i] for i in equation.params["permutation"]])


@follows("reshape", "squeeze", "expand_dims", wants=want_unchanged)
@_on_first
def _follow_reshape(equation, inputs, term):
    if equation.params.get("dimensions") is not None:
        raise Unfollowed("a reshape with dimensions")
    return reshaped(term, equation.invars[0].aval.shape, equation.outvars[0].aval.shape)


@follows("convert_element_type", wants=want_converted)
@follows("copy", "copy_p", "name", "reduce_precision", wants=want_unchanged)
@_on_first
def _follow_same(equation, inputs, term):
    return term


@follows("neg", wants=want_unchanged)
@_on_first
def _follow_negative(equation, inputs, term):
    return term.times(-1)


@follows("rev", wants=want_unchanged)
@_on_first
def _follow_reversed(equation, inputs, term):
    for i in equation.params["dimensions"]:
        term = term.rearranged(i, lambda x: jnp.flip(x, 0))
    return term


@follows("cumsum", wants=want_part)
@_on_first
def _follow_cumulative(equation, inputs, term):
    axis, reverse = equation.params["axis"], equation.params["reverse"]
    return term.rearranged(axis, lambda x: jax.lax.cumsum(x, 0, reverse), several=False)


@follows("pad", wants=want_padded)
@_on_first
def _follow_pad(equation, inputs, term):
    edges = [tuple(map(int, edge)) for edge in equation.params["padding_config"]]
    for i, edge in enumerate(edges):
        if min(edge[:2]) < 0 or edge[2]:
            term = term.rearranged(i, lambda x, e=edge: _padded(x, e))
            edges[i] = 0, 0, 0
    pairs = zip(term.axes, edges, equation.outvars[0].aval.shape, strict=True)
    return term.with_axes([GradientAxis(a.labels, a.start + low, n) for a, (low, _, _), n in pairs])


def _padded(x: Any, edge: tuple[int, int, int]) -> Any:
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [edge, *[(0, 0, 0)] * (x.ndim - 1)])


@follows("slice", wants=want_part)
@_on_first
def _follow_slice(equation, inputs, term):
    starts, stops = equation.params["start_indices"], equation.params["limit_indices"]
    steps = equation.params["strides"] or [1] * len(starts)
    for i, (start, stop, step) in enumerate(zip(starts, stops, steps, strict=True)):
        if step != 1:
            term = term.rearranged(i, lambda x, s=slice(start, stop, step): x[s])
            starts, stops = _replaced(starts, i, 0), _replaced(stops, i, term.axes[i].size)
    return term.between(starts, stops)


def _replaced(numbers: Sequence[int], place: int, new: int) -> list[int]:
    return [new if i == place else n for i, n in enumerate(numbers)]


@follows("reduce_sum", wants=want_reduced)
@_on_first
def _follow_reduce(equation, inputs, term):
    return term.without(equation.params["axes"])


@follows("broadcast_in_dim", wants=want_broadcast)
def _follow_broadcast(hook, equation, inputs, wants):
    aval = equation.outvars[0].aval
    if is_zero(equation.invars[0]):
        return [no_products(aval)]
    if is_plain_array(inputs[0]):
        return bind(equation, inputs)
    if list(equation.params["broadcast_dimensions"]) != sorted(
        equation.params["broadcast_dimensions"]
    ):
        raise Unfollowed("a broadcast that transposes")
    return _follow_reshape(hook, equation, inputs, wants)


@follows("add", "add_any", "sub", wants=want_part)
def _follow_add(hook, equation, inputs, wants):
    first, second = inputs
    if equation.primitive.name == "sub" and isinstance(second, Products):
        second = second.map(lambda term: term.times(-1), equation.outvars[0].aval)
    return [total(equation.outvars[0].aval, first, second)]


def total(aval: Any, first: Any, second: Any) -> Any:
    if isinstance(first, Products) and isinstance(second, Products):
        return first.plus(second)
    for one, other in ((first, second), (second, first)):
        if isinstance(one, Products) and not one.terms and not one.carried:
            return jnp.broadcast_to(gradient_array(other), aval.shape).astype(aval.dtype)
    return gradient_array(first) + gradient_array(second)


@follows("concatenate", wants=want_part)
def _follow_concatenate(hook, equation, inputs, wants):
    aval, dimension = equation.outvars[0].aval, equation.params["dimension"]
    if not all(isinstance(x, Products) for x in inputs):
        return bind(equation, [gradient_array(x) for x in inputs])
    joined, starts = no_products(aval), np.cumsum([0, *(x.shape[dimension] for x in inputs)])
    for value, start in zip(inputs, starts.tolist(), strict=False):

        def move(term: Term, place: int = start) -> Term:
            axes = list(term.axes)
            own = axes[dimension]
            axes[dimension] = own._replace(start=own.start + place, size=aval.shape[dimension])
            return term.with_axes(axes)

        joined = joined.plus(value.map(move, aval))
    return [joined]


@follows("mul", "div", wants=want_product)
def _follow_product(hook, equation, inputs, wants):
    first, second = inputs
    if is_plain_array(first) and is_plain_array(second):
        return None
    place = 0 if is_plain_array(first) else 1
    array, products = inputs[place], inputs[1 - place]
    change = _reciprocal if equation.primitive.name == "div" else jnp.asarray
    return [_times_along(hook, equation, products, place, array, change)]


@follows("select_n", wants=want_selected)
def _follow_selected(hook, equation, inputs, wants):
    which, *cases = inputs
    place = next((i for i, case in enumerate(cases) if isinstance(case, Products)), None)
    if place is None:
        return None
    is_chosen = lambda x: x == jnp.asarray(place, x.dtype)  # noqa: E731
    return [_times_along(hook, equation, cases[place], 0, which, is_chosen)]


def _times_along(
    hook: Any, equation: Any, products: Products, place: int, array: Any, change: Any
) -> Products:
    """Products times an input of an equation, which is changed where it is smallest."""
    atom, aval = equation.invars[place], equation.outvars[0].aval
    small, dimensions = hook.source(atom, array, aval.shape)
    factor = change(small)
    shared = isinstance(atom, Literal) or atom not in hook.varying
    return products.map(lambda term: term.along(factor, dimensions, shared), aval)


def _reciprocal(x: Any) -> Any:
    """Its reciprocal, in float32 or wider."""
    return 1 / with_real_dtype(jnp.asarray(x), accumulator(x))


@follows("split", wants=want_split)
def _follow_split(hook, equation, inputs, wants):
    value, axis = inputs[0], equation.params["axis"]
    if not isinstance(value, Products):
        return None
    parts, start = [], 0
    for size, variable in zip(equation.params["sizes"], equation.outvars, strict=True):
        parts.append(_between(value, axis, start, start + size, variable.aval))
        start += size
    return parts


@follows("unstack", wants=want_unstacked)
def _follow_unstack(hook, equation, inputs, wants):
    value, axis = inputs[0], equation.params["axis"]
    if not isinstance(value, Products):
        return None
    return [_between(value, axis, i, i + 1, v.aval) for i, v in enumerate(equation.outvars)]


def _between(value: Products, axis: int, start: int, stop: int, aval: Any) -> Products:
    """The gradient between two indices of an axis; without the axis if ``aval`` lacks it."""
    starts = _replaced([0] * len(value.shape), axis, start)
    stops = _replaced(value.shape, axis, stop)
    shape = _replaced(value.shape, axis, stop - start)

    def cut(term: Term) -> Term | None:
        part = term.between(starts, stops)
        return part and reshaped(part, shape, aval.shape)

    return value.map(cut, aval)


@follows("optimization_barrier", wants=want_unchanged)
def _follow_barrier(hook, equation, inputs, wants):
    return tie(inputs)


@follows(*JIT, *CALLS, wants=want_called)
def _follow_call(hook, equation, inputs, wants):
    return evaluate(called_program(equation), inputs, hook.inside(equation, ()))
