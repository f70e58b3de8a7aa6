"""Uses of a weight, where it meets data: a dense product, a convolution or a lookup of rows.

The gradient of a weight for one example is a sum, over the places, of products of rows of ``x``,
what went in, and of the cotangent ``ct`` of what came out. Both have the axes of the scans around
in front, then one of examples, then their own.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var, primitives
from jax.lax import Precision

from clipgrad._arrays import accumulator, times, with_real_dtype
from clipgrad._compat import to_varying, varying_axes
from clipgrad._per_example.labels import EXAMPLES, AxisLabel, Factorization, Kind
from clipgrad._per_example.places import ViewPlace, has_views
from clipgrad._per_example.products import product
from clipgrad._programs import bind

Each = jax.Array | None  # a number for each example

# The first result of an equation, behind those of the equations around it.
EquationPath = tuple[Var, ...]


class Rows(NamedTuple):
    """The rows of both sides, of the shape (groups, examples, rows, numbers); see `WeightSides`.

    A side may be indices, of the shape (groups, examples, rows): each row has a single 1.
    """

    left: jax.Array
    right: jax.Array

    @property
    def is_outer(self) -> bool:
        """Whether each side is one row of numbers."""
        return all(x.ndim == 4 and x.shape[0] == x.shape[2] == 1 for x in self)


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """An equation in which a view of a weight meets data."""

    path: EquationPath
    equation: JaxprEqn
    operand: int  # which of the inputs is the view
    place: ViewPlace

    @property
    def source(self) -> Hashable:
        """A key that uses with the same x share."""
        return self.path[:-1], self.equation.invars[1 - self.operand]

    @property
    def view(self) -> tuple[int, ...]:
        """The shape of the view."""
        return self._aval(self.operand).shape

    @property
    def x(self) -> Any:
        """The shape and dtype of what meets the view, in one step of the scans around."""
        return self._aval(1 - self.operand)

    @property
    def y(self) -> Any:
        """The shape and dtype of the result, in one step of the scans around."""
        return self.equation.outvars[0].aval

    def _aval(self, place: int) -> Any:
        return self.equation.invars[place].aval

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the scans around."""
        return tuple(scan.length for scan in self.place.scans)

    @property
    def repeats(self) -> bool:
        """Whether a scan uses the same weight in all its steps."""
        return any(not scan.is_along for scan in self.place.scans)

    @property
    def key(self) -> Hashable:
        """The place of the gradient, and what of it is on which side: rows of one key add up."""
        return self.place.frame, self.place.box, self.factorization.sides

    @functools.cached_property
    def factorization(self) -> Factorization:
        """The axes of both factors; an index has the axis that it is along."""
        return Factorization.of([*self.along, *self.axes], *self.labels)

    @functools.cached_property
    def labels(self) -> tuple[list[AxisLabel], list[AxisLabel]]:
        """The labels of all axes of x, as `expanded` gives it, and of ct."""
        x, ct = self._own_labels()
        return [*self.outer, EXAMPLES, *x], [*self.outer, EXAMPLES, *ct]

    @property
    def outer(self) -> list[AxisLabel]:
        """The labels of the scans around: an axis of the weight, or of rows."""
        return [
            AxisLabel.of_weight(scan.axis, Kind.UNIT_OF_SCAN, i)
            if scan.is_along
            else AxisLabel(Kind.STEP, i)
            for i, scan in enumerate(self.place.scans)
        ]

    @property
    def along(self) -> list[AxisLabel]:
        """The labels of the scans that go along an axis of the weight."""
        return [label for label in self.outer if label.kind != Kind.STEP]

    def axis(self, i: int) -> AxisLabel:
        """The label of an axis of the view."""
        return AxisLabel.of_weight(self.place.labels[i], Kind.UNIT_OF_VIEW, i)

    @property
    def axes(self) -> list[AxisLabel]:
        """The labels of the view."""
        return [self.axis(i) for i in range(len(self.view))]

    def _own_labels(self) -> tuple[list[AxisLabel], list[AxisLabel]]:
        raise NotImplementedError

    def expanded(self, x: jax.Array) -> jax.Array:
        """The data that meets the view, with an axis for each of its labels."""
        return x

    def rows(self, x: jax.Array, ct: jax.Array) -> Rows:
        """The rows of the gradients of all examples."""
        axes, (of_x, of_ct) = self.factorization, self.labels
        x = _in_rows(self.expanded(x), of_x, axes, axes.x)
        return self._on_sides(x, _in_rows(ct, of_ct, axes, axes.ct))

    def _on_sides(self, x: jax.Array, ct: jax.Array) -> Rows:
        return Rows(x, ct) if self.factorization.x_is_left else Rows(ct, x)

    def each(self, x: jax.Array, ct: jax.Array) -> jax.Array:
        """The gradient of each example: (examples, scans along the leaf, view)."""
        out = [EXAMPLES, *self.along, *self.axes]
        return product([self.expanded(x), ct], self.labels, out)

    def total(self, x: jax.Array, ct: jax.Array) -> jax.Array:
        """The sum of the gradients of all examples: (scans along the leaf, view).

        By JAX's own transpose of the operation.
        """
        kind = accumulator(ct)
        weight = to_varying(jnp.zeros(self.view, kind), varying_axes(ct))

        def of_one(x: jax.Array, ct: jax.Array) -> jax.Array:
            run = jax.vmap(self._again, (0, None))
            return jax.linear_transpose(lambda w: run(x, w), weight)(ct)[0]

        x, ct = (self._folded(values) for values in (x, ct))
        found = jax.vmap(of_one)(x, ct.astype(kind))
        along = [scan.length for scan in self.place.scans if scan.is_along]
        return found.reshape(*along, *self.view)

    def _again(self, x: jax.Array, w: jax.Array) -> jax.Array:
        raise NotImplementedError

    def _folded(self, values: jax.Array) -> jax.Array:
        """(steps along the leaf, all other steps and examples, own axes)."""
        outer = len(self.outer)
        along = [i for i, k in enumerate(self.outer) if k.kind != Kind.STEP]
        rest = [i for i in range(outer + 1) if i not in along]
        count = math.prod(values.shape[i] for i in along)
        values = jnp.transpose(values, [*along, *rest, *range(outer + 1, values.ndim)])
        return values.reshape(count, -1, *values.shape[outer + 1 :])


