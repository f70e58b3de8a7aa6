"""Sums of groups of leaves: the one place that knows how each device adds up.

A sum of squares is right where it is in range (see ``ranges.py``); elsewhere the squares of scaled
elements are added up. `added_up` chooses how:

* a CPU alone: the plain sums, and a branch for what is out of range. Each sum is a pass over the
  data, so that a second one is made only where it is needed. Of slices of small leaves one sum in
  float64, in whose range all squares are: it takes no branch, which would take long to compile.
* a GPU that has all of a leaf: all terms in one reduction, which reads the leaf once; but of
  columns one sum in float64, since a GPU has no kernel for several sums over leading axes. Its
  scalars are joined, since each of them would be a launch.
* a TPU, and leaves that are spread over devices: one sum for each term, apart. They share one read
  on a TPU, and one collective; for one reduction XLA would gather the whole leaf.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._arrays.by_leaf import Joined, for_each
from clipgrad._arrays.numbers import (
    from_bits,
    real_or_absolute,
    to_ordered_bits,
    widest,
    with_real_dtype,
)
from clipgrad._arrays.ranges import is_in_range
from clipgrad._compat import tracks_varying, varying_axes
from clipgrad._devices import by_platform
from clipgrad._sharding import explicit_sharding, is_local, on_every_device, on_one_device

Arrays = Sequence[jax.Array]
Axes = tuple[int, ...] | None
# The terms of sums: arrays in the shape of one of real numbers.
Terms = Callable[[jax.Array], Sequence[jax.Array]]


class Groups(NamedTuple):
    """Elements that are added up together; hashable, so that it can be static under `jax.jit`.

    Attributes:
      axes: for each leaf the axes that are reduced; ``None``: all of them.
      members: for each group the places of its leaves, which keep the same axes.
      names: the mapped axes over which the leaves are spread.
      keep: whether axes that are named are kept with size 1.
    """

    axes: tuple[Axes, ...]
    members: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = ()
    keep: bool = False

    @classmethod
    def one(cls, count: int, names: tuple[str, ...] = ()) -> "Groups":
        """One group of so many leaves."""
        return cls((None,) * count, (tuple(range(count)),), names)

    @classmethod
    def slices(cls, axes: Iterable[Axes], names: tuple[str, ...] = ()) -> "Groups":
        """Each leaf by itself, or its slices over these axes."""
        axes = tuple(axes)
        return cls(axes, tuple((i,) for i in range(len(axes))), names, keep=True)

    @property
    def joint(self) -> bool:
        """Whether all leaves form one group, which has one sum."""
        return len(self.members) == 1 and not self.keep and not any(self.axes)

    def dtypes(self, leaves: Arrays) -> list[str]:
        """The dtypes of the sums of leaves, the widest of their group."""
        return self.per_leaf([widest([leaves[i] for i in group]) for group in self.members])

    def per_leaf(self, values: Sequence[Any]) -> list[Any]:
        """For each leaf the value of its group."""
        of = {i: x for group, x in zip(self.members, values, strict=True) for i in group}
        return [of[i] for i in range(len(self.axes))]

    def sums(self, parts: Arrays, leaves: Arrays) -> list[jax.Array]:
        """The sum of each group; ``parts`` has the shapes of ``leaves``."""
        return self.totals(self._reduce(jnp.sum, parts, leaves), leaves)

    def sums_of(
        self,
        sums: Callable[..., Any],
        leaves: Arrays,
        *arrays: Arrays,
        static: tuple[Any, ...] = (),
    ) -> list[Any]:
        """For each leaf on this device ``sums(*static, axes, keep, leaf, *arrays)``.

        The function gets the axes that it sums over, whether it keeps them, the leaf in the dtype
        of its sums, and its item of each of ``arrays``.
        """
        each = zip(self.dtypes(leaves), self.axes_from_end(leaves), self.keeps(), strict=True)
        rows = [(sums, dtype, (*static, axes, keep)) for dtype, axes, keep in each]
        return for_each(_of_wide, rows, leaves, *arrays)

    def wide_sums(self, leaves: Arrays) -> list[jax.Array]:
        """The sums of squares in float64, which the context allows."""
        return self.totals(self.sums_of(wide_sum, leaves), leaves)

    def totals(self, local: Arrays, leaves: Arrays) -> list[jax.Array]:
        """The sum of each group, from the sums of the leaves on this device."""
        return self._over_devices(local, leaves, _added, jax.lax.psum)

    def totals_of_terms(self, rows: Sequence[Arrays], leaves: Arrays) -> list[list[jax.Array]]:
        """The `totals` of each term, from a row of all terms for each leaf.

        The numbers of many leaves are added up in a call, traced once for all terms and forms.
        """
        columns = zip(*rows, strict=True)
        return [
            self._over_devices(column, leaves, _added_in_a_call, jax.lax.psum) for column in columns
        ]

    def maxima(self, parts: Arrays, leaves: Arrays) -> list[jax.Array]:
        """The maximum of each group: NaN if an element is, 0 for a group without elements."""
        bits = [to_ordered_bits(part) for part in parts]
        local = self._reduce(functools.partial(jnp.max, initial=0), bits, leaves)
        largest = functools.partial(functools.reduce, jnp.maximum)
        totals = self._over_devices(local, leaves, largest, jax.lax.pmax)
        return [from_bits(total) for total in totals]

    def slice_sizes(self, leaves: Arrays) -> list[int]:
        """The number of elements in a slice of each leaf, on all devices that it is spread over."""
        pairs = zip(leaves, self.axes_from_end(leaves), strict=True)
        here = [math.prod(leaf.shape[i] for i in axes) for leaf, axes in pairs]
        devices = [math.prod(map(jax.lax.axis_size, self._axes_of(leaf))) for leaf in leaves]
        return [size * count for size, count in zip(here, devices, strict=True)]

    def _reduce(
        self, op: Callable[..., jax.Array], parts: Arrays, leaves: Arrays
    ) -> list[jax.Array]:
        rows = zip(self.axes_from_end(leaves), self.keeps(), parts, strict=True)
        return [op(part, axis=axes, keepdims=keep) for axes, keep, part in rows]

    def keeps(self) -> list[bool]:
        """For each leaf whether its reduced axes are kept: not of a whole leaf."""
        return [self.keep and axes is not None for axes in self.axes]

    def axes_from_end(self, leaves: Arrays) -> list[tuple[int, ...]]:
        """The axes of each leaf that are reduced, counted from the end."""
        return [
            tuple(range(-x.ndim, 0)) if axes is None else tuple(i - x.ndim for i in axes)
            for axes, x in zip(self.axes, leaves, strict=True)
        ]

    def _over_devices(
        self,
        local: Arrays,
        leaves: Arrays,
        merge: Callable[[Arrays], jax.Array],
        collective: Callable[..., list[jax.Array]],
    ) -> list[jax.Array]:
        """Merges ``local`` values: first on this device, then in one collective for each axis."""
        local = local if self.keep else list(map(on_every_device, local))
        places = [self._axes_of(leaf) for leaf in leaves]
        parts_of: list[list[jax.Array]] = [[] for _ in self.members]
        for names in dict.fromkeys(places):
            here = [[local[i] for i in group if places[i] == names] for group in self.members]
            owners = [owner for owner, parts in zip(parts_of, here, strict=True) if parts]
            merged = [merge(parts) for parts in here if parts]
            merged = collective(merged, names) if names else merged
            for owner, value in zip(owners, merged, strict=True):
                owner.append(value)
        return list(map(merge, parts_of))

    def _axes_of(self, leaf: jax.Array) -> tuple[str, ...]:
        """The mapped axes over which this leaf is spread, where that is known, or else all."""
        varying = varying_axes(leaf)
        return tuple(n for n in self.names if n in varying or not tracks_varying(n))


def _added(parts: Arrays) -> jax.Array:
    return functools.reduce(jax.lax.add, parts)


def _added_in_a_call(parts: Arrays) -> jax.Array:
    return for_each(_added, [()], [parts])[0] if len(parts) > 2 else _added(parts)


def added_up(
    terms: Terms,
    leaves: Arrays,
    groups: Groups,
    finish: Callable[..., Any],
    cpu: Callable[[Arrays, Arrays], Any] | None,
    gpu_columns: Callable[[Arrays, Arrays], Any] | None = None,
    plain: Arrays = (),
    counts: Sequence[float] = (),
    completed: Callable[[Any], Any] | None = None,
) -> Any:
    """For each group what ``finish`` makes of its totals, in the form that suits the device.

    Args:
      terms: the arrays to add up, of the real numbers, or absolute values, of a leaf; the second
        one has the squares as they are.
      leaves: all leaves.
      groups: which of them, or which of their slices, are added up together.
      finish: a function of the group's count, if there are counts, and of the total of each term,
        element by element.
      cpu: the same on a CPU: a function of ``plain`` and the leaves; see `unless_out_of_range`.
      gpu_columns: the same on a GPU, of sums that are not over rows.
      plain: the total of the second term of each group, if the program has it anyway.
      counts: a number for each group.
      completed: adds to the results of all forms what the one for a CPU has.
    """
    each = {"groups": groups, "finish": finish, "counts": counts}
    apart = functools.partial(added_up_apart, terms, **each)
    if fit_one_reduction(leaves, groups.axes):
        gpu = functools.partial(_together, terms, **each)
    elif gpu_columns and on_one_device(leaves):
        gpu = gpu_columns
    else:
        gpu = functools.partial(apart, launched=True)
    if completed:
        gpu, apart = _then(completed, gpu), _then(completed, apart)
    return by_platform(list(plain), list(leaves), cpu=cpu or apart, gpu=gpu, default=apart)


def _then(completed: Callable[[Any], Any], form: Callable[..., Any]) -> Callable[..., Any]:
    return lambda plain, leaves: completed(form(plain, leaves))


def fit_one_reduction(leaves: Arrays, axes: Sequence[Axes]) -> bool:
    """Whether several sums of each leaf over its axes are best taken in one reduction.

    One device has all of a leaf, and the last axis is one of those that are reduced.
    """
    rows = all(a is None or x.ndim - 1 in a for a, x in zip(axes, leaves, strict=True))
    return rows and all(map(is_local, leaves))


def unless_out_of_range(
    plain: Arrays, ordinary: Callable[[], Any], again: Callable[[], Any]
) -> Any:
    """A branch: what is ordinary where all of these sums of squares are in range."""
    flags = [_all_hold(is_in_range(x)) for x in joined_leaves(plain)]
    return branch(flags, ordinary, again)


def _all_hold(flags: jax.Array) -> jax.Array:
    """`jnp.all`, as a count of those that do not hold: XLA compiles that sum in less time."""
    if flags.size == 1:
        return flags.reshape(())
    return jnp.sum(~flags, dtype=jnp.float32) == 0


def branch(flags: Arrays, ordinary: Callable[[], Any], again: Callable[[], Any]) -> Any:
    """A branch: what is ordinary where all of these flags hold."""
    with jax.named_scope("out_of_range"):
        return jax.lax.cond(functools.reduce(jnp.logical_and, flags), ordinary, again)


def added_up_apart(
    terms: Terms,
    plain: Arrays,
    leaves: Arrays,
    groups: Groups,
    finish: Callable[..., Any],
    counts: Sequence[float] = (),
    launched: bool = False,
) -> list[Any]:
    """`added_up` by one sum for each term; ``launched`` says that scalars are launches."""
    rows = groups.sums_of(_sums_apart, leaves, static=(terms, bool(plain)))
    columns = groups.totals_of_terms(rows, leaves)
    columns = [columns[0], list(plain), *columns[1:]] if plain else columns
    if launched:
        return finished_in_few(columns, finish, counts)
    return for_each(finish, [(n,) for n in counts] or [()] * len(plain or columns[0]), *columns)


def _together(
    terms: Terms,
    plain: Arrays,
    leaves: Arrays,
    groups: Groups,
    finish: Callable[..., Any],
    counts: Sequence[float],
) -> list[Any]:
    """`added_up` by one reduction of all terms of a leaf."""
    del plain
    rows = groups.sums_of(_sums_together, leaves, static=(terms,))
    columns = groups.totals_of_terms(rows, leaves)
    return finished_in_few(columns, finish, counts)


def finished_in_few(
    columns: list[Any], finish: Callable[..., Any], counts: Sequence[float]
) -> list[Any]:
    """The results of all groups, computed in few arrays."""
    joined = Joined.of(columns[0])
    numbers = list(zip(*joined.numbers(counts), strict=True)) or [()] * len(joined.places)
    arrays = list(map(joined.join, columns))
    if any(isinstance(x, np.ndarray) for row in numbers for x in row):
        each = zip(numbers, zip(*arrays, strict=True), strict=True)
        results = [finish(*row, *few) for row, few in each]
    else:  # in calls that the form without joined numbers may have, too
        results = for_each(finish, numbers, *arrays)
    rows, structures = zip(*map(jax.tree.flatten, results), strict=True)
    fields = map(joined.part, zip(*rows, strict=True))
    return [structures[0].unflatten(row) for row in zip(*fields, strict=True)]


def _sums_apart(
    terms: Terms, has_plain: bool, axes: tuple[int, ...], keep: bool, leaf: jax.Array
) -> list[jax.Array]:
    each = list(terms(real_or_absolute(leaf)))
    each = each[:1] + each[2:] if has_plain else each
    return [jnp.sum(x, axis=axes, keepdims=keep) for x in each]


def wide_sum(axes: tuple[int, ...], keep: bool, leaf: jax.Array) -> jax.Array:
    """The sum of squares in float64, which the context allows."""
    wide = real_or_absolute(with_real_dtype(leaf, "float64"))
    return jnp.sum(jnp.square(wide), axis=axes, keepdims=keep)


def wide_sums(counts: bool, axes: tuple[int, ...], keep: bool, leaf: jax.Array) -> list[jax.Array]:
    """The `wide_sum`, and with ``counts`` the number of elements that are NaN or inf."""
    if not counts:
        return [wide_sum(axes, keep, leaf)]
    wide = real_or_absolute(with_real_dtype(leaf, "float64"))
    terms = [jnp.square(wide), (~jnp.isfinite(leaf)).astype(jnp.float64)]
    return _reduced(terms, axes, keep)


def _sums_together(
    terms: Terms, axes: tuple[int, ...], keep: bool, leaf: jax.Array
) -> list[jax.Array]:
    return _reduced(terms(real_or_absolute(leaf)), axes, keep)


def _reduced(terms: Arrays, axes: tuple[int, ...], keep: bool) -> list[jax.Array]:
    front = tuple(i % terms[0].ndim for i in axes)
    sums, _ = reduced_together(terms, (), front)
    return [jnp.expand_dims(x, front) for x in sums] if keep else sums


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
    reduced = jax.lax.reduce(operands, zeros, merged, axes)
    return list(reduced[:number]), list(reduced[number:])


def _of_wide(
    sums: Callable[..., Any], dtype: str, static: tuple[Any, ...], leaf: jax.Array, *arrays: Any
) -> Any:
    return sums(*static, with_real_dtype(leaf, dtype), *arrays)


# Leaves of up to 2 ** 14 elements are joined before they are added up again, since XLA compiles one
# loop for all of them: up to 2 ** 20 elements, 4 MB in float32, which are temporaries.
_SMALL, _JOINED = 2**14, 2**20


def joined_leaves(leaves: Arrays) -> list[jax.Array]:
    """The elements in fewer arrays; those whose types are sharded stay apart."""
    kinds: list[Any] = []
    total = 0
    for i, leaf in enumerate(leaves):
        apart = leaf.size > min(_SMALL, _JOINED - total) or explicit_sharding(leaf)
        kinds.append(i if apart else (leaf.dtype, varying_axes(leaf)))
        total += 0 if apart else leaf.size
    return Joined.by(kinds, leaves, part_of=lambda number: number).join(leaves)
