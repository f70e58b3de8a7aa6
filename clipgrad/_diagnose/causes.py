"""Why a cotangent ends at an operand: a table of causes, each with its own test."""

from collections.abc import Callable
from typing import Any, NamedTuple

from clipgrad._diagnose.cut_facts import CutFacts
from clipgrad._diagnose.guilty import BRANCH, CANCELS, CARRY, CONTROL, EMPTY, Found
from clipgrad._losses import TracedLoss

# What is meant to detach comes last: a cut that nobody chooses is the finding beside it.
DETACHED = 8
SILENT, UNKNOWN, OVERFLOW = "silent", "unknown", "overflow"


class Cause(NamedTuple):
    """Why a cotangent ends: a row of the table, or this with the facts in its places."""

    name: str  # such as "cast"
    holds: Callable[[CutFacts], Any]  # whether this is the cause of a cut
    text: str  # what is so, with numbers
    step: str = ""  # what to write instead; "" if there is nothing
    rank: float = 0  # the smaller, the more likely it is what one looks for
    is_note: bool = False  # whether it may be meant
    is_of_operation: bool = False  # whether it is so at any numbers, hence at each step of a scan


# Of several rows that hold the first is the cause: by how a value is used, then by the operation,
# then by the numbers. No row stands for what the others leave over, but that nothing is known.
CAUSES = (
    Cause("random", lambda cut: cut.is_random_choice,
          "random numbers alone decide that it is multiplied by 0 or left out, as a layer that is "
          "dropped", "", 0, True),
    Cause("branch", lambda cut: cut.way == BRANCH,
          "it is read only in a branch of the cond that is not taken",
          "check the predicate; a branch that is not taken trains nothing"),
    Cause("overwritten", lambda cut: cut.way == CARRY,
          "what {label} puts there is overwritten before it is read",
          "check the indices; in a scan add to the carry, or return it as an output",
          is_of_operation=True),
    Cause("one element", lambda cut: cut.way == CANCELS and cut.is_softmax_over_one,
          "{label} over an axis of length 1 is constant",
          "if a choice is meant, weigh by the softmax over all, before one is chosen", -0.1,
          is_of_operation=True),
    Cause("cancels", lambda cut: cut.way == CANCELS,
          "the cotangents of its uses are not zero, but their sum is",
          "the loss does not depend on it here, as where a value is subtracted from itself, or "
          "over an axis of length 1", -0.1, is_of_operation=True),
    Cause("empty", lambda cut: cut.way == EMPTY,
          "{label} takes no element of it: {emptiness}",
          "check the bounds of the slice, or the indices",
          is_of_operation=True),
    Cause("stop_gradient", lambda cut: cut.stops,
          "{label} detaches it", "if that is meant, leave it out of argnums", DETACHED, True, True),
    Cause("stop_gradient", lambda cut: cut.is_detached_copy,
          "the {label} takes a detached copy of it", "if that is meant, leave it out of argnums",
          DETACHED, True),
    Cause("custom rule", lambda cut: cut.is_of_users_rule,
          "the rule of {operation} returns zeros for operand {operand}",
          "compare it with numerical slopes by cg.check_grads", is_of_operation=True),
    Cause("flat", lambda cut: cut.is_flat_everywhere,
          "{label} is flat everywhere, so its derivative is 0",
          "x + jax.lax.stop_gradient({label}(x) - x) lets the gradient through", -0.2,
          is_of_operation=True),
    Cause("cast", lambda cut: cut.is_cast,
          "a cast to {dtype} has no derivative",
          "keep it floating, or let the gradient through by a custom VJP", 1, is_of_operation=True),
    Cause("bitcast", lambda cut: cut.is_bitcast,
          "a cast to {dtype} has no derivative",
          "keep it floating, or let the gradient through by a custom VJP", 1, is_of_operation=True),
    Cause("index", lambda cut: cut.is_index,
          "the indices of {label} have no derivative",
          "multiply by the values, or by their softmax", 2, is_of_operation=True),
    Cause("comparison", lambda cut: cut.is_comparison,
          "a comparison ({label}) has no derivative",
          "use a smooth function such as jax.nn.sigmoid", 3, is_of_operation=True),
    Cause("integers", lambda cut: cut.is_whole,
          "the result of {label} is {dtype}, which has no derivative",
          "compute with floating numbers, or let the gradient through by a custom VJP", 3,
          is_of_operation=True),
    Cause(OVERFLOW, lambda cut: cut.infinite,
          "{operation} takes {infinite}, and its derivative is 0 there",
          "keep it finite: bound it, rescale it, or compute with its logarithm", -0.2),
    Cause("trains later", lambda cut: cut.factor.kind == "trains later",
          "it is multiplied by {source} and has a gradient: its first update ends that", "", 0,
          True),
    Cause("zero factors", lambda cut: cut.factor.kind == "zero factors",
          "it is multiplied by {source}, and whose gradient is 0 too: neither ever trains",
          "start one of the two from other values"),
    Cause("random", lambda cut: cut.factor.kind == "random",
          "random numbers alone decide that it is multiplied by 0 or left out, as a layer that is "
          "dropped", "", 0, True),
    Cause("constant zeros", lambda cut: cut.factor.kind == "constant zeros",
          "it is multiplied by constant zeros, as an initial state is", "", 0.3, True),
    Cause("zero factor", lambda cut: cut.factor.kind == "zero factor",
          "it is multiplied by {source}", "check what makes these zeros"),
    Cause("underflow", lambda cut: cut.is_underflow,
          "the cotangent that {operation} passes back{size} rounds to 0 in {number_type}",
          "{cure}"),
    Cause(SILENT, lambda cut: cut.adds_up_to_zero,
          "the cotangents along an axis add up to 0", "", 0.5, True),
    Cause("saturated", lambda cut: cut.is_flat_here and cut.is_relu_above,
          "{label} is saturated at all {count:,} elements of its input, {numbers}",
          "scale its input, or compute with its logarithm"),
    Cause("dead", lambda cut: cut.is_flat_here and cut.is_one_sided,
          "{label} is flat at all {count:,} elements of its input, {numbers}",
          "a smaller step or bias, or a leaky form, lets the gradient through"),
    Cause("clipped", lambda cut: cut.is_flat_here and cut.is_clip,
          "{label} clips all {count:,} elements of its input, {numbers}",
          "widen its bounds, or scale its input"),
    Cause("where", lambda cut: cut.is_mask and cut.is_zero_at_any_size,
          "the {label} takes the other side at every element",
          "check its mask: the condition, its axis, and what it is for"),
    Cause("not read", lambda cut: cut.is_read and cut.is_zero_at_any_size,
          "{label} reads or writes no element of it that has a cotangent",
          "check the indices, and what else is read there", 0.5),
    Cause("overwritten", lambda cut: cut.is_written_over and cut.is_zero_at_any_size,
          "what {label} puts there is overwritten before it is read",
          "check the indices; in a scan add to the carry, or return it as an output"),
    Cause("not read", lambda cut: cut.is_written and cut.is_zero_at_any_size,
          "{label} reads or writes no element of it that has a cotangent",
          "check the indices, and what else is read there", 0.5),
    Cause("stationary", lambda cut: cut.is_at_zero and cut.is_zero_at_any_size,
          "its input is 0 throughout, where {label} is flat", "start from other values", 1.5, True),
    Cause("saturated", lambda cut: cut.is_flat_here and cut.is_unary,
          "{label} is saturated at all {count:,} elements of its input, {numbers}",
          "scale its input, or compute with its logarithm"),
    Cause(UNKNOWN, lambda cut: True,
          "the derivative of {operation} by operand {operand} is 0 at these numbers, and its cause "
          "is not known: {operands}", "look at these numbers", 0.4),
)  # fmt: skip
# Of a loss that is 0 these are what one wants, such as a hinge loss without a violation.
EXCUSED = frozenset(
    ("dead", "clipped", "where", "zero factor", "saturated", "cancels", "not read", "branch")
)


def cause_of(cut: Found, given: TracedLoss, zero: Any) -> Cause:
    """The cause of a cut; ``zero`` are the inputs whose gradients are zero."""
    facts = CutFacts(cut, given, zero)
    row = next(row for row in CAUSES if row.holds(facts))
    words = facts.words(row.text + row.step)
    # What only chooses a branch or ends a loop is no use of a value.
    rank = DETACHED + 1 + row.rank if cut.way == CONTROL else row.rank
    return row._replace(text=row.text.format(**words), step=row.step.format(**words), rank=rank)


def is_at_each_step(cut: Found, cause: Cause, given: TracedLoss) -> bool:
    """Whether a cut in a scan is one at every step of it, not at the one at which it was found."""
    return cause.is_of_operation or CutFacts(cut, given, ()).is_zero_at_each_step