class Dense(Use):
    """A `jax.lax.dot_general`."""

    def _own_labels(self) -> tuple[list[AxisLabel], list[AxisLabel]]:
        contracted, batch = self.equation.params["dimension_numbers"]
        own, data = self.operand, 1 - self.operand
        x: list[Any] = [None] * len(self.x.shape)
        for pair in (*zip(*contracted, strict=True), *zip(*batch, strict=True)):
            x[pair[data]] = self.axis(pair[own])
        used = {*contracted[own], *batch[own]}
        free = [self.axis(i) for i in range(len(self.view)) if i not in used]
        rows = [_row_label(i) for i, label in enumerate(x) if label is None]
        x = [_row_label(i) if label is None else label for i, label in enumerate(x)]
        both = [self.axis(i) for i in batch[own]]
        return x, [*both, *(free + rows if own == 0 else rows + free)]

    def total(self, x: jax.Array, ct: jax.Array) -> jax.Array:
        """The sum of the gradients of all examples, a product of their rows."""
        return product([x, ct], self.labels, [*self.along, *self.axes])


class Convolution(Use):
    """A `jax.lax.conv_general_dilated` without groups; rows are what each tap of a kernel sees."""

    def _own_labels(self) -> tuple[list[AxisLabel], list[AxisLabel]]:
        numbers = self.equation.params["dimension_numbers"]
        batch, *rows = map(_row_label, range(len(self.view) - 1))
        outputs, inputs, *taps = map(self.axis, numbers.rhs_spec)
        x = _at_places(numbers.lhs_spec, [batch, inputs, *rows])
        x[numbers.lhs_spec[1] : numbers.lhs_spec[1]] = taps
        return x, _at_places(numbers.out_spec, [batch, outputs, *rows])

    def expanded(self, x: jax.Array) -> jax.Array:
        """The patches of x: what each tap sees, with the axes of taps before that of inputs."""
        outer = x.shape[: len(self.outer) + 1]
        found = jax.vmap(self._patches)(x.reshape(-1, *x.shape[len(outer) :]))
        return found.reshape(*outer, *found.shape[1:])

    def _patches(self, x: jax.Array) -> jax.Array:
        params = self.equation.params
        lhs, rhs, out = params["dimension_numbers"]
        pairs = zip(params["padding"], params["lhs_dilation"], strict=True)
        edges = [(0, 0, 0), (0, 0, 0), *((int(a), int(b), d - 1) for (a, b), d in pairs)]
        padded = lax.pad(x, jnp.zeros((), x.dtype), _at_places(lhs, edges))
        positions = [self.y.shape[i] for i in out[2:]]
        taps, strides = [self.view[i] for i in rhs[2:]], params["window_strides"]
        sizes, found = [x.shape[i] for i in lhs[:2]], []
        for tap in itertools.product(*map(range, taps)):
            start = [t * d for t, d in zip(tap, params["rhs_dilation"], strict=True)]
            ends = zip(start, positions, strides, strict=True)
            stop = [first + (count - 1) * step + 1 for first, count, step in ends]
            limits = [0, 0, *start], [*sizes, *stop], [1, 1, *strides]
            found.append(lax.slice(padded, *(_at_places(lhs, each) for each in limits)))
        stacked, axis = jnp.stack(found, lhs[1]), lhs[1]
        return stacked.reshape(*stacked.shape[:axis], *taps, *stacked.shape[axis + 1 :])

    def _again(self, x: jax.Array, w: jax.Array) -> jax.Array:
        precise = {"precision": (Precision.HIGHEST,) * 2, "preferred_element_type": None}
        return bind(self.equation, [x.astype(w.dtype), w], **precise)[0]


