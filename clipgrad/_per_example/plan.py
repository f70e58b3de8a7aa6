"""The plan for the gradient of each leaf, and its cost, from shapes alone.

Of each method the time is estimated that it adds to a plain gradient on an accelerator. A number is
read or written at the bandwidth, and multiplied at the rate of its type. Norms and clipped sums do
not run at the default precision of a backend: a bfloat16 factor meets a float32 weight in three
products of bfloat16, and a float32 factor in six. The gradients of all examples, as `jax.vmap` of
`jax.grad` makes them, run at the default precision, and are written and read twice.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._numerics import accumulator
from clipgrad._per_example.batches import part_count, without_shardings
from clipgrad._per_example.blocks import blocks, row_count
from clipgrad._per_example.course import Course
from clipgrad._per_example.grams import uses_gram
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.terms import Products, Term, apart
from clipgrad._per_example.traced import followed
from clipgrad._trees import is_none, with_paths

# One pass took 0.4 to 0.9 times as long as two in the benchmarks, whose models keep up to 0.6 GB,
# most of which a plain gradient keeps as well. So it is chosen while the factors are no larger than
# the parameters and their gradient, or than this: a part of the memory of what trains a model; and
# no larger than the gradients of all examples, which the factors of many steps of a recurrence are.
# On an accelerator the estimated time decides among what fits.
_ROOM = 2**30


class LeafPlan(NamedTuple):
    """The plan for one leaf that is clipped or measured.

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
      dtype: of the operations: bfloat16 factors are multiplied as they are where that is fast.
    """

    path: str
    shape: tuple[int, ...]
    norm: str
    products: int
    rows: int
    flops: int
    bytes: int
    reason: str
    dtype: str


class Plan(NamedTuple):
    """The plan by which each example is clipped or measured; ``str()`` is a table.

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
        rows = [("leaf", "shape", "norm", "products", "rows", "MFLOP", "type", "MiB", "why")]
        for leaf in self.leaves:
            cost = f"{leaf.flops / 1e6:.3g}", leaf.dtype, f"{leaf.bytes / 2**20:.3g}"
            counts = str(leaf.products), str(leaf.rows)
            rows.append((leaf.path, str(leaf.shape), leaf.norm, *counts, *cost, leaf.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)) for row in rows]
        kept = f"{self.bytes / 2**20:.3g} MiB kept, {self.direct_bytes / 2**20:.3g} MiB if direct"
        return "\n".join([f"{self.method}: {self.reason}", *(x.rstrip() for x in lines), kept])


def plan_of(subject: PerExampleSubject, params: Any, batch: Any, run: Callable[..., Any]) -> Plan:
    """The plan of a subject for parameters and a batch of these shapes.

    ``run`` is what is done with the gradient, as `followed` takes it; here it gets no arrays.
    """
    size, parts = part_count(batch, subject.microbatch)
    size //= parts
    paths = [path for path, leaf in with_paths(params) if not is_none(leaf)]
    kinds = jax.tree.leaves(jax.eval_shape(lambda params: params, params))
    whole = sum(tree_bytes(kind) for kind in kinds)
    if (why := subject.why_direct(params)) is not None:
        leaves = [_direct_leaf(*pair, size, why) for pair in zip(paths, kinds, strict=True)]
        return Plan("direct", why, tuple(leaves), size * whole, size * whole)
    params, batch = without_shardings((params, batch))
    few = jax.tree.map(lambda x: jax.eval_shape(lambda x: x[:size], x), batch)
    course, shapes = _decided(subject, params, few, run)
    leaves = [
        _leaf(path, kind.shape, value, size, course.reason(i))
        for i, (path, kind, value) in enumerate(zip(paths, kinds, shapes, strict=True))
    ]
    method, why = method_for(subject, params, shapes, size)
    if method == "direct":
        leaves = [_direct_leaf(*pair, size, "") for pair in zip(paths, kinds, strict=True)]
    return Plan(method, why, tuple(leaves), sum(leaf.bytes for leaf in leaves), size * whole)


def _decided(
    subject: PerExampleSubject, params: Any, batch: Any, run: Callable[..., Any]
) -> tuple[Course, list[Any]]:
    """The decisions about the leaves, and the shapes of the gradients of one example."""
    found: list[Any] = []

    def traced(params: Any, batch: Any) -> Any:
        made, *rest = followed(subject, params, batch, run)
        found.extend(rest)
        return made

    jax.eval_shape(traced, params, batch)
    course, shapes = found
    return course, shapes


