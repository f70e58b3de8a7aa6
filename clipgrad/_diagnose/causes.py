"""Why a cotangent ends at an operand: a name, a sentence, what to do, from its entry."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from clipgrad._diagnose.guilty import (
    BRANCH,
    CANCELS,
    CARRY,
    Found,
    is_of_users_rule,
    runs_once,
    sources,
)
from clipgrad._diagnose.levels import holds_zeros, range_of, wide
from clipgrad._diagnose.loops import InScan, InWhile
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._diagnose.tape import Entry, Tape
from clipgrad._programs import dtype_of, holds_floats

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


class Cause(NamedTuple):
    """Why a cotangent ends: a row of the table, or this with the facts in its places."""

    text: str  # what is so, with numbers
    step: str = ""  # what to write instead; "" if there is nothing
    rank: float = 0  # the smaller, the more likely it is what one looks for
    is_note: bool = False  # whether it may be meant
    name: str = ""  # such as "cast"


# What is meant to detach comes last: a cut that nobody chooses is the finding beside it.
DETACHED = 8
CAUSES = {
    "branch": Cause("it is read only in a branch of the cond that is not taken",
                   "check the predicate; a branch that is not taken trains nothing"),
    "stop_gradient": Cause("{label} detaches it", "if that is meant, leave it out of argnums",
                          DETACHED, True),
    "custom rule": Cause("the rule of {operation} returns zeros for operand {operand}",
                        "compare it with numerical slopes by cg.check_grads"),
    "flat": Cause("{label} is flat everywhere, so its derivative is 0",
                 "x + jax.lax.stop_gradient({label}(x) - x) lets the gradient through", -0.2),
    "cast": Cause("a cast to {dtype} has no derivative",
                 "keep it floating, or let the gradient through by a custom VJP", 1),
    "index": Cause("the indices of {label} have no derivative",
                  "multiply by the values, or by their softmax", 2),
    "comparison": Cause("a comparison ({label}) has no derivative",
                       "use a smooth function such as jax.nn.sigmoid", 3),
    "one element": Cause("{label} over an axis of length 1 is constant",
                        "if a choice is meant, weigh by the softmax over all, before one is chosen",
                        -0.1),
    "dead": Cause("{label} is flat at all {size:,} elements of its input, {numbers}",
                 "a smaller step or bias, or a leaky form, lets the gradient through"),
    "saturated": Cause("{label} is saturated at all {size:,} elements of its input, {numbers}",
                      "scale its input, or compute with its logarithm"),
    "clipped": Cause("{label} clips all {size:,} elements of its input, {numbers}",
                    "widen its bounds, or scale its input"),
    "where": Cause("the {label} takes the other side at every element",
                  "check its mask: the condition, its axis, and what it is for"),
    "not read": Cause("{label} reads or writes no element of it that has a cotangent",
                     "check the indices, and what else is read there", 0.5),
    "overwritten": Cause("what {label} puts there is overwritten before it is read",
                        "check the indices; in a scan add to the carry, or return it as an output"),
    "zero factor": Cause("it is multiplied by {source}", "check what makes these zeros"),
    "underflow": Cause("a cotangent of {source} is less than {dtype} can hold",
                      "scale the loss, or compute in float32"),
    "cancels": Cause("the cotangents of its uses are not zero, but their sum is",
                    "the loss does not depend on it here, as where a value is subtracted from "
                    "itself, or over an axis of length 1", -0.1),
    # What may be meant.
    "trains later": Cause("it is multiplied by {source} and has a gradient: its first update ends "
                         "that", "", 0, True),
    "zero factors": Cause("it is multiplied by {source}, and whose gradient is 0 too: neither ever "
                         "trains", "start one of the two from other values"),
    "constant zeros": Cause("it is multiplied by constant zeros, as an initial state is", "", 0.3,
                           True),
    "random": Cause("random numbers alone decide that it is multiplied by 0 or left out, as a "
                   "layer that is dropped", "", 0, True),
    "stationary": Cause("its input is 0 throughout, where {label} is flat",
                       "start from other values", 1.5, True),
    "silent": Cause("the cotangents along an axis add up to 0", "", 0.5, True),
}  # fmt: skip
CAUSES["bitcast"] = CAUSES["cast"]
SILENT = "silent"
# Of a loss that is 0 these are what one wants, such as a hinge loss without a violation.
EXCUSED = frozenset(
    ("dead", "clipped", "where", "zero factor", "saturated", "cancels", "not read", "branch")
)


def cause_of(cut: Found, given: DiagnosisSubject, zero: Any) -> Cause:
    """The cause of a cut; ``zero`` are the inputs whose gradients are zero."""
    entry, k = cut.entry, cut.number
    name, source = _name_of(cut, given), ""
    if name in MULTIPLYING:
        name, source = _of_product(entry, k, given, zero)
    row = CAUSES[name]
    low, high = range_of([entry.ins[k]])
    label = entry.place.function
    words = {
        "label": next((own for own in (label, entry.name) if own in FLAT | INDICES), label),
        "operation": entry.place.operation,
        "operand": k,
        "dtype": next((dtype_of(v) for v in entry.equation.outvars), None),
        "size": np.size(entry.ins[k]),
        "numbers": f"{low:.3g} to {high:.3g}",
        "source": source,
    }
    text, step = row.text.format(**words), row.step.format(**words)
    return row._replace(name=name, text=text, step=step)


def _name_of(cut: Found, given: DiagnosisSubject) -> str:
    """The name of the cause; of a product its own."""
    entry, k = cut.entry, cut.number
    name, label = entry.name, entry.place.function
    low, high = range_of([entry.ins[k]])
    is_one = "softmax" in label and 1 in np.shape(entry.ins[k])
    is_index = bool(INDICES & {label, name})
    is_clip, is_one_sided = label in CLIPPING, label in ONE_SIDED
    is_chosen = cut.way == BRANCH or (name == "select_n" and not cut.way)
    is_over = name in WRITES and (k == 0 or (name in SETS and bool(entry.tape.steps)))
    is_whole = not any(map(holds_floats, entry.outs)) or label in INDICES
    rows = (
        ("random", is_chosen and _is_random(entry.tape, entry.equation.invars[:1], given)),
        ("branch", cut.way == BRANCH),
        ("overwritten", cut.way == CARRY),
        ("one element", cut.way == CANCELS and is_one),
        ("cancels", cut.way == CANCELS),
        ("stop_gradient", name == "stop_gradient"),
        ("custom rule", is_of_users_rule(entry)),
        ("flat", bool({label, name} & FLAT)),
        ("comparison", isinstance(entry.inside, InWhile)),
        ("cast", is_whole and name == "convert_element_type"),
        ("bitcast", is_whole and name == "bitcast_convert_type"),
        ("index", is_whole and is_index),
        ("comparison", is_whole),
        (name, name in MULTIPLYING),
        ("silent", name in ADDED_UP),
        ("underflow", name == "convert_element_type"),
        ("saturated", is_one_sided and not is_clip and "relu" in label and low > 0),
        ("dead", not is_clip and (is_one_sided or name == "max") and name not in READERS),
        ("clipped", is_clip or name in ("min", "clamp")),
        ("where", name == "select_n"),
        ("not read", name in READERS),
        ("overwritten", is_over),
        ("not read", name in WRITES),
        ("stationary", low == high == 0),
    )
    return next((cause for cause, applies in rows if applies), "saturated")


def _of_product(entry: Entry, k: int, given: DiagnosisSubject, zero: Any) -> tuple[str, str]:
    """The cause at a product, and what is zero there, or how small a cotangent is."""
    other = 1 - k if k < 2 else 0
    atom = entry.equation.invars[other]
    if not holds_zeros(entry.ins[other]):
        low, high = range_of([np.abs(wide(entry.ins[other]))])
        factor = high if entry.name != "div" else 1 / low if low else 0
        size = factor * range_of([np.abs(wide(g)) for g in entry.got])[1]
        if size < float(jnp.finfo(entry.ins[k].dtype).tiny):
            return "underflow", f"{size:.2g}"
        if entry.name != "mul":
            return "silent", ""
        is_random = _is_random(entry.tape, [atom], given)
        source = "its other factor, which is 0 wherever there is a cotangent"
        return "random" if is_random else "zero factor", source
    source, is_state = zero_source(entry.tape, atom)
    if source.is_constant:
        is_factor = entry.name == "mul" and not is_state
        return "zero factor" if is_factor else "constant zeros", "a constant that is 0"
    if source.entry is None:
        is_trained = source.number in given.chosen
        later = "zero factors" if source.number in zero else "trains later"
        named = f"{given.names[source.number]}, which is 0"
        return later if is_trained else "zero factor", named
    is_random = _is_random(source.entry.tape, source.entry.equation.invars, given)
    place = source.entry.place
    named = f"values that are 0 since {place.function} ({place.location})"
    return "random" if is_random else "zero factor", named


def _is_random(tape: Tape, atoms: Any, given: DiagnosisSubject) -> bool:
    """Whether values are random, and computed from keys and counters alone."""
    arguments, operations = sources(tape, atoms)
    is_drawn = any(name.startswith(("random_bits", "threefry")) for name in operations)
    return is_drawn and not any(holds_floats(given.inputs[i]) for i in arguments)


# If one operand of these is zero, so is the result.
_ABSORBING = MULTIPLYING - {"div"}


def zero_source(tape: Tape, atom: Any) -> tuple[Found, bool]:
    """The first value that is zero, from which a value has its zeros.

    Second is whether a scan begins with it.
    """
    is_state = False
    while not tape.is_constant(atom):
        entry = tape.made.get(atom)
        if entry is None:
            number = tape.jaxpr.invars.index(atom)
            if tape.within is None:
                return Found("zero", None, number), is_state
            inside, now = tape.within.entry.inside, tape.within.time
            is_carry = isinstance(inside, InScan) and inside.is_carry(number)
            is_state = is_state or is_carry
            if is_carry and now and not holds_zeros(tape.within.entry.ins[number]):
                tape = inside.step(inside.times[now - 1])
                atom = tape.jaxpr.outvars[number - inside.fixed]
            else:
                tape, atom = tape.outside(number)
        elif runs_once(entry):
            tape, atom = entry.inside.result(entry.equation.outvars.index(atom), 0)
        else:
            operands = entry.equation.invars
            zeros = [a for a, x in zip(operands, entry.ins, strict=True) if holds_zeros(x)]
            if all(map(tape.is_constant, operands)):
                break
            is_part = entry.name in _ABSORBING or (entry.name == "div" and operands[0] in zeros)
            if not zeros or not (is_part or len(zeros) == len(operands)):
                return Found("zero", entry), is_state
            atom = zeros[0]
    return Found("zero", is_constant=True), is_state
