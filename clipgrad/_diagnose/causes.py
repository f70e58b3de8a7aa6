"""Why a cotangent ends at an operand: a table of causes, each with its own test.

A new cause is one row of `CAUSES`: its test on the facts of a cut, which `cut_facts.py` computes,
the text, and the causes that may hold as well and that it comes before. It needs one program in
`tests/diagnose/zero_cuts.py`, and a line of `docs/zero.md`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from clipgrad._diagnose.cut_facts import CutFacts
from clipgrad._diagnose.origins import Cut, Way
from clipgrad._losses import TracedLoss

# What is meant to detach comes last: a cut that nobody chooses is the finding beside it.
DETACHED = 8
UNDERFLOW = "underflow"
# Ways in which a cotangent ends at any numbers, hence at each step of a scan.
_AT_ANY_NUMBERS = frozenset((Way.CARRY, Way.CANCELS, Way.EMPTY))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """A row of the table, or this with the facts in its places.

    Attributes:
      name: such as "cast"; `GradientFinding.cause` has it.
      holds: whether this is a cause of a cut.
      text: what is so, with places for the words of `CutFacts`.
      step: what to write instead; "" if there is nothing.
      rank: of several cuts of one leaf that of the smallest rank is told, and the others of this
        rank beside it. Below 0 is what is wrong at any numbers, 0 what is wrong at these, above 0
        what most programs have on purpose: indices, comparisons, and last what is detached.
      precedes: causes that may hold of the same cut, and say less; those that they precede need not
        be named again.
      is_note: whether it may be meant.
      is_silent: whether it is not even told.
      is_excused: whether it is what one wants where the loss is 0, as a hinge without a violation.
      is_of_operation: whether it is so at any numbers, hence at each step of a scan.
    """

    name: str
    holds: Callable[[CutFacts], Any]
    text: str
    step: str = ""
    rank: float = 0
    precedes: tuple[str, ...] = ()
    is_note: bool = False
    is_silent: bool = False
    is_excused: bool = False
    is_of_operation: bool = False


_KEEP_FLOATING = "keep it floating, or let the gradient through by a custom VJP"
_LEAVE_OUT = "if that is meant, leave it out of argnums"

# Of several rows that hold the first is the cause. The order is by `precedes` alone: causes that
# are in none of these never hold together, and test_the_order_of_causes_is_what_they_say turns
# the table around as far as these let it. The last row holds always.
CAUSES = (
    # -- By the way on which a value is used. What is not used has no derivative either, whatever
    # its type ("integers"), and may be large enough at these numbers ("underflow").
    Cause(
        name="random",
        holds=lambda cut: cut.is_random_choice or cut.factor.kind == "random",
        text="random numbers alone decide that it is multiplied by 0 or left out, as a layer that "
        "is dropped",
        is_note=True,
        precedes=("branch", "where"),  # the branch, or the mask, is random
    ),
    Cause(
        name="branch",
        holds=lambda cut: cut.way is Way.BRANCH,
        text="it is read only in a branch of the cond that is not taken",
        step="check the predicate; a branch that is not taken trains nothing",
        is_excused=True,
    ),
    Cause(
        name="empty",
        holds=lambda cut: cut.way is Way.EMPTY,
        text="{label} takes no element of it: {emptiness}",
        step="check the bounds of the slice, or the indices",
        precedes=("overwritten", "integers", "not read"),
    ),
    Cause(
        name="out of range",
        holds=lambda cut: cut.dropped,
        text="{label} reads or writes nothing of it: the indices, {outside}, are out of range",
        step="correct the indices, or make the array larger",
        # What is dropped is not overwritten; nor does it matter that `bincount` counts, or what the
        # numbers are.
        precedes=(
            "overwritten",
            "index",
            "integers",
            "overflow",
            "not read",
            "stationary",
            "saturated",
        ),
        is_excused=True,
    ),
    Cause(
        name="overwritten",
        holds=lambda cut: cut.way is Way.CARRY or cut.is_written_over,
        text="what {label} puts there is overwritten before it is read",
        step="check the indices; in a scan add to the carry, or return it as an output",
        precedes=("integers", UNDERFLOW, "not read"),
    ),
    Cause(
        name="one element",
        holds=lambda cut: cut.way is Way.CANCELS and cut.is_softmax_over_one,
        text="{label} over an axis of length 1 is constant",
        step="if a choice is meant, weigh by the softmax over all, before one is chosen",
        rank=-0.1,
        precedes=("cancels", UNDERFLOW),  # the cotangents of the only element cancel
    ),
    Cause(
        name="cancels",
        holds=lambda cut: cut.way is Way.CANCELS,
        text="the cotangents of its uses are not zero, but their sum is",
        step="the loss does not depend on it here, as where a value is subtracted from itself, or "
        "over an axis of length 1",
        rank=-0.1,
        precedes=(UNDERFLOW,),
        is_excused=True,
    ),
    # -- By the operation. Those without a derivative go from the special one to "integers": what an
    # index, a comparison or a cast returns are integers or flags.
    Cause(
        name="stop_gradient",
        holds=lambda cut: cut.stops,
        text="{label} detaches it",
        step=_LEAVE_OUT,
        rank=DETACHED,
        precedes=("integers",),
        is_note=True,
        is_of_operation=True,
    ),
    Cause(
        name="stop_gradient",
        holds=lambda cut: cut.is_detached_copy,
        text="the {label} takes a detached copy of it",
        step=_LEAVE_OUT,
        rank=DETACHED,
        precedes=("where",),  # the mask takes the same numbers, detached
        is_note=True,
    ),
    Cause(
        name="custom rule",
        holds=lambda cut: cut.is_of_users_rule,
        text="the rule of {operation} returns zeros for operand {operand}",
        step="compare it with numerical slopes by cg.check_grads",
        # whatever the function around it is called, and however small the zeros are
        precedes=("flat", UNDERFLOW, "dead", "clipped", "stationary", "saturated"),
        is_of_operation=True,
    ),
    Cause(
        name="flat",
        holds=lambda cut: cut.is_flat_everywhere,
        text="{label} is flat everywhere, so its derivative is 0",
        step="x + jax.lax.stop_gradient({label}(x) - x) lets the gradient through",
        rank=-0.2,
        precedes=("zero factor", "where", "stationary"),  # also at 0, and by what it is made of
        is_of_operation=True,
    ),
    Cause(
        name="cast",
        holds=lambda cut: cut.is_cast,
        text="a cast to {dtype} has no derivative",
        step=_KEEP_FLOATING,
        rank=1,
        precedes=("comparison", "integers"),  # `x.astype(bool)` compares
        is_of_operation=True,
    ),
    Cause(
        name="bitcast",
        holds=lambda cut: cut.is_bitcast,
        text="a cast to {dtype} has no derivative",
        step=_KEEP_FLOATING,
        rank=1,
        precedes=("integers",),
        is_of_operation=True,
    ),
    Cause(
        name="index",
        holds=lambda cut: cut.is_index,
        text="the indices of {label} have no derivative",
        step="multiply by the values, or by their softmax",
        rank=2,
        # `searchsorted` compares; of `sort` the values beside the indices have a derivative
        precedes=("comparison", "integers", UNDERFLOW),
        is_of_operation=True,
    ),
    Cause(
        name="comparison",
        holds=lambda cut: cut.is_comparison,
        text="a comparison ({label}) has no derivative",
        step="use a smooth function such as jax.nn.sigmoid",
        rank=3,
        precedes=("integers",),
        is_of_operation=True,
    ),
    Cause(
        name="integers",
        holds=lambda cut: cut.is_whole,
        text="the result of {label} is {dtype}, which has no derivative",
        step="compute with floating numbers, or let the gradient through by a custom VJP",
        rank=3,
        precedes=(UNDERFLOW,),
        is_of_operation=True,
    ),
    # -- By what the numbers of the operation are: inf, zero, too small.
    Cause(
        name="overflow",
        holds=lambda cut: cut.infinite,
        text="{operation} takes {infinite}, and its derivative is 0 there",
        step="keep it finite: bound it, rescale it, or compute with its logarithm",
        rank=-0.2,
        precedes=("dead", "clipped", "where", "not read", "saturated"),  # that is what inf does
    ),
    Cause(
        name="trains later",
        holds=lambda cut: cut.factor.kind == "trains later",
        text="it is multiplied by {source} and has a gradient: its first update ends that",
        precedes=("stationary",),  # as of w * v where both are 0; so the three below
        is_note=True,
    ),
    Cause(
        name="zero factors",
        holds=lambda cut: cut.factor.kind == "zero factors",
        text="it is multiplied by {source}, and whose gradient is 0 too: neither ever trains",
        step="start one of the two from other values",
        precedes=("stationary",),
    ),
    Cause(
        name="constant zeros",
        holds=lambda cut: cut.factor.kind == "constant zeros",
        text="it is multiplied by constant zeros, as an initial state is",
        rank=0.3,
        precedes=("stationary",),
        is_note=True,
    ),
    Cause(
        name="zero factor",
        holds=lambda cut: cut.factor.kind == "zero factor",
        text="it is multiplied by {source}",
        step="check what makes these zeros",
        precedes=("stationary",),
        is_excused=True,
    ),
    Cause(
        name=UNDERFLOW,
        holds=lambda cut: cut.is_underflow,
        text="the cotangent that {operation} passes back{size} rounds to 0 in {number_type}",
        step="{cure}",
        precedes=("stationary", "saturated"),  # a power of a small number is flat
    ),
    Cause(
        name="adds up to zero",
        holds=lambda cut: cut.adds_up_to_zero,
        text="the cotangents along an axis add up to 0",
        rank=0.5,
        precedes=("stationary",),  # as of a product with itself at 0
        is_note=True,
        is_silent=True,
    ),
    # -- By where the function is flat: what it is, then where it is looked at.
    Cause(
        name="dead",
        holds=lambda cut: cut.is_flat_here and cut.is_one_sided and not cut.is_relu_above,
        text="{label} is flat at all {count:,} elements of its input, {numbers}",
        step="a smaller step or bias, or a leaky form, lets the gradient through",
        precedes=("stationary", "saturated"),  # a relu is a function of one array
        is_excused=True,
    ),
    Cause(
        name="clipped",
        holds=lambda cut: cut.is_flat_here and cut.is_clip,
        text="{label} clips all {count:,} elements of its input, {numbers}",
        step="widen its bounds, or scale its input",
        precedes=("not read", "stationary", "saturated"),  # a minimum reads one element
        is_excused=True,
    ),
    Cause(
        name="where",
        holds=lambda cut: cut.is_mask and cut.is_zero_at_any_size,
        text="the {label} takes the other side at every element",
        step="check its mask: the condition, its axis, and what it is for",
        precedes=("stationary",),
        is_excused=True,
    ),
    Cause(
        name="not read",
        holds=lambda cut: (cut.is_read or cut.is_written) and cut.is_zero_at_any_size,
        text="{label} reads or writes no element of it that has a cotangent",
        step="check the indices, and what else is read there",
        rank=0.5,
        precedes=("stationary", "saturated"),  # a maximum reads other elements at other numbers
        is_excused=True,
    ),
    Cause(
        name="stationary",
        holds=lambda cut: cut.is_at_zero and cut.is_zero_at_any_size,
        text="its input is 0 throughout, where {label} is flat",
        step="start from other values",
        rank=1.5,
        precedes=("saturated",),
        is_note=True,
    ),
    Cause(
        name="saturated",
        holds=lambda cut: cut.is_flat_here and (cut.is_unary or cut.is_relu_above),
        text="{label} is saturated at all {count:,} elements of its input, {numbers}",
        step="scale its input, or compute with its logarithm",
        is_excused=True,
    ),
    # No row stands for what the others leave over, but that nothing is known.
    Cause(
        name="unknown",
        holds=lambda cut: True,
        text="the derivative of {operation} by operand {operand} is 0 at these numbers, and its "
        "cause is not known: {operands}",
        step="look at these numbers",
        rank=0.4,
    ),
)


def cause_of(cut: Cut, traced: TracedLoss, zero: Any) -> Cause:
    """The cause of a cut; ``zero`` are the inputs whose gradients are zero."""
    facts = CutFacts(cut, traced, zero)
    row = next(row for row in CAUSES if row.holds(facts))
    words = facts.words(row.text + row.step)
    # What only chooses a branch or ends a loop is no use of a value.
    rank = DETACHED + 1 + row.rank if cut.way is Way.CONTROL else row.rank
    text, step = row.text.format(**words), row.step.format(**words)
    return dataclasses.replace(row, text=text, step=step, rank=rank)


def is_at_each_step(cut: Cut, cause: Cause, traced: TracedLoss) -> bool:
    """Whether a cut in a scan is one at every step of it, not at the one at which it was found."""
    is_anyhow = cause.is_of_operation or cut.way in _AT_ANY_NUMBERS
    return is_anyhow or CutFacts(cut, traced, ()).is_zero_at_each_step
