"""The operations in which a weight meets data: one row for each, which a further one needs too."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, primitives
from jax.lax import Precision

from clipgrad._per_example.labels import AxisLabel, Kind
from clipgrad._per_example.uses import EquationPath, Use, UseKind
from clipgrad._per_example.weight_views import WeightView, has_views
from clipgrad._programs import bind

Labels = tuple[list[AxisLabel], list[AxisLabel]]  # of x and of ct


def use_of(path: EquationPath, equation: JaxprEqn, operand: int, view: WeightView) -> Use | None:
    """The use of a view by an equation, if its gradient is a sum of products of rows."""
    kind = USE_KINDS.get(equation.primitive)
    used = kind and kind.view(equation, operand, view)
    return Use(path, equation, operand, used, kind) if kind and used else None


def _row(i: int) -> AxisLabel:
    return AxisLabel(Kind.ROW, i)


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _numbers(equation: JaxprEqn) -> Any:
    """The parameter that says what each axis is."""
    return equation.params["dimension_numbers"]


def _at(positions: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Values, each at its position."""
    ordered: list[Any] = [None] * len(positions)
    for i, value in zip(positions, values, strict=True):
        ordered[i] = value
    return ordered


# Dense products


def _dense_view(equation: JaxprEqn, operand: int, view: WeightView) -> WeightView | None:
    return view if has_views(equation.invars[1 - operand].aval) else None


def _dense_labels(use: Use) -> Labels:
    contracted, batch = _numbers(use.equation)
    weight, data = use.operand, 1 - use.operand
    x: list[Any] = [None] * len(use.x.shape)
    for pair in (*zip(*contracted, strict=True), *zip(*batch, strict=True)):
        x[pair[data]] = use.axis(pair[weight])
    joined = {*contracted[weight], *batch[weight]}
    free = [label for i, label in enumerate(use.axes) if i not in joined]
    rows = [_row(i) for i, label in enumerate(x) if label is None]
    x = [_row(i) if label is None else label for i, label in enumerate(x)]
    both = [use.axis(i) for i in batch[weight]]
    # The axes of a result of dot_general: those of the batch, of the first operand, of the second.
    return x, [*both, *(free + rows if weight == 0 else rows + free)]


# Convolutions: a row is what the kernel sees at one position. With groups the kernel's outputs are
# groups of outputs, and the view has two axes for them.


def _convolution_view(equation: JaxprEqn, operand: int, view: WeightView) -> WeightView | None:
    is_kernel = operand == 1 and has_views(equation.invars[0].aval)
    if not is_kernel or equation.params["batch_group_count"] != 1:
        return None
    groups, output = _groups(equation), _numbers(equation).rhs_spec[0]
    return view if groups == 1 else view.split(_shape(equation.invars[1]), output, groups)


def _groups(equation: JaxprEqn) -> int:
    return equation.params["feature_group_count"]


def _convolution_labels(use: Use) -> Labels:
    lhs, (output, *others), out = _numbers(use.equation)
    batch, *rows = map(_row, range(len(use.y.shape) - 1))
    groups = [] if _groups(use.equation) == 1 else [use.axis(output)]
    # The axis of groups is in front of that of outputs, so it moves all axes from there on.
    outputs, inputs, *taps = (
        use.axis(i + len(groups) if i >= output else i) for i in (output, *others)
    )
    x, ct = _at(lhs, [batch, inputs, *rows]), _at(out, [batch, outputs, *rows])
    x[lhs[1] : lhs[1]] = [*taps, *groups]
    ct[out[1] : out[1]] = groups
    return x, ct


