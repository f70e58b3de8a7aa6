"""The squares of all leaves as one array: what is done with them is compiled once, not by leaf."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._numerics import if_else
from clipgrad._per_example.course import following
from clipgrad._per_example.grams import squares
from clipgrad._per_example.squares import Squares
from clipgrad._per_example.terms import Products, apart, rejoined


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
    """The squares of a leaf for each example."""
    if isinstance(value, Squares):
        return value
    if isinstance(value, Products) and value.squares is not None:
        return value.squares
    if isinstance(value, Products):
        own, shared = apart(value)
        return jax.vmap(lambda own: squares(rejoined(own, shared)), axis_size=size)(own)
    return jax.vmap(lambda x: Squares.of(x, zero=zero))(value)
