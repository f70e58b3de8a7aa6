"""Labels: what an axis of an array is in the gradient of a weight."""

import enum
from collections.abc import Iterable
from typing import NamedTuple


class Kind(enum.IntEnum):
    """The kinds of axes. Rows have their axes in this order, so it is one for all uses."""

    WEIGHT = 0  # an axis of the weight, by its number
    UNIT_OF_VIEW = 1  # an axis of size 1 of a view, which is none of the weight
    UNIT_OF_SCAN = 2  # a scan along such an axis
    STEP = 3  # a scan that uses the same weight in all its steps
    EXAMPLE = 4
    ROW = 5  # of the data alone


class WeightAxis(NamedTuple):
    """An axis of a weight as it lies after so many reshapes that split or merged axes."""

    reshapes: int
    number: int


class AxisLabel(NamedTuple):
    """The label of an axis: two axes of one label are summed or compared along each other."""

    kind: Kind
    number: WeightAxis | int

    @classmethod
    def of_weight(cls, axis: WeightAxis | None, unit: Kind, number: int) -> "AxisLabel":
        """The label of an axis of a weight; `None` is one of size 1, numbered among its kind."""
        return cls(unit, number) if axis is None else cls(Kind.WEIGHT, axis)


EXAMPLES = AxisLabel(Kind.EXAMPLE, 0)


class WeightSides(NamedTuple):
    """The weight's axes in a gradient that is a sum of products: all three lists are in order.

    Attributes:
      groups: axes that both factors have.
      left: axes of one of the factors. Its first one is before the first one of the other, and no
        axis is before any: so rows of two uses lie on the same sides.
      right: axes of the other factor.
    """

    groups: tuple[WeightAxis, ...]
    left: tuple[WeightAxis, ...]
    right: tuple[WeightAxis, ...]


class Factorization(NamedTuple):
    """The axes of the two factors of a gradient, ``x`` and ``ct``, in the order of their kinds.

    Attributes:
      groups: axes of the view, or of scans along it, that both have.
      rows: other axes that both have, which are summed over.
      x: axes of the view that ``x`` alone has, as numbers or as indices.
      ct: axes of the view that ``ct`` alone has.
    """

    groups: tuple[AxisLabel, ...]
    rows: tuple[AxisLabel, ...]
    x: tuple[AxisLabel, ...]
    ct: tuple[AxisLabel, ...]

    @classmethod
    def of(
        cls, view: Iterable[AxisLabel], x: Iterable[AxisLabel], ct: Iterable[AxisLabel]
    ) -> "Factorization":
        """The axes by the labels of a view and of scans along it, and of its factors.

        An axis of the view that neither has is one that ``x`` has the indices of.
        """
        view, x, ct = set(view), set(x), set(ct)
        both = x & ct
        parts = both & view, both - view - {EXAMPLES}, view - ct, view & ct - both
        return cls(*(tuple(sorted(part)) for part in parts))

    @property
    def x_is_left(self) -> bool:
        """Whether ``x`` is the left factor; see `WeightSides`."""
        return _weight_axes(self.x) <= _weight_axes(self.ct)

    @property
    def sides(self) -> WeightSides:
        """The weight's axes on each side, which uses whose rows can be compared share."""
        groups, x, ct = map(_weight_axes, (self.groups, self.x, self.ct))
        return WeightSides(groups, x, ct) if self.x_is_left else WeightSides(groups, ct, x)


def _weight_axes(labels: Iterable[AxisLabel]) -> tuple[WeightAxis, ...]:
    return tuple(k.number for k in labels if isinstance(k.number, WeightAxis))
