"""The squares of all leaves as one array: what is done with them is compiled once, not by leaf."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._per_example.course import following
from clipgrad._per_example.grams import squares
from clipgrad._per_example.squares import Squares
from clipgrad._per_example.terms import Products, apart, rejoined
from clipgrad._per_example.wanted import is_matrix

# The most elements of an array that waits for others of its shape, to be measured with them. With
# 2 ** 12 elements, 8 unrolled layers of a transformer took 4.8 s of CPU time to trace and compile,
# and 8.4 MB; with these 4.3 s and 7.1 MB, with 127 elements 4.5 s.
_MOST_ELEMENTS = 2**9
# The same for vectors, such as biases and scales of wide layers, and the least that is kept for the
# other leaves in multiples of them. A model of many positions keeps more: a vector is a sum over
# positions. Without positions it is as large as a factor, and a copy of it would be noticed.
_MOST_OF_A_VECTOR, _LEAST_BESIDE_VECTORS = 2**13, 16


def waiting_leaves(arrays: Mapping[int, Any], kept: int) -> frozenset[int]:
    """The leaves whose arrays are measured with others of their shape, from shapes alone.

    Of the gradient of one example ``kept`` numbers are there, with those of the other leaves.
    """
    real = {i: x for i, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    small = {i for i, x in real.items() if x.size <= _MOST_ELEMENTS}
    vectors = {i for i, x in real.items() if x.size <= _MOST_OF_A_VECTOR and not is_matrix(x)}
    is_room = sum(real[i].size for i in vectors) <= kept // (1 + _LEAST_BESIDE_VECTORS)
    return frozenset(small | vectors if is_room else small)


def squares_of_leaves(values: Mapping[int, Any], size: int, zero: frozenset[int]) -> Squares:
    """The squares of leaves, of the shape (leaves, examples), in their order.

    A leaf is given as an array, `Products` or `Squares`, with ``size`` examples in front. NaN and
    inf count as 0 in the arrays of the leaves ``zero``.
    """
    groups: dict[Any, list[int]] = {}
    for i, value in values.items():
        alone = isinstance(value, Products | Squares)
        key = i if alone else (value.shape, value.dtype.name, i in zero)
        groups.setdefault(key, []).append(i)
    found = []
    for leaves in groups.values():
        with following(leaves):
            found.append(_of_group([values[i] for i in leaves], size, leaves[0] in zero))
    if not found:
        return Squares(*(jnp.zeros((0, size), kind) for kind in ("float32", "int32", "float32")))
    columns = [_as_rows(column) for column in zip(*found, strict=True)]
    order = np.argsort([i for leaves in groups.values() for i in leaves])
    if any(order != np.arange(len(order))):
        columns = [column[order] for column in columns]
    return Squares(*columns)


def _as_rows(parts: Sequence[jax.Array]) -> jax.Array:
    """Rows in the widest of their dtypes."""
    dtype = max(parts, key=lambda part: part.dtype.itemsize).dtype
    return jnp.concatenate([part.astype(dtype) for part in parts])


def _of_group(values: Sequence[Any], size: int, zero: bool) -> Squares:
    """The squares of values that are alike, of the shape (values, examples)."""
    first = values[0]
    if len(values) > 1:
        each = jax.vmap(jax.vmap(lambda x: Squares.of(x, zero=zero)))
        return each(jnp.stack(values))
    return jax.tree.map(lambda x: x[None], each_squares(first, size, zero))


def each_squares(value: Any, size: int, zero: bool = False) -> Squares:
    """The squares of a leaf for each example."""
    if isinstance(value, Squares):
        return value
    if isinstance(value, Products) and value.squares is not None:
        return value.squares
    if isinstance(value, Products):
        own, shared = apart(value)
        return jax.vmap(lambda own: squares(rejoined(own, shared)), axis_size=size)(own)
    return jax.vmap(lambda x: Squares.of(x, zero=zero))(value)
