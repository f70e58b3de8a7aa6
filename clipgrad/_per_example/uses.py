"""Uses of a weight, where it meets data, and the two sides of its gradient there.

The gradient of a weight for one example is a sum, over all uses, of products of rows of ``x``, what
met the weight, and of the cotangent ``ct`` of what came out. Both have the axes of the scans around
in front, then one of examples, then their own. Which operations are uses says `USE_KINDS`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from clipgrad._arrays import accumulator, times, with_real_dtype
from clipgrad._compat import to_varying, varying_axes
from clipgrad._per_example.labels import EXAMPLES, AxisLabel, Factorization, Kind
from clipgrad._per_example.products import product
from clipgrad._per_example.weight_views import WeightView, has_views

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


class UseKind(NamedTuple):
    """How an operation uses a weight: a row of the table `USE_KINDS`.

    ``x`` is what meets the view of the weight, and ``ct`` the cotangent of the result, of one
    example in one step of the scans around. The operation has these two operands: one with more, as
    `ragged_dot` with its group sizes, is no use.

    Attributes:
      view: a function of the equation, the number of the operand that is the view, and the view:
        the view with axes as the labels need them, or None if it is not used in this way.
      labels: a function of a use: the labels of all axes of ``x``, as ``patches`` gives it, and of
        ``ct``, as ``split`` gives it.
      patches: a function of a use and ``x``, which gives it an axis for each label. None: it has.
      split: a function of a use and ``ct``, which does the same.
      indices: a function of a use and of all ``x`` and ``ct``, where ``x`` says what is looked up:
        the indices along the axis of the view that neither side has a label of, and ``ct``, 0 where
        nothing is looked up.
      again: the operation for ``x`` of several examples and a weight, whose transpose gives the sum
        of their gradients. None: a product of the two sides. A further product asks for full
        precision itself, and `DefaultPrecision` of the tests of precision has to know it, since a
        CPU computes in full precision anyway.
      is_slow_by_example: whether JAX is slow at the gradient of each example.
    """

    view: Callable[[JaxprEqn, int, WeightView], WeightView | None]
    labels: Callable[["Use"], tuple[list[AxisLabel], list[AxisLabel]]]
    patches: Callable[["Use", jax.Array], jax.Array] | None = None
    split: Callable[["Use", jax.Array], jax.Array] | None = None
    indices: Callable[["Use", jax.Array, jax.Array], tuple[jax.Array, jax.Array]] | None = None
    again: Callable[["Use", jax.Array, jax.Array], jax.Array] | None = None
    is_slow_by_example: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """An equation in which a view of a weight meets data."""

    path: EquationPath
    equation: JaxprEqn
    operand: int  # which of the inputs is the view
    view: WeightView
    kind: UseKind

    @property
    def source(self) -> Hashable:
        """A key that uses with the same x share."""
        return self.path[:-1], self.equation.invars[1 - self.operand]

    @property
    def weight(self) -> Any:
        """The shape and dtype of the weight as the equation has it."""
        return self.equation.invars[self.operand].aval

    @property
    def x(self) -> Any:
        """The shape and dtype of what meets the view, in one step of the scans around."""
        return self.equation.invars[1 - self.operand].aval

    @property
    def y(self) -> Any:
        """The shape and dtype of the result, in one step of the scans around."""
        return self.equation.outvars[0].aval

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the scans around."""
        return tuple(scan.length for scan in self.view.scans)

    @property
    def repeats(self) -> bool:
        """Whether a scan uses the same weight in all its steps."""
        return any(not scan.is_along for scan in self.view.scans)

    @property
    def key(self) -> Hashable:
        """The place of the gradient, and what of it is on which side: rows of one key add up."""
        return self.view.reshapes, self.view.slice, self.factorization.sides

    @functools.cached_property
    def factorization(self) -> Factorization:
        """The axes of both factors; an index has the axis that it is along."""
        return Factorization.of([*self.along, *self.axes], *self.labels)

    @functools.cached_property
    def labels(self) -> tuple[list[AxisLabel], list[AxisLabel]]:
        """The labels of all axes of both sides."""
        x, ct = self.kind.labels(self)
        return [*self.outer, EXAMPLES, *x], [*self.outer, EXAMPLES, *ct]

    @property
    def outer(self) -> list[AxisLabel]:
        """The labels of the scans around: an axis of the weight, or of rows."""
        return [
            AxisLabel.of_weight(scan.axis, Kind.UNIT_OF_SCAN, i)
            if scan.is_along
            else AxisLabel(Kind.STEP, i)
            for i, scan in enumerate(self.view.scans)
        ]

    @property
    def along(self) -> list[AxisLabel]:
        """The labels of the scans that go along an axis of the weight."""
        return [label for label in self.outer if label.kind != Kind.STEP]

    def axis(self, i: int) -> AxisLabel:
        """The label of an axis of the view."""
        return AxisLabel.of_weight(self.view.labels[i], Kind.UNIT_OF_VIEW, i)

    @property
    def axes(self) -> list[AxisLabel]:
        """The labels of the view."""
        return [self.axis(i) for i in range(len(self.view.labels))]

    def sides(self, x: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both sides of all examples, with an axis for each of their labels."""
        return self._in_each(self.kind.patches, x), self._in_each(self.kind.split, ct)

    def _in_each(self, function: Callable | None, values: jax.Array) -> jax.Array:
        """A function of what belongs to one example in one step, of all of them."""
        if function is None:
            return values
        outer = len(self.outer) + 1
        each = values.reshape(-1, *values.shape[outer:])
        results = jax.vmap(functools.partial(function, self))(each)
        return results.reshape(*values.shape[:outer], *results.shape[1:])

    @functools.cached_property
    def sizes(self) -> dict[AxisLabel, int]:
        """The sizes of the axes of ct but for the examples, in all steps."""
        shape = self.y.shape
        if self.kind.split is not None:
            shape = jax.eval_shape(functools.partial(self.kind.split, self), self.y).shape
        labels = [k for k in self.labels[1] if k != EXAMPLES]
        return dict(zip(labels, (*self.lengths, *shape), strict=True))

    def rows(self, x: jax.Array, ct: jax.Array) -> Rows:
        """The rows of the gradients of all examples."""
        axes, (of_x, of_ct) = self.factorization, self.labels
        if self.kind.indices is not None:
            x, ct = self.kind.indices(self, x, ct)
            x = _in_rows(x, of_x, axes, [])[..., 0]
        else:
            x, ct = self.sides(x, ct)
            x = _in_rows(x, of_x, axes, axes.x)
        ct = _in_rows(ct, of_ct, axes, axes.ct)
        return Rows(x, ct) if axes.x_is_left else Rows(ct, x)

    def each(self, x: jax.Array, ct: jax.Array) -> jax.Array:
        """The gradient of each example: (examples, scans along the leaf, view)."""
        if self.kind.indices is not None:  # added up row by row
            axis = len(self.outer)
            x, ct = (jnp.expand_dims(jnp.moveaxis(v, axis, 0), axis + 1) for v in (x, ct))
            return jax.vmap(self.total)(x, ct)
        out = [EXAMPLES, *self.along, *self.axes]
        return product(self.sides(x, ct), self.labels, out)

    def total(self, x: jax.Array, ct: jax.Array) -> jax.Array:
        """The sum of the gradients of all examples: (scans along the leaf, view)."""
        if self.kind.again is None:
            return product(self.sides(x, ct), self.labels, [*self.along, *self.axes])
        return self._transposed(self.kind.again, x, ct)

    def _transposed(self, again: Callable, x: jax.Array, ct: jax.Array) -> jax.Array:
        """The sum by JAX's own transpose of the operation, which makes no patches."""
        dtype = accumulator(ct)
        weight = to_varying(jnp.zeros(self.weight.shape, dtype), varying_axes(ct))

        def of_one(x: jax.Array, ct: jax.Array) -> jax.Array:
            run = jax.vmap(functools.partial(again, self), (0, None))
            return jax.linear_transpose(lambda w: run(x, w), weight)(ct)[0]

        x, ct = (self._folded(values) for values in (x, ct))
        total = jax.vmap(of_one)(x, ct.astype(dtype))
        along = [scan.length for scan in self.view.scans if scan.is_along]
        return total.reshape(*along, *self.weight.shape)

    def _folded(self, values: jax.Array) -> jax.Array:
        """(steps along the leaf, all other steps and examples, own axes)."""
        outer = len(self.outer)
        along = [i for i, k in enumerate(self.outer) if k.kind != Kind.STEP]
        others = [i for i in range(outer + 1) if i not in along]
        count = math.prod(values.shape[i] for i in along)
        values = jnp.transpose(values, [*along, *others, *range(outer + 1, values.ndim)])
        return values.reshape(count, -1, *values.shape[outer + 1 :])


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
