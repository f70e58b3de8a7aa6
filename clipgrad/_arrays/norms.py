r"""Norms that neither overflow, nor underflow, nor lose low precision.

A norm is ``root / scale``. In the ordinary case the scale is 1 and the root is what
``sqrt(sum(g ** 2))`` gives, bit by bit. Where that sum leaves its range, the squares of elements
times a power of two are summed (``ranges.py``), as each device does it best (``sums.py``).

From a clip to the sum of squares, top down:

* ``clip_by_global_norm(1.0).update`` (``_clip/gradient_clip.py``) selects leaves, measures, scales;
* ``measured_norms`` (``_clip/clipping.py``) asks the rule;
* ``ClipByGlobalNorm.measure`` (``_clip/rules/global_norm.py``) asks for one norm of all leaves;
* here: ``tree_norm`` names one group of all leaves, ``_norms_of_squares`` takes the sums of their
  ``square``, and ``_in_range`` what stands in for sums out of range.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from clipgrad._arrays.by_leaf import for_each, run_in_loop
from clipgrad._arrays.calls import explain_call
from clipgrad._arrays.numbers import (
    if_else,
    in_one_program,
    nan_unless,
    number,
    one_program_if_eager,
    over,
    quotient,
    real_or_absolute,
    real_product,
    times,
    widest,
    with_real_dtype,
)
from clipgrad._arrays.ranges import (
    in_range,
    is_in_range,
    is_root_in_range,
    narrow_root,
    root_in_range,
    scale_of_largest,
    scale_of_plain,
    scaled_square,
    three_squares,
    toward_one,
    unless_plain,
)
from clipgrad._arrays.sums import (
    Arrays,
    Axes,
    Groups,
    added_up,
    added_up_apart,
    branch,
    finished_in_few,
    joined_leaves,
    unless_out_of_range,
    wide_sum,
    wide_sums,
)
from clipgrad._arrays.trees import check_is_tree, clippable_leaves, described, shown
from clipgrad._compat import to_varying, tracks_varying, varying_axes
from clipgrad._errors import warn

# A `PartitionSpec` says that every leaf is spread over the axes in it.
AxisName = str | Sequence[str] | PartitionSpec | None


class Norm(NamedTuple):
    """A norm as the quotient of a ``root`` in the middle of the range and a ``scale``.

    Attributes:
      root: not finite where an element is not.
      scale: a power of two, 1 in the ordinary range.
      divisor: the root to compare with and to divide by: NaN where it is not finite, small where
        it is 0. As in optax it is a square root, not a choice of two, and all that a clip uses:
        XLA rounds quotients of anything else otherwise.
      nonfinite: how many elements are NaN or inf; ``None`` if nobody asked.
    """

    root: jax.Array
    scale: jax.Array
    divisor: jax.Array
    nonfinite: jax.Array | None = None

    @classmethod
    def of(cls, root: jax.Array, scale: jax.Array) -> "Norm":
        """The norm ``root / scale``."""
        divisor = if_else(lax.eq(root, number(0, root)), _nothing(root) ** 0.5, root)
        return cls(root, scale, nan_unless(lax.is_finite(root), divisor))

    @property
    def value(self) -> jax.Array:
        """The norm itself; inf where it is larger than its dtype can hold."""
        return lax.div(self.root, self.scale)

    def exceeds(self, limit: jax.Array) -> jax.Array:
        """Whether the norm is above the limit, or not finite."""
        within = lax.le(self.root, self.scaled(limit))
        return lax.bitwise_not(lax.bitwise_and(lax.is_finite(self.root), within))

    def scaled(self, limit: jax.Array) -> jax.Array:
        """A limit of the norm as one of the divisor."""
        return _scaled(limit, self.scale)


# Under jax_debug_infs the product may be inf in it; outside, 0 times inf would be a derivative.
@one_program_if_eager
def _scaled(limit: jax.Array, scale: jax.Array) -> jax.Array:
    product, most = limit * scale, float(jnp.finfo(limit.dtype).max)
    return if_else(lax.gt(product, number(most, product)), most, product)


class _Kind(NamedTuple):
    """A kind of norm.

    Attributes:
      ord: its order.
      mean: whether it is of the mean instead of the sum (rms).
      as_optax: whether squares are added up in the order and the dtype in which optax adds them.
      counts: whether NaN and inf are counted; of order 2, and of one group of whole leaves.
      values_from: the first of the groups that nothing is scaled by, if there are any.
    """

    ord: float
    mean: bool = False
    as_optax: bool = True
    counts: bool = False
    values_from: int | None = None


@explain_call()
def global_norm(tree: Any, ord: float = 2, axis_name: AxisName = None) -> jax.Array:
    r"""Computes the norm of a whole tree, without overflow or underflow.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> cg.global_norm({"w": jnp.array([3.0]), "b": jnp.array([4.0], jnp.bfloat16)})
      Array(5., dtype=float32)
      >>> cg.global_norm(jnp.full(4, 300.0, jnp.float16))    # 4 * 300 ** 2 is inf in float16
      Array(600., dtype=float32)

    Args:
      tree: a pytree of gradients.
      ord: the order $p$, a number in (0, inf].
      axis_name: inside `jax.shard_map`, `jax.pmap` or ``jax.vmap(axis_name=...)``, the name or
        names of the mapped axes over which the tree is spread; under `jax.jit` you do not need
        this. By default `jax.shard_map` tracks which leaves differ between devices, and a leaf that
        is the same on all devices counts once (JAX does not know this about a `jax.lax.all_gather`
        result). With ``check_vma=False``, `jax.pmap` and `jax.vmap`, every leaf counts as spread,
        so a leaf that is the same counts once for each device, with a warning. ``jax.P("x")``
        instead of ``"x"`` says that every leaf is spread. Without ``axis_name``, each device
        computes the norm of its own part, with a warning if JAX knows that a leaf differs; ``()``
        says that you want this.

    Returns:
      A scalar array, float32 or float64.

    Raises:
      ValueError: if ``ord`` is not in (0, inf], or ``axis_name`` is not a mapped axis here.

    All leaves together count as one vector $g$, whose norm is $(\sum_i |g_i|^p)^{1/p}$.

    Guarantees:
      * Squares are summed in float32, or in float64 if a leaf is float64, and the result has that
        dtype.
      * The norm is right even if the squares overflow or underflow. Only subnormal elements (below
        1.2e-38 in float32) may count as 0, as XLA does on most devices.
      * On a float32 tree in the ordinary range the norm is bit-identical to ``optax.tree.norm``.
      * The derivative is finite everywhere; at zero it is 0.
      * An empty tree has norm 0 for every ``ord``. ``None``, integer, boolean, ``float0`` and
        PRNG-key leaves do not count; complex elements count by absolute value.
      * NaN anywhere gives NaN; otherwise inf anywhere gives inf.
    """
    warn_of_parts("global_norm", clippable_leaves(tree), axis_name)
    check_is_tree("tree", tree, "global_norm(jax.grad(loss)(params, batch))")
    return tree_norm(tree, ord, axis_name).value


# The mapped axes along which each device has all that is measured.
_WHOLE_ALONG = jax.make_user_context(())


def whole_along(axes: Iterable[str]) -> contextlib.AbstractContextManager:
    """Inside, `warn_of_parts` does not warn of leaves that vary over these mapped axes."""
    return _WHOLE_ALONG(tuple(sorted(axes)))


def warn_of_parts(
    caller: str, leaves: Sequence[Any], axis_name: AxisName, slices: bool = False
) -> None:
    """Warns of leaves that vary over a mapped axis which nobody has named, and the reverse.

    In the first case each device has the norm of its own part; an empty ``axis_name`` says that
    this is meant. With ``slices``, any does: JAX tracks that a leaf varies, and not along which of
    its axes, so only the caller knows which mapped axes cut a slice. In the second case JAX does
    not track what varies over an axis that is named; a `PartitionSpec` says that all leaves do.
    """
    named = mapped_names(axis_name)
    untracked = [name for name in named if not tracks_varying(name)]
    if untracked and not isinstance(axis_name, PartitionSpec):
        warn(
            f"{caller}: got axis_name={axis_name!r}, and JAX does not track which leaves are the "
            f"same on all devices of {_listed(untracked)} (jax.pmap, jax.vmap, or jax.shard_map "
            "with check_vma=False), so that such a leaf is counted once for each device; leave "
            f"check_vma=True, or write axis_name=jax.P({_listed(named)}) if every leaf is spread"
        )
    if axis_name is not None and (slices or not axis_name):
        return
    unnamed = sorted(frozenset().union(*map(varying_axes, leaves)) - {*named, *_WHOLE_ALONG.value})
    if unnamed:
        every = (*named, *unnamed)
        axes = repr(every[0]) if len(every) == 1 else repr(every)
        warn(
            f"{caller}: got leaves that vary over {_listed(unnamed)}, a mapped axis "
            "that axis_name does not name, so that each device has the norm of its own part; "
            f"write axis_name={axes} for the norm of the whole, or axis_name=() if each device is "
            "meant to have its own"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def tree_norm(tree: Any, ord: float = 2, axis_name: AxisName = None, counts: bool = False) -> Norm:
    """`global_norm` as a `Norm`, which can be larger than its dtype can hold.

    With ``counts=True`` a norm of order 2 has the number of elements that are NaN or inf.
    """
    ord, names = check_order("ord", ord), mapped_names(axis_name)
    kind = _Kind(ord, counts=counts and ord == 2)
    leaves = clippable_leaves(tree)
    if not leaves:
        none = Norm.of(jnp.float32(0), jnp.float32(1))
        return none._replace(nonfinite=none.root if kind.counts else None)
    return _group_norms(leaves, Groups.one(len(leaves), names), kind)[0]


def slice_norms(
    leaves: Sequence[Any],
    axes: Sequence[Axes],
    ord: float = 2,
    axis_name: AxisName = None,
    mean: bool = False,
    as_optax: bool = False,
    values_from: int | None = None,
) -> list[Norm]:
    """An array of norms for each leaf, reduced over its axes, which are kept with size 1.

    ``mean=True`` divides the sum of squares by their number first: the root mean square.
    ``as_optax=True`` has the bits of ``sqrt(sum(g ** 2))``. From the leaf of number ``values_from``
    on the norms may have the scale 1: nothing is scaled by them.
    """
    if mean and ord != 2:
        raise ValueError(f"mean: got True with ord={ord!r}, expected ord=2, the mean of squares")
    kind = _Kind(check_order("ord", ord), mean, as_optax, values_from=values_from)
    names = mapped_names(axis_name)
    return _group_norms(list(leaves), Groups.slices(axes, names), kind) if leaves else []


def group_norms(
    leaves: Sequence[jax.Array],
    axes: Sequence[Axes],
    members: Sequence[Sequence[int]],
    axis_name: AxisName = None,
) -> list[jax.Array]:
    """For each group the norms of its members, the leaves at these places, over their axes.

    ``axes`` has the axes of each leaf, ``None``: all. The leaves of a group keep the same others.
    Norms are constants to differentiation, in the widest dtype that a norm of a leaf has. A CPU
    alone adds up in float64, in whose range all squares of float32 are: a hundred groups compile
    like plain sums.
    """
    if not leaves:
        return []
    dtype = widest(leaves)
    fixed = [real_or_absolute(with_real_dtype(lax.stop_gradient(x), dtype)) for x in leaves]
    groups = Groups(tuple(axes), tuple(map(tuple, members)), mapped_names(axis_name))
    cpu = functools.partial(_norms_of_wide_sums, groups) if dtype == "float32" else None
    return added_up(three_squares, fixed, groups, root_in_range, cpu)


def _norms_of_wide_sums(groups: Groups, _: Arrays, leaves: Arrays) -> list[jax.Array]:
    with jax.enable_x64(True):
        return [jnp.sqrt(x).astype(jnp.float32) for x in groups.wide_sums(leaves)]


def tree_size(tree: Any, axis_name: AxisName = None) -> jax.Array:
    """The number of elements of a tree that are clipped, in the dtype of its norm."""
    leaves = clippable_leaves(tree)
    if not axis_name:
        return jnp.array(float(sum(leaf.size for leaf in leaves)), widest(leaves))
    sizes = [jnp.array(float(leaf.size), widest(leaves)) for leaf in leaves]
    return total_over_devices(sizes, leaves, axis_name)


def total_over_devices(
    local: Sequence[jax.Array], leaves: Sequence[jax.Array], axis_name: AxisName = None
) -> jax.Array:
    """The sum of one number for each leaf, and over the devices on which the leaf differs."""
    groups = Groups.one(len(leaves), mapped_names(axis_name))
    return groups.totals(local, leaves)[0] if leaves else jnp.zeros((), widest(leaves))


def sums_of_groups(
    parts: Sequence[jax.Array],
    leaves: Sequence[jax.Array],
    axes: Sequence[Axes] | None,
    axis_name: AxisName = None,
) -> list[jax.Array]:
    """The sum of each group of parts in the shapes of the leaves, over all devices.

    A group is a slice of a leaf over its axes, which are kept; without axes it is all leaves.
    """
    if not leaves:
        return []
    names = mapped_names(axis_name)
    groups = Groups.one(len(leaves), names) if axes is None else Groups.slices(axes, names)
    return groups.sums(parts, leaves)


def check_order(name: str, ord: float) -> float:
    """The order of a norm, if it is one: a number in (0, inf]."""
    if isinstance(ord, (jax.Array, np.ndarray, np.generic)) and not isinstance(ord, Tracer):
        if np.size(ord) != 1:
            raise ValueError(
                f"{name}: got {described(ord)}, expected a number in (0, inf]; for several arrays "
                "write a tree of them, such as (a, b)"
            )
        ord = ord.item()
    if isinstance(ord, bool) or not isinstance(ord, (int, float)) or not ord > 0:
        raise ValueError(
            f"{name}: got {shown(ord)}, expected a number in (0, inf], not a tracer, such as 2 or "
            "jnp.inf; for optax.inject_hyperparams name it in static_args"
        )
    return int(ord) if ord < math.inf and ord == int(ord) else float(ord)


def mapped_names(axis_name: AxisName) -> tuple[str, ...]:
    """The names of mapped axes; `ValueError` for one that is not mapped here."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    for name in names:
        try:
            lax.axis_index(name)
        except NameError:
            raise ValueError(
                f"axis_name: got {name!r}, which is not a mapped axis here; expected the name of "
                "an axis of an enclosing shard_map, pmap or vmap; under jit leave axis_name out"
            ) from None
    return names


