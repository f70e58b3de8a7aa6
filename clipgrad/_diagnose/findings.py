"""Findings in words."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from clipgrad._diagnose.faults import BadValue, VjpFault
from clipgrad._diagnose.raised import Raised
from clipgrad._diagnose.records import GradientFinding
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._diagnose.suspects import MASKED_INPUT, MASKING, Suspect, next_step, suspect
from clipgrad._diagnose.units import SCAN
from clipgrad._docs import docs_page
from clipgrad._jaxpr import dtype_of, holds_floats
from clipgrad._names import Location, Place


def value_finding(origin: BadValue, given: DiagnosisSubject) -> GradientFinding:
    """A finding on where a loss has its NaN or inf from."""
    source, place = origin.source, origin.source.place
    if source.argument is not None:
        return _argument_finding(source.argument, given)
    assert place is not None
    if origin.values is None:
        what = f"{place.operation} takes a constant that is not finite, and the loss depends on it"
    else:
        what = f"{_operation_at(place, origin.values)} is not finite, but its inputs are"
        if not np.isfinite(origin.values).all():
            what = f"{_operation_at(place, origin.values)} is NaN, but none of its inputs is"
    if source.root and source.root.argument is not None:
        what += f" ({given.names[source.root.argument]} contains inf)"
    if origin.becomes and (then := origin.becomes.place):
        is_nan = origin.becomes.badness == 2
        outcome = "turns its inf into NaN" if is_nan else "is not finite because of its inf"
        what += f", and {then.operation} ({then.location}) {outcome}"
    return _operation_finding("value", place, source.step, what, origin.values or (), source.device)


def vjp_finding(
    fault: VjpFault,
    given: DiagnosisSubject,
    hidden: BadValue | None = None,
    overflow: str = "",
) -> GradientFinding:
    """A finding on an operation whose VJP is at fault, or on a value whose cotangents are.

    ``hidden`` is a value that is not finite and that the VJP reads, of this or of another
    operation, and ``overflow`` what is too large for its dtype, from `overflow_of`.
    """
    if fault.summed:
        return _sum_finding(fault, given, overflow)
    place = fault.place
    rule = place.equation.primitive.name in ("custom_vjp_call", "custom_jvp_call")
    of = f"the {'rule' if rule else 'VJP'} of {_operation_at(place, fault.values)}"
    what = f"{of} turns finite cotangents into NaN or inf"
    advice = overflow
    if hidden and hidden.source.place:
        what += _of_hidden(hidden, hidden.source.place, place)
        read, values = hidden.source.place, hidden.values or ()
        advice = _operation_advice(("hidden", "value"), read, values)
        advice = advice or f"; {MASKED_INPUT} ({docs_page('nan')})"
        advice += _masked_axis(read, given)
    where = fault.step, what, fault.values, fault.source.device
    return _operation_finding("vjp", place, *where, advice=advice)


def _of_hidden(hidden: BadValue, read: Place, place: Place) -> str:
    """Such as ", since it reads the result of exp at 199 (model.py:7), which ... hides"."""
    is_own = read.key == place.key
    what = ", since its value is not finite"
    if not is_own:
        package = read.location.package
        function = f" in {package.partition(' ')[0]}" if package and package[0] != "_" else ""
        what = (
            f", since it reads the result of {_operation_at(read, hidden.values or ())}{function}"
        )
        what += f" ({read.location})"
    if hidden.hidden_by:
        hider = f"{hidden.hidden_by.operation} ({hidden.hidden_by.location})"
        what += f"{', and' if is_own else ', which'} {hider} hides it from the loss"
        what = what.replace("hides it", "hides") if not is_own else what
    return what


def _masked_axis(place: Place, given: DiagnosisSubject) -> str:
    """The axis of a softmax, which has subtracted the largest element along it."""
    package = place.location.package or ""
    if package.partition(" ")[0] not in MASKING:
        return ""
    before = itertools.takewhile(
        lambda e: e is not place.equation, place.program_in(given.program).eqns
    )
    found = [e for e in before if e.primitive.name == "reduce_max"]
    if not found:
        return ""
    axes = ", ".join(map(str, found[-1].params["axes"]))
    return f"; the softmax is over axis {axes} of {_type(found[-1].invars[0])}"


def is_suspect(place: Place, values: Sequence[float]) -> bool:
    """Whether the VJP of an operation is known to fail at these values."""
    return _suspect_of("vjp", place, values) is not None


def _suspect_of(kind: str, place: Place, values: Sequence[float]) -> Suspect | None:
    package = place.location.package
    function = package.partition(" ")[0] if package else None
    dtype = next((str(dtype_of(v)) for v in place.equation.outvars if holds_floats(v)), "")
    return suspect(kind, place.operation, function, dtype, values)


def _sum_finding(fault: VjpFault, given: DiagnosisSubject, overflow: str) -> GradientFinding:
    """A finding on a value whose cotangents overflow when they are summed."""
    assert fault.summed is not None
    value, place = fault.summed, fault.place
    finite = f"the cotangents of its {value.uses} uses are finite, but their sum is not"
    if value.argument is not None:
        name = given.names[value.argument]
        what = f"{name} is used more than once; {finite}{overflow}"
        return function_finding("vjp", what, given)
    what = "the carry of the scan" if place.operation == SCAN else f"the value of {place.operation}"
    what += f" is used more than once; {finite}"
    where = fault.step, what, (), fault.source.device
    return _operation_finding("vjp", place, *where, advice=overflow)


def overflow_of(cotangent: Place, values: Sequence[float]) -> str:
    """The advice for an operation of the backward pass that makes inf of finite operands."""
    dtype = next(dtype_of(v) for v in cotangent.equation.outvars if holds_floats(v))
    limit = float(jnp.finfo(dtype).max)
    name = "a cotangent"
    if cotangent.operation == "convert_element_type":
        name = f"the cotangent {values[0]:.4g}"
    instead = "bound it with cg.error_clip or cg.error_clip_by_name"
    if dtype == jnp.float16:
        instead = "multiply the loss by a smaller scale, or compute in bfloat16 or float32"
    return f"; {name} exceeds {limit:.5g}, the largest {dtype}; {instead}"


def data_finding(
    origin: BadValue, fault: VjpFault, sources: Sequence[int], given: DiagnosisSubject
) -> GradientFinding:
    """A finding on what is not finite in an argument, or is computed from some that are data."""
    found = value_finding(origin, given)
    names = ", ".join(given.names[i] for i in sources)
    computed = f"; it is computed from {names}" if names and origin.source.argument is None else ""
    reader = f"{fault.place.operation} ({fault.place.location})"
    what = f"{computed}; the VJP of {reader} reads it"
    return dataclasses.replace(found, message=found.message + what)


def raised_finding(raised: Raised | None, error: str, given: DiagnosisSubject) -> GradientFinding:
    """A finding on an operation that raises an error; None for one that was not found."""
    if raised is None:
        return function_finding("raises", f"a callback in it raises {error}", given)
    place, steps = raised.place, raised.steps
    what = f"{place.operation} raises {raised.text}"
    if raised.is_finite:
        what += "; its operands are finite"
    return _operation_finding("raises", place, steps[-1] if steps else None, what)


def function_finding(kind: str, message: str, given: DiagnosisSubject) -> GradientFinding:
    """A finding at the function itself."""
    code = getattr(given.fun, "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code else (None, None)
    where = f"{Location(file, line, None)}: " if file else ""
    return GradientFinding(kind, file, line, "argument", "", None, where + message)


def _argument_finding(argument: int, given: DiagnosisSubject) -> GradientFinding:
    array = jnp.asarray(given.inputs[argument])
    count = int(jnp.sum(~jnp.isfinite(array)))
    name = given.names[argument]
    what = f"{count} of {array.size} elements of {name} are not finite before the loss uses them"
    if argument in given.chosen:
        what += "; the step that made them so is an earlier one: diagnose its capture or checkpoint"
        what += f" ({docs_page('my_run_blew_up')})"
    return function_finding("value", what, given)


def _operation_finding(
    kind: str,
    place: Place,
    step: int | None,
    what: str,
    values: Sequence[float] = (),
    device: str | None = None,
    advice: str = "",
) -> GradientFinding:
    where = place.location
    around = inside_of(place, where)
    if step is not None:
        own = [place.equation.params["length"]] if place.operation == SCAN else []
        around += f", at step {step} of {[*place.nest, *own][-1]}"
    around += f", on device {device}" if device else ""
    message = f"{where}: {what}{around}{advice or _operation_advice((kind,), place, values)}"
    at = where.file, where.line, place.operation, place.module, step
    return GradientFinding(kind, *at, message, device=device)


def inside_of(place: Place, where: Location) -> str:
    """The function of a package, and the module, that an operation is in, as the end of a text."""
    parts = [f", in {where.package}"] if where.package and where.file else []
    parts += [f", in module {place.module}"] if place.module else []
    return "".join(parts)


def _operation_advice(kinds: Sequence[str], place: Place, values: Sequence[float]) -> str:
    """The advice for an operation, of the first of some kinds that has one; "" if there is none."""
    rows = (_suspect_of(kind, place, values) for kind in kinds)
    if row := next(filter(None, rows), None):
        return f"; {row.advice(place.operation)}"
    steps = (next_step(kind, place.operation, values) for kind in kinds)
    step = next(filter(None, steps), None)
    return f"; {step}" if step else ""


def _type(x: Any) -> str:
    return f"{x.aval.dtype}{list(x.aval.shape)}"


def _operation_at(place: Place, values: Sequence[float]) -> str:
    """Such as "sqrt at 0", or "gather of index 14 on axis 0 of float32[10,4]"."""
    if (
        place.operation == "gather" and len(values) == 2
    ):  # the index and its axis, see `operands_of`
        array = _type(place.equation.invars[0])
        return f"gather of index {values[0]:.0f} on axis {values[1]:.0f} of {array}"
    shown = [v for v in place.equation.invars if holds_floats(v)][: len(values)]
    numbers = [f"{np.float64(value):.4g}" for value, _ in zip(values, shown, strict=False)]
    return f"{place.operation} at {', '.join(numbers)}" if numbers else place.operation
