"""By what each example's gradient is scaled, from the squares of its leaves.

The squares of all leaves are one array: what is done with them is compiled once, not by leaf.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._clip import ClipByBlockRMS, ClipStats, scaled_stats, stats_dtype
from clipgrad._numerics import Norm, accumulator, if_else
from clipgrad._per_example.course import following
from clipgrad._per_example.grams import squares
from clipgrad._per_example.squares import Squares
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.terms import Products, apart, rejoined
from clipgrad._trees import partition


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """The number that multiplies the gradient of each leaf; leaves share a number."""

    numbers: tuple[jax.Array, ...]
    # The number of each leaf; None where it is not clipped.
    places: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})

    def of(self, leaf: int) -> jax.Array | None:
        place = self.places[leaf]
        return None if place is None else self.numbers[place]

    def among(self, flags: Sequence[bool]) -> "Weights":
        """The weights of all leaves, where only the leaves with a flag have been counted."""
        places = iter(self.places)
        return Weights(self.numbers, tuple(next(places) if flag else None for flag in flags))


class Scaling(NamedTuple):
    """By what the gradients of the examples are scaled."""

    weights: Weights
    ok: jax.Array | None  # which examples are not left out
    stats: ClipStats


def scaling_of(
    subject: PerExampleSubject,
    params: Any,
    values: Sequence[Any],
    zero: frozenset[int],
    size: int,
) -> Scaling:
    """The scales of the leaves of ``size`` examples, from their products, squares or arrays.

    With ``nonfinite="zero"`` an example is left out whose gradient of a leaf is NaN or inf, unless
    it is one of the leaves ``zero``, in which these count as 0.
    """
    flags, ok = subject.flags(params), None
    parameters, structure = jax.tree.flatten(params)
    leaves = squares_of_leaves({i: v for i, v in enumerate(values) if flags[i]}, size, zero)
    sizes = [jnp.size(p) for p, flag in zip(parameters, flags, strict=True) if flag]
    bad = bad_elements(leaves, sizes)
    if subject.nonfinite == "zero":
        ok = jnp.all(jnp.isfinite(leaves.total), axis=0)
        leaves = leaves._replace(
            total=jnp.where(ok, leaves.total, 0), exponent=jnp.where(ok, leaves.exponent, 0)
        )
    chosen = structure.unflatten(partition(parameters, flags)[0])
    weights, stats = example_scales(subject.rule, chosen, leaves, bad)
    return Scaling(weights.among(flags), ok, stats)


def squares_of_leaves(values: Mapping[int, Any], size: int, zero: frozenset[int]) -> Squares:
    """The squares of leaves, of the shape (leaves, examples), in their order.

    A leaf is given as an array, `Products` or `Squares`, with ``size`` examples in front. NaN and
    inf count as 0 in the arrays of the leaves ``zero``.
    """
    found = []
    for i, value in values.items():
        with following([i]):
            found.append(_of_leaf(value, size, i in zero))
    if not found:
        return Squares(*(jnp.zeros((0, size), kind) for kind in ("float32", "int32", "float32")))
    total, exponent = (_in_rows([each[k] for each in found]) for k in (0, 1))
    bad = None
    if zero:
        none = jnp.zeros(size, total.dtype)
        bad = _in_rows([none if x.nonfinite is None else x.nonfinite for x in found])
    return Squares(total, if_else(total == 0, 0, exponent), bad)


def bad_elements(leaves: Squares, sizes: Sequence[int]) -> jax.Array:
    """The numbers of elements of each example that are NaN or inf, of leaves of these sizes.

    Nobody knows how many are in a norm that is not finite: all count.
    """
    all_of = np.asarray(sizes, leaves.total.dtype).reshape(-1, 1)
    bad = all_of * (~jnp.isfinite(leaves.total)).astype(all_of.dtype)
    return jnp.sum(bad if leaves.nonfinite is None else bad + leaves.nonfinite, axis=0)


def _in_rows(rows: Sequence[jax.Array]) -> jax.Array:
    """Rows in the widest of their dtypes."""
    dtype = max(rows, key=lambda row: row.dtype.itemsize).dtype
    return jnp.stack([row.astype(dtype) for row in rows])


def _of_leaf(value: Any, size: int, zero: bool) -> Squares:
    if isinstance(value, Squares):
        return value
    if isinstance(value, Products) and value.squares is not None:
        return value.squares
    if isinstance(value, Products):
        own, shared = apart(value)
        return jax.vmap(lambda own: squares(rejoined(own, shared)), axis_size=size)(own)
    return jax.vmap(lambda x: Squares.of(x, zero=zero))(value)


def example_scales(
    rule: Any, params: Any, leaves: Squares, bad: jax.Array
) -> tuple[Weights, ClipStats]:
    """The scales of the leaves of each example, and what they do.

    ``params`` has the leaves that are clipped, and `None` in place of others. The squares have the
    shape (leaves, examples); of each example ``bad`` elements are NaN or inf.
    """
    kinds = [accumulator(jnp.asarray(p)) for p in jax.tree.leaves(params)]
    alike = list(dict.fromkeys(kinds)) if rule is None or rule.acts_on == "tree" else []
    places = [alike.index(kind) for kind in kinds] if alike else range(len(kinds))

    form, ones = (_scales_of_all, alike) if alike else (_scales_by_leaf, kinds)
    of_one = functools.partial(form, rule, params, ones=[jnp.ones((), kind) for kind in ones])
    numbers, stats = jax.vmap(of_one, in_axes=(1, 0))(leaves, bad)
    return Weights(tuple(numbers), tuple(places)), stats


def _scales_of_all(
    rule: Any, params: Any, leaves: Squares, bad: jax.Array, ones: list[jax.Array]
) -> tuple[list[jax.Array], ClipStats]:
    """One number for all leaves of a dtype: XLA would compute the number of each leaf again."""
    whole, dtype = leaves.over_axis().norm(), stats_dtype(params)
    bad = bad.astype(dtype)
    total = jnp.array(float(sum(jnp.size(p) for p in jax.tree.leaves(params))), dtype)
    if rule is None:
        no_limit = jnp.full_like(whole.root, jnp.inf)
        stats = _stats(whole, no_limit, whole.exceeds(no_limit), bad, total)
        return ones, stats._replace(after=stats.before, changed=0 * stats.changed)
    ((norm, limit),) = rule.l2_limits(params, [whole])
    return rule.scale(ones, [whole]), _stats(norm, limit, rule.changes(norm, limit), bad, total)


def _scales_by_leaf(
    rule: Any, params: Any, leaves: Squares, bad: jax.Array, ones: list[jax.Array]
) -> tuple[list[jax.Array], ClipStats]:
    dtype, mean = stats_dtype(params), type(rule) is ClipByBlockRMS
    sizes = [float(jnp.size(p)) for p in jax.tree.leaves(params)]
    own = [jax.tree.map(lambda x, i=i: x[i], leaves) for i in range(len(sizes))]
    norms = [
        leaf._replace(total=leaf.total.astype(one.dtype)).norm(max(size, 1.0) if mean else 1.0)
        for leaf, size, one in zip(own, sizes, ones, strict=True)
    ]
    pairs = zip(rule.l2_limits(params, norms), sizes, strict=True)
    bad = bad.astype(dtype)
    each = [
        _stats(n, limit, rule.changes(n, limit), bad, jnp.array(size, n.root.dtype))
        for (n, limit), size in pairs
    ]
    stats = jax.tree.map(lambda *fields: sum(x.astype(dtype) for x in fields), *each)
    scales = jax.tree.leaves(rule.scale(jax.tree.structure(params).unflatten(ones), norms))
    return scales, stats._replace(nonfinite=bad)


def _stats(
    norm: Norm, limit: jax.Array, clips: jax.Array, bad: jax.Array, size: jax.Array
) -> ClipStats:
    return scaled_stats(norm.value, limit, clips, jnp.isfinite(norm.root), bad, size)