def method_for(
    subject: PerExampleSubject, params: Any, shapes: Sequence[Any], size: int
) -> tuple[str, str]:
    """The method for gradients of one example of these shapes, and why."""
    if subject.method != "auto":
        return subject.method, "as asked"
    whole = tree_bytes(jax.eval_shape(lambda params: params, params))
    room, kept = max(2 * whole, _ROOM), _kept(shapes, size)
    if (rates := device_rates()) is not None:
        own = {"one pass": kept <= room, "two passes": True}
        memory = device_memory()
        own["direct"] = size * whole <= (room if memory is None else memory // 4)
        if subject.nonfinite != "propagate":  # an example is left out where it is followed
            del own["direct"]
        return _fastest(seconds_of(shapes, size, rates), own)
    if kept > room:
        return "two passes", f"the factors do not fit into {room / 2**20:,.0f} MiB"
    if kept > size * whole:
        return "two passes", "the factors are larger than the gradients of all examples"
    return "one pass", f"the factors fit into {room / 2**20:,.0f} MiB"


def _fastest(seconds: Mapping[str, float], fits: Mapping[str, bool]) -> tuple[str, str]:
    """The method that takes the least time of those that fit, and the estimates."""
    method = min((m for m, flag in fits.items() if flag), key=seconds.__getitem__)
    found = [
        f"{m} {1e3 * seconds[m]:.3g} ms" + ("" if flag else " (does not fit)")
        for m, flag in fits.items()
    ]
    where = jax.default_backend().upper()
    return method, f"estimated beside a plain gradient on a {where}: {', '.join(found)}"


def _direct_leaf(path: str, kind: Any, size: int, why: str) -> LeafPlan:
    stored, flops = size * tree_bytes(kind), 4 * size * kind.size
    return LeafPlan(path, kind.shape, "direct", 0, 0, flops, stored, why, accumulator(kind))


def _kept(tree: Any, size: int) -> int:
    """The bytes of the arrays of so many examples, and of what these share."""
    own, shared = apart(tree)
    return size * tree_bytes(own) + tree_bytes(shared)


def _leaf(path: str, shape: tuple[int, ...], value: Any, size: int, reason: str) -> LeafPlan:
    kept = _kept(value, size)
    if not isinstance(value, Products):
        reason = reason or "a sum or an element-wise product, no larger than its inputs"
        flops = 4 * size * math.prod(shape)
        return LeafPlan(path, shape, "direct", 0, 0, flops, kept, reason, accumulator(value))
    cost, count = LeafCost.of(value), len(value.terms)
    norm, flops = "Gram" if cost.is_gram else "product", size * (cost.norm + cost.sum)
    return LeafPlan(path, shape, norm, count, cost.rows, flops, kept, "", cost.dtype)


class Rates(NamedTuple):
    """Bytes and operations in a second: in bfloat16, and in float32 as by default."""

    bandwidth: float
    half: float
    default: float


# Of an H200 as measured, and of a TPU v5e by its data sheet. A ratio of two methods is needed, and
# other devices of a kind have about the same.
_RATES = {
    "gpu": Rates(3.9e12, 620e12, 300e12),
    "tpu": Rates(0.8e12, 190e12, 190e12),
}


class LeafCost(NamedTuple):
    """The operations for the leaf of one example."""

    rows: int
    is_gram: bool
    norm: int
    sum: int
    dtype: str  # of the factors

    @classmethod
    def of(cls, value: Products) -> "LeafCost":
        """The cost of a gradient, given as products of shapes."""
        found: list[LeafCost] = []

        def look(products: Products) -> None:
            each, count = blocks(products), math.prod(products.shape)
            gram, rows = uses_gram(each, products.shape), sum(map(row_count, each))
            kinds = {p.values.dtype for block in each for p in block.own if p.hot is None}
            dtype = "bfloat16" if kinds == {jnp.dtype("bfloat16")} else "float32"
            norm = sum(_norm_flops(block, gram, count) for block in each)
            found.append(cls(rows, gram, norm, 2 * rows * count, dtype))

        jax.eval_shape(look, value)
        return found[0]


def _norm_flops(block: Term, gram: bool, count: int) -> int:
    own = sum(math.prod(part.values.shape[1:]) for part in block.own)
    rows = row_count(block)
    return 2 * rows * (rows * own if gram else count)


def tree_bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def device_rates() -> Rates | None:
    """The rates of the backend that JAX uses by default; None for a CPU."""
    return _RATES.get(jax.default_backend())


def device_memory() -> int | None:
    """The bytes of the first device, where it says so."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit")


def seconds_of(shapes: Sequence[Any], size: int, rates: Rates) -> dict[str, float]:
    """The time that each method adds, for gradients of one example of these shapes."""
    products = [value for value in shapes if isinstance(value, Products)]
    costs = [LeafCost.of(value) for value in products]
    kept, whole = tree_bytes(apart(products)[0]), sum(4 * math.prod(v.shape) for v in products)

    def seconds(norm: bool, weights: float, default: float) -> float:
        total = 0.0
        for cost in costs:
            half = cost.dtype == "bfloat16"
            exact = rates.half if half else rates.half / 6
            usual = rates.half if half else rates.default
            total += cost.norm / exact if norm else 0
            total += cost.sum * (weights * (3 if half else 1) / exact + default / usual)
        return total

    return {
        "one pass": size * (seconds(True, 1, 0) + 2 * kept / rates.bandwidth),
        "two passes": size * (seconds(True, 1, 1) + 2 * kept / rates.bandwidth),
        "direct": size * (seconds(False, 0, 1) + 3 * whole / rates.bandwidth),
    }