def _group_norms(leaves: list[jax.Array], groups: Groups, kind: _Kind) -> list[Norm]:
    norms = _differentiable_norms(groups, kind, leaves)
    return [norm._replace(scale=lax.stop_gradient(norm.scale)) for norm in norms]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _differentiable_norms(groups: Groups, kind: _Kind, leaves: list[jax.Array]) -> list[Norm]:
    if kind.ord != 2:
        return _norms_of_order(groups, kind.ord, leaves)
    # Eagerly one operation after the other, so that results round as optax's do.
    return in_one_program(_norms_of_squares, 0, 1)(groups, kind, leaves)


def _counts(groups: Groups, mean: bool, leaves: Arrays) -> tuple[float, ...]:
    """The divisors of the sums of squares: 1, or for a mean the numbers of elements."""
    if not mean:
        return (1.0,) * len(groups.members)
    return tuple(float(max(size, 1)) for size in groups.slice_sizes(leaves))


def _norms_of_squares(groups: Groups, kind: _Kind, leaves: Arrays) -> list[Norm]:
    """The root of the sum of squares in range of each group, divided by its count."""
    if not kind.as_optax:
        return _in_range(groups, kind, (), leaves)
    # Not in calls, whose operations XLA writes out late: it would round differently than in optax.
    squares = map(square, map(with_real_dtype, leaves, groups.dtypes(leaves)))
    rows = zip(squares, groups.axes_from_end(leaves), groups.keeps(), strict=True)
    sums = [jnp.sum(x, axes, keepdims=keep) for x, axes, keep in rows]
    return _in_range(groups, kind, groups.totals(sums, leaves), leaves)


