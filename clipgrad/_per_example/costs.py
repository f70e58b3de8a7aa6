"""The time that each method adds to a plain gradient on an accelerator, from shapes alone.

A number is read or written at the bandwidth, and multiplied at the rate of its type. Norms and
clipped sums do not run at the default precision of a backend: a bfloat16 factor meets a float32
weight in three products of bfloat16, and a float32 factor in six. The gradients of all examples, as
`jax.vmap` of `jax.grad` makes them, run at the default precision, and are written and read twice.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._per_example.blocks import blocks, row_count
from clipgrad._per_example.grams import uses_gram
from clipgrad._per_example.terms import Products, Term, apart


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
    """The bytes of all arrays of a tree."""
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
