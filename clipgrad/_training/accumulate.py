"""Sums over the microbatches of a batch, each of which is every k-th example."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._arrays import (
    at_least_float32,
    combine,
    described,
    is_array,
    path_string,
    split_overwritten,
    times,
)
from clipgrad._clip import ClipStats
from clipgrad._frameworks import Parameters

Gradients = Callable[..., tuple[tuple[Any, Any], Any, Any, Any]]
Weight = Callable[[Any], Any]


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
        new, result, state = f(state, i)
        return (jax.tree.map(lambda t, n: t + n.astype(t.dtype), total, new), state), result

    return jax.lax.scan(body, (zeros, state), jnp.arange(parts))


def wide_zeros(leaf: Any, like: Any) -> jax.Array:
    """Zeros placed as a leaf is, in the dtype of ``like`` or float32 if that is narrower."""
    return jnp.zeros_like(leaf, dtype=at_least_float32(jnp.result_type(like)))


def accumulated(gradients: Gradients, parts: int, weight: Weight | None = None) -> Gradients:
    """``gradients(params, batch) -> ((loss, aux), grads, stats, params)`` over microbatches.

    Loss and gradients are averaged, in float32 or wider, statistics added, aux values stacked. Of
    values that overwrite a parameter the largest counts. The state of a model goes from one
    microbatch to the next, and the last one's is in the parameters that come back. With ``weight``
    loss, gradients and the cotangents of the statistics count as their share of all weights.
    """

    def averaged(params: Parameters, batch: Any) -> Any:
        _check_batch(batch, parts)
        part = microbatches(batch, parts)
        shares = None if weight is None else _shares(weight, part, parts)

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
        sums, (aux, stats, overwriting) = scan_sums(
            _of_share(of_part, shares), zeros, parts, params.state
        )
        total, state = sums
        count = parts if shares is None else 1
        loss, grads = jax.tree.map(lambda t, s: (t / count).astype(s.dtype), total, like)
        # All start from the same history, and each puts the largest number that it met into it.
        grads = combine(grads, jax.tree.map(lambda value: value.max(0), overwriting))
        stats = jax.tree.map(lambda field: field.sum(0), stats)
        return (loss, aux), grads, stats, params.with_state(state)

    return averaged


def _check_batch(batch: Any, parts: int) -> None:
    """Raises `ValueError` for a leaf that can't be split into so many microbatches."""
    leaves = jax.tree.leaves_with_path(batch)
    lengths = {jnp.shape(x)[0] for _, x in leaves if jnp.ndim(x) and not _is_key(x, None)}
    for path, leaf in leaves:
        shape = jnp.shape(leaf)
        if _is_key(leaf, lengths):
            place = f" at {path_string(path)!r}" if path else ""
            examples = max(lengths, default=parts)
            raise ValueError(
                f"batch: got one PRNG key{place} with accumulate={parts}, expected an array of "
                f"keys; write jax.random.split(key, {examples}), a key for each example, of which "
                f"a microbatch has its own, or jax.random.split(key, {parts}), a key for each "
                "microbatch, and keys[0] in the loss"
            )
        if not shape or shape[0] % parts:
            raise ValueError(
                f"batch: got a leaf of shape {shape}, expected a leading axis divisible by "
                f"accumulate={parts}"
            )


def _is_key(leaf: Any, lengths: set[int] | None) -> bool:
    """Whether this is one key of random numbers; an old one is two words, and not two examples."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return not jnp.shape(leaf)
    is_old = dtype == jnp.uint32 and jnp.shape(leaf) == (2,)
    return is_old and (lengths is None or 2 not in lengths)


def _shares(weight: Weight, part: Callable[[Any], Any], parts: int) -> jax.Array:
    """The share of each microbatch in the sum of all weights; equal ones if that is 0."""
    weights = jax.lax.map(lambda i: weight_of(weight, part(i)), jnp.arange(parts))
    total = jnp.sum(weights)
    return jnp.where(total == 0, 1 / parts, weights / jnp.where(total == 0, 1, total))


def weight_of(weight: Weight, batch: Any) -> jax.Array:
    """The weight of a microbatch, in float32 or wider; `ValueError` if it is not one number."""
    result = weight(batch)
    is_number = isinstance(result, bool | int | float) or is_array(result)
    if not is_number or jnp.shape(result) or jnp.iscomplexobj(result):
        raise ValueError(
            f"weight: got {described(result)} from it, expected a number for each microbatch, "
            "such as its number of tokens; write lambda batch: jnp.sum(mask of batch)"
        )
    result = jnp.asarray(result)
    is_floating = jnp.issubdtype(result.dtype, jnp.floating)
    return result.astype(at_least_float32(result.dtype) if is_floating else float)


def _of_share(of_part: Callable[..., Any], shares: jax.Array | None) -> Callable[..., Any]:
    """The function of a microbatch whose first results count by its share."""
    if shares is None:
        return of_part

    def weighted(state: Any, i: Any) -> Any:
        summands, (aux, stats, overwriting), state = of_part(state, i)
        summands = jax.tree.map(lambda x: _weighted(x, shares[i]), summands)
        stats = {name: _weighted_stats(s, shares[i]) for name, s in stats.items()}
        return summands, (aux, stats, overwriting), state

    return weighted


def _weighted(x: jax.Array, share: jax.Array) -> jax.Array:
    """``x`` times a share, in float32 or wider; 0 if that is 0, of NaN as well."""
    wide = x.astype(at_least_float32(x.dtype))
    product = times(wide, share.astype(wide.real.dtype))
    return jnp.where(share == 0, jnp.zeros_like(product), product)


def _weighted_stats(stats: ClipStats, share: jax.Array) -> ClipStats:
    """The statistics of cotangents times a share; those of no share are not counted as bad."""
    counted = (share != 0).astype(stats.size.dtype)
    return stats._replace(
        before=_weighted(stats.before, share**2),
        after=_weighted(stats.after, share**2),
        changed=stats.changed * counted,
        nonfinite=stats.nonfinite * counted,
    )