def square(leaf: jax.Array) -> jax.Array:
    """``|leaf| ** 2``, real."""
    if not jnp.iscomplexobj(leaf):
        return jnp.square(leaf)
    return jnp.square(leaf.real) + jnp.square(leaf.imag)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _in_range(groups: Groups, kind: _Kind, plain: Arrays, leaves: Arrays) -> list[Norm]:
    """The norms, from the plain sums where these are in range; without them each form sums up."""
    counts = _counts(groups, kind.mean, leaves)
    counted = functools.partial(_counted, groups.names, leaves) if kind.counts else None
    if all(leaf.dtype == jnp.float16 for leaf in leaves):  # whose squares float32 holds
        norms = for_each(_of_plain, [(n,) for n in counts], plain or _plain_sums(groups, leaves))
        return counted(norms) if counted else norms
    gpu = functools.partial(_of_columns_on_gpu, groups, counts)
    cpu = functools.partial(_by_size, groups, kind)
    if plain:
        cpu = functools.partial(_by_branch, groups, counts)
        cpu = functools.partial(_one_by_branch, groups, kind) if groups.joint else cpu
    return added_up(three_squares, leaves, groups, _of_three, cpu, gpu, plain, counts, counted)


def _plain_sums(groups: Groups, leaves: Arrays) -> list[jax.Array]:
    return groups.totals(groups.sums_of(_plain_sum, leaves), leaves)


