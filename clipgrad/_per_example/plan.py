"""What is done with the gradient of each leaf, and what it costs."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._per_example.batches import part_count
from clipgrad._per_example.blocks import blocks
from clipgrad._per_example.explicit import without_shardings
from clipgrad._per_example.follow import Notes
from clipgrad._per_example.grams import uses_gram
from clipgrad._per_example.subject import PerExampleSubject, check_params
from clipgrad._per_example.terms import Products
from clipgrad._per_example.traced import ExampleGradient
from clipgrad._trees import is_none, with_paths

# One pass took 0.4 to 0.9 times as long as two in the benchmarks, whose models keep up to 0.6 GB,
# most of which a plain gradient keeps as well. So it is chosen while the factors are no larger than
# the parameters and their gradient, or than this: a part of the memory of what trains a model.
_ROOM = 2**30


class LeafPlan(NamedTuple):
    """How one leaf is clipped or measured.

    Attributes:
      path: of the leaf, such as ``"layers/0/kernel"``.
      shape: of the leaf.
      norm: ``"Gram"``: from Gram matrices of its factors; ``"product"``: from the gradient, made
        of the factors for this leaf alone and only for its norm; ``"direct"``: from the gradient
        of each example.
      products: the number of products in the sum that is its gradient; those in a scan are one.
      rows: the number of rows of these products together.
      flops: of the norms and the clipped sum, for the whole batch.
      bytes: the bytes that are kept for it until the norms are known.
      reason: why it, or a part of it, is direct.
    """

    path: str
    shape: tuple[int, ...]
    norm: str
    products: int
    rows: int
    flops: int
    bytes: int
    reason: str


class Plan(NamedTuple):
    """How each example is clipped or measured; ``str()`` is a table.

    Attributes:
      method: ``"one pass"``, ``"two passes"`` or ``"direct"``.
      reason: why the method is direct, or why it was chosen.
      leaves: a `LeafPlan` for each leaf.
      bytes: the bytes that one pass keeps until the norms are known.
      direct_bytes: the bytes of the gradients of all examples of a microbatch.
    """

    method: str
    reason: str
    leaves: tuple[LeafPlan, ...]
    bytes: int
    direct_bytes: int

    def __str__(self) -> str:
        """A table with a line for each leaf."""
        rows = [("leaf", "shape", "norm", "products", "rows", "MFLOP", "MiB", "why")]
        for leaf in self.leaves:
            cost = f"{leaf.flops / 1e6:.3g}", f"{leaf.bytes / 2**20:.3g}"
            counts = str(leaf.products), str(leaf.rows)
            rows.append((leaf.path, str(leaf.shape), leaf.norm, *counts, *cost, leaf.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)) for row in rows]
        kept = f"{self.bytes / 2**20:.3g} MiB kept, {self.direct_bytes / 2**20:.3g} MiB if direct"
        return "\n".join([f"{self.method}: {self.reason}", *(x.rstrip() for x in lines), kept])


def plan_of(
    subject: PerExampleSubject, params: Any, batch: Any, gradient: ExampleGradient | None = None
) -> Plan:
    """The plan of a subject for parameters and a batch of these shapes.

    With the ``gradient`` of an example, the batch is what is computed at once.
    """
    size, parts = part_count(batch, subject.microbatch)
    size //= parts
    paths = [path for path, leaf in with_paths(params) if not is_none(leaf)]
    given = jax.tree.leaves(params)
    if not given or not all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in given):
        check_params(params)
    kinds = jax.tree.leaves(jax.eval_shape(lambda params: params, params))
    whole = sum(_bytes(kind.shape, kind.dtype) for kind in kinds)
    if (why := subject.why_direct(params)) is not None:
        leaves = [_direct_leaf(*pair, size, why) for pair in zip(paths, kinds, strict=True)]
        return Plan("direct", why, tuple(leaves), size * whole, size * whole)
    notes = Notes()
    found = _products(subject, params, batch, size, gradient, notes)
    leaves = [
        _leaf(path, kind.shape, value, size, notes.get(i, []))
        for i, (path, kind, value) in enumerate(zip(paths, kinds, found, strict=True))
    ]
    kept = sum(leaf.bytes for leaf in leaves)
    method, why = subject.method, "as asked"
    if method == "auto":
        room = max(2 * whole, _ROOM)
        method = "one pass" if kept <= room else "two passes"
        fits = "fit into" if kept <= room else "do not fit into"
        why = f"the factors {fits} {room / 2**20:,.0f} MiB"
    return Plan(method, why, tuple(leaves), kept, size * whole)


def _products(
    subject: PerExampleSubject,
    params: Any,
    batch: Any,
    size: int,
    gradient: ExampleGradient | None,
    notes: Notes,
) -> list[Any]:
    """The gradients of ``size`` examples as shapes: of an array, or of `Products`."""
    if gradient is not None:
        return jax.eval_shape(lambda: gradient.each(params, batch, None, notes).gradients)

    def traced(params: Any, batch: Any) -> list[Any]:
        found = ExampleGradient.of(subject.loss_fn, subject.has_aux, params, batch)
        return found.each(params, batch, None, notes).gradients

    params, batch = without_shardings((params, batch))
    few = jax.tree.map(lambda x: jax.eval_shape(lambda x: x[:size], x), batch)
    return jax.eval_shape(traced, params, few)


def _direct_leaf(path: str, kind: Any, size: int, why: str) -> LeafPlan:
    stored = size * _bytes(kind.shape, kind.dtype)
    return LeafPlan(path, kind.shape, "direct", 0, 0, 4 * size * kind.size, stored, why)


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _leaf(path: str, shape: tuple[int, ...], value: Any, size: int, notes: list[str]) -> LeafPlan:
    count = math.prod(shape)
    if not isinstance(value, Products):
        reason = "; ".join(notes) or "a sum or an element-wise product, no larger than its inputs"
        return LeafPlan(
            path, shape, "direct", 0, 0, 4 * size * count, _bytes(value.shape, value.dtype), reason
        )
    # For one example: the shapes of factors without the axis of examples.
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), value)
    facts: dict[str, Any] = {}

    def look(products: Products) -> None:
        found = blocks(products)
        facts["rows"] = sum(block.rows for block in found)
        facts["gram"] = uses_gram(products)
        facts["flops"] = sum(_flops(block, facts["gram"], count) for block in found)

    jax.eval_shape(look, one)
    kept = sum(_bytes(x.shape, x.dtype) for x in jax.tree.leaves(value))
    norm = "Gram" if facts["gram"] else "product"
    flops = size * facts["flops"]
    return LeafPlan(path, shape, norm, len(value.terms), facts["rows"], flops, kept, "")


def _flops(block: Any, gram: bool, count: int) -> int:
    """Of the norm and the sum of a block of one example."""
    own = sum(math.prod(part.values.shape[1:]) for part in block.parts)
    return 2 * block.rows * ((block.rows * own if gram else count) + count)
