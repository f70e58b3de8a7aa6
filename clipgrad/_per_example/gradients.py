"""The gradients of all examples, as rows or as they are, from one forward and one backward pass."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._arrays import accumulator, is_array, with_real_dtype
from clipgrad._compat import to_varying, varying_axes
from clipgrad._per_example.gradient_methods import GradientMethod, method_of
from clipgrad._per_example.norms_of_arrays import norms_of_array
from clipgrad._per_example.norms_of_rows import gram_norms
from clipgrad._per_example.padding import Padding
from clipgrad._per_example.request import Request
from clipgrad._per_example.taps import Taps
from clipgrad._per_example.uses import Each, Factors, Use, weighted, zero_unless
from clipgrad._per_example.walk import WalkedProgram
from clipgrad._programs import Traced, evaluate, trace

# Rows, most of which a plain gradient keeps as well, are kept of all examples up to this, on each
# device, or up to the bytes of the parameters and their gradient: a part of the memory of what
# trains a model.
_ROOM = 2**30


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
        factors = {i: [f.left_out(ok) for f in uses] for i, uses in self.factors.items()}
        return ExampleGradients(each, factors)


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleProgram:
    """The program of the loss of one example, traced once, and what is done with its leaves."""

    traced: Traced
    has_aux: bool
    leaves: tuple[Any, ...]  # shapes and dtypes of the parameters
    methods: tuple[GradientMethod, ...]

    @classmethod
    def of(cls, request: Request, params: Any, batch: Any) -> "ExampleProgram":
        """The program for the first example of a batch."""
        params = jax.tree.map(jnp.asarray, params)
        example = jax.tree.map(lambda x: jnp.asarray(x)[0], batch)
        traced = trace(request.loss_fn, (params, example), {})
        leaves = jax.tree.leaves(params)
        walked = WalkedProgram.of(traced.program, len(leaves))
        methods = [method_of(i, leaf.shape, walked) for i, leaf in enumerate(leaves)]
        if request.method == "direct":
            methods = [GradientMethod("direct", "method='direct'")] * len(leaves)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        return cls(traced, request.has_aux, tuple(shapes), tuple(methods))

    @functools.cached_property
    def uses(self) -> list[Use]:
        """The uses whose rows are kept."""
        return [use for method in self.methods for use in method.uses]

    @functools.cached_property
    def x_of(self) -> list[int]:
        """For each use the number of the first one with the same x, which is stored once."""
        sources = [use.source for use in self.uses]
        return [sources.index(source) for source in sources]

    def direct(self) -> list[int]:
        """The leaves whose gradient JAX makes for each example."""
        return [i for i, method in enumerate(self.methods) if method.norm == "direct"]

    def bytes_of(self, leaf: int) -> int:
        """The bytes that are kept of one example for a leaf: rows, and a gradient that is made."""
        method, shape = self.methods[leaf], self.leaves[leaf]
        each = method.norm == "direct" or method.sums_each
        kept = shape.size * shape.dtype.itemsize if each else 0
        for n, use in enumerate(self.uses):
            if use.view.leaf == leaf:
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
            of_use = Factors(use, xs[self.x_of[n]], cts[n])
            factors.setdefault(use.view.leaf, []).append(of_use)
        made = [i for i, method in enumerate(self.methods) if method.sums_each]
        each |= {i: self._made(i, factors[i]) for i in made}
        return result, ExampleGradients(each, factors)

    def _zeros(self) -> dict[int, jax.Array]:
        """The zeros that taps give the cotangents of results to."""
        make = lambda use: jnp.zeros((*use.lengths, *use.y.shape), use.y.dtype)  # noqa: E731
        pairs = enumerate(self.uses)
        return {n: to_varying(make(use), varying_axes(use.y)) for n, use in pairs}

    def _loss(self, leaves: Any, direct: Any, zeros: Any, example: Any) -> tuple[Any, Any]:
        tapped = zip(self.uses, range(len(self.uses)), self.x_of, strict=True)
        taps = Taps({use.path: (1 - use.operand, x, n) for use, n, x in tapped}, zeros)
        params = [direct.get(i, leaf) for i, leaf in enumerate(leaves)]
        inputs = [x for x in (*params, *example) if is_array(x)]
        result = self.traced.result(evaluate(self.traced.program, inputs, taps))
        value = result[0] if self.has_aux else result
        return jnp.asarray(value), (result, taps.seen)

    def norms(
        self, leaves: list[int], gradients: ExampleGradients, size: int, padding: Padding = None
    ) -> list[jax.Array]:
        """The norms of the gradients of leaves, for each of which there are ``size``."""
        grams = [i for i in leaves if self.methods[i].norm == "Gram"]
        by_grams = gram_norms([gradients.factors[i] for i in grams], padding)
        norms = dict(zip(grams, by_grams, strict=True))
        return [norms[i] if i in norms else self._norm(i, gradients, size) for i in leaves]

    def _norm(self, leaf: int, gradients: ExampleGradients, size: int) -> jax.Array:
        """The norms of the gradients of a leaf, from these themselves."""
        if leaf in gradients.each:
            return norms_of_array(gradients.each[leaf])
        if leaf in gradients.factors:
            return norms_of_array(self._made(leaf, gradients.factors[leaf]))
        return jnp.zeros(size, accumulator(self.leaves[leaf]))

    def _made(self, leaf: int, factors: list[Factors]) -> jax.Array:
        """The gradient of each example, made of rows."""
        shape = self.leaves[leaf].shape
        return sum(
            jax.vmap(lambda g, view=use.view: view.to_leaf(g, shape))(use.each(x, ct))
            for use, x, ct in factors
        )  # type: ignore[return-value]

    def total(self, leaf: int, gradients: ExampleGradients, weights: Each) -> jax.Array:
        """The sum of the gradients of a leaf times weights."""
        like, each = self.leaves[leaf], gradients.each.get(leaf)
        if each is not None:
            return _sum_over_examples(with_real_dtype(each, accumulator(each)), weights)
        if leaf not in gradients.factors:
            return jnp.zeros(like.shape, accumulator(like))
        factors = gradients.factors[leaf]
        return sum(f.use.view.to_leaf(f.total(weights), like.shape) for f in factors)  # type: ignore

    @property
    def bytes(self) -> int:
        """The bytes of the gradient of one example."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.leaves)

    def microbatch_count(self, request: Request, size: int) -> int:
        """In how many parts the examples are taken: what is kept of one fits into memory."""
        if request.microbatch is not None or request.method == "direct":
            return size // (request.microbatch or size)
        kept = size * sum(map(self.bytes_of, range(len(self.leaves))))
        devices = jax.device_count()
        room = devices * max(_ROOM, 2 * self.bytes)
        least = min(math.ceil(kept / room), size) or 1
        fitting = [n for n in range(least, size + 1) if size % n == 0]
        spread = [n for n in fitting if size // n % devices == 0]  # each device has as many
        return (spread or fitting)[0]


def _sum_over_examples(each: jax.Array, weights: Each) -> jax.Array:
    """The sum of the gradients times weights; a product, which a CPU adds up 5 times as fast."""
    if weights is None:
        return jnp.sum(each, axis=0)
    if jnp.iscomplexobj(each):
        return jnp.sum(weighted(each, weights, 0), axis=0)
    return jnp.einsum("b...,b->...", each, weights.astype(each.dtype), precision="highest")