def _plain_sum(axes: tuple[int, ...], keep: bool, leaf: jax.Array) -> jax.Array:
    return jnp.sum(square(leaf), axis=axes, keepdims=keep)


# Up to so many elements a float32 leaf is added up in float64 in about the time that a plain sum
# and its branch take, and compiles in half of it. For larger ones the sum itself takes longer.
_FEW = 2**11


def _by_size(groups: Groups, kind: _Kind, _: Arrays, leaves: Arrays) -> list[Norm]:
    """The norms of slices of leaves on a CPU: of small leaves in float64, else by a branch."""
    norms: dict[int, Norm] = {}
    first = len(leaves) if kind.values_from is None else kind.values_from
    finishes = [(i >= first, n) for i, n in enumerate(_counts(groups, kind.mean, leaves))]
    forms = list(map(_form_of_size, groups.dtypes(leaves), leaves))
    for form in dict.fromkeys(forms):
        places = [i for i, x in enumerate(forms) if x is form]
        some = Groups.slices([groups.axes[i] for i in places], groups.names)
        each, arrays = [finishes[i] for i in places], [leaves[i] for i in places]
        norms |= zip(places, form(some, each, arrays), strict=True)
    return [norms[i] for i in range(len(leaves))]


def _form_of_size(dtype: str, leaf: jax.Array) -> Callable[..., list[Norm]]:
    if dtype != "float32":
        return _by_scaled_branch
    return _by_wide_sums if leaf.size <= _FEW else _by_wide_branch


