r"""Norms that neither overflow, nor underflow, nor lose low precision.

A norm is held as ``root / scale``. In the ordinary case the scale is 1 and the root is what
``sqrt(sum(g ** 2))`` gives, bit by bit. The squares are summed twice more, of leaves scaled by
$2^{\pm 93}$ (float32), for the cases in which that sum leaves its range. All three sums are
taken at once, without a branch: on accelerators they are one pass over the leaves, without a
wait for the host, and over several devices they are one all-reduce.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from clipgrad._numbers import (
    accumulator,
    over,
    real_product,
    real_size,
    scaled_square,
    square,
    times,
    widen,
)
from clipgrad._reductions import Arrays, Axes, Groups
from clipgrad._trees import leaves_taking_part

AxisName = str | Sequence[str] | None

# Sums below TINY may have lost squares to underflow. Leaves times 2 ** SHIFT have not, and times
# 2 ** -SHIFT leave room for 2 ** 40 elements of the largest magnitude.
TINY = {"float32": 2.0**-60, "float64": 2.0**-900}
SHIFT = {"float32": 93, "float64": 700}


class Norm(NamedTuple):
    """A norm as the quotient of a ``root`` in the middle of the range and a ``scale``."""

    root: jax.Array
    scale: jax.Array

    @property
    def value(self) -> jax.Array:
        """The norm itself; inf where it is larger than its dtype can hold."""
        return self.root / self.scale

    def exceeds(self, limit: jax.Array) -> jax.Array:
        """Where the norm is above the limit, or not finite."""
        return ~(jnp.isfinite(self.root) & (self.root <= limit * self.scale))


class _Kind(NamedTuple):
    """Which norm: its order, and whether of the mean instead of the sum (rms)."""

    ord: float
    mean: bool = False


def tree_norm(tree: Any, ord: float = 2, axis_name: AxisName = None) -> Norm:
    """`global_norm` as a `Norm`, which can be larger than its dtype can hold."""
    kind, names = _Kind(check_order(ord)), _names(axis_name)
    leaves = leaves_taking_part(tree)
    if not leaves:
        return Norm(jnp.float32(0), jnp.float32(1))
    return _norms(leaves, Groups(None, names), kind)[0]


def slice_norms(
    leaves: Sequence[Any],
    axes: Sequence[Axes],
    ord: float = 2,
    axis_name: AxisName = None,
    mean: bool = False,
) -> list[Norm]:
    """An array of norms for each leaf, reduced over its axes, which are kept with size 1.

    ``mean=True`` divides the sum by the number of its terms first: the root mean square.
    """
    kind, names = _Kind(check_order(ord), mean), _names(axis_name)
    return _norms(list(leaves), Groups(tuple(axes), names), kind) if leaves else []


def tree_total(part: Callable[..., jax.Array], tree: Any, axis_name: AxisName = None) -> jax.Array:
    """The sum of ``part(leaf)`` over all elements of a tree, in the dtype of its norm."""
    leaves = leaves_taking_part(tree)
    groups, dtype = Groups(None, _names(axis_name)), widest(leaves)
    parts = [part(leaf).astype(dtype) for leaf in leaves]
    return groups.sums(parts, leaves)[0] if leaves else jnp.zeros((), dtype)


def tree_size(tree: Any, axis_name: AxisName = None) -> jax.Array:
    """The number of elements of a tree that take part, in the dtype of its norm."""
    leaves = leaves_taking_part(tree)
    groups, dtype = Groups(None, _names(axis_name)), widest(leaves)
    sizes = [jnp.array(leaf.size, dtype) for leaf in leaves]
    return groups.totals(sizes, leaves)[0] if leaves else jnp.zeros((), dtype)


def widest(leaves: Sequence[Any]) -> str:
    """The dtype of a norm over all of these leaves."""
    return max([accumulator(leaf) for leaf in leaves], default="float32")


def check_order(ord: float) -> float:
    """The order of a norm, if it is one: a number in (0, inf]."""
    if isinstance(ord, (jax.Array, np.ndarray, np.generic)) and not isinstance(ord, Tracer):
        ord = ord.item()
    if isinstance(ord, bool) or not isinstance(ord, (int, float)) or not ord > 0:
        raise ValueError(
            f"ord: got {ord!r}, expected a number in (0, inf] that is no tracer, such as 2 or "
            "jnp.inf; for optax.inject_hyperparams name it in static_args"
        )
    return int(ord) if ord < math.inf and ord == int(ord) else float(ord)


def _names(axis_name: AxisName) -> tuple[str, ...]:
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    for name in names:
        try:
            jax.lax.axis_index(name)
        except NameError:
            raise ValueError(
                f"axis_name: got {name!r}, which is not a mapped axis here; expected the name of "
                "an axis of an enclosing shard_map, pmap or vmap. Under jit leave axis_name out"
            ) from None
    return names


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _norms(leaves: list[jax.Array], groups: Groups, kind: _Kind) -> list[Norm]:
    norms = _differentiable_norms(groups, kind, leaves)
    return [Norm(norm.root, jax.lax.stop_gradient(norm.scale)) for norm in norms]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _differentiable_norms(groups: Groups, kind: _Kind, leaves: list[jax.Array]) -> list[Norm]:
    wide = [
        widen(leaf, dtype)
        for leaf, dtype in zip(leaves, _accumulators(groups, leaves), strict=True)
    ]
    if kind.ord == 2:
        sums = _sums_in_range(groups, wide, leaves)
        counts = groups.sizes(leaves) if kind.mean else [1] * len(sums)
        return [
            Norm(jnp.sqrt(total / max(count, 1)), scale)
            for (total, scale), count in zip(sums, counts, strict=True)
        ]
    sizes = [jnp.abs(g) for g in wide]
    largest = groups.maxima(sizes, leaves)
    scales = [_scale_of(jnp.square(m)) for m in largest]
    if kind.ord == math.inf:
        return [Norm(m * s, s) for m, s in zip(largest, scales, strict=True)]
    tops = [
        jnp.where((m > 0) & jnp.isfinite(m), m * s, 1) for m, s in zip(largest, scales, strict=True)
    ]
    shrunk = zip(sizes, groups.per_leaf(scales, leaves), groups.per_leaf(tops, leaves), strict=True)
    totals = groups.sums([(g * s / t) ** kind.ord for g, s, t in shrunk], leaves)
    return [Norm(x ** (1 / kind.ord) * t, s) for x, t, s in zip(totals, tops, scales, strict=True)]


@_differentiable_norms.defjvp
def _norms_jvp(groups: Groups, kind: _Kind, primals: Any, tangents: Any) -> Any:
    r"""$d\,\mathrm{root} = \mathrm{scale} \sum \mathrm{Re}(\bar w\,dg)$, weights w bounded."""
    (leaves,), (dleaves,) = primals, tangents
    norms = _differentiable_norms(groups, kind, leaves)
    weights = _weights(groups, kind, leaves, norms)
    terms = [
        real_product(w, widen(dg, w.real.dtype.name))
        for w, dg in zip(weights, dleaves, strict=True)
    ]
    sums = groups.sums(terms, leaves)
    droots = [total * norm.scale for total, norm in zip(sums, norms, strict=True)]
    return norms, [
        Norm(d, jnp.zeros_like(norm.scale)) for d, norm in zip(droots, norms, strict=True)
    ]


def _weights(groups: Groups, kind: _Kind, leaves: Arrays, norms: list[Norm]) -> list[jax.Array]:
    """The derivative of each norm by its elements; 0 where the norm is 0."""
    roots = groups.per_leaf([jnp.where(n.root > 0, n.root, 1) for n in norms], leaves)
    scales = groups.per_leaf([n.scale for n in norms], leaves)
    units = [
        over(times(widen(g, r.dtype.name), s), r)
        for g, s, r in zip(leaves, scales, roots, strict=True)
    ]
    if kind.ord == 2:
        counts = groups.sizes(leaves) if kind.mean else [1] * len(leaves)
        divisors = [jnp.array(max(n, 1), u.real.dtype) for u, n in zip(units, counts, strict=True)]
        return [over(u, n) for u, n in zip(units, divisors, strict=True)]
    sizes = [jnp.abs(jnp.where(u == 0, 1, u)) for u in units]
    if kind.ord < math.inf:
        return [
            times(over(u, size), size ** (kind.ord - 1))
            for u, size in zip(units, sizes, strict=True)
        ]
    # XLA may divide a batch of rows by reciprocals, so that x / x is not 1: compare products.
    ties = [
        ((jnp.abs(widen(g, r.dtype.name)) * s == r) & (u != 0)).astype(u.real.dtype)
        for g, s, r, u in zip(leaves, scales, roots, units, strict=True)
    ]
    counts = groups.per_leaf(groups.sums(ties, leaves), leaves)
    shares = [
        tie / jnp.maximum(n, 1) / size for tie, n, size in zip(ties, counts, sizes, strict=True)
    ]
    return [times(u, share) for u, share in zip(units, shares, strict=True)]


def _sums_in_range(
    groups: Groups, wide: list[jax.Array], leaves: Arrays
) -> list[tuple[jax.Array, jax.Array]]:
    """For each group a sum of squares of scaled leaves that is in range, and the scale."""
    sizes = [real_size(g) for g in wide]

    def sums(sign: int) -> list[jax.Array]:
        squares = [scaled_square(size, sign * SHIFT[size.dtype.name]) for size in sizes]
        return groups.sums(squares, leaves)

    plain = groups.sums([square(g) for g in wide], leaves)
    scales = [_scale_of(total) for total in plain]
    return [
        (jnp.where(s > 1, up, jnp.where(s < 1, down, total)), s)
        for total, up, down, s in zip(plain, sums(1), sums(-1), scales, strict=True)
    ]


def _scale_of(total: jax.Array) -> jax.Array:
    dtype = total.dtype.name
    up, down = (jnp.array(2.0**k, dtype) for k in (SHIFT[dtype], -SHIFT[dtype]))
    return jnp.where(total < TINY[dtype], up, jnp.where(jnp.isinf(total), down, 1))


def _accumulators(groups: Groups, leaves: Arrays) -> list[str]:
    """For each leaf the dtype of its sums, the widest of its group."""
    joint = [widest(leaves)] * len(leaves)
    return joint if groups.joint else [accumulator(leaf) for leaf in leaves]
