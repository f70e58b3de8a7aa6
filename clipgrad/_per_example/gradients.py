"""The gradients of all examples, as rows or as they are, from one forward and one backward pass."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._arrays import accumulator, is_array, with_real_dtype
from clipgrad._compat import to_varying, varying_axes
from clipgrad._per_example.course import LeafCourse, course_of
from clipgrad._per_example.norms_of_arrays import norms_of_array
from clipgrad._per_example.norms_of_rows import gram_norms
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.uses import Each, Factors, Use, weighted, zero_unless
from clipgrad._per_example.walk import Taps, WalkedProgram
from clipgrad._programs import Traced, evaluate, trace


class ExampleGradients(NamedTuple):
    """The gradients of examples: by leaf as arrays, or as factors of the leaf's uses.

    Attributes:
      each: (examples, ...) for each leaf that is direct, or whose sum is made of these.
      factors: for each leaf that has rows.
    """

    each: dict[int, jax.Array]
    factors: dict[int, list[Factors]]

    def left_out(self, ok: Each) -> "ExampleGradients":
        """With 0 instead of the gradients of examples that are not ``ok``."""
        if ok is None:
            return self
        each = {i: zero_unless(ok, g, 0) for i, g in self.each.items()}
        factors = {i: [f.left_out(ok) for f in own] for i, own in self.factors.items()}
        return ExampleGradients(each, factors)


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
        leaves = jax.tree.leaves(params)
        found = WalkedProgram.of(traced.program, len(leaves))
        courses = [course_of(i, leaf.shape, found) for i, leaf in enumerate(leaves)]
        if subject.method == "direct":
            courses = [LeafCourse("direct", "method='direct'")] * len(leaves)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        return cls(traced, subject.has_aux, tuple(shapes), tuple(courses))

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
        for n, use in enumerate(self.uses):
            if use.place.leaf == leaf:
                arrays = [use.y, use.x] if self.x_of[n] == n else [use.y]
                kept += math.prod(use.lengths) * sum(a.size * a.dtype.itemsize for a in arrays)
        return kept

    def gradients(self, params: Any, batch: Any) -> tuple[Any, ExampleGradients]:
        """The results of the loss for each example, and the gradients."""
        leaves = [jnp.asarray(p) for p in jax.tree.leaves(params)]
        examples = [jnp.asarray(x) for x in jax.tree.leaves(batch)]
        depths = {n: len(use.lengths) for n, use in enumerate(self.uses)}
        sources = {self.x_of[n]: depth for n, depth in depths.items()}

        def of_one(example: list[jax.Array]) -> Any:
            direct = {i: leaves[i] for i in self.direct()}
            run = lambda direct, zeros: self._loss(leaves, direct, zeros, example)  # noqa: E731
            value, pull, (result, xs) = jax.vjp(run, direct, self._zeros(), has_aux=True)
            return result, xs, *pull(jnp.ones_like(value))

        out = 0, sources, 0, depths
        result, *stored = jax.vmap(of_one, out_axes=out)(examples)
        # What norms are measured of, and what is summed, is what was stored: otherwise XLA may make
        # it a second time, and round differently.
        xs, each, cts = jax.tree.map(jax.lax.optimization_barrier, stored)
        factors: dict[int, list[Factors]] = {}
        for n, use in enumerate(self.uses):
            own = Factors(use, xs[self.x_of[n]], cts[n])
            factors.setdefault(use.place.leaf, []).append(own)
        made = [i for i, course in enumerate(self.courses) if course.sums_each]
        each |= {i: self._made(i, factors[i]) for i in made}
        return result, ExampleGradients(each, factors)

    def _zeros(self) -> dict[int, jax.Array]:
        """The zeros that taps give the cotangents of results to."""
        make = lambda use: jnp.zeros((*use.lengths, *use.y.shape), use.y.dtype)  # noqa: E731
        pairs = enumerate(self.uses)
        return {n: to_varying(make(use), varying_axes(use.y)) for n, use in pairs}

    def _loss(self, leaves: Any, direct: Any, zeros: Any, example: Any) -> tuple[Any, Any]:
        own = zip(self.uses, range(len(self.uses)), self.x_of, strict=True)
        taps = Taps({use.path: (1 - use.operand, x, n) for use, n, x in own}, zeros)
        own = [direct.get(i, leaf) for i, leaf in enumerate(leaves)]
        inputs = [x for x in (*own, *example) if is_array(x)]
        result = self.traced.result(evaluate(self.traced.program, inputs, taps))
        value = result[0] if self.has_aux else result
        return jnp.asarray(value), (result, taps.seen)

    def norms(self, leaf: int, found: ExampleGradients, size: int) -> jax.Array:
        """The norms of the gradients of a leaf."""
        if leaf in found.each:
            return norms_of_array(found.each[leaf])
        if leaf not in found.factors:
            return jnp.zeros(size, accumulator(self.leaves[leaf]))
        own = found.factors[leaf]
        is_gram = self.courses[leaf].norm == "Gram"
        return gram_norms(own) if is_gram else norms_of_array(self._made(leaf, own))

    def _made(self, leaf: int, factors: list[Factors]) -> jax.Array:
        """The gradient of each example, made of rows."""
        shape = self.leaves[leaf].shape
        return sum(
            jax.vmap(lambda g, place=use.place: place.to_leaf(g, shape))(use.each(x, ct))
            for use, x, ct in factors
        )  # type: ignore[return-value]

    def total(self, leaf: int, found: ExampleGradients, weights: Each) -> jax.Array:
        """The sum of the gradients of a leaf times weights."""
        like, each = self.leaves[leaf], found.each.get(leaf)
        if each is not None:
            return _sum_over_examples(with_real_dtype(each, accumulator(each)), weights)
        if leaf not in found.factors:
            return jnp.zeros(like.shape, accumulator(like))
        own = found.factors[leaf]
        return sum(f.use.place.to_leaf(f.total(weights), like.shape) for f in own)  # type: ignore


def _sum_over_examples(each: jax.Array, weights: Each) -> jax.Array:
    """The sum of the gradients times weights; a product, which a CPU adds up 5 times as fast."""
    if weights is None:
        return jnp.sum(each, axis=0)
    if jnp.iscomplexobj(each):
        return jnp.sum(weighted(each, weights, 0), axis=0)
    return jnp.einsum("b...,b->...", each, weights.astype(each.dtype), precision="highest")
