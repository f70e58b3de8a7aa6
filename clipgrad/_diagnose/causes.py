"""The cause for which a cotangent ends at an operand, in words, and what to do."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from clipgrad._diagnose.blocks import LONGER, ZERO, Block, reached
from clipgrad._diagnose.cuts import BRANCH, CARRY, SUM, ZeroCut
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._jaxpr import CUSTOM_RULES, called_program, dtype_of, holds_floats, scan_counts
from clipgrad._names import Place, is_users


class Cause(NamedTuple):
    """Why a cotangent ends."""

    name: str  # such as "cast"
    text: str  # what is so, with numbers
    step: str  # what to write instead; "" if there is nothing
    rank: float  # the smaller, the more likely it is what one looks for
    is_note: bool  # whether it may be meant


SILENT = "silent"
STRUCTURAL = {"cast", "bitcast", "comparison", "index", "flat", "custom rule"}  # at any numbers
_MASK = -1e30  # a logit below it is masked
_SATURATED = 5.0  # logits that differ by less leave no element of a softmax at 0 or 1
# Of a loss that is 0 these are what one wants, such as a hinge loss without a violation.
EXCUSED = {"dead", "clipped", "where", "zero factor", "saturated", "cancels", "not read", "branch"}

# What functions or primitives there are of a kind.
_FLAT = frozenset("round floor ceil sign nextafter floor_divide rint trunc fix".split())
_INDICES = frozenset(
    """argmax argmin argsort top_k sort searchsorted digitize unique histogram bincount
    approx_top_k approx_max_k approx_min_k""".split()
)
_ONE_SIDED = frozenset("relu maximum max leaky_relu relu6 hinge_loss reduce_max".split())
_CLIPS = frozenset("clip clamp minimum min hard_tanh hard_sigmoid hard_swish hard_silu".split())
_READERS = frozenset(
    """gather dynamic_slice slice concatenate pad reduce_max reduce_min stack unstack split
    select_and_gather_add reduce_window_max cummax cummin argsort""".split()
)
_WRITES = frozenset("scatter scatter_add scatter-add dynamic_update_slice scatter_mul".split())
# The cotangents of these are added up, along an axis or over devices.
_SPREAD = frozenset(
    "add sub add_any neg broadcast_in_dim pvary pcast psum psum_invariant all_gather".split()
)
_STOPS = frozenset("stop_gradient map tree_map stop".split())


# By the kind of operation: the cause, what is so, what to write instead, and the rank.
_CAUSES = {
    "branch": ("branch", "it is read only in a branch of the cond that is not taken",
               "check the predicate; a branch that is not taken trains nothing", 0),
    "stop": ("stop_gradient", "stop_gradient detaches it",
             "if that is meant, leave it out of argnums", 0.2),
    "own stop": ("stop_gradient", "{label} detaches it", "", 5),
    "rule": ("custom rule", "the rule of {label} returns zeros for operand {operand}",
             "check it with cg.check_vjp: clipgrad help custom_rules", 0),
    "flat": ("flat", "{label} is flat everywhere, so its derivative is 0",
             "x + jax.lax.stop_gradient({label}(x) - x) lets the gradient through", -0.2),
    "cast": ("cast", "a cast to {dtype} has no derivative",
             "keep it floating, or let the gradient through by a custom VJP", 1),
    "bitcast": ("bitcast", "a bitcast to {dtype} has no derivative",
                "keep it floating, or let the gradient through by a custom VJP", 1),
    "index": ("index", "the indices of {label} have no derivative",
              "multiply by the values, or by their softmax", 2),
    "comparison": ("comparison", "a comparison ({label}) has no derivative",
                   "use a smooth function such as jax.nn.sigmoid", 3),
    "one": ("one element", "{label} over an axis of length 1 is constant",
            "if a choice is meant, weigh by the softmax over all, before one is chosen", -0.1),
    "mask": ("one element", "{label} is constant where its mask leaves one element",
             "check the mask, and its axis", -0.1),
    "softmax": ("saturated", "the cotangents of {label} cancel: it is saturated",
                "make the logits smaller", -0.1),
    "sum": ("cancels", "its uses have cotangents that are not zero, but their sum is{one}",
            "the loss does not depend on it here", -0.1),
    "itself": ("cancels", "it is subtracted from itself",
               "was stop_gradient meant on one of the two?", -0.1),
    "spread": (SILENT, "the cotangents along an axis add up to 0", "", 0.5),
    "relu": ("dead", "{label} is flat at {every}, {numbers}",
             "a smaller step or bias, or a leaky form, lets the gradient through", 0),
    "relu above": ("saturated", "{label} is flat at {every}, {numbers}", "scale its input", 0),
    "clip": ("clipped", "{label} clips {every}, {numbers}",
             "widen its bounds, or scale its input", 0),
    "where": ("where", "the {label} takes the other side at every element",
              "check its mask: the condition, its axis, and what it is for", 0),
    "select": ("where", "the where takes the other side at every element",
               "check its mask: the condition, its axis, and what it is for", 1),
    "reader": ("not read", "{label} reads no element of it that has a cotangent",
               "check the indices, and what else is read there", 0.5),
    "over": ("overwritten", "{label} writes over all of it that is read", "check the indices", 0),
    "next": ("overwritten", "{label} puts it into the carry, and the next step overwrites it",
             "add to what is carried, or return it as an output of each step", 0),
    "rewritten": ("overwritten", "a later write covers what {label} writes",
                  "check the indices of both", 0),
    "none": ("not read", "{label} writes no element of it that is read", "check the indices", 0),
    "zeros": ("stationary", "its input is 0 throughout, where {label} is flat",
              "start from other values", 1.5),
    "saturated": ("saturated", "{label} is saturated at {every}, {numbers}",
                  "scale its input, or compute with its logarithm", 0),
    "other": ("flat", "the derivative of {label} is 0 at {every}, {numbers}", "", 0),
    "underflow": ("underflow", "a cotangent of {largest:.2g} is less than {dtype} can hold",
                  "scale the loss, or compute in float32", 0),
    "disjoint": ("zero factor", "its other factor, {numbers}, is 0 wherever there is a cotangent",
                 "check the masks: they have no element in common", 0),
    "products": ("cancels", "the products of {label} with the cotangents add up to 0", "", 0.6),
    "data": ("zero factor", "it is multiplied by {name}, which is 0 {when}", "check {name}", 0),
    "later": ("trains later", "it is multiplied by {name}, which is 0 {when} and has a "
              "gradient: its first update ends that", "", 0),
    "both": ("zero factors", "it is multiplied by {name}, which is 0 {when}, and whose "
             "gradient is 0 too: neither ever trains", "start one of the two from other values", 0),
    "made": ("zero factor", "it is multiplied by values that are 0 {when} since {name}",
             "check what makes these zeros", 0),
    "constant": ("zero factor", "it is multiplied by a constant that is 0",
                 "check the constant", 0),
    "state": ("constant zeros", "it is multiplied by constant zeros, as an initial state is",
              "", 0.3),
}  # fmt: skip
_NOTES = {"stop", "own stop", "mask", "spread", "zeros", "products", "later", "state"}


def cause_of(cut: ZeroCut, given: DiagnosisSubject, zero: Sequence[int]) -> Cause:
    """The cause of a cut; ``zero`` are the inputs whose gradients are zero."""
    kind, numbers = _kind_of(cut, given, zero)
    name, text, step, rank = _CAUSES[kind]
    low, high = cut.range(cut.variable)
    size = math.prod(getattr(cut.variable.aval, "shape", ()))
    facts = {
        "label": cut.place.function,
        "operand": cut.operand,
        "dtype": next((dtype_of(v) for v in cut.place.equation.outvars), None),
        "every": f"all {size:,} elements of its input",
        "numbers": f"{low:.3g} to {high:.3g}",
        "largest": cut.largest,
        "when": "throughout" if np.all(cut.where) else "there",
    } | numbers
    is_note = kind in _NOTES or (kind == "one" and _is_attention(cut))
    rank += 4 if cut.is_alive else 0
    return Cause(name, text.format(**facts), step.format(**facts), rank, is_note)


def _kind_of(
    cut: ZeroCut, given: DiagnosisSubject, zero: Sequence[int]
) -> tuple[str, dict[str, object]]:
    """The row of the table of a cut, and what its text has besides."""
    name, label = cut.place.equation.primitive.name, cut.place.function
    if cut.kind == BRANCH:
        return "branch", {}
    if cut.kind == CARRY:
        return "next", {}
    if cut.kind == SUM:
        return _kind_of_sum(cut, label)
    if name == "stop_gradient":
        return ("stop" if label in _STOPS else "own stop"), {}
    if name in CUSTOM_RULES:
        program = called_program(cut.place.equation)
        info = getattr(getattr(program, "jaxpr", None), "debug_info", None)
        if is_users(getattr(info, "func_filename", None) or "<frozen"):
            return "rule", {"label": cut.place.operation}
    if label in _FLAT or name in _FLAT:
        return "flat", {"label": label if label in _FLAT else name}
    if name == "while":
        return "comparison", {"label": "in the condition of a loop"}
    if not any(holds_floats(v) for v in cut.place.equation.outvars) or label in _INDICES:
        casts = {"convert_element_type": "cast", "bitcast_convert_type": "bitcast"}
        is_index = name not in casts and bool(_INDICES & {label, name})
        index: dict[str, object] = {"label": label if label in _INDICES else name}
        return casts.get(name, "index" if is_index else "comparison"), index if is_index else {}
    if name in ABSORBING or name == "div":
        return _kind_of_product(cut, given, zero)
    return _kind_of_numbers(cut, name, label), {}


def _kind_of_sum(cut: ZeroCut, label: str) -> tuple[str, dict[str, object]]:
    is_one = 1 in _lengths(cut)
    if "softmax" in label or "logsumexp" in label:
        low, high = cut.range(cut.variable)
        if is_one or _is_masked(cut):
            return ("one" if is_one else "mask"), {}
        if high - low > _SATURATED:
            return "softmax", {}
        return "sum", {"one": ", as where the elements of a softmax are added up"}
    if any(e.primitive.name == "sub" and e.invars[0] is e.invars[1] for e in cut.uses):
        return "itself", {}
    one = ": a sum or mean over an axis of length 1 is taken from itself or divides itself"
    return "sum", {"one": one if is_one else ""}


def _kind_of_numbers(cut: ZeroCut, name: str, label: str) -> str:
    low, high = cut.range(cut.variable)
    is_clip = label in _CLIPS
    rows = (
        ("spread", name in _SPREAD),
        ("underflow", name == "convert_element_type"),
        ("relu above", not is_clip and label in _ONE_SIDED and "relu" in label and low > 0),
        ("relu", not is_clip and (label in _ONE_SIDED or name in ("max", "relu"))),
        ("clip", is_clip or name in ("min", "clamp")),
        ("where", name == "select_n" and "where" in label),
        ("select", name == "select_n"),
        ("reader", name in _READERS),
        ("over", name in _WRITES and cut.operand == 0),
        ("rewritten", name in _WRITES and _is_rewritten(cut)),
        ("none", name in _WRITES),
        ("zeros", (low, high) == ZERO),
        ("mask", "softmax" in label and _is_masked(cut)),
        ("saturated", cut.variable.aval.shape == _shape_of_result(cut)),
    )
    return next((kind for kind, applies in rows if applies), "other")


def _is_rewritten(cut: ZeroCut) -> bool:
    """Whether another step or a later write has indices among those of a write."""
    found, own = False, cut.place.equation

    def goes_on(block: Block, i: int, k: int) -> bool:
        nonlocal found
        other = block.jaxpr.eqns[i]
        if k == 0 and other.primitive.name in _WRITES:
            pairs = zip(_places_written(own), _places_written(other), strict=False)
            ranges = [(cut.range(a), block.range(b, ~cut.where if other is own else None))
                      for a, b in pairs]  # fmt: skip
            found = found or all(a[0] <= b[1] and b[0] <= a[1] for a, b in ranges)
        return not found

    reached(cut.block, cut.place.equation.outvars, goes_on)
    return found


def _places_written(write: JaxprEqn) -> list:
    is_slice = write.primitive.name == "dynamic_update_slice"
    return list(write.invars[2:] if is_slice else write.invars[1:2])


def _kind_of_product(
    cut: ZeroCut, given: DiagnosisSubject, zero: Sequence[int]
) -> tuple[str, dict[str, object]]:
    equation = cut.place.equation
    other = equation.invars[1 - cut.operand] if cut.operand < 2 else equation.invars[0]
    low, high = cut.range(other)
    if (low, high) == ZERO:
        return _kind_of_zeros(cut, other, given, zero)
    dtype, is_product = dtype_of(cut.variable), equation.primitive.name == "mul"
    smallest = float(np.finfo(np.dtype(dtype)).tiny) if str(dtype) != "bfloat16" else 1e-38
    factor = max(abs(low), abs(high))
    if equation.primitive.name == "div":
        factor = 1 / min(abs(low), abs(high)) if low * high else 0
    if np.isfinite(cut.largest) and cut.largest * factor < smallest:
        return "underflow", {"largest": cut.largest * factor, "dtype": dtype}
    is_sum = cut.variable.aval.shape != _shape_of_result(cut)
    if is_product and not is_sum:
        return "disjoint", {"numbers": f"{low:.3g} to {high:.3g}"}
    return "products", {}


def _kind_of_zeros(
    cut: ZeroCut, other: object, given: DiagnosisSubject, zero: Sequence[int]
) -> tuple[str, dict[str, object]]:
    source = zero_source(cut.block, other, cut.where)
    if source.argument is not None:
        kind = "both" if source.argument in zero else "later"
        kind = kind if source.argument in given.chosen else "data"
        return kind, {"name": given.names[source.argument]}
    if source.place is not None:
        return "made", {"name": f"{source.place.function} ({source.place.location})"}
    is_factor = cut.place.equation.primitive.name == "mul" and not source.is_state
    return ("constant" if is_factor else "state"), {}


def _shape_of_result(cut: ZeroCut) -> tuple[int, ...]:
    return getattr(cut.place.equation.outvars[0].aval, "shape", ())


def _is_masked(cut: ZeroCut) -> bool:
    """Whether logits are so small that they are a mask."""
    found, atom = [cut.range(cut.variable)], cut.variable
    if atom in cut.block.producers:
        equation = cut.block.producers[atom][1]
        found += [cut.range(v) for v in equation.invars if holds_floats(v)]
    return min(low for low, _ in found) < _MASK


def _lengths(cut: ZeroCut) -> set[int]:
    """The numbers of elements that sums of a value take together, also some operations later."""
    read, found = {cut.variable}, set()
    for equation in cut.block.jaxpr.eqns:
        if not any(type(v) is not Literal and v in read for v in equation.invars):
            continue
        if equation.primitive.name in ("reduce_sum", "reduce_max"):
            shape = equation.invars[0].aval.shape
            found.add(math.prod(shape[axis] for axis in equation.params["axes"]))
        elif all(v.aval.shape == cut.variable.aval.shape for v in equation.outvars):
            read.update(equation.outvars)
    return found


def _is_attention(cut: ZeroCut) -> bool:
    """Whether the value is a product of two things that are trained, as logits of attention are."""
    block, atom = cut.block, cut.variable
    for _ in range(12):
        while block.outer and (around := block.outside(atom)) is not None:
            block, atom = block.outer, around
        if type(atom) is Literal or atom not in block.producers:
            return False
        number, equation, _ = block.producers[atom]
        if equation.primitive.name == "dot_general":
            found = [block.cotangent(number, "operand", k) for k in (0, 1)]
            return all(own is not None for own in found)
        if equation.primitive.name in ("gather", "top_k", "sort", "dynamic_slice"):
            return False
        floats = [v for v in equation.invars if type(v) is not Literal and holds_floats(v)]
        if not floats:
            return False
        atom = floats[0]
    return False


# If one operand of these is zero, so is the result.
ABSORBING = frozenset({"mul", "dot_general", "conv_general_dilated", "ragged_dot_general"})


class ZeroSource(NamedTuple):
    """An input or the result of an operation that is zero; a constant if both are None."""

    argument: int | None = None
    place: Place | None = None
    is_state: bool = False  # whether a scan begins with it


def zero_source(block: Block, atom: Any, where: Any = None) -> ZeroSource:
    """The first value that is zero, from which a value has its zeros, at some of the steps."""
    if type(atom) is Literal or atom in block.jaxpr.constvars:
        return ZeroSource()
    if atom in block.positions:
        return _of_input(block, atom, where)
    number, equation, position = block.producers[atom]
    if inner := [b for b in block.children.get(number, ()) if b.ran]:
        body = inner[0]
        is_longer = equation.primitive.name in LONGER
        return zero_source(body, body.jaxpr.outvars[position], None if is_longer else where)
    kinds = {
        v: str(getattr(v.aval, "dtype", "")) for v in equation.invars if type(v) is not Literal
    }
    numbers = [v for v in equation.invars if type(v) is Literal or holds_floats(v)
               or kinds[v].startswith(("bool", "int", "uint"))]  # fmt: skip
    zeros = [v for v in numbers if block.range(v, where) == ZERO]
    if not equation.invars:
        return ZeroSource()
    if zeros and (equation.primitive.name in ABSORBING or len(zeros) == len(numbers)):
        return zero_source(block, zeros[0], where)
    if equation.primitive.name == "div" and zeros and zeros[0] is equation.invars[0]:
        return zero_source(block, zeros[0], where)
    if all(type(v) is Literal for v in equation.invars):
        return ZeroSource()
    return ZeroSource(place=block.place(equation))


def _of_input(block: Block, atom: Any, where: Any) -> ZeroSource:
    position = block.positions[atom]
    around = block.outside(atom)
    if around is None or block.outer is None or block.parent is None:
        return ZeroSource(argument=position)
    if block.is_carry(position) and block.outer.range(around) != ZERO:
        constants, _ = scan_counts(block.parent.equation)
        return zero_source(block, block.jaxpr.outvars[position - constants])
    if where is not None and block.parent.equation.primitive.name in LONGER:
        where = np.any(where, axis=-1)
    found = zero_source(block.outer, around, where)
    return found._replace(is_state=found.is_state or block.is_carry(position))
