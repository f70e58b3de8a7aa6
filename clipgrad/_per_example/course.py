"""The course of each leaf's gradient, decided from shapes alone."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from clipgrad._per_example.norms_of_rows import gram_entries, group_and_row_count, have_grams
from clipgrad._per_example.uses import Convolution, Use
from clipgrad._per_example.walk import WalkedProgram

# JAX makes the gradient of each example where it is smaller than its rows: they would be stored,
# and it is stored in any case. A gradient that is about as large is left to its Gram matrices,
# which are smaller than both.
_FEW_PLACES = 1.5


class LeafCourse(NamedTuple):
    """The course of a leaf, as in `LeafPlan`."""

    norm: str
    reason: str
    uses: tuple[Use, ...] = ()  # if rows are kept
    sums_each: bool = False  # whether the clipped sum is made of the gradients of the norms
    rows: int = 0


def course_of(leaf: int, shape: Sequence[int], found: WalkedProgram) -> LeafCourse:
    """The course of a leaf, by its uses."""
    uses, size = [use for use in found.uses if use.place.leaf == leaf], math.prod(shape)
    if leaf in found.others:
        return LeafCourse("direct", found.others[leaf])
    if not uses:
        return LeafCourse("none", "not used")
    numbers = sum(map(_stored, uses))
    if numbers > _FEW_PLACES * size and all(map(_is_made_by_jax, uses)):
        return LeafCourse("direct", "its gradient is smaller than its rows")
    rows = sum(math.prod(group_and_row_count(use)) for use in uses)
    if not have_grams(uses):
        reason, is_gram = "its uses lie in different ways", False
    else:
        is_gram = gram_entries(uses) <= max(size, 2)
        reason = "Gram matrices are " + ("smaller" if is_gram else "larger") + " than it"
    norm = "Gram" if is_gram else "product"
    return LeafCourse(norm, reason, tuple(uses), not is_gram and size <= numbers, rows)


def _is_made_by_jax(use: Use) -> bool:
    """Whether JAX makes the gradients of examples as fast as a product of rows does.

    A recurrence would add up all gradients in each step, and a convolution whose kernel differs
    between examples is slow on each backend.
    """
    return not use.repeats and not isinstance(use, Convolution)


def _stored(use: Use) -> int:
    """The numbers of one example's rows."""
    return math.prod(use.lengths) * (use.x.size + use.y.size)