# For each group whether nothing is scaled by its norm, and the divisor of its sum.
Finishes = Sequence[tuple[bool, float]]


def _by_wide_sums(groups: Groups, finishes: Finishes, leaves: Arrays) -> list[Norm]:
    """Sums in float64, in whose range all squares of float32 are."""
    with jax.enable_x64(True):
        if groups.names:
            return for_each(_finished, finishes, groups.wide_sums(leaves))
        rows = zip(finishes, groups.axes_from_end(leaves), groups.keeps(), strict=True)
        return for_each(_wide_norm, [(*finish, *row) for finish, *row in rows], leaves)


def _wide_norm(
    is_value: bool, count: float, axes: tuple[int, ...], keep: bool, leaf: jax.Array
) -> Norm:
    """Sum and norm in one call: two take twice the time to trace."""
    return _finished(is_value, count, wide_sum(axes, keep, with_real_dtype(leaf, "float32")))


def _finished(is_value: bool, count: float, total: jax.Array) -> Norm:
    """The norm of a wide sum; if it is a mere value, in half of the operations."""
    if not is_value:
        return _of_wide_sum(count, total)
    root = lax.convert_element_type(lax.sqrt(_mean(count, total)), jnp.float32)
    return Norm(root, lax.full_like(root, 1), root)


