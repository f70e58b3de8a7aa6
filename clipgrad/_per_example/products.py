"""The products that gradients are made of: `dot_general`, and rows added up by their index."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from clipgrad._per_example.follow import follows, gradient_array, is_plain_array
from clipgrad._per_example.terms import Factor, GradientAxis, Products, Term, Unfollowed
from clipgrad._per_example.wanted import want_contracted, want_scattered, want_updated

SMALL = "no larger for one example than its factors"


@follows("dot_general", wants=want_contracted)
def _follow_dot_general(hook, equation, inputs, wants):
    (contracted, shared) = equation.params["dimension_numbers"]
    aval = equation.outvars[0].aval
    if any(isinstance(x, Products) for x in inputs):
        return _times_matrix(hook, equation, inputs, wants[0])
    if not all(is_plain_array(x) and jnp.issubdtype(x.dtype, jnp.floating) for x in inputs):
        raise Unfollowed("a product of numbers that are not real")
    rank = inputs[0].ndim
    left, right = list(range(rank)), list(range(rank, rank + inputs[1].ndim))
    pairs = [*zip(*shared, strict=True), *zip(*contracted, strict=True)]
    for i, j in pairs:
        right[j] = left[i]
    used = [left[i] for i, _ in pairs]
    out = [left[i] for i in shared[0]] + [k for k in (*left, *right) if k not in used]
    factors = [Factor(inputs[0], tuple(left)), Factor(inputs[1], tuple(right))]
    axes = [GradientAxis((label,), 0, n) for label, n in zip(out, aval.shape, strict=True)]
    term = Term(tuple(factors), tuple(axes))
    return one_product(hook, term, aval, wants[0])


def _times_matrix(hook: Any, equation: Any, inputs: list, want: Any) -> list:
    """A gradient times a matrix that all examples share: one more factor, which others take in."""
    (contracted, shared) = equation.params["dimension_numbers"]
    side = 0 if isinstance(inputs[0], Products) else 1
    products, matrix, aval = inputs[side], inputs[1 - side], equation.outvars[0].aval
    pairs = [*zip(*shared, strict=True), *zip(*contracted, strict=True)]
    places = {pair[1 - side]: pair[side] for pair in pairs}  # of the matrix in the gradient
    free = [i for i in range(matrix.ndim) if i not in places]
    batched = [pair[side] for pair in zip(*shared, strict=True)]
    kept = [i for i in range(len(products.shape)) if i not in places.values()]

    def times(term: Term) -> Term:
        fresh = term.fresh(len(free))
        new = [GradientAxis((k,), 0, matrix.shape[i]) for k, i in zip(fresh, free, strict=True)]
        moved = jnp.transpose(matrix, [*places, *free])
        factor = term.part_along(moved, list(places.values()), fresh)
        own, others = [term.axes[i] for i in kept], new
        axes = [term.axes[i] for i in batched] + (own + others if side == 0 else others + own)
        factors = (*term.factors, factor)
        return dataclasses.replace(term, factors=factors, axes=tuple(axes)).tidied()

    made = products.map(times, aval)
    factors = sum(f.values.size for term in made.terms for f in term.factors if not f.is_shared)
    if not is_small(hook, aval, factors, want):
        return [made]
    hook.course.note(want.leaves, SMALL)
    return [gradient_array(made)]


def one_product(hook: Any, term: Term, aval: Any, want: Any) -> list[Products]:
    """A gradient as one term, unless one factor has all of its axes, or it is small and no sum."""
    sizes = [factor.values.size for factor in term.factors]
    whole = {label for axis in term.axes for label in axis.labels}
    if any(whole <= set(factor.labels) for factor in term.factors):
        raise Unfollowed("an element-wise product, as large as its factors")
    if is_small(hook, aval, sum(sizes), want):
        raise Unfollowed(SMALL)
    return [Products((term,), tuple(aval.shape), aval.dtype)]


def is_small(hook: Any, aval: Any, factors: int, want: Any) -> bool:
    """Whether a gradient is no larger than its factors, and no sum of several."""
    summed = hook.reduction is not None and hook.reduction.adds(want)
    kept = summed or want.is_contracted or want.steps > 1
    return math.prod(aval.shape) <= factors and not kept


@follows("scatter-add", "scatter_add", wants=want_scattered)
def _follow_scatter(hook, equation, inputs, wants):
    zeros, indices, updates = inputs
    numbers = equation.params["dimension_numbers"]
    window, inserted = numbers.update_window_dims, numbers.inserted_window_dims
    batched = getattr(numbers, "operand_batching_dims", ())
    if not isinstance(zeros, Products) or batched:
        raise Unfollowed("rows added to an array by index")
    if sorted(numbers.scatter_dims_to_operand_dims) != sorted(inserted):
        raise Unfollowed("slices added at an index")
    shape, aval = equation.invars[0].aval.shape, equation.outvars[0].aval
    rows = [i for i in range(equation.invars[2].aval.ndim) if i not in window]
    others = [i for i in range(len(shape)) if i not in inserted]
    if any(
        equation.invars[2].aval.shape[i] != shape[j] for i, j in zip(window, others, strict=True)
    ):
        raise Unfollowed("slices added at an index")
    to = numbers.scatter_dims_to_operand_dims
    parts = {axis: indices[..., i] for i, axis in enumerate(to)}
    inside = [(index >= 0) & (index < shape[axis]) for axis, index in parts.items()]
    clips = equation.params["mode"] == GatherScatterMode.CLIP
    hot = {axis: jnp.clip(index, 0, shape[axis] - 1) for axis, index in parts.items()}
    terms = []
    for term in _terms(updates, rows, inside, clips):
        made = [axis.labels for axis in term.axes]
        rows_labels = tuple(made[i][0] if made[i] else -1 for i in rows)
        terms.append(_with_indices(term, hot, rows_labels, [term.axes[i] for i in window], shape))
    products = Products(tuple(terms), tuple(aval.shape), aval.dtype)
    if zeros.carried or zeros.terms:
        products = zeros.plus(products)
    sizes = [factor.values.size for term in terms for factor in term.factors]
    if wants[0].steps == 1 and not zeros.carried and math.prod(aval.shape) <= sum(sizes):
        raise Unfollowed(SMALL)
    return [products]


def _terms(updates: Any, rows: list[int], inside: list[jax.Array], clips: bool) -> list[Term]:
    """The terms that are added, with zeros for rows whose index is out of range."""
    if is_plain_array(updates):
        updates = Products.of(updates)
    if updates.carried:
        raise Unfollowed("a carry with rows added by index")
    terms = list(updates.terms)
    if any(
        len(term.axes[i].labels) != 1 or term.extent(term.axes[i]) != term.axes[i].size
        for term in terms
        for i in rows
    ):
        raise Unfollowed("merged or padded rows added at an index")
    if clips:
        return terms
    for mask in inside:
        terms = [term.along(mask, rows, shared=False) for term in terms]
    return terms


def _with_indices(
    term: Term, hot: dict, labels: tuple, window: list[GradientAxis], shape: Any
) -> Term:
    """A term of rows as one of the gradient: the rows are summed, at their indices."""
    fresh = iter(term.fresh(len(hot)))
    factors, axes, others = list(term.factors), {}, iter(window)
    for axis, index in hot.items():
        label = next(fresh)
        factors.append(Factor(index, labels, label, shape[axis]))
        axes[axis] = GradientAxis((label,), 0, shape[axis])
    ordered = [axes[i] if i in axes else next(others) for i in range(len(shape))]
    return Term(tuple(factors), tuple(ordered))


@follows("dynamic_update_slice", wants=want_updated)
def _follow_update(hook, equation, inputs, wants):
    zeros, updates, *starts = inputs
    if not isinstance(zeros, Products) or zeros.carried or zeros.terms or is_plain_array(updates):
        raise Unfollowed("a slice written at an index")
    shape, sizes = equation.invars[0].aval.shape, equation.invars[1].aval.shape
    moved = [i for i, n in enumerate(sizes) if n != shape[i]]
    if any(sizes[i] != 1 for i in moved):
        raise Unfollowed("a slice of several rows written at an index")

    hot = {i: jnp.clip(starts[i], 0, shape[i] - 1) for i in moved}

    def place(term: Term) -> Term:
        rest = [axis for i, axis in enumerate(term.axes) if i not in hot]
        return _with_indices(term, hot, (), rest, shape).tidied()

    return [updates.map(place, equation.outvars[0].aval)]
