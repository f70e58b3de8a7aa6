"""Sums over the microbatches of a batch, each of which is every k-th example."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._arrays import at_least_float32, combine, split_overwritten
from clipgrad._frameworks import Parameters

Gradients = Callable[..., tuple[tuple[Any, Any], Any, Any, Any]]


def microbatches(batch: Any, parts: int) -> Callable[[Any], Any]:
    """A function of the index of a microbatch, of which ``parts`` make up the batch.

    The i-th has the examples i, i + parts, ...: so a sharded leading axis stays where it is.
    """
    shape = lambda x: (x.shape[0] // parts, parts, *x.shape[1:])  # noqa: E731
    apart = jax.tree.map(lambda x: jnp.reshape(x, shape(x)), batch)
    return lambda i: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 1, False), apart)


def scan_sums(
    f: Callable[[Any, Any], tuple[Any, Any, Any]], zeros: Any, parts: int, state: Any = None
) -> tuple[tuple[Any, Any], Any]:
    """The sum of the first results of ``f(state, i)``, and the last state; the second, stacked.

    The third result is the state of the next.
    """

    def body(carried: Any, i: jax.Array) -> tuple[Any, Any]:
        total, state = carried
        new, rest, state = f(state, i)
        return (jax.tree.map(lambda t, n: t + n.astype(t.dtype), total, new), state), rest

    return jax.lax.scan(body, (zeros, state), jnp.arange(parts))


def wide_zeros(leaf: Any, like: Any) -> jax.Array:
    """Zeros placed as a leaf is, in the dtype of ``like`` or float32 if that is narrower."""
    return jnp.zeros_like(leaf, dtype=at_least_float32(jnp.result_type(like)))


def accumulated(gradients: Gradients, parts: int) -> Gradients:
    """``gradients(params, batch) -> ((loss, aux), grads, stats, params)`` over microbatches.

    Loss and gradients are averaged, in float32 or wider, statistics added, aux values stacked. Of
    values that overwrite a parameter the largest counts. The state of a model goes from one
    microbatch to the next, and the last one's is in the parameters that come back.
    """

    def averaged(params: Parameters, batch: Any) -> Any:
        for shape in map(jnp.shape, jax.tree.leaves(batch)):
            if not shape or shape[0] % parts:
                raise ValueError(
                    f"batch: got a leaf of shape {shape}, expected a leading axis "
                    f"divisible by accumulate={parts}"
                )
        part = microbatches(batch, parts)

        def of_part(state: Any, i: Any) -> Any:
            (loss, aux), grads, stats, after = gradients(params.with_state(state), part(i))
            if not params.has_form_of(after):
                raise ValueError(
                    f"loss_fn: got a function that changes more of an NNX model than the values of "
                    f"its state, expected one that does not with accumulate={parts}; create its "
                    "variables before the step, or leave accumulate out"
                )
            grads, overwriting = split_overwritten(grads)
            return (loss, grads), (aux, stats, overwriting), after.state

        like, *_ = jax.eval_shape(of_part, params.state, 0)
        trained, _ = split_overwritten(params.trained)
        zeros = jax.tree.map(wide_zeros, (0.0, trained), like)
        sums, (aux, stats, overwriting) = scan_sums(of_part, zeros, parts, params.state)
        total, state = sums
        loss, grads = jax.tree.map(lambda t, s: (t / parts).astype(s.dtype), total, like)
        # All start from the same history, and each puts the largest number that it met into it.
        grads = combine(grads, jax.tree.map(lambda value: value.max(0), overwriting))
        stats = jax.tree.map(lambda field: field.sum(0), stats)
        return (loss, aux), grads, stats, params.with_state(state)

    return averaged
