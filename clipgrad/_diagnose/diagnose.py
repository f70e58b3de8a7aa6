"""From a loss and its arguments to the operation that spoils its gradient."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from clipgrad._diagnose.blocks import Block
from clipgrad._diagnose.cotangents import (
    Summary,
    measure,
    parts_of_arguments,
)
from clipgrad._diagnose.diagnosis import GradientDiagnosis
from clipgrad._diagnose.examples import bad_examples
from clipgrad._diagnose.faults import (
    BadValue,
    VjpFault,
    bad_value,
    first_fault,
    is_value_at_fault,
    origin_of_loss,
)
from clipgrad._diagnose.findings import (
    data_finding,
    function_finding,
    is_suspect,
    overflow_of,
    raised_finding,
    value_finding,
    vjp_finding,
)
from clipgrad._diagnose.origins import CONSTANT, Origins, origins
from clipgrad._diagnose.raised import is_of_callback, raised_in, told_error, without
from clipgrad._diagnose.recorded import operands_of
from clipgrad._diagnose.records import GradientFinding
from clipgrad._diagnose.subject import (
    NO_MODELS,
    CapturedArgs,
    DiagnosisSubject,
    named_arguments,
    subject,
)
from clipgrad._diagnose.suspects import OVERFLOWING
from clipgrad._diagnose.trends import trend_findings
from clipgrad._diagnose.underflow import may_underflow, underflow_findings
from clipgrad._diagnose.units import CLOSED, SCAN, module_sites, units_and_rows
from clipgrad._diagnose.zeros import zero_findings
from clipgrad._errors import first_line
from clipgrad._jaxpr import settings_of_runs
from clipgrad._program import GradientProgram, dependence


def diagnose(
    fun: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any] | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    examples: str | int | Sequence[str | int] | None = None,
    data: str | int | Sequence[str | int] | None = None,
) -> GradientDiagnosis:
    r"""Finds the operation that makes a gradient NaN, explode, vanish, underflow or exactly zero.

    The loss is traced once; you do not tag or edit it. One compiled backward pass measures its
    cotangents by module and by step of each scan. If a gradient is not finite, a second pass
    follows the cotangents from operation to operation.

    Guarantees:
      * A "value" finding is the first operation with finite inputs and a value that is not finite,
        or with a NaN but without a NaN in its inputs, if the loss depends on it; a mask of -inf is
        not a finding. If a NaN or an inf comes from the inf of an earlier operation, that earlier
        operation is the finding, even if its inf has become 0 between the two.
      * A "vjp" finding is the first operation in backward order whose VJP turns finite cotangents
        into NaN or inf. It comes after the "value" finding, and there is at most one of each. If it
        reads NaN or inf from data that is not differentiated, the finding is a "value": the
        argument, or the operation that computed it.
      * A "grows" or "shrinks" finding is a steady trend of the norms, by layer or by step of scans,
        over four orders of magnitude in all: growth by at least 1.05 a step, decay by at most 0.6,
        or a slower decay over thirty orders or until it rounds to zero. Decay by a fixed factor, in
        iterations to a fixed point and in gates is not a finding while parameters keep a gradient.
      * If the gradient of a leaf is exactly zero, a "zero" finding is the operation at which it is
        cut, with the reason: its result has a gradient, and its operand has none. What may be meant
        is a note, such as `jax.lax.stop_gradient`, a leaf that the loss does not read, or a factor
        of zero that has a gradient itself.
      * Each finding names the line in your file, the module, and the step of the innermost scan, in
        eager code and inside `jax.jit`, `jax.lax.scan`, `jax.lax.cond`, `jax.checkpoint`,
        `jax.shard_map` and `jax.pmap`; a "value" finding also inside `jax.lax.while_loop`.
      * Inside `jax.shard_map` and `jax.pmap` a finding names the device, such as "data=5": the
        first device on which the operation fails. A fault on one device hides none on another.
      * If a callback raises an error, as a check or a solver does, a "raises" finding is the
        operation that it is in. If this operation gets a NaN or inf, the finding is where that is
        from, and a note has the error.
      * A function with a custom rule is one operation; if its rule is right, a note names it. A
        kernel of `jax.experimental.pallas` is one operation too.
      * A loss or a gradient that is not finite always has a finding. It is the compiled loss that
        counts: XLA may simplify ``log(exp(x))``, which overflows in eager code, to ``x``.
      * `jax.debug_nans`, `jax.debug_infs` and a transfer guard are off inside, and restored after.
      * Arguments and models are not changed.

    Args:
      fun: the loss, a function that returns a scalar, or ``(scalar, aux)``.
      args: the tuple of its arguments.
      kwargs: its keyword arguments.
      argnums: the positions of the arguments to differentiate, with respect to their floating
        leaves.
      has_aux: whether ``fun`` returns ``(scalar, aux)``.
      examples: the name or position of an argument with the axis of the batch, or several. Each
        example is then evaluated alone, as a batch of one, or, if the loss needs whole batches, as
        a batch of copies. The report lists the examples whose loss or gradient is bad. Arguments
        that the loss takes only with as many rows are cut too; notes name them, and those with as
        many rows that are not cut.
      data: the name or position of an argument that is data, or several. A leaf that has a
        gradient, but by no operation that reads the data, is then a "zero" finding too: only a
        penalty trains it.

    Returns:
      A `GradientDiagnosis`; ``print`` it.

    Raises:
      TypeError: ``fun`` is not a function, ``args`` not a tuple or ``kwargs`` not a mapping.
      ValueError: the loss is not a floating scalar, ``argnums`` is out of range, there is nothing
        to differentiate, ``fun`` has side effects (writing to a `jax.new_ref` of its own is none),
        ``examples`` does not name a batch, or ``data`` names no argument.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> found = cg.diagnose(lambda x: jnp.sum(jnp.sqrt(x)), (jnp.array([4.0, 0.0]),))
      >>> found.ok, found.findings[0].kind, found.findings[0].operation
      (False, 'vjp', 'sqrt')
    """
    with settings_of_runs(), jax.disable_jit(False):
        trace = functools.partial(subject, fun, argnums=argnums, has_aux=has_aux)
        try:
            given = trace(args, kwargs)
        except Exception as error:
            if isinstance(args, CapturedArgs):
                error.add_note(NO_MODELS)
            raise
        keys = [] if data is None else named_arguments("data", data, fun, args, kwargs or {})
        inputs = frozenset(i for i, (key, _) in enumerate(given.paths) if key in keys)
        if keys and not inputs:
            raise ValueError(f"data: got {data!r}, expected an argument with arrays")
        found = _diagnosis_or_error(given, inputs)
        if not found.findings and isinstance(args, CapturedArgs) and args.expected:
            found = dataclasses.replace(found, notes=(*found.notes, args.expected))
        if examples is None:
            return found
        bad, notes = bad_examples(given, trace, args, kwargs or {}, examples)
        return dataclasses.replace(found, examples=bad, notes=(*found.notes, *notes))


def _diagnosis_or_error(given: DiagnosisSubject, data: frozenset[int]) -> GradientDiagnosis:
    """The diagnosis of a loss, also if a callback in it raises an error.

    If the operation that raises gets what is not finite, the finding is on where that is from.
    """
    try:
        return _diagnosis(given, data)
    except Exception as error:
        if not is_of_callback(error):
            raise
        raised, told = raised_in(given), told_error(error)
    finding = raised_finding(raised, told, given)
    if raised and raised.is_finite is False:
        with contextlib.suppress(Exception):  # such as one that another callback raises
            found = _diagnosis(without(given, raised))
            if found.findings:
                return dataclasses.replace(found, notes=(*found.notes, finding.message))
    return GradientDiagnosis((finding,), (), ())


def _diagnosis(given: DiagnosisSubject, data: frozenset[int] = frozenset()) -> GradientDiagnosis:
    block = Block(given.program)
    sites, parts = module_sites(block), parts_of_arguments(block, given.chosen)
    run = functools.partial(measure, given.program, given.inputs, given.chosen)
    every = {site.site: site for site in [*sites, *itertools.chain(*parts)]}
    loss, grads, measured = run(list(every.values()))
    pairs = list(units_and_rows(block, measured))
    found = tuple(row for _, row in pairs)
    each = zip(parts, grads, strict=True)
    parameters = [p for own, grad in each for p in [measured[s.site] for s in own] or [grad]]
    trends = list(trend_findings(pairs, given, grads, parameters))
    growths = [trend for trend in trends if not isinstance(trend, str)]
    findings = [*_nonfinite(given, loss, grads, growths), *growths]
    notes = [*_block_notes(block), *(trend for trend in trends if isinstance(trend, str))]
    if may_underflow(found, given, grads):
        try:
            others = [run(sites, wide=True), run(sites, is_scaled=True)]
            same = [[r for _, r in units_and_rows(block, measured)] for *_, measured in others]
            each = [grads, *(own for _, own, _ in others)]
            findings += underflow_findings(found, same, given, each)
        except (TypeError, ValueError, NotImplementedError) as error:
            # An operation may be there for half precision alone.
            notes += [f"diagnose did not look for underflow: {first_line(error)}"]
    if not {finding.kind for finding in findings} & {"value", "vjp"}:
        slices = [[measured[s.site] for s in own] for own in parts]
        zeros, more = zero_findings(given, block, loss, grads, slices, data)
        findings = _with_zeros(findings, zeros)
        notes += more
    return GradientDiagnosis(tuple(findings), found, tuple(notes))


def _with_zeros(
    findings: list[GradientFinding], zeros: list[GradientFinding]
) -> list[GradientFinding]:
    """All findings; one of underflow has the leaves that it leaves at zero."""
    lost = ", ".join(own.leaf for own in zeros if own.cause == "underflow")
    if not lost or not {finding.kind for finding in findings} & {"underflow", "shrinks"}:
        return [*findings, *zeros]
    then = f"; the gradient of {lost} is exactly zero"
    named = [
        dataclasses.replace(own, leaf=lost, cause=own.kind, message=own.message + then)
        if own.kind == "underflow" else own
        for own in findings
    ]  # fmt: skip
    return [*named, *(own for own in zeros if own.cause != "underflow")]


def _nonfinite(
    given: DiagnosisSubject,
    loss: float,
    grads: list[Summary],
    trends: Sequence[GradientFinding],
) -> list[GradientFinding]:
    """The findings of NaN and inf: in the value, and then in the backward pass.

    A sum over the steps of a scan in which cotangents grow is not finite for that reason.
    """
    findings, origin, forward = [], None, None
    if not np.isfinite(loss):
        forward = origins(given.program, given.inputs)
        origin = origin_of_loss(given.program, given.inputs, forward)
        what = f"the compiled loss is {loss}, but each operation alone has a finite value"
        unexplained = function_finding("value", what, given)
        findings.append(value_finding(origin, given) if origin else unexplained)
    bad = [i for i, grad in enumerate(grads) if np.any(grad.nonfinite)]
    if bad:
        excused = is_value_at_fault(origin, forward) if origin and forward else lambda *_: False
        gradient = GradientProgram.of(given.program, given.inputs, given.chosen)
        found = first_fault(gradient, given.inputs, bad, excused)
        growing = {(t.file, t.line) for t in trends if t.kind == "grows" and t.operation == SCAN}
        scans = found.summed.scans if found and found.summed else ()
        if any(scan.location[:2] in growing for scan in scans):
            return findings
        if found:
            findings.append(_of_vjp(found, forward, gradient, given))
        elif not findings:
            what = f"the gradient of {', '.join(given.names[given.chosen[i]] for i in bad)} is not "
            what += "finite; diagnose did not find the operation"
            findings.append(function_finding("vjp", what, given))
    return findings


def _of_vjp(
    fault: VjpFault, forward: Origins | None, gradient: GradientProgram, given: DiagnosisSubject
) -> GradientFinding:
    """The finding on a VJP; if it reads NaN or inf of data, the finding on these."""
    place = fault.source.place
    if fault.source.badness == 1 and place is not None and place.operation in OVERFLOWING:
        values = operands_of(gradient.program, [*given.inputs, *gradient.seeds], fault.source)
        if np.isfinite(values).all():
            return vjp_finding(fault, given, overflow=overflow_of(place, values))
    key = fault.place.key, fault.source.steps
    if not fault.bad_operands:
        if fault.summed or is_suspect(fault.place, fault.values):
            return vjp_finding(fault, given)
        hidden = (forward or origins(given.program, given.inputs)).hidden
        source = fault.source._replace(place=fault.place)
        own = BadValue(source, fault.values, hidden_by=hidden.get(key)) if key in hidden else None
        return vjp_finding(fault, given, own)
    forward = forward or origins(given.program, given.inputs)
    operands = forward.operands.get(key, [])
    sources = [operands[i].source for i in fault.bad_operands if operands]
    source = next((source for source in sources if source and source.time != CONSTANT), None)
    if source is None:
        return vjp_finding(fault, given)
    read = dependence(given.program)[source.place.key] if source.place else []
    arguments = frozenset().union(*read)
    found = bad_value(given.program, given.inputs, source)
    if source.place and arguments & {*given.chosen}:
        hider = forward.hidden.get((source.place.key, source.steps))
        return vjp_finding(fault, given, found._replace(hidden_by=hider))
    return data_finding(found, fault, sorted(arguments), given)


def _block_notes(block: Block) -> list[str]:
    """Notes on operations that have rules of their own, or are not measured inside."""
    notes = {}
    for own, equation in block.operations():
        place, name = own.place(equation), equation.primitive.name
        if name == "custom_vjp_call":
            text = f"{place.operation} has a custom VJP, and is measured as one operation"
        elif name in CLOSED:
            text = f"{name} is measured as one operation, not inside"
        else:
            continue
        notes.setdefault(text, f"{place.location}: {text}")
    return list(notes.values())
