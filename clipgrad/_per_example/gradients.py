"""The gradients of all examples, as rows or as they are, from one forward and one backward pass."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._compat import to_varying, varying_axes
from clipgrad._jaxpr import Traced, evaluate, trace
from clipgrad._numerics import accumulator, times, with_real_dtype
from clipgrad._per_example.course import LeafCourse, course_of
from clipgrad._per_example.norms_of_arrays import norms_of_array
from clipgrad._per_example.norms_of_rows import gram_norms
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.uses import EquationPath, Use
from clipgrad._per_example.walk import Taps, found_in
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
        return {use.path: n for n, use in enumerate(self.uses)}

    @functools.cached_property
    def uses(self) -> list[Use]:
        """The uses whose rows are kept."""
        return [use for course in self.courses for use in course.uses]

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
        for use in course.uses:
            n = self.numbers[use.path]
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
        found = jax.tree.map(jax.lax.optimization_barrier, found)
        kept = [i for i, course in enumerate(self.courses) if course.sums_each]
        each = found.each | {i: self._made(i, found) for i in kept}
        return result, found._replace(each=each)

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

    def norms(self, leaf: int, found: Stored, size: int) -> jax.Array:
        """The norms of the gradients of a leaf."""
        if leaf in found.each:
            return norms_of_array(found.each[leaf])
        norm = self.courses[leaf].norm
        if norm == "none":
            return jnp.zeros(size, accumulator(self.leaves[leaf]))
        if norm == "Gram":
            return gram_norms(*self._rows(leaf, found))
        return norms_of_array(self._made(leaf, found))

    def _rows(self, leaf: int, found: Stored) -> tuple[Sequence[Use], list, list]:
        uses = self.courses[leaf].uses
        numbers = [self.numbers[use.path] for use in uses]
        return uses, [found.xs[self.x_of[n]] for n in numbers], [found.cts[n] for n in numbers]

    def _made(self, leaf: int, found: Stored) -> jax.Array:
        """The gradient of each example, made of rows."""
        shape = self.leaves[leaf].shape
        return sum(
            jax.vmap(lambda g, place=use.place: place.to_leaf(g, shape))(use.each(x, ct))
            for use, x, ct in zip(*self._rows(leaf, found), strict=True)
        )  # type: ignore[return-value]

    def total(self, leaf: int, found: Stored, weights: Each) -> jax.Array:
        """The sum of the gradients of a leaf times weights."""
        like, each = self.leaves[leaf], found.each.get(leaf)
        if each is not None:
            return _sum_over_examples(with_real_dtype(each, accumulator(each)), weights)
        if self.courses[leaf].norm == "none":
            return jnp.zeros(like.shape, accumulator(like))
        return sum(
            use.place.to_leaf(_weighted(use, x, ct, weights), like.shape)
            for use, x, ct in zip(*self._rows(leaf, found), strict=True)
        )  # type: ignore[return-value]

    def left_out(self, found: Stored, ok: Each) -> Stored:
        """The gradients with 0 in place of those of examples that are not ``ok``."""
        if ok is None:
            return found
        depths = {n: len(use.lengths) for n, use in enumerate(self.uses)}

        def zero(x: jax.Array, axis: int = 0) -> jax.Array:
            return jnp.where(_beside(ok, x, axis), x, jnp.zeros_like(x))

        each = {i: zero(g) for i, g in found.each.items()}
        rows = ({n: zero(x, depths[n]) for n, x in part.items()} for part in found[1:])
        return Stored(each, *rows)


def _weighted(use: Use, x: jax.Array, ct: jax.Array, weights: Each) -> jax.Array:
    """The sum of gradients times weights: these multiply x, or ct, in float32 or wider."""
    axis = len(use.lengths)
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


def _times(x: jax.Array, weights: jax.Array, axis: int) -> jax.Array:
    return times(x, _beside(weights.astype(accumulator(x)), x, axis))


def _beside(numbers: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """The numbers of the examples, along their axis."""
    return numbers.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
