"""Why a cotangent ends at an operand: the cause, in words, and what to do."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import Literal

from clipgrad._diagnose.blocks import ZERO
from clipgrad._diagnose.cuts import BRANCH, SUM, ZeroCut
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._diagnose.zero_sources import ABSORBING, zero_source
from clipgrad._jaxpr import CUSTOM_RULES, called_program, dtype_of, holds_floats
from clipgrad._names import Place, is_users

_FLAT = {"round", "floor", "ceil", "sign", "nextafter", "floor_divide", "rint", "trunc", "fix"}
_CASTS = {"convert_element_type": "cast", "bitcast_convert_type": "bitcast"}
_INDICES = {"argmax", "argmin", "argsort", "top_k", "sort", "searchsorted", "digitize", "unique"}
_INDICES |= {"histogram", "bincount", "approx_top_k", "approx_max_k", "approx_min_k"}
_RELUS = {"relu", "maximum", "max", "leaky_relu", "relu6", "hinge_loss", "reduce_max"}
_CLIPS = {"clip", "clamp", "minimum", "min", "hard_tanh", "hard_sigmoid", "hard_swish", "hard_silu"}
_SATURATE = {"logistic", "tanh", "erf", "erfc", "exp", "exp2", "expm1", "erf_inv", "log_softmax"}
_SATURATE |= {"sigmoid", "softmax", "softplus", "elu", "selu", "gelu", "silu", "swish", "logaddexp"}
_SATURATE |= {"log_sigmoid", "soft_sign", "celu", "logsumexp", "sinh", "cosh", "log1p", "atan"}
_READERS = {"gather", "dynamic_slice", "slice", "concatenate", "pad", "reduce_max", "reduce_min"}
_READERS |= {
    "stack",
    "unstack",
    "split",
    "select_and_gather_add",
    "reduce_window_max",
    "cummax",
    "cummin",
    "argsort",
}
_WRITES = {"scatter", "scatter_add", "scatter-add", "dynamic_update_slice", "scatter_mul"}
# The cotangents of these are added up, along an axis or over devices.
_SPREAD = {
    "add",
    "sub",
    "add_any",
    "neg",
    "broadcast_in_dim",
    "pvary",
    "pcast",
    "psum",
    "psum_invariant",
    "all_gather",
}
_STOPS = {"stop_gradient", "map", "tree_map", "stop"}


class Cause(NamedTuple):
    """Why a cotangent ends.

    Attributes:
      name: such as "cast".
      text: what is so, with numbers.
      step: what to write instead; "" if there is nothing.
      rank: the smaller, the more likely it is what one looks for.
      is_note: whether it may be meant.
    """

    name: str
    text: str
    step: str = ""
    rank: float = 0.0
    is_note: bool = False


SILENT = "silent"
STRUCTURAL = {"cast", "bitcast", "comparison", "index", "flat", "custom rule"}  # at any numbers
_MASK = -1e30  # a logit below it is masked
_SATURATED = 5.0  # logits that differ by less leave no element of a softmax at 0 or 1


# Of a loss that is 0 these are what one wants, such as a hinge loss without a violation.
EXCUSED = {"dead", "clipped", "where", "zero factor", "saturated", "cancels", "not read", "branch"}


def cause_of(cut: ZeroCut, given: DiagnosisSubject, zero: Sequence[int]) -> Cause:
    """The cause of a cut; ``zero`` are the inputs whose gradients are zero."""
    cause = _cause(cut, given, zero)
    return cause._replace(rank=cause.rank + 4) if cut.is_alive else cause


def _cause(cut: ZeroCut, given: DiagnosisSubject, zero: Sequence[int]) -> Cause:
    name, label = cut.place.equation.primitive.name, cut.place.function
    if cut.kind == BRANCH:
        text = "it is read only in a branch of the cond that is not taken"
        return Cause(
            "branch", text, "check the predicate; a branch that is not taken trains nothing"
        )
    if cut.kind == SUM:
        return _of_sum(cut, label, given)
    if name == "stop_gradient":
        return _of_stop(cut, label)
    if name in CUSTOM_RULES and is_users(_file(cut.place)):
        text = f"the rule of {cut.place.operation} returns zeros for operand {cut.operand}"
        return Cause("custom rule", text, f"check it with cg.check_vjp: {_RULES_PAGE}")
    if label in _FLAT or name in _FLAT:
        return _of_flat(label if label in _FLAT else name)
    if name == "while":
        return _of_integers(cut, name, "in the condition of a loop")
    if not any(holds_floats(v) for v in cut.place.equation.outvars) or label in _INDICES:
        return _of_integers(cut, name, label)
    return _of_numbers(cut, name, label, given, zero)


_RULES_PAGE = "clipgrad help custom_rules"


def _file(place: Place) -> str:
    info = getattr(getattr(called_program(place.equation), "jaxpr", None), "debug_info", None)
    return getattr(info, "func_filename", None) or "<frozen"


def _of_stop(cut: ZeroCut, label: str) -> Cause:
    if label in _STOPS:
        text = "stop_gradient detaches it"
        step = "if that is meant, leave it out of argnums"
        return Cause("stop_gradient", text, step, 0.2, True)
    return Cause("stop_gradient", f"{label} detaches it", "", 5, True)


def _of_flat(label: str) -> Cause:
    text = f"{label} is flat everywhere, so its derivative is 0"
    step = f"x + jax.lax.stop_gradient({label}(x) - x) lets the gradient through"
    return Cause("flat", text, step, -0.2)


def _of_integers(cut: ZeroCut, name: str, label: str) -> Cause:
    dtype = next((dtype_of(v) for v in cut.place.equation.outvars), None)
    if name in _CASTS:
        what = "cast" if name == "convert_element_type" else "bitcast"
        text = f"a {what} to {dtype} has no derivative"
        return Cause(what, text, "keep it floating, or let the gradient through by a custom VJP", 1)
    if label in _INDICES or name in _INDICES:
        text = f"the indices of {label if label in _INDICES else name} have no derivative"
        return Cause("index", text, "multiply by the values, or by their softmax", 2)
    text = f"a comparison ({label}) has no derivative"
    return Cause("comparison", text, "use a smooth function such as jax.nn.sigmoid", 3)


def _of_sum(cut: ZeroCut, label: str, given: DiagnosisSubject) -> Cause:
    is_one = 1 in _lengths(cut)
    if "softmax" in label or "logsumexp" in label:
        if is_one:
            return _of_one(cut, label, given)
        if _is_masked(cut):
            return _of_mask(label)
        low, high = cut.block.range(cut.variable)
        if high - low > _SATURATED:
            text = f"the cotangents of {label} cancel: it is saturated"
            return Cause("saturated", text, "make the logits smaller", -0.1)
    text = "its uses have cotangents that are not zero, but their sum is"
    if is_one:
        text += ": a sum or mean over an axis of length 1 is taken from itself or divides itself"
    return Cause("cancels", text, "the loss does not depend on it here", -0.1)


def _is_masked(cut: ZeroCut) -> bool:
    """Whether logits are so small that they are a mask."""
    found, atom = [cut.block.range(cut.variable)], cut.variable
    if atom in cut.block.producers:
        equation = cut.block.producers[atom][1]
        found += [cut.block.range(v) for v in equation.invars if holds_floats(v)]
    return min(low for low, _ in found) < _MASK


def _of_mask(label: str) -> Cause:
    text = f"{label} is constant where its mask leaves one element"
    return Cause("one element", text, "check the mask, and its axis", -0.1, True)


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


def _of_one(cut: ZeroCut, label: str, given: DiagnosisSubject) -> Cause:
    text = f"{label} over an axis of length 1 is constant"
    step = "if a choice is meant, weigh by the softmax over all, before one is chosen"
    return Cause("one element", text, step, -0.1, _is_attention(cut, given))


def _is_attention(cut: ZeroCut, given: DiagnosisSubject) -> bool:
    """Whether the value is a product of two things that are trained, as logits of attention are."""
    block, atom = cut.block, cut.variable
    for _ in range(12):
        while (
            type(atom) is not Literal
            and block.outer
            and (around := block.outside(atom)) is not None
        ):
            block, atom = block.outer, around
        if type(atom) is Literal or atom not in block.producers:
            return False
        number, equation, _ = block.producers[atom]
        if equation.primitive.name == "dot_general":
            found = [block.values.cotangent(number, "operand", k) for k in (0, 1)]
            return all(own is not None for own in found)
        if equation.primitive.name in ("gather", "top_k", "sort", "dynamic_slice"):
            return False
        floats = [v for v in equation.invars if type(v) is not Literal and holds_floats(v)]
        if not floats:
            return False
        atom = floats[0]
    return False


def _of_numbers(
    cut: ZeroCut, name: str, label: str, given: DiagnosisSubject, zero: Sequence[int]
) -> Cause:
    low, high = cut.block.range(cut.variable)
    every = f"all {_elements_of(cut)} elements of its input"
    numbers = f"{low:.3g} to {high:.3g}"
    if name in ABSORBING or name == "div":
        return _of_product(cut, label, given, zero)
    if name in _SPREAD:
        return Cause(SILENT, "the cotangents along an axis add up to 0", "", 0.5, True)
    if name == "convert_element_type":
        return _of_underflow(cut, f"the cast to {dtype_of(cut.place.equation.outvars[0])}")
    is_clip = label in _CLIPS
    if not is_clip and (label in _RELUS or name in ("max", "relu")):
        return _of_relu(cut, label, every, numbers)
    if is_clip or name in ("min", "clamp"):
        text = f"{label} clips {every}, {numbers}"
        return Cause("clipped", text, "widen its bounds, or scale its input")
    if name == "select_n":
        text = f"the {label if 'where' in label else 'where'} takes the other side at every element"
        return Cause("where", text, "check its mask: the condition, its axis, and what it is for",
                     0 if "where" in label or label == "select_n" else 1)  # fmt: skip
    if name in _READERS:
        text = f"{label} reads no element of it that has a cotangent"
        return Cause("not read", text, "check the indices, and what else is read there", 0.5)
    if name in _WRITES:
        is_target = cut.operand == 0
        text = f"{label} writes over all of it" if is_target else f"{label} writes none of it"
        return Cause("overwritten" if is_target else "not read", text, "check the indices")
    if (low, high) == ZERO:
        text = f"its input is 0 throughout, where {label} is flat"
        return Cause("stationary", text, "start from other values", 1.5, True)
    if "softmax" in label and _is_masked(cut):
        return _of_mask(label)
    if label in _SATURATE or name in _SATURATE:
        text = f"{label} is saturated at {every}, {numbers}"
        return Cause("saturated", text, "scale its input, or compute with its logarithm")
    return Cause("flat", f"the derivative of {label} is 0 at {every}, {numbers}")


def _elements_of(cut: ZeroCut) -> str:
    return f"{math.prod(getattr(cut.variable.aval, 'shape', ())):,}"


def _of_relu(cut: ZeroCut, label: str, every: str, numbers: str) -> Cause:
    low, high = cut.block.range(cut.variable)
    if "relu" in label and low > 0:
        return Cause("saturated", f"{label} is flat at {every}, {numbers}", "scale its input")
    text = f"{label} is flat at {every}, {numbers}"
    return Cause("dead", text, "a smaller step or bias, or a leaky form, lets the gradient through")


def _of_underflow(cut: ZeroCut, what: str) -> Cause:
    text = f"a cotangent of {cut.largest:.2g} is less than {what} can hold"
    return Cause("underflow", text, "scale the loss, or compute in float32")


def _of_product(cut: ZeroCut, label: str, given: DiagnosisSubject, zero: Sequence[int]) -> Cause:
    equation = cut.place.equation
    other = equation.invars[1 - cut.operand] if cut.operand < 2 else equation.invars[0]
    low, high = cut.block.range(other)
    if (low, high) == ZERO:
        return _of_zeros(cut, other, given, zero)
    dtype = dtype_of(cut.variable)
    smallest = float(np.finfo(np.dtype(dtype)).tiny) if str(dtype) != "bfloat16" else 1e-38
    size = 1 / min(abs(low), abs(high)) if equation.primitive.name == "div" and low * high else 0
    factor = size if equation.primitive.name == "div" else max(abs(low), abs(high))
    if np.isfinite(cut.largest) and cut.largest * factor < smallest:
        return _of_underflow(cut._replace(largest=cut.largest * factor), str(dtype))
    is_sum = cut.variable.aval.shape != getattr(equation.outvars[0].aval, "shape", ())
    if equation.primitive.name == "mul" and not is_sum:
        text = f"its other factor, {low:.3g} to {high:.3g}, is 0 wherever there is a cotangent"
        return Cause("zero factor", text, "check the masks: they have no element in common")
    return Cause(
        "cancels", f"the products of {label} with the cotangents add up to 0", "", 0.6, True
    )


def _of_zeros(cut: ZeroCut, other: object, given: DiagnosisSubject, zero: Sequence[int]) -> Cause:
    source = zero_source(cut.block, other)
    if source.argument is not None:
        name = given.names[source.argument]
        text = f"it is multiplied by {name}, which is 0 throughout"
        if source.argument not in given.chosen:
            return Cause("zero factor", text, f"check {name}")
        if source.argument not in zero:
            text += " and has a gradient: its first update ends that"
            return Cause("trains later", text, is_note=True)
        text += ", and whose gradient is 0 too: neither ever trains"
        return Cause("zero factors", text, "start one of the two from other values")
    if source.place is not None:
        at = f"{source.place.function} ({source.place.location})"
        text = f"it is multiplied by values that are 0 throughout since {at}"
        return Cause("zero factor", text, "check what makes these zeros")
    if cut.place.equation.primitive.name == "mul" and not source.is_state:
        return Cause(
            "zero factor", "it is multiplied by a constant that is 0", "check the constant"
        )
    text = "it is multiplied by constant zeros, as an initial state is"
    return Cause("constant zeros", text, "", 0.3, True)
