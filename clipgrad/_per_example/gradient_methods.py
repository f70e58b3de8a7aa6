"""How the gradient of each leaf is measured and summed, decided from shapes alone."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from clipgrad._per_example.norms_of_rows import gram_entries, group_and_row_count, have_grams
from clipgrad._per_example.uses import Use
from clipgrad._per_example.walk import WalkedProgram

# JAX makes the gradient of each example where it is smaller than its rows: they would be stored,
# and it is stored in any case. A gradient that is about as large is left to its Gram matrices,
# which are smaller than both.
_FEW_PLACES = 1.5


class GradientMethod(NamedTuple):
    """What is done with the gradient of a leaf.

    Attributes:
      norm: ``"Gram"``, ``"product"``, ``"direct"`` or ``"none"``, as in `LeafPlan`.
      reason: why.
      uses: where the leaf meets data, if rows are kept.
      sums_each: whether the clipped sum is made of the gradients of the norms.
      rows: how many rows one example has.
      is_unfollowed: whether it is direct because of what the loss does with it.
    """

    norm: str
    reason: str
    uses: tuple[Use, ...] = ()
    sums_each: bool = False
    rows: int = 0
    is_unfollowed: bool = False


def method_of(leaf: int, shape: Sequence[int], walked: WalkedProgram) -> GradientMethod:
    """The method for a leaf, by its uses. The first reason that holds decides.

    A leaf with any use that is not followed has no rows that are whole; then what is smallest is
    kept: the gradient, Gram matrices, or both.
    """
    uses, size = [use for use in walked.uses if use.view.leaf == leaf], math.prod(shape)
    if leaf in walked.others:
        return GradientMethod("direct", walked.others[leaf], is_unfollowed=True)
    if not uses:
        return GradientMethod("none", "not used")
    numbers = sum(map(_stored, uses))
    if numbers > _FEW_PLACES * size and not any(map(_is_slow_in_jax, uses)):
        return GradientMethod("direct", "its gradient is smaller than its rows")
    rows = sum(math.prod(group_and_row_count(use)) for use in uses)
    if not have_grams(uses):
        reason, is_gram = "its uses lie in different ways", False
    else:
        is_gram = gram_entries(uses) <= max(size, 2)
        reason = "Gram matrices are " + ("smaller" if is_gram else "larger") + " than it"
    norm = "Gram" if is_gram else "product"
    return GradientMethod(norm, reason, tuple(uses), not is_gram and size <= numbers, rows)


def _is_slow_in_jax(use: Use) -> bool:
    """Whether JAX makes the gradients of examples slower than a product of rows does.

    A recurrence adds up all gradients in each step, and for some operations, as convolutions, the
    gradients of examples are slow on each backend.
    """
    return use.repeats or use.kind.is_slow_by_example


def _stored(use: Use) -> int:
    """The numbers of one example's rows."""
    return math.prod(use.lengths) * (use.x.size + use.y.size)
