"""Findings in words: what an entry did, with its numbers, and what to do about it."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import reduce_max_p

from clipgrad._diagnose.advice import MASKED_INPUT, Suspect, is_lookup, next_step, suspect
from clipgrad._diagnose.guilty import MASKING, is_of_users_rule
from clipgrad._diagnose.index_ranges import indices_of
from clipgrad._diagnose.levels import INF, NAN, level, levels
from clipgrad._diagnose.origins import (
    Argument,
    Carry,
    Constant,
    Located,
    Operation,
    Origin,
    Raised,
    Sum,
)
from clipgrad._diagnose.records import GradientFinding
from clipgrad._diagnose.rule_faults import fault_in_rule, place_in_rule
from clipgrad._diagnose.tape import Entry
from clipgrad._errors import docs_page, first_line
from clipgrad._losses import TracedLoss
from clipgrad._names import Location, Place
from clipgrad._programs import (
    Does,
    at_first,
    dtype_of,
    equations,
    has_custom_rule,
    holds_floats,
)

_ERROR = re.compile(r"^(?:[\w.]+\.)?_?(\w+(?:Error|Exception|Warning)): ", re.MULTILINE)


# -- The findings.


def value_finding(
    source: Origin, traced: TracedLoss, then: Operation | None = None
) -> GradientFinding:
    """A finding on where a value has its NaN or inf from; ``then`` is what makes NaN of an inf."""
    match source:
        case Argument(number):
            return _argument_finding(number, traced)
        case Constant(reader):
            return _constant_finding(reader, traced)
        case Operation(entry):
            values = _values(entry, entry.outs)
            what = f"{_operation_at(entry, values)} is not finite, but its inputs are"
            if not np.isfinite(values).all() or any(map(level, entry.ins)):
                what = f"{_operation_at(entry, values)} is NaN, but none of its inputs is"
                what += _infinite_arguments(entry, traced)
            if then:
                where = then.entry.place.location
                what += f", and {_op(then.entry)} ({where}) turns its inf into NaN"
            return operation_finding("value", source, what, _advice(("value",), entry, values))


def vjp_finding(fault: Operation, hidden: Operation | None = None) -> GradientFinding:
    """A finding on an operation whose VJP is at fault.

    ``hidden`` is where a value that is not finite is from, which the VJP reads.
    """
    entry = fault.entry
    values = _values(entry, entry.in_cotangents, of_itself=True)
    rule = "rule" if has_custom_rule(entry.equation) else "VJP"
    at = f"the {rule} of {_operation_at(entry, values)}"
    what = f"{at} turns finite cotangents into NaN or inf"
    if hidden is None and (inside := fault_in_rule(entry)):
        where = place_in_rule(entry, inside)
        what += f", since its {operation_at(inside.entry)} ({where}) is not finite"
    advice = _advice(("vjp",), entry, values)
    if _suspect("vjp", entry, values) is None:
        if hidden:
            read = _values(hidden.entry, hidden.entry.outs)
            what += _of_hidden(hidden.entry, read, is_itself=hidden.entry is entry)
            advice = _advice(("hidden", "value"), hidden.entry, read)
            advice = advice or f"; {MASKED_INPUT} ({docs_page('nan')})"
            advice += _masked_axis(hidden.entry)
        elif not advice:
            advice = _overflow(entry)
    return operation_finding("vjp", fault, what, advice)


def hidden_finding(hidden: Operation, names: str) -> GradientFinding:
    """A finding on an inf that the loss hides, of which the compiled gradient makes NaN."""
    what = f"{operation_at(hidden.entry)} is inf; the loss hides it, as a division does, but the "
    what += f"compiled gradient of {names} is not finite"
    step = "; keep it finite: bound it, rescale it, or compute with its logarithm"
    return operation_finding("vjp", hidden, what, step)


def sum_finding(fault: Sum, traced: TracedLoss) -> GradientFinding:
    """A finding on a value whose cotangents overflow when they are summed."""
    finite = "is used more than once; the cotangents of its uses are finite, but their sum is not"
    value = fault.value
    if isinstance(value, Argument):
        name, dtype = traced.names[value.number], dtype_of(traced.inputs[value.number])
        return function_finding("sum", f"{name} {finite}{_too_large(dtype)}", traced)
    entry = value.entry
    name = f"the value of {_op(entry)}" if isinstance(value, Operation) else "the carry of the scan"
    dtype = next(dtype_of(v) for v in entry.equation.outvars if holds_floats(v))
    return operation_finding("sum", value, f"{name} {finite}", _too_large(dtype))


def data_finding(
    source: Argument | Operation, reader: Entry, arguments: Sequence[int], traced: TracedLoss
) -> GradientFinding:
    """A finding on what is not finite in an argument, or is computed from some that are data."""
    finding = value_finding(source, traced)
    what = ""
    if isinstance(source, Operation) and arguments:
        what = f"; it is computed from {', '.join(traced.names[i] for i in arguments)}"
    what += f"; the VJP of {_op(reader)} ({reader.place.location}) reads it"
    if isinstance(source, Argument) and source.number in traced.chosen:
        what += f"; {MASKED_INPUT} ({docs_page('nan')})"
    return dataclasses.replace(finding, message=finding.message + what)


def raised_finding(raised: Raised | None, error: str, traced: TracedLoss) -> GradientFinding:
    """A finding on an operation that raises an error; None for one that was not found."""
    if raised is None:
        return function_finding("raises", f"a callback in it raises {error}", traced)
    entry = raised.entry
    what = f"{_op(entry)} raises {error}"
    if not raised.is_backward and not any(map(level, entry.ins)):
        what += "; its operands are finite"
    return operation_finding("raises", Operation(entry), what, _advice(("raises",), entry, []))


def function_finding(kind: str, message: str, traced: TracedLoss) -> GradientFinding:
    """A finding at the function itself."""
    code = getattr(traced.fun, "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code else (None, None)
    where = f"{Location(file, line, None)}: " if file else ""
    return GradientFinding(kind, file, line, "argument", "", None, where + message)


def _constant_finding(reader: Entry | None, traced: TracedLoss) -> GradientFinding:
    if reader is None:
        what = "the loss is a constant that is not finite; it is computed from no argument"
        return function_finding("value", what, traced)
    what = f"{_op(reader)} takes a constant that is not finite, and the loss depends on it"
    return operation_finding("value", Operation(reader), what, _advice(("value",), reader, []))


def _argument_finding(argument: int, traced: TracedLoss) -> GradientFinding:
    array = jnp.asarray(traced.inputs[argument])
    count = int(jnp.sum(~jnp.isfinite(array)))
    name = traced.names[argument]
    what = f"{count} of {array.size} elements of {name} are not finite before the loss uses them"
    if argument in traced.chosen:
        what += "; the step that made them so is an earlier one: diagnose its capture or checkpoint"
        what += f" ({docs_page('my_run_blew_up')})"
    return function_finding("value", what, traced)


def operation_finding(kind: str, located: Located, what: str, advice: str) -> GradientFinding:
    """A finding at the line of an entry, with its module, its step and its device."""
    entry, step = located.entry, located.step
    place, device = entry.place, _device(kind, entry)
    where = place.location
    around = f", in {where.package}" if where.package and where.file else ""
    around += _of_derivative(entry)
    around += f", in module {place.module}" if place.module else ""
    if step is not None:
        is_inside = isinstance(located, Carry)
        length = entry.equation.params["length"] if is_inside else place.nest[-1]
        around += f", at step {step} of {length}"
    around += f", on device {device}" if device else ""
    message = f"{where}: {what}{around}{advice}"
    at = where.file, where.line, place.operation, place.module, step
    return GradientFinding(kind, *at, message, device=device)


def _device(kind: str, entry: Entry) -> str | None:
    """The coordinates of the devices whose values or cotangents are bad; a cut has none."""
    if kind == "zero" or not entry.tape.runs.axes:
        return None
    arrays = [
        x for x in (entry.outs if kind == "value" else entry.in_cotangents) if holds_floats(x)
    ]
    if not arrays:  # one that raises has no results
        return None
    bad = np.max([levels(x, 1) for x in arrays], axis=0)
    return entry.place.device([(int(d),) for d in np.flatnonzero(bad == np.max(bad))])


def _of_derivative(entry: Entry) -> str:
    """The operation of the user's in whose derivative an operation is, as of an inner gradient."""
    call, tape = entry.place.derivative_of, entry.tape
    if call is None:
        return ""
    while tape.within:
        tape = tape.within.entry.tape
    places = map(Place, equations(tape.jaxpr))
    first = next((place for place in places if place.derivative_of == call), entry.place)
    is_itself = first.equation is entry.equation or first.operation == _op(entry)
    return "" if is_itself else f", in the derivative of {first.operation}"