class Lookup(Use):
    """A `jax.lax.gather` of whole rows along one axis of the view; x has their indices."""

    @property
    def along_axis(self) -> int:
        """The axis of the view that the indices are along."""
        return self.equation.params["dimension_numbers"].start_index_map[0]

    def _own_labels(self) -> tuple[list[AxisLabel], list[AxisLabel]]:
        offsets = self.equation.params["dimension_numbers"].offset_dims
        rows = [i for i in range(len(self.y.shape)) if i not in offsets]
        others = iter([self.axis(i) for i in range(len(self.view)) if i != self.along_axis])
        ct = [next(others) if i in offsets else _row_label(i) for i in range(len(self.y.shape))]
        return [_row_label(i) for i in rows], ct

    def rows(self, x: jax.Array, ct: jax.Array) -> Rows:
        """The indices of the rows, and the cotangents; 0 where an index is out of range."""
        x, labels, size = x[..., 0], self.labels, self.view[self.along_axis]
        if self.equation.params["mode"] != lax.GatherScatterMode.CLIP:
            added = [i for i, k in enumerate(labels[1]) if k not in labels[0]]
            valid = jnp.expand_dims((x >= 0) & (x < size), added)
            ct = jnp.where(valid, ct, jnp.zeros_like(ct))
        axes = self.factorization
        indices = _in_rows(jnp.clip(x, 0, size - 1), labels[0], axes, [])
        return self._on_sides(indices[..., 0], _in_rows(ct, labels[1], axes, axes.ct))

    def each(self, x: jax.Array, ct: jax.Array) -> jax.Array:
        """The gradient of each example, added up row by row."""
        axis = len(self.outer)
        x, ct = (jnp.expand_dims(jnp.moveaxis(v, axis, 0), axis + 1) for v in (x, ct))
        return jax.vmap(self.total)(x, ct)

    def _again(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return bind(self.equation, [w, x])[0]


class Factors(NamedTuple):
    """The factors of the gradients by a use: what went in, and cotangents of what came out."""

    use: Use
    x: jax.Array
    ct: jax.Array

    def left_out(self, ok: jax.Array) -> "Factors":
        """With 0 instead of the factors of examples that are not ``ok``."""
        axis = len(self.use.lengths)
        return Factors(self.use, *(zero_unless(ok, x, axis) for x in (self.x, self.ct)))

    def total(self, weights: Each) -> jax.Array:
        """The sum of gradients times weights: these multiply x, or ct, in float32 or wider.

        What is multiplied is copied, so it is the smaller one, but no index.
        """
        use, x, ct = self
        axis = len(use.lengths)
        if weights is None:
            return use.total(x, ct)
        if x.size < ct.size and has_views(x):
            return use.total(weighted(x, weights, axis), ct)
        return use.total(x, weighted(ct, weights, axis))


def weighted(x: jax.Array, weights: jax.Array, axis: int) -> jax.Array:
    """An array times the weights of the examples along an axis, in float32 or wider."""
    x = with_real_dtype(x, accumulator(x))
    return times(x, _beside(weights.astype(accumulator(x)), x, axis))


def zero_unless(ok: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """0 instead of what belongs to examples along an axis that are not ``ok``."""
    return jnp.where(_beside(ok, x, axis), x, jnp.zeros_like(x))


def _beside(numbers: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    return numbers.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


def _at_places(places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Values, each at its place."""
    found: list[Any] = [None] * len(places)
    for i, value in zip(places, values, strict=True):
        found[i] = value
    return found


def _row_label(i: int) -> AxisLabel:
    return AxisLabel(Kind.ROW, i)


def _in_rows(
    values: jax.Array,
    labels: Sequence[AxisLabel],
    axes: Factorization,
    numbers: Sequence[AxisLabel],
) -> jax.Array:
    """(groups, examples, rows, numbers)."""
    order = [*axes.groups, EXAMPLES, *axes.rows, *numbers]
    values = jnp.transpose(values, [list(labels).index(k) for k in order])
    first = len(axes.groups)
    groups, examples = math.prod(values.shape[:first]), values.shape[first]
    rows = math.prod(values.shape[first + 1 :][: len(axes.rows)])
    return values.reshape(groups, examples, rows, -1)


_USES: dict[Any, type[Use]] = {
    primitives.dot_general_p: Dense,
    primitives.conv_general_dilated_p: Convolution,
    primitives.gather_p: Lookup,
}


def use_of(path: EquationPath, equation: JaxprEqn, operand: int, place: ViewPlace) -> Use | None:
    """The use of a view by an equation, if its gradient is a sum of products of rows."""
    kind, params = _USES.get(equation.primitive), equation.params
    if kind is None:
        return None
    use = kind(path, equation, operand, place)
    if kind is Lookup:
        return use if operand == 0 and _has_rows(params, use) else None
    if not has_views(use.x):
        return None
    if kind is Dense:
        return use
    grouped = params["feature_group_count"] != 1 or params["batch_group_count"] != 1
    return use if operand == 1 and not grouped else None


def _has_rows(params: Any, use: Use) -> bool:
    """Whether a lookup takes whole rows by one index each."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    axes = numbers.start_index_map
    if len(axes) != 1 or numbers.collapsed_slice_dims != axes or numbers.operand_batching_dims:
        return False
    others = [n for i, n in enumerate(use.view) if i != axes[0]]
    return [n for i, n in enumerate(sizes) if i != axes[0]] == others