def _by_wide_branch(groups: Groups, finishes: Finishes, leaves: Arrays) -> list[Norm]:
    """The plain sums, and only if one of them is out of range others in float64.

    A sum in range stays as it is if another is not. It does not go through the branch, where it
    would be another kernel for each leaf.
    """
    plain = _plain_sums(groups, leaves)
    with jax.enable_x64(True):

        def unread() -> list[jax.Array]:
            return [jnp.zeros_like(x, jnp.float64) for x in plain]

        totals = unless_out_of_range(plain, unread, lambda: groups.wide_sums(leaves))
        return for_each(_finished_in_range, finishes, plain, totals)


def _finished_in_range(is_value: bool, count: float, plain: jax.Array, total: jax.Array) -> Norm:
    total = if_else(is_in_range(plain), plain.astype(jnp.float64), total)
    return _finished(is_value, count, total)


def _by_scaled_branch(groups: Groups, finishes: Finishes, leaves: Arrays) -> list[Norm]:
    """`_by_branch` of leaves whose squares no dtype has in its range."""
    return _by_branch(groups, [n for _, n in finishes], _plain_sums(groups, leaves), leaves)


def _by_branch(
    groups: Groups, counts: Sequence[float], plain: Arrays, leaves: Arrays
) -> list[Norm]:
    """The plain sums, and only if one of them is out of range another pass over the leaves."""
    again = functools.partial(_scaled_sums, groups, plain, leaves)
    sums = unless_out_of_range(plain, lambda: list(plain), again)
    return for_each(_of_scaled, [(n,) for n in counts], plain, sums)


def _one_by_branch(groups: Groups, kind: _Kind, plain: Arrays, leaves: Arrays) -> list[Norm]:
    """The root of one plain sum; out of range that of another sum, of float32 in float64.

    Its squares need no scale then, of which XLA would store one in the shape of each leaf. The
    same pass counts NaN and inf: where a plain sum is in range, there are none.
    """
    # Before the branch: one kernel adds up the leaves' sums and takes it.
    root = jnp.sqrt(plain[0])

    def again() -> list[Norm]:
        joined = joined_leaves(leaves)
        whole = Groups.one(len(joined), groups.names)
        if root.dtype == jnp.float32:
            with jax.enable_x64(True):
                rows = whole.sums_of(wide_sums, joined, static=(kind.counts,))
                totals = whole.totals_of_terms(rows, joined)
                return [run_in_loop(_of_wide_sums, *(total for (total,) in totals))]
        norm = _of_scaled(1.0, plain[0], _scaled_sums(whole, plain, joined)[0])
        count = count_nonfinite(joined, groups.names or None) if kind.counts else None
        return [norm._replace(nonfinite=count)]

    none = jnp.zeros_like(root) if kind.counts else None
    ordinary = Norm(root, jnp.ones_like(root), root, none)
    return branch([is_root_in_range(root)], lambda: [ordinary], again)


def _counted(names: tuple[str, ...], leaves: Arrays, norms: list[Norm]) -> list[Norm]:
    """The norm of one group, with the number of NaN and inf in it."""
    (norm,) = norms
    count = count_unless(jnp.isfinite(norm.root), list(leaves), names)
    return [norm._replace(nonfinite=count)]


