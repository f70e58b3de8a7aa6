"""Why a cotangent ends at an operand: a name, a sentence, what to do, from its entry."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from clipgrad._diagnose.calls import InCall
from clipgrad._diagnose.guilty import (
    BRANCH,
    CANCELS,
    CARRY,
    Found,
    Roots,
    is_of_users_rule,
    roots,
)
from clipgrad._diagnose.levels import holds_zeros, range_of, wide
from clipgrad._diagnose.loops import InScan, InWhile
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._diagnose.tape import Entry, Tape
from clipgrad._jaxpr import dtype_of, holds_floats

FLAT = frozenset("round floor ceil sign nextafter floor_divide rint trunc fix".split())
INDICES = frozenset(
    """argmax argmin argsort top_k sort searchsorted digitize unique histogram bincount
    approx_top_k approx_max_k approx_min_k""".split()
)
ONE_SIDED = frozenset("relu maximum max leaky_relu relu6 hinge_loss reduce_max".split())
CLIPPING = frozenset("clip clamp minimum min hard_tanh hard_sigmoid hard_swish hard_silu".split())
READERS = frozenset(
    """gather dynamic_slice slice concatenate pad reduce_max reduce_min stack unstack split
    select_and_gather_add reduce_window_max cummax cummin argsort""".split()
)
WRITES = frozenset("scatter scatter_add scatter-add dynamic_update_slice scatter_mul".split())
SETS = frozenset("scatter dynamic_update_slice".split())
# The cotangents of these are added up, along an axis or over devices.
ADDED_UP = frozenset("reduce_sum broadcast_in_dim psum psum_invariant cumsum add sub neg".split())
MULTIPLYING = frozenset("mul div dot_general conv_general_dilated ragged_dot_general".split())
_MASK = -1e30  # a logit below it is masked


class Cause(NamedTuple):
    """Why a cotangent ends."""

    name: str  # such as "cast"
    text: str  # what is so, with numbers
    step: str  # what to write instead; "" if there is nothing
    rank: float  # the smaller, the more likely it is what one looks for
    is_note: bool  # whether it may be meant


class Zero(NamedTuple):
    """A sentence of the table, with places for the facts."""

    text: str
    step: str = ""
    rank: float = 0
    is_note: bool = False


# What is meant to detach comes last: a cut that nobody chooses is the finding beside it.
DETACHED = 8
CAUSES = {
    "branch": Zero("it is read only in a branch of the cond that is not taken",
                  "check the predicate; a branch that is not taken trains nothing"),
    "stop_gradient": Zero("{label} detaches it", "if that is meant, leave it out of argnums",
                         DETACHED, True),
    "custom rule": Zero("the rule of {operation} returns zeros for operand {operand}",
                       "compare it with numerical slopes by cg.check_grads"),
    "flat": Zero("{label} is flat everywhere, so its derivative is 0",
                "x + jax.lax.stop_gradient({label}(x) - x) lets the gradient through", -0.2),
    "cast": Zero("a cast to {dtype} has no derivative",
                "keep it floating, or let the gradient through by a custom VJP", 1),
    "index": Zero("the indices of {label} have no derivative",
                 "multiply by the values, or by their softmax", 2),
    "comparison": Zero("a comparison ({label}) has no derivative",
                      "use a smooth function such as jax.nn.sigmoid", 3),
    "one element": Zero("{label} over an axis of length 1 is constant",
                       "if a choice is meant, weigh by the softmax over all, before one is chosen",
                       -0.1),
    "dead": Zero("{label} is flat at all {size:,} elements of its input, {numbers}",
                "a smaller step or bias, or a leaky form, lets the gradient through"),
    "saturated": Zero("{label} is saturated at all {size:,} elements of its input, {numbers}",
                     "scale its input, or compute with its logarithm"),
    "clipped": Zero("{label} clips all {size:,} elements of its input, {numbers}",
                   "widen its bounds, or scale its input"),
    "where": Zero("the {label} takes the other side at every element",
                 "check its mask: the condition, its axis, and what it is for"),
    "not read": Zero("{label} reads or writes no element of it that has a cotangent",
                    "check the indices, and what else is read there", 0.5),
    "overwritten": Zero("what {label} puts there is overwritten before it is read",
                       "check the indices; in a scan add to the carry, or return it as an output"),
    "zero factor": Zero("it is multiplied by {source}", "check what makes these zeros"),
    "underflow": Zero("a cotangent of {largest:.2g} is less than {dtype} can hold",
                     "scale the loss, or compute in float32"),
    "cancels": Zero("the cotangents of its uses are not zero, but their sum is",
                   "the loss does not depend on it here, as where a value is subtracted from "
                   "itself, or over an axis of length 1", -0.1),
    # What may be meant.
    "trains later": Zero("it is multiplied by {source} and has a gradient: its first update ends "
                        "that", "", 0, True),
    "zero factors": Zero("it is multiplied by {source}, and whose gradient is 0 too: neither ever "
                        "trains", "start one of the two from other values"),
    "constant zeros": Zero("it is multiplied by constant zeros, as an initial state is", "", 0.3,
                          True),
    "random": Zero("random numbers alone decide that it is multiplied by 0 or left out, as a layer "
                  "that is dropped", "", 0, True),
    "stationary": Zero("its input is 0 throughout, where {label} is flat",
                      "start from other values", 1.5, True),
    "silent": Zero("the cotangents along an axis add up to 0", "", 0.5, True),
}  # fmt: skip
SILENT = "silent"
# Of a loss that is 0 these are what one wants, such as a hinge loss without a violation.
EXCUSED = frozenset(
    ("dead", "clipped", "where", "zero factor", "saturated", "cancels", "not read", "branch")
)


class Facts(NamedTuple):
    """The cause of a cut, by its row, and what its sentence has besides."""

    row: str
    source: str = ""
    largest: float = 0.0
    name: str = ""  # of the cause, if it is not that of the row


def cause_of(cut: Found, given: DiagnosisSubject, zero: Any) -> Cause:
    """The cause of a cut; ``zero`` are the inputs whose gradients are zero."""
    entry, k = cut.entry, cut.number
    facts = _facts(cut, given, zero)
    row = CAUSES[facts.row]
    low, high = range_of([entry.ins[k]])
    label = entry.place.function
    own = next((name for name in (label, entry.name) if name in FLAT | INDICES), label)
    words = {
        "label": own,
        "operation": entry.place.operation,
        "operand": k,
        "dtype": next((dtype_of(v) for v in entry.equation.outvars), None),
        "size": np.size(entry.ins[k]),
        "numbers": f"{low:.3g} to {high:.3g}",
        "source": facts.source,
        "largest": facts.largest,
    }
    text, step = row.text.format(**words), row.step.format(**words)
    return Cause(facts.name or facts.row, text, step, row.rank, row.is_note)


def _facts(cut: Found, given: DiagnosisSubject, zero: Any) -> Facts:
    entry, k = cut.entry, cut.number
    name, label = entry.name, entry.place.function
    if cut.way == BRANCH:
        is_drawn = _is_random(roots(entry.tape, entry.equation.invars[:1]), given)
        return Facts("random" if is_drawn else "branch")
    if cut.way == CARRY:
        return Facts("overwritten")
    if cut.way == CANCELS:
        is_masked = range_of([entry.ins[k]])[0] < _MASK  # which may leave one element
        is_one = 1 in np.shape(entry.ins[k])
        row = "one element" if is_one else "silent" if is_masked else "cancels"
        return Facts(row if "softmax" in label else "cancels")
    if name == "stop_gradient":
        return Facts("stop_gradient")
    if is_of_users_rule(entry):
        return Facts("custom rule")
    if {label, name} & FLAT:
        return Facts("flat")
    if isinstance(entry.inside, InWhile):
        return Facts("comparison")
    if not any(map(holds_floats, entry.outs)) or label in INDICES:
        casts = {"convert_element_type": "cast", "bitcast_convert_type": "bitcast"}
        is_index = bool(INDICES & {label, name}) and name not in casts
        row = "cast" if name in casts else "index" if is_index else "comparison"
        return Facts(row, name=casts.get(name, ""))
    if name in MULTIPLYING:
        return _of_product(entry, k, given, zero)
    if name == "select_n" and _is_random(roots(entry.tape, entry.equation.invars[:1]), given):
        return Facts("random")
    return Facts(_of_numbers(entry, k, label))


def _of_numbers(entry: Entry, k: int, label: str) -> str:
    name = entry.name
    low, high = range_of([entry.ins[k]])
    is_clip = label in CLIPPING
    is_read = name in WRITES and k > 0
    rows = (
        ("silent", name in ADDED_UP),
        ("underflow", name == "convert_element_type"),
        ("saturated", not is_clip and label in ONE_SIDED and "relu" in label and low > 0),
        ("dead", not is_clip and (label in ONE_SIDED or name == "max") and name not in READERS),
        ("clipped", is_clip or name in ("min", "clamp")),
        ("where", name == "select_n"),
        ("not read", name in READERS),
        ("overwritten", name in WRITES and (k == 0 or (name in SETS and bool(entry.tape.steps)))),
        ("not read", is_read),
        ("stationary", low == high == 0),
    )
    return next((cause for cause, applies in rows if applies), _of_softmax(entry, label, low))


def _of_softmax(entry: Entry, label: str, low: float) -> str:
    if "softmax" not in label or low >= _MASK:
        return "saturated"
    return "silent"  # its mask leaves one element


def _of_product(entry: Entry, k: int, given: DiagnosisSubject, zero: Any) -> Facts:
    other = 1 - k if k < 2 else 0
    atom = entry.equation.invars[other]
    if not holds_zeros(entry.ins[other]):
        low, high = range_of([np.abs(wide(entry.ins[other]).astype(np.float64))])
        factor = high if entry.name != "div" else 1 / low if low else 0
        size = range_of([np.abs(wide(g).astype(np.float64)) for g in entry.got])[1]
        if size * factor < float(jnp.finfo(entry.ins[k].dtype).tiny):
            return Facts("underflow", largest=size * factor)
        if entry.name != "mul":
            return Facts("silent")
        if _is_random(roots(entry.tape, [atom]), given):
            return Facts("random")
        return Facts("zero factor", "its other factor, which is 0 wherever there is a cotangent")
    source = zero_source(entry.tape, atom)
    if source.argument is not None:
        named = f"{given.names[source.argument]}, which is 0"
        if source.argument not in given.chosen:
            return Facts("zero factor", named)
        return Facts("zero factors" if source.argument in zero else "trains later", named)
    if source.entry is not None:
        if _is_random(roots(source.entry.tape, source.entry.equation.invars), given):
            return Facts("random")
        place = source.entry.place
        return Facts("zero factor", f"values that are 0 since {place.function} ({place.location})")
    if entry.name == "mul" and not source.is_state:
        return Facts("zero factor", "a constant that is 0")
    return Facts("constant zeros")


def _is_random(found: Roots, given: DiagnosisSubject) -> bool:
    """Whether values are random, and computed from keys and counters alone."""
    is_drawn = any(name.startswith(("random_bits", "threefry")) for name in found.operations)
    return is_drawn and not any(holds_floats(given.inputs[i]) for i in found.arguments)


# If one operand of these is zero, so is the result.
_ABSORBING = MULTIPLYING - {"div"}


class ZeroSource(NamedTuple):
    """An input or the result of an operation that is zero; a constant if both are None."""

    argument: int | None = None
    entry: Entry | None = None
    is_state: bool = False  # whether a scan begins with it


def zero_source(tape: Tape, atom: Any) -> ZeroSource:
    """The first value that is zero, from which a value has its zeros."""
    is_state = False
    while not tape.is_constant(atom):
        entry = tape.made.get(atom)
        if entry is None:
            number = tape.jaxpr.invars.index(atom)
            if tape.within is None:
                return ZeroSource(number, None, is_state)
            holder = tape.within.entry.inside
            is_state = is_state or (isinstance(holder, InScan) and holder.is_carry(number))
            tape, atom = _source_outside(tape, number)
        elif isinstance(entry.inside, InCall):
            tape, atom = entry.inside.result(entry.equation.outvars.index(atom), 0)
        else:
            zeros = [
                a for a, x in zip(entry.equation.invars, entry.ins, strict=True) if holds_zeros(x)
            ]
            if all(tape.is_constant(a) for a in entry.equation.invars):
                return ZeroSource(is_state=is_state)
            is_all = len(zeros) == len(entry.ins)
            is_part = entry.name in _ABSORBING and bool(zeros)
            is_part = is_part or (entry.name == "div" and holds_zeros(entry.ins[0]))
            if not (is_all or is_part):
                return ZeroSource(None, entry, is_state)
            atom = zeros[0]
    return ZeroSource(is_state=is_state)


def _source_outside(tape: Tape, number: int) -> tuple[Tape, Any]:
    """The value that an input is outside of a program: of a carry the first, if that is 0."""
    assert tape.within is not None
    holder, now = tape.within.entry, tape.within.time
    inside = holder.inside
    if isinstance(inside, InScan) and inside.is_carry(number) and now:
        if not holds_zeros(holder.ins[number]):
            before = inside.step(inside.times[now - 1])
            return before, before.jaxpr.outvars[number - inside.fixed]
    return holder.tape, holder.equation.invars[number + tape.within.shift]
