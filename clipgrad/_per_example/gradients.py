"""The gradients of all examples, as rows or as they are, from one forward and one backward pass."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._compat import to_varying, varying_axes
from clipgrad._jaxpr import Traced, evaluate, trace
from clipgrad._numerics import accumulator, times, with_real_dtype
from clipgrad._per_example.course import LeafCourse, course_of
from clipgrad._per_example.norms_of_rows import gram_squares
from clipgrad._per_example.squares import Squares
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.uses import Use
from clipgrad._per_example.walk import EquationPath, Taps, found_in
from clipgrad._program import dependent_variables
from clipgrad._trees import is_array

Each = jax.Array | None


class Stored(NamedTuple):
    """The gradients of examples, stored: by leaf as arrays, or by use as rows.

    Attributes:
      each: (examples, ...) for each leaf that is direct.
      xs: what went into uses, by the number of the first use of a source.
      cts: the cotangents of what came out of uses, by their numbers.
    """

    each: dict[int, jax.Array]
    xs: dict[int, jax.Array]
    cts: dict[int, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleProgram:
    """The program of the loss of one example, traced once, and what is done with its leaves."""

    traced: Traced
    has_aux: bool
    leaves: tuple[Any, ...]  # shapes and dtypes of the parameters
    courses: tuple[LeafCourse, ...]

    @classmethod
    def of(cls, subject: PerExampleSubject, params: Any, batch: Any) -> "ExampleProgram":
        """The program for the first example of a batch."""
        params = jax.tree.map(jnp.asarray, params)
        example = jax.tree.map(lambda x: jnp.asarray(x)[0], batch)
        traced = trace(subject.loss_fn, (params, example), {})
        leaves, count = jax.tree.leaves(params), len(jax.tree.leaves((params, example)))
        data = dependent_variables(traced.program, range(len(leaves), count))
        found = found_in(traced.program, len(leaves), data)
        courses = [course_of(i, leaf.shape, found) for i, leaf in enumerate(leaves)]
        if subject.method == "direct":
            courses = [LeafCourse("direct", "method='direct'")] * len(leaves)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        return cls(traced, subject.has_aux, tuple(shapes), tuple(courses))

    @functools.cached_property
    def numbers(self) -> dict[EquationPath, int]:
        """The number of each use whose rows are kept."""
        places = [where for course in self.courses for where, _ in course.uses]
        return {where: n for n, where in enumerate(places)}

    @functools.cached_property
    def uses(self) -> list[Use]:
        """The uses whose rows are kept."""
        return [use for course in self.courses for _, use in course.uses]

    @functools.cached_property
    def x_of(self) -> list[int]:
        """For each use the number of the first one with the same x, which is stored once."""
        sources = [use.source for use in self.uses]
        return [sources.index(source) for source in sources]

    def direct(self) -> list[int]:
        """The leaves whose gradient JAX makes for each example."""
        return [i for i, course in enumerate(self.courses) if course.norm == "direct"]

    def bytes_of(self, leaf: int) -> int:
        """The bytes that are kept of one example for a leaf: rows, and a gradient that is made."""
        course, shape = self.courses[leaf], self.leaves[leaf]
        each = course.norm == "direct" or course.sums_each
        kept = shape.size * shape.dtype.itemsize if each else 0
        for n in (self.numbers[where] for where, _ in course.uses):
            use = self.uses[n]
            arrays = [use.y, use.x] if self.x_of[n] == n else [use.y]
            kept += math.prod(use.lengths) * sum(a.size * a.dtype.itemsize for a in arrays)
        return kept

    def gradients(self, params: Any, batch: Any) -> tuple[Any, Stored]:
        """The results of the loss for each example, and the gradients."""
        leaves = [jnp.asarray(p) for p in jax.tree.leaves(params)]
        examples = [jnp.asarray(x) for x in jax.tree.leaves(batch)]
        depths = {n: len(use.lengths) for n, use in enumerate(self.uses)}
        sources = {n: d for n, d in depths.items() if self.x_of[n] == n}

        def of_one(example: list[jax.Array]) -> tuple[Any, Stored]:
            direct = {i: leaves[i] for i in self.direct()}
            given = direct, self._zeros()
            run = lambda direct, zeros: self._loss(leaves, direct, zeros, example)  # noqa: E731
            value, pull, (result, xs) = jax.vjp(run, *given, has_aux=True)
            each, cts = pull(jnp.ones_like(value))
            return result, Stored(each, xs, cts)

        out = 0, Stored(0, sources, depths)  # type: ignore[arg-type]
        result, found = jax.vmap(of_one, out_axes=out)(examples)
        # What norms are measured of, and what is summed, is what was stored: otherwise XLA may make
        # it a second time, and round differently.
        return result, jax.tree.map(jax.lax.optimization_barrier, found)

    def _zeros(self) -> dict[int, jax.Array]:
        """The zeros that taps give the cotangents of results to."""
        make = lambda use: jnp.zeros((*use.lengths, *use.y.shape), use.y.dtype)  # noqa: E731
        pairs = enumerate(self.uses)
        return {n: to_varying(make(use), varying_axes(use.y)) for n, use in pairs}

    def _loss(self, leaves: Any, direct: Any, zeros: Any, example: Any) -> tuple[Any, Any]:
        sources = {n: 1 - use.operand for n, use in enumerate(self.uses) if self.x_of[n] == n}
        taps = Taps(self.numbers, sources, zeros, ())
        own = [direct.get(i, leaf) for i, leaf in enumerate(leaves)]
        inputs = [x for x in (*own, *example) if is_array(x)]
        result = self.traced.result(evaluate(self.traced.program, inputs, taps))
        value = result[0] if self.has_aux else result
        return jnp.asarray(value), (result, taps.seen)

    def squares(self, leaf: int, found: Stored, size: int) -> tuple[Squares, Each]:
        """The squares of the gradients of a leaf; and these, where sums are made of them."""
        course = self.courses[leaf]
        if course.norm == "none":
            return Squares.none(size), None
        if course.norm == "Gram":
            return gram_squares(*self._rows(leaf, found)), None
        each = found.each[leaf] if course.norm == "direct" else self._made(leaf, found)
        kept = each if course.norm == "direct" or course.sums_each else None
        return Squares.of(each), kept

    def _rows(self, leaf: int, found: Stored) -> tuple[list[Use], list, list]:
        numbers = [self.numbers[where] for where, _ in self.courses[leaf].uses]
        xs = [found.xs[self.x_of[n]] for n in numbers]
        return [self.uses[n] for n in numbers], xs, [found.cts[n] for n in numbers]

    def _made(self, leaf: int, found: Stored) -> jax.Array:
        """The gradient of each example, made of rows."""
        shape = self.leaves[leaf].shape
        return sum(
            jax.vmap(lambda g, place=use.place: place.to_leaf(g, shape))(use.each(x, ct))
            for use, x, ct in zip(*self._rows(leaf, found), strict=True)
        )  # type: ignore[return-value]

    def total(self, leaf: int, found: Stored, each: Each, weights: Each, ok: Each) -> jax.Array:
        """The sum of the gradients of a leaf times weights, of the examples that are ``ok``."""
        kind, shape = self.leaves[leaf].dtype, self.leaves[leaf].shape
        if each is not None:
            return _sum_over_examples(
                _where_ok(ok, with_real_dtype(each, accumulator(each)), 0), weights
            )
        if self.courses[leaf].norm == "none":
            return jnp.zeros(shape, accumulator(jnp.zeros((), kind)))
        return sum(
            use.place.to_leaf(_weighted(use, x, ct, weights, ok), shape)
            for use, x, ct in zip(*self._rows(leaf, found), strict=True)
        )  # type: ignore[return-value]


def _weighted(use: Use, x: jax.Array, ct: jax.Array, weights: Each, ok: Each) -> jax.Array:
    """The sum of gradients times weights: these multiply x, or ct, in float32 or wider."""
    axis = len(use.lengths)
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = _where_ok(ok, x, axis)
    ct = _where_ok(ok, ct, axis)
    if weights is not None and use.scales_x(x, ct):
        x = _times(x.astype(accumulator(x)), weights, axis)
    elif weights is not None:
        ct = _times(ct.astype(accumulator(ct)), weights, axis)
    return use.total(x, ct)


def _sum_over_examples(each: jax.Array, weights: Each) -> jax.Array:
    """The sum of the gradients times weights; a product, which a CPU adds up 5 times as fast."""
    if weights is None:
        return jnp.sum(each, axis=0)
    if jnp.iscomplexobj(each):
        return jnp.sum(_times(each, weights, 0), axis=0)
    return jnp.einsum("b...,b->...", each, weights.astype(each.dtype), precision="highest")


def _where_ok(ok: Each, x: jax.Array, axis: int) -> jax.Array:
    return x if ok is None else jnp.where(_beside(ok, x, axis), x, jnp.zeros_like(x))


def _times(x: jax.Array, weights: Each, axis: int) -> jax.Array:
    if weights is None:
        return x
    return times(x, _beside(weights.astype(accumulator(x)), x, axis))


def _beside(numbers: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """The numbers of the examples, along their axis."""
    return numbers.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
