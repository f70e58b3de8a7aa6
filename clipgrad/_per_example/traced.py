"""The gradient of one example as a program, evaluated for all examples at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._jaxpr import evaluate, opened, trace
from clipgrad._per_example import convolutions, linear, products, scans  # noqa: F401  how they are followed
from clipgrad._per_example.after import After
from clipgrad._per_example.follow import End, Follow, Notes
from clipgrad._per_example.wanted import Want, wanted
from clipgrad._trees import is_array


class Examples(NamedTuple):
    """What the examples of a batch gave; each array has an axis for them in front."""

    gradients: list[Any]  # of each leaf: an array, `Products` or `Squares`
    value: Any  # what the loss function returned


def each_example(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    params: Any,
    batch: Any,
    *,
    end: End | None = None,
    notes: Notes | None = None,
) -> Examples:
    """The gradients of the examples, as products or as what ``end`` makes of them."""
    notes = Notes() if notes is None else notes

    def of_one(params: Any, example: Any) -> tuple[list[Any], Any]:
        return one_example(loss_fn, has_aux, params, example, end, notes)

    return Examples(*jax.vmap(of_one, in_axes=(None, 0))(params, batch))


def one_example(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    params: Any,
    example: Any,
    end: End | None,
    notes: Notes,
    after: jax.Array | None = None,
) -> tuple[list[Any], Any]:
    """The gradient of one example leaf by leaf, and what the loss function returned.

    It is evaluated when ``after``, from `never`, is known.
    """
    count = len(jax.tree.leaves(params))

    def run(params: Any, example: Any) -> Any:
        value, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(params, example)
        return jax.tree.leaves(grads), value

    traced = trace(run, (params, example), {})
    rest = len(opened(traced.program)[0].outvars) - count
    wants = [Want(frozenset([i]), True, True, 1) for i in range(count)] + [None] * rest
    hook: Any = Follow(wanted(traced.program, wants), end, notes)
    if after is not None:
        hook = After.of(traced.program, _array_count(params), hook, after)
    inputs = [leaf for leaf in jax.tree.leaves((params, example)) if is_array(leaf)]
    outputs = evaluate(traced.program, inputs, hook)
    _, value = traced.result([jnp.zeros(())] * count + outputs[count:])
    return outputs[:count], value


def _array_count(tree: Any) -> int:
    return sum(map(is_array, jax.tree.leaves(tree)))