def error_text(error: BaseException) -> str:
    """The kind and the first sentence of the error that a callback raised."""
    raised = list(_ERROR.finditer(str(error)))
    if not raised:
        return first_line(error)
    text = " ".join(str(error)[raised[-1].end() :].partition("\n\n")[0].split())
    return f"{raised[-1].group(1)}: {text.partition('. ')[0].rstrip('.')}"


# -- The numbers of an entry.


def _values(entry: Entry, bad: Sequence[Any], of_itself: bool = False) -> list[float]:
    """The elements of the floating operands where a result is bad, or the operand's cotangent.

    Of a gather these are the index that is out of range, and its axis.
    """
    if is_lookup(entry.equation) and not of_itself:
        indices = indices_of(entry)
        return [float(number) for number in indices and indices.first_outside or ()]
    if of_itself:
        pairs = [(x, _bad_elements(b)) for x, b in zip(entry.ins, bad, strict=True) if level(b)]
    else:
        results = [y for y in bad if holds_floats(y)]
        mask = _bad_elements(max(results, key=lambda y: (level(y), y.size))) if results else None
        pairs = [(x, mask) for x in entry.ins if holds_floats(x)]
    return [float(at_first(mask, x)) for x, mask in pairs if mask is not None]


def _bad_elements(x: Any) -> Any:
    """The elements of an array that are as bad as any of it."""
    return jnp.isnan(x) if level(x) == NAN else jnp.isinf(x)