@functools.partial(jax.jit, static_argnums=2)
def count_unless(
    finite: jax.Array, leaves: list[jax.Array], names: tuple[str, ...] = ()
) -> jax.Array:
    """The number of NaN and inf, counted only if there are any; traced once for all forms."""
    axes = varying_axes(finite)
    # JAX cannot mark them inside of the branch, if `jax.vmap` makes a choice of it.
    leaves = [to_varying(x, axes) for x in leaves] if axes else leaves

    def none() -> jax.Array:
        return to_varying(jnp.zeros((), widest(leaves)), axes)

    def count() -> jax.Array:
        tree = leaves if names else joined_leaves(leaves)
        return to_varying(count_nonfinite(tree, names or None), axes)

    return lax.cond(finite, none, count)


def count_nonfinite(tree: Any, axis_name: AxisName = None) -> jax.Array:
    """The number of elements of a tree that are NaN or inf."""
    leaves = clippable_leaves(tree)
    dtype, masks = widest(leaves), [~jnp.isfinite(leaf) for leaf in leaves]
    if axis_name is None:
        return count_true(masks, dtype)
    return total_over_devices([count_true([mask], dtype) for mask in masks], leaves, axis_name)


def count_true(masks: Sequence[jax.Array], dtype: str) -> jax.Array:
    """The number of true elements of masks."""
    counts = [jnp.sum(mask.astype(dtype)) for mask in masks]
    return functools.reduce(jnp.add, counts, jnp.zeros((), dtype))


def _of_columns_on_gpu(
    groups: Groups, counts: Sequence[float], plain: Arrays, leaves: Arrays
) -> list[Norm]:
    """Sums in float64, since a GPU reads a leaf once for one sum of columns, and not for three.

    A branch would be one that the host decides, which waits for the device.
    """
    if any(dtype != "float32" for dtype in groups.dtypes(leaves)):
        each = {"groups": groups, "finish": _of_three, "counts": counts}
        return added_up_apart(three_squares, plain, leaves, launched=True, **each)
    with jax.enable_x64(True):
        return finished_in_few([groups.wide_sums(leaves)], _of_wide_sum, counts)


def _scaled_sums(groups: Groups, plain: Arrays, leaves: Arrays) -> list[jax.Array]:
    """The sums of squares of elements times a scale that suits the plain sum."""
    return groups.totals(groups.sums_of(_scaled_sum, leaves, groups.per_leaf(plain)), leaves)


def _scaled_sum(axes: tuple[int, ...], keep: bool, leaf: jax.Array, plain: jax.Array) -> jax.Array:
    return jnp.sum(scaled_square(leaf, plain), axis=axes, keepdims=keep)


def _of_plain(count: float, plain: jax.Array) -> Norm:
    return _rooted(count, plain, jnp.ones_like(plain))


@jax.jit
def _of_wide_sums(total: jax.Array, nonfinite: jax.Array | None = None) -> Norm:
    count = None if nonfinite is None else nonfinite.astype(jnp.float32)
    return _of_wide_sum(1.0, total)._replace(nonfinite=count)


def _of_wide_sum(count: float, total: jax.Array) -> Norm:
    return Norm(*narrow_root(_mean(count, total)))


def _of_scaled(count: float, plain: jax.Array, scaled: jax.Array) -> Norm:
    # A sum in range stays as it is if another is not: in a branch XLA adds up in another order.
    return _rooted(count, unless_plain(plain, scaled), scale_of_plain(plain))


def _of_three(count: Any, down: jax.Array, plain: jax.Array, up: jax.Array) -> Norm:
    return _rooted(count, *in_range(down, plain, up))


def _rooted(count: Any, total: jax.Array, scale: jax.Array) -> Norm:
    total = _mean(count, total)
    finite = nan_unless(lax.is_finite(total), total)
    safe = if_else(lax.eq(total, number(0, total)), _nothing(total), finite)
    root, divisor = lax.sqrt(total), lax.sqrt(safe)
    factor = toward_one(root, scale)
    return Norm(*(lax.mul(x, factor) for x in (root, scale, divisor)))


def _mean(count: Any, total: jax.Array) -> jax.Array:
    if isinstance(count, float) and count == 1:
        return total
    return total / jnp.asarray(count, total.dtype)


