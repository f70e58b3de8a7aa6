"""Sums of products that are rounded as in float32, on every backend."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import platform_dependent

from clipgrad._arrays import accumulator
from clipgrad._devices import gpus_have_bfloat16


def einsum(
    arrays: Sequence[jax.Array], labels: Sequence[Sequence[Any]], out: Sequence[Any], **options: Any
) -> jax.Array:
    """`jax.numpy.einsum` with anything as labels; those that all arrays and the result have first.

    XLA transposes factors whose rows are in front of such an axis.
    """
    same = [k for k in out if all(k in each for each in labels)]
    pairs, names = [], {k: i for i, k in enumerate(dict.fromkeys(itertools.chain(*labels)))}
    for array, each in zip(arrays, labels, strict=True):
        order = [*same, *(k for k in each if k not in same)]
        if list(each) != order:
            array = jnp.transpose(array, [list(each).index(k) for k in order])
        pairs += [array, [names[k] for k in order]]
    return jnp.einsum(*pairs, [names[k] for k in out], **options)


def on_accelerators(
    function: Callable[[Any], Any], on_cpu: Callable[[Any], Any], operand: Any
) -> Any:
    """A function of an operand in programs for accelerators, another one in those for a CPU."""
    return platform_dependent(operand, cpu=on_cpu, default=function)


def product(
    arrays: Sequence[jax.Array], labels: Sequence[Sequence[Any]], out: Sequence[Any]
) -> jax.Array:
    """An `einsum` of two arrays whose terms are rounded as in float32; float64 stays.

    The default precision of a backend is not enough for a norm, or for a sum that must not exceed
    one: of float32 a GPU makes TF32, a TPU one bfloat16. A bfloat16 array is multiplied as it is
    where matrix units are fast at that: its products with another are exact in float32, and so are
    those with the `_halves` of a float32 array. Of two float32 arrays six products of halves are
    added, by a kernel of NVIDIA's GPUs and by "highest" of a TPU: what the other three would add is
    less than a rounding. A CPU has no such units, and XLA lacks some of these products there.
    float16 becomes float32: its range is too small for the halves, and a TPU does not multiply it
    exactly.
    """
    dtype = max(map(accumulator, arrays))

    def wide(*arrays: jax.Array, precision: Any = "highest") -> jax.Array:
        return einsum([x.astype(dtype) for x in arrays], labels, out, precision=precision)

    def by_halves(*arrays: jax.Array) -> jax.Array:
        pairs = itertools.product(*map(_halves, arrays))
        options = {"preferred_element_type": dtype}
        return functools.reduce(jnp.add, [einsum(pair, labels, out, **options) for pair in pairs])

    if dtype != "float32":
        return wide(*arrays)
    if any(x.dtype == jnp.bfloat16 for x in arrays):
        return platform_dependent(*arrays, cpu=wide, default=by_halves)
    if not gpus_have_bfloat16():
        return wide(*arrays)
    six = functools.partial(wide, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6)
    return platform_dependent(*arrays, cuda=six, default=wide)


def _halves(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 arrays whose sum a float32 array is, to its last bit; the largest first."""
    if x.dtype == jnp.bfloat16:
        return [x]
    halves, x = [], x.astype(jnp.float32)
    for _ in range(3):
        # Not by a cast: XLA removes a cast and its inverse, and nothing would be left over.
        half = jax.lax.reduce_precision(x, 8, 7)
        halves.append(half.astype(jnp.bfloat16))
        x = jnp.where(jnp.isfinite(half), x - half, 0)
    return halves