def operation_at(entry: Entry) -> str:
    """The operation that made a value that is not finite, with the numbers of its operands."""
    return _operation_at(entry, _values(entry, entry.outs))


def _operation_at(entry: Entry, values: Sequence[float]) -> str:
    """Such as "sqrt at 0", or "gather of index 14 on axis 0 of float32[10,4]"."""
    if is_lookup(entry.equation) and len(values) == 2:
        array = array_type(entry.equation.invars[0])
        return f"gather of index {values[0]:.0f} on axis {values[1]:.0f} of {array}"
    numbers = ", ".join(f"{np.float64(value):.4g}" for value in values)
    return f"{_op(entry)} at {numbers}" if numbers else _op(entry)


def _op(entry: Entry) -> str:
    return entry.place.operation


def array_type(x: Any) -> str:
    """The type and shape of a variable, such as "float32[5, 4]"."""
    return f"{x.aval.dtype}{list(x.aval.shape)}"


def _infinite_arguments(entry: Entry, traced: TracedLoss) -> str:
    """The arguments that an infinity among the operands is, or comes from unchanged."""
    bad = [i for i, x in enumerate(traced.inputs) if level(x) == INF]
    return f" ({', '.join(traced.names[i] for i in bad)} contains inf)" if bad else ""


def _of_hidden(read: Entry, values: Sequence[float], is_itself: bool) -> str:
    """Such as ", since it reads the result of exp at 199 (model.py:7)"."""
    if is_itself:
        return ", since its value is not finite there"
    package = read.place.location.package
    function = f" in {package.partition(' ')[0]}" if package and package[0] != "_" else ""
    result = f"{_operation_at(read, values)}{function} ({read.place.location})"
    return f", since it reads the result of {result}, which is not finite"