def _nothing(total: jax.Array) -> float:
    """A small sum of squares to divide by the root of, instead of 0.

    A second derivative divides by the third power of that root, which must not be 0.
    """
    return 2.0 ** (jnp.finfo(total.dtype).minexp // 2 - 1)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _norms_of_order(groups: Groups, ord: float, leaves: Arrays) -> list[Norm]:
    wide = map(with_real_dtype, leaves, groups.dtypes(leaves))
    sizes = [jnp.abs(g) for g in wide]
    largest = groups.maxima(sizes, leaves)
    scales = [scale_of_largest(m) for m in largest]
    tops = [m * s for m, s in zip(largest, scales, strict=True)]
    if ord == math.inf:
        return [Norm.of(top, s) for top, s in zip(tops, scales, strict=True)]
    # Not the maximum itself: it may be a subnormal number that acts as 0.
    tops = [jnp.where((top > 0) & jnp.isfinite(top), top, 1) for top in tops]
    shrunk = zip(sizes, groups.per_leaf(scales), groups.per_leaf(tops), strict=True)
    totals = groups.sums([(g * s / t) ** ord for g, s, t in shrunk], leaves)
    return [Norm.of(x ** (1 / ord) * t, s) for x, t, s in zip(totals, tops, scales, strict=True)]


@_differentiable_norms.defjvp
def _norms_jvp(groups: Groups, kind: _Kind, primals: Any, tangents: Any) -> Any:
    r"""$d\,\mathrm{root} = \mathrm{scale} \sum \mathrm{Re}(\bar w\,dg)$, weights w bounded."""
    (leaves,), (dleaves,) = primals, tangents
    norms = _differentiable_norms(groups, kind, leaves)
    weights = _weights_of_norms(groups, kind, leaves, norms)
    terms = [
        real_product(w, with_real_dtype(dg, w.real.dtype.name))
        for w, dg in zip(weights, dleaves, strict=True)
    ]
    sums = groups.sums(terms, leaves)
    pairs = zip(sums, norms, strict=True)
    droots = [(total * norm.scale, norm.scale) for total, norm in pairs]
    tangents = [Norm(d, jnp.zeros_like(scale), d) for d, scale in droots]
    none = [None if n.nonfinite is None else jnp.zeros_like(n.nonfinite) for n in norms]
    return norms, [d._replace(nonfinite=x) for d, x in zip(tangents, none, strict=True)]


def _weights_of_norms(
    groups: Groups, kind: _Kind, leaves: Arrays, norms: list[Norm]
) -> list[jax.Array]:
    """The derivative of each norm by its elements; 0 where the norm is 0."""
    roots = groups.per_leaf([jnp.where(n.root > 0, n.root, 1) for n in norms])
    # No scale at 0: twice the large one of small numbers would be inf in a second derivative.
    scales = groups.per_leaf([jnp.where(n.root == 0, 0, n.scale) for n in norms])
    units = [
        quotient(times(with_real_dtype(g, r.dtype.name), s), r)
        for g, s, r in zip(leaves, scales, roots, strict=True)
    ]
    sizes = [jnp.abs(jnp.where(u == 0, 1, u)) for u in units]
    if kind.ord < math.inf:
        counts = groups.per_leaf(_counts(groups, kind.mean, leaves))
        return [
            times(over(u, size), size ** (kind.ord - 1) / n)
            for u, size, n in zip(units, sizes, counts, strict=True)
        ]
    # XLA may divide a batch of rows by reciprocals, so that x / x is not 1: compare products.
    ties = [
        ((jnp.abs(with_real_dtype(g, r.dtype.name)) * s == r) & (u != 0)).astype(u.real.dtype)
        for g, s, r, u in zip(leaves, scales, roots, units, strict=True)
    ]
    counts = groups.per_leaf(groups.sums(ties, leaves))
    shares = [
        tie / jnp.maximum(n, 1) / size for tie, n, size in zip(ties, counts, sizes, strict=True)
    ]
    return [times(u, share) for u, share in zip(units, shares, strict=True)]