def _patches(use: Use, x: jax.Array) -> jax.Array:
    """What each tap of the kernel sees, with the axes of taps before those of the inputs."""
    params = use.equation.params
    lhs, rhs, out = params["dimension_numbers"]
    pairs = zip(params["padding"], params["lhs_dilation"], strict=True)
    edges = [(0, 0, 0), (0, 0, 0), *((int(a), int(b), d - 1) for (a, b), d in pairs)]
    padded = lax.pad(x, jnp.zeros((), x.dtype), _at(lhs, edges))
    positions = [use.y.shape[i] for i in out[2:]]
    taps, strides = [use.weight.shape[i] for i in rhs[2:]], params["window_strides"]
    sizes, seen = [x.shape[i] for i in lhs[:2]], []
    for tap in itertools.product(*map(range, taps)):
        start = [t * d for t, d in zip(tap, params["rhs_dilation"], strict=True)]
        ends = zip(start, positions, strides, strict=True)
        stop = [first + (count - 1) * step + 1 for first, count, step in ends]
        limits = [0, 0, *start], [*sizes, *stop], [1, 1, *strides]
        seen.append(lax.slice(padded, *(_at(lhs, each) for each in limits)))
    stacked, axis = jnp.stack(seen, lhs[1]), lhs[1]
    inputs = _split(x.shape[axis], _groups(use.equation))
    return stacked.reshape(*stacked.shape[:axis], *taps, *inputs, *stacked.shape[axis + 2 :])


def _split(size: int, groups: int) -> list[int]:
    """The sizes of an axis that is split into groups; of one group it is not."""
    return [size] if groups == 1 else [groups, size // groups]


def _grouped(use: Use, ct: jax.Array) -> jax.Array:
    """The cotangent with its outputs split into groups."""
    axis = _numbers(use.equation).out_spec[1]
    outputs = _split(ct.shape[axis], _groups(use.equation))
    return ct.reshape(*ct.shape[:axis], *outputs, *ct.shape[axis + 1 :])


def _convolved(use: Use, x: jax.Array, w: jax.Array) -> jax.Array:
    precise = {"precision": (Precision.HIGHEST,) * 2, "preferred_element_type": None}
    return bind(use.equation, [x.astype(w.dtype), w], **precise)[0]


# Lookups of whole rows along one axis of a weight: x has their indices.


def _lookup_view(equation: JaxprEqn, operand: int, view: WeightView) -> WeightView | None:
    numbers, sizes = _numbers(equation), equation.params["slice_sizes"]
    axes, shape = numbers.start_index_map, _shape(equation.invars[0])
    if operand != 0 or len(axes) != 1 or numbers.operand_batching_dims:
        return None
    whole = all(sizes[i] == n for i, n in enumerate(shape) if i != axes[0])
    return view if whole and numbers.collapsed_slice_dims == axes else None


def _lookup_labels(use: Use) -> Labels:
    numbers = _numbers(use.equation)
    (along,), offsets, count = numbers.start_index_map, numbers.offset_dims, len(use.y.shape)
    others = iter([label for i, label in enumerate(use.axes) if i != along])
    ct = [next(others) if i in offsets else _row(i) for i in range(count)]
    return [_row(i) for i in range(count) if i not in offsets], ct


def _indices(use: Use, x: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The indices of rows, and the cotangents; 0 where an index is out of range."""
    (along,), labels = _numbers(use.equation).start_index_map, use.labels
    x, size = x[..., 0], use.weight.shape[along]
    if use.equation.params["mode"] != lax.GatherScatterMode.CLIP:
        added = [i for i, k in enumerate(labels[1]) if k not in labels[0]]
        valid = jnp.expand_dims((x >= 0) & (x < size), added)
        ct = jnp.where(valid, ct, jnp.zeros_like(ct))
    return jnp.clip(x, 0, size - 1), ct


def _looked_up(use: Use, x: jax.Array, w: jax.Array) -> jax.Array:
    return bind(use.equation, [w, x])[0]


# An operation that is not here makes a weight direct. A row needs at least the view and the labels:
# an axis of both sides that the view has too is a group, one that it has not is a row.
USE_KINDS: dict[Any, UseKind] = {
    primitives.dot_general_p: UseKind(_dense_view, _dense_labels),
    primitives.conv_general_dilated_p: UseKind(
        _convolution_view,
        _convolution_labels,
        patches=_patches,
        split=_grouped,
        again=_convolved,
        is_slow_by_example=True,
    ),
    primitives.gather_p: UseKind(_lookup_view, _lookup_labels, indices=_indices, again=_looked_up),
}
