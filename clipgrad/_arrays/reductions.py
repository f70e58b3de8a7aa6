"""Sums and maxima over groups of leaves: all leaves as one group, or slices of each leaf."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._arrays.by_leaf import for_each
from clipgrad._arrays.numbers import (
    accumulator,
    from_bits,
    to_ordered_bits,
    widest,
    with_real_dtype,
)
from clipgrad._compat import tracks_varying, varying_axes

Arrays = Sequence[jax.Array]
Axes = tuple[int, ...] | None


class Groups(NamedTuple):
    """Elements that are reduced together; hashable, so that it can be static under `jax.jit`.

    Attributes:
      axes: for each leaf the axes that are reduced and kept with size 1 (``None``: all of
        them). ``None`` instead of the tuple makes one group of all leaves.
      names: the mapped axes over which the leaves are spread.
    """

    axes: tuple[Axes, ...] | None
    names: tuple[str, ...] = ()

    @property
    def joint(self) -> bool:
        """Whether all leaves form one group."""
        return self.axes is None

    def dtypes(self, leaves: Arrays) -> list[str]:
        """The dtypes of the sums of leaves, the widest of their group."""
        return [widest(leaves)] * len(leaves) if self.joint else list(map(accumulator, leaves))

    def sums(self, parts: Arrays, leaves: Arrays) -> list[jax.Array]:
        """The sum of each group; ``parts`` has the shapes of ``leaves``."""
        return self.totals(self._reduce(jnp.sum, parts, leaves), leaves)

    def sums_of(self, sums: Callable[..., Any], leaves: Arrays, *given: Arrays) -> list[Any]:
        """For each leaf on this device what ``sums(axes, keep, leaf, *given)`` makes of it.

        The function gets the axes that it sums over, whether it keeps them, the leaf in the dtype
        of its sums, and its item of each of ``given``.
        """
        pairs = zip(self.dtypes(leaves), self._axes_from_end(leaves), strict=True)
        static = [(sums, dtype, axes, not self.joint) for dtype, axes in pairs]
        return for_each(_sums_of_wide, static, leaves, *given)

    def totals(self, local: Arrays, leaves: Arrays) -> list[jax.Array]:
        """The sum of each group, from the sums of the leaves on this device."""
        return self._over_devices(local, leaves, jax.lax.add, jax.lax.psum)

    def maxima(self, parts: Arrays, leaves: Arrays) -> list[jax.Array]:
        """The maximum of each group: NaN if an element is, 0 for a group without elements."""
        bits = [to_ordered_bits(part) for part in parts]
        local = self._reduce(functools.partial(jnp.max, initial=0), bits, leaves)
        totals = self._over_devices(local, leaves, jnp.maximum, jax.lax.pmax)
        return [from_bits(total) for total in totals]

    def per_leaf(self, values: Sequence[Any], leaves: Arrays) -> list[Any]:
        return list(values) * len(leaves) if self.joint else list(values)

    def slice_sizes(self, leaves: Arrays) -> list[int]:
        """The number of elements in a slice of each leaf, on all devices that it is spread over."""
        pairs = zip(leaves, self._axes_from_end(leaves), strict=True)
        here = [math.prod(leaf.shape[i] for i in axes) for leaf, axes in pairs]
        devices = [math.prod(map(jax.lax.axis_size, self._axes_of(leaf))) for leaf in leaves]
        return [size * count for size, count in zip(here, devices, strict=True)]

    def _reduce(
        self, op: Callable[..., jax.Array], parts: Arrays, leaves: Arrays
    ) -> list[jax.Array]:
        axes = self._axes_from_end(leaves)
        keep = not self.joint
        return [op(part, axis=a, keepdims=keep) for a, part in zip(axes, parts, strict=True)]

    def _axes_from_end(self, leaves: Arrays) -> list[tuple[int, ...]]:
        """The axes of each leaf that are reduced, counted from the end."""
        pairs = zip(self.axes or [None] * len(leaves), leaves, strict=True)
        return [
            tuple(range(-x.ndim, 0)) if axes is None else tuple(i - x.ndim for i in axes)
            for axes, x in pairs
        ]

    def _over_devices(
        self,
        local: Arrays,
        leaves: Arrays,
        merge: Callable[[jax.Array, jax.Array], jax.Array],
        collective: Callable[..., list[jax.Array]],
    ) -> list[jax.Array]:
        """Merges ``local`` values: first on this device, then in one collective for each axis."""
        places: dict[tuple[str, ...], list[int]] = {}
        for i, leaf in enumerate(leaves):
            places.setdefault(self._axes_of(leaf), []).append(i)
        if self.joint:
            merged = {
                n: [functools.reduce(merge, [local[i] for i in p])] for n, p in places.items()
            }
            totals = [collective(v, n)[0] if n else v[0] for n, v in merged.items()]
            return [functools.reduce(merge, totals)]
        totals = list(local)
        for names, places_of in places.items():
            if names:
                reduced = collective([local[i] for i in places_of], names)
                for i, value in zip(places_of, reduced, strict=True):
                    totals[i] = value
        return totals

    def _axes_of(self, leaf: jax.Array) -> tuple[str, ...]:
        """The mapped axes over which this leaf is spread, where that is known, or else all."""
        varying = varying_axes(leaf)
        return tuple(n for n in self.names if n in varying or not tracks_varying(n))


def reduced_together(
    terms: Arrays, integers: Arrays, axes: tuple[int, ...]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The sums of some arrays over axes, and the largest of some integers, at least 0.

    It is one reduction, so that a GPU reads once what all of them are computed from. Of arrays that
    are spread over devices XLA would gather the whole.
    """
    number = len(terms)

    def merged(a: Any, b: Any) -> Any:
        sums = map(jax.lax.add, a[:number], b[:number])
        return *sums, *map(jax.lax.max, a[number:], b[number:])

    operands = (*terms, *integers)
    zeros = tuple(jnp.zeros((), x.dtype) for x in operands)
    found = jax.lax.reduce(operands, zeros, merged, axes)
    return list(found[:number]), list(found[number:])


def _sums_of_wide(
    sums: Callable[..., Any],
    dtype: str,
    axes: tuple[int, ...],
    keep: bool,
    leaf: jax.Array,
    *given: jax.Array,
) -> Any:
    return sums(axes, keep, with_real_dtype(leaf, dtype), *given)