def _masked_axis(entry: Entry) -> str:
    """The axis of a softmax, which has subtracted the largest element along it."""
    package = entry.place.location.package or ""
    before = entry.tape.entries[: entry.number]
    maxima = [e.equation for e in before if e.equation.primitive is reduce_max_p]
    if package.partition(" ")[0] not in MASKING or not maxima:
        return ""
    axes = ", ".join(map(str, maxima[-1].params["axes"]))
    return f"; the softmax is over axis {axes} of {array_type(maxima[-1].invars[0])}"


# -- The advice.


def is_suspect(entry: Entry) -> bool:
    """Whether the VJP of an operation is known to fail at its numbers."""
    return _suspect("vjp", entry, _values(entry, entry.in_cotangents, of_itself=True)) is not None


def _suspect(kind: str, entry: Entry, values: Sequence[float]) -> Suspect | None:
    package = entry.place.location.package
    function = package.partition(" ")[0] if package else None
    dtype = next((str(dtype_of(v)) for v in entry.equation.outvars if holds_floats(v)), "")
    return suspect(kind, entry.equation, function, dtype, values)


def _advice(kinds: Sequence[str], entry: Entry, values: Sequence[float]) -> str:
    """The advice for an operation, of the first of some kinds that has one; "" if there is none."""
    for kind in kinds:
        if row := _suspect(kind, entry, values):
            return f"; {row.advice(_op(entry))}"
    is_foreign = has_custom_rule(entry.equation) and not is_of_users_rule(entry)
    steps = (next_step(kind, entry.equation, values) for kind in kinds if not is_foreign)
    step = next(filter(None, steps), None)
    return f"; {step}" if step else ""


def _overflow(entry: Entry) -> str:
    """The advice for a VJP that makes inf of finite numbers by their size."""
    bad = [(i, b) for i, b in enumerate(entry.in_cotangents) if level(b)]
    is_inf = all(level(b) == INF for _, b in bad) and not any(map(level, entry.ins))
    if not is_inf or not entry.numeric.overflows:
        return ""
    number = None
    if entry.numeric.does is Does.CASTS:
        number = float(at_first(_bad_elements(bad[0][1]), entry.out_cotangents[0]))
    return _too_large(dtype_of(bad[0][1]), number)


def _too_large(dtype: Any, number: float | None = None) -> str:
    limit = float(jnp.finfo(dtype).max)
    name = "a cotangent" if number is None else f"the cotangent {number:.4g}"
    instead = "bound it with cg.error_clip or cg.error_clip_by_name"
    if dtype == jnp.float16:
        instead = "multiply the loss by a smaller scale, or compute in bfloat16 or float32"
    return f"; {name} exceeds {limit:.5g}, the largest {dtype}; {instead}"


def bad_reads(entry: Entry) -> list[Any]:
    """The operands that are not finite where a cotangent of an operand is not."""
    pairs = zip(entry.equation.invars, entry.ins, strict=True)
    return [a for a, x in pairs if not entry.tape.is_constant(a) and _is_bad_there(entry, x)]


def has_bad_result(entry: Entry) -> bool:
    """Whether a result is not finite where a cotangent of an operand is not."""
    return any(_is_bad_there(entry, y) for y in entry.outs)


def _is_bad_there(entry: Entry, x: Any) -> bool:
    is_bad = levels(x, np.ndim(x)) > 0
    bad = [levels(b, b.ndim) > 0 for b in entry.in_cotangents if level(b)]
    return any(np.any(is_bad & b) if is_bad.shape == b.shape else is_bad.any() for b in bad)
