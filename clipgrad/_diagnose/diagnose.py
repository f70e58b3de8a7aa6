"""From a loss and its arguments to the operation that spoils its gradient."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from clipgrad._arrays import check_arguments, explain_call
from clipgrad._diagnose.captured_args import NO_MODELS, CapturedArgs
from clipgrad._diagnose.causes import UNDERFLOW
from clipgrad._diagnose.diagnosis import GradientDiagnosis
from clipgrad._diagnose.examples import arguments_of_examples, bad_examples, rows_of_examples
from clipgrad._diagnose.finding_kinds import BROKEN, FINDING_KINDS
from clipgrad._diagnose.finding_texts import error_text, raised_finding, value_finding
from clipgrad._diagnose.guilty import raised_from
from clipgrad._diagnose.measure import measure
from clipgrad._diagnose.nan_judge import broken, raised_in
from clipgrad._diagnose.program_units import (
    all_units,
    inner_programs,
    module_sites,
    units_and_rows,
)
from clipgrad._diagnose.records import GradientFinding
from clipgrad._diagnose.tape import is_of_callback
from clipgrad._diagnose.trends import trend_findings
from clipgrad._diagnose.underflow import underflow_findings
from clipgrad._diagnose.zeros import zero_findings
from clipgrad._errors import first_line
from clipgrad._losses import TracedLoss, traced_loss
from clipgrad._names import placed_equations
from clipgrad._programs import (
    has_custom_vjp,
    is_cond,
    is_foreign,
    is_while,
    operation_name,
    settings_of_runs,
)


@explain_call()
def diagnose(
    fun: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any] | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    examples: str | int | Sequence[str | int] | None = None,
) -> GradientDiagnosis:
    """Finds the operation that makes a gradient NaN, infinite, zero, or far too large or small.

    You do not tag or edit the loss. The report names the line in your file, and what to write
    there.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> diagnosis = cg.diagnose(lambda x: jnp.sum(jnp.sqrt(x)), (jnp.array([4.0, 0.0]),))
      >>> diagnosis.ok, diagnosis.findings[0].kind, diagnosis.findings[0].operation
      (False, 'vjp', 'sqrt')

    Args:
      fun: the loss, a function that returns a floating scalar, or ``(scalar, aux)``.
      args: the tuple of its arguments; for one argument ``(params,)``.
      kwargs: its keyword arguments.
      argnums: the position, or positions, of the arguments to differentiate, with respect to their
        floating leaves.
      has_aux: ``True`` if ``fun`` returns ``(scalar, aux)``.
      examples: the argument that has the batch, by name or position, to look for single bad
        examples as well; several if several have the axis of the batch, which is the first. Each
        example then runs alone, as a batch of one, or, if the loss needs whole batches, as a batch
        of copies.

    Returns:
      A `GradientDiagnosis`; ``print`` it.

    Raises:
      TypeError: ``fun`` is not a function, ``args`` not a tuple or ``kwargs`` not a mapping.
      ValueError: the loss is not a floating scalar, ``argnums`` is out of range, there is nothing
        to differentiate, ``fun`` has side effects (writing to a `jax.new_ref` of its own is none),
        or ``examples`` does not name a batch.

    The loss is traced once. One compiled backward pass measures the cotangents by module and by
    step of each scan. Only if something is not finite, exactly zero, or raises an error, the loss
    runs a second time, operation by operation: that run keeps what each operation read and made,
    and the cotangents of both. A loop or a function is one operation in that run, and is opened if
    the fault is inside.

    ===========  ===================================================================================
    finding      meaning
    ===========  ===================================================================================
    "value"      the first operation with finite inputs and a value that is not finite
    "vjp"        the first operation, going backward, that turns finite cotangents into NaN or inf
    "sum"        finite cotangents of one value have a sum that is not finite
    "raises"     a callback in this operation, such as a check or a solver, raises an error
    "underflow"  the gradient is too small for its dtype
    "grows"      the norm grows by 1.05 or more at each step, by over four orders of magnitude
    "shrinks"    the norm falls to 0.6 or less at each step, by over four orders of magnitude; or
                 more slowly, by over thirty orders, or until it rounds to zero
    "zero"       the gradient of a leaf, or of a layer of a scan, is exactly zero from here on
    ===========  ===================================================================================

    Guarantees:
      * A loss or a gradient that is not finite always has a finding. It is the compiled loss that
        counts: XLA may simplify ``log(exp(x))``, which overflows in eager code, to ``x``.
      * Each finding names the line in your file, the module, and the step of the innermost scan, in
        eager code and inside `jax.jit`, `jax.lax.scan`, `jax.lax.cond`, `jax.checkpoint`,
        `jax.shard_map` and `jax.pmap`; a "value" finding also inside `jax.lax.while_loop`. In
        `jax.shard_map` and `jax.pmap` a finding names the device, such as "data=5".
      * "value": a mask of -inf is not a finding, and neither is a value that the loss does not
        depend on. If an operation makes a NaN of an inf, the finding is the operation that made the
        inf. An operation that makes a NaN of inputs without a NaN is a finding, too.
      * "vjp" and "sum": neither is reported behind a "value" finding. If a VJP reads NaN or inf
        from an argument, or from data that is not differentiated, the finding is a "value": the
        argument, or the operation that computed it.
      * "raises": if the operation gets a NaN or inf, the finding is where that is from, and a note
        has the error.
      * "grows" and "shrinks": the norms change steadily, over layers one of which is computed from
        the other, or over the steps of a scan. A decay is a note while all leaves keep a gradient.
      * "zero": the finding is where the gradient stops: the result of the operation has a gradient,
        and the input has none. The reason was tested there; if it is not known, the finding says
        so, and shows the numbers of all inputs. What you may have meant is a note: a
        `jax.lax.stop_gradient`, a leaf that the loss does not read, a factor of zero that has a
        gradient itself. A cut that nobody chooses is a finding whatever else is detached, and so is
        a loss that reads nothing of what it is differentiated by.
      * A function with a custom rule is one operation; if its rule is right, a note names it. A
        kernel of `jax.experimental.pallas` is one operation too.
      * `jax.debug_nans`, `jax.debug_infs` and a transfer guard are off inside, and restored after.
      * Arguments and models are not changed.
    """
    if examples is not None:
        check_arguments(fun, args, kwargs)
        arguments_of_examples(examples, fun, args, kwargs or {})
    with settings_of_runs(), jax.disable_jit(False):
        trace = functools.partial(traced_loss, fun, argnums=argnums, has_aux=has_aux)
        try:
            traced = trace(args, kwargs)
        except Exception as error:
            if isinstance(args, CapturedArgs):
                error.add_note(NO_MODELS)
            raise
        if examples is not None:
            rows_of_examples(traced, args, kwargs or {}, examples)
        diagnosis = _diagnosis_or_error(traced)
        if not diagnosis.findings and isinstance(args, CapturedArgs) and args.expected:
            notes = (*diagnosis.notes, args.expected)
            diagnosis = dataclasses.replace(diagnosis, notes=notes)
        if examples is None:
            return diagnosis
        bad = bad_examples(traced, trace, args, kwargs or {}, examples)
        return dataclasses.replace(diagnosis, examples=bad)


def _diagnosis_or_error(traced: TracedLoss) -> GradientDiagnosis:
    """The diagnosis of a loss, also if a callback in it raises an error.

    If the operation that raises gets what is not finite, the finding is on where that is from.
    """
    try:
        return _diagnosis(traced)
    except Exception as error:
        if not is_of_callback(error):
            raise
        text = error_text(error)
    raised = raised_in(traced)
    finding = raised_finding(raised, text, traced)
    source = raised and raised_from(raised)
    if source:
        cause = value_finding(source, traced)
        return GradientDiagnosis((cause,), (), (finding.message,))
    return GradientDiagnosis((finding,), (), ())


def _diagnosis(traced: TracedLoss) -> GradientDiagnosis:
    units = list(all_units(traced.program))
    sites = module_sites(units)
    measured = measure(traced.program, traced.inputs, traced.chosen, sites)
    pairs = units_and_rows(units, measured.sites)
    rows = [row for _, row in pairs]
    trends = list(trend_findings(pairs, traced, measured))
    findings = [trend for trend in trends if not isinstance(trend, str)]
    notes = [
        *_notes_on_rules(traced.program),
        *(trend for trend in trends if isinstance(trend, str)),
    ]
    findings += broken(traced, measured, findings)
    try:
        findings += underflow_findings(traced, units, measured, rows)
    except (TypeError, ValueError, NotImplementedError) as error:
        # An operation may be there for half precision alone.
        notes += [f"diagnose did not look for underflow: {first_line(error)}"]
    if not any(finding.kind in BROKEN for finding in findings):
        zeros, more = zero_findings(traced, measured)
        findings, notes = _with_zeros(findings, zeros), [*notes, *more]
    findings.sort(key=lambda finding: [*FINDING_KINDS].index(finding.kind))
    return GradientDiagnosis(tuple(findings), tuple(rows), tuple(notes))


def _with_zeros(
    findings: list[GradientFinding], zeros: list[GradientFinding]
) -> list[GradientFinding]:
    """All findings; one of underflow has the leaves that it leaves at zero."""
    lost = ", ".join(finding.leaf for finding in zeros if finding.cause == UNDERFLOW)
    if not lost or not {finding.kind for finding in findings} & {"underflow", "shrinks"}:
        return [*findings, *zeros]
    then = f"; the gradient of {lost} is exactly zero"
    named = [
        dataclasses.replace(
            finding, leaf=lost, cause=finding.kind, message=finding.message + then
        )
        if finding.kind == "underflow" else finding
        for finding in findings
    ]  # fmt: skip
    return [*named, *(finding for finding in zeros if finding.cause != UNDERFLOW)]


def _is_closed(equation: JaxprEqn) -> bool:
    """Whether what is inside of an equation is not measured."""
    is_held = is_while(equation) or is_cond(equation) or is_foreign(equation)
    return is_held and not inner_programs(equation)


def _notes_on_rules(program: Any) -> list[str]:
    """Notes on operations that have rules of their own, or are not measured inside."""
    notes = {}
    for placed in placed_equations(program, inner_programs):
        place, name = placed.place, operation_name(placed.place.equation)
        if has_custom_vjp(place.equation):
            text = f"{place.operation} has a custom VJP, and is measured as one operation"
        elif _is_closed(place.equation):
            text = f"{name} is measured as one operation, not inside"
        else:
            continue
        notes.setdefault(text, f"{place.location}: {text}")
    return list(notes.values())
