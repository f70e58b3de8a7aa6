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
      fun: the loss, a function that returns a floating scalar or ``(scalar, aux)``.
      args: the tuple of arguments; for one argument write ``(params,)``.
      kwargs: the keyword arguments.
      argnums: the position or positions of the arguments to differentiate; only floating leaves
        count.
      has_aux: ``True`` if ``fun`` returns ``(scalar, aux)``.
      examples: the argument that holds the batch, by name or position, if you also want the report
        to name bad examples; several arguments if several have the batch axis, which must be the
        first axis. Each example then runs alone, as a batch with one example or, if the loss needs
        whole batches, as a batch of copies.

    Returns:
      A `GradientDiagnosis`; ``print`` it.

    Raises:
      TypeError: ``fun`` is not a function, ``args`` not a tuple or ``kwargs`` not a mapping.
      ValueError: the loss is not a floating scalar, ``argnums`` is out of range, there is nothing
        to differentiate, ``fun`` has side effects (you may write to a `jax.new_ref` that you create
        inside), or ``examples`` does not name a batch.

    The loss is traced once. One compiled backward pass measures the cotangents by module and by
    scan step. If something is not finite, is exactly zero or raises an error, the loss runs a
    second time, operation by operation. The second run keeps the inputs, the outputs and the
    cotangents of each operation. In the second run a loop or a function is one operation;
    `diagnose` looks inside if the fault is there.

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
      * If the loss or the gradient is not finite, there is always a finding. The compiled loss
        counts, not the eager one: XLA may simplify ``log(exp(x))``, which overflows in eager code,
        to ``x``.
      * Each finding names the line in your file, the module, and the step of the innermost scan, in
        eager code and inside `jax.jit`, `jax.lax.scan`, `jax.lax.cond`, `jax.checkpoint`,
        `jax.shard_map` and `jax.pmap`. A "value" finding does so inside `jax.lax.while_loop`, too.
        In `jax.shard_map` and `jax.pmap` a finding also names the device, such as "data=5".
      * "value": if an operation turns an inf into a NaN, the finding is the operation that made the
        inf. An operation that makes a NaN from inputs without a NaN is a finding, too. A mask of
        -inf is not a finding, and neither is a value that the loss does not depend on.
      * "vjp" and "sum": if a VJP reads NaN or inf from an argument, or from data that you do not
        differentiate, the finding is a "value": the argument, or the operation that computed the
        data. Faults that follow from a "value" finding are not reported.
      * "raises": if the operation receives a NaN or inf, the finding is the origin of that number,
        and a note has the error.
      * "grows" and "shrinks": the norms change steadily, from layer to layer (each computed from
        the one before) or over the steps of a scan. A decay is only a note as long as every leaf
        has a gradient.
      * "zero": the finding names the operation where the gradient stops: the result has a gradient,
        and the input has none. `diagnose` tests the reason there. If the reason is unknown, the
        finding says so, and shows the numbers of all inputs. You get only a note for cuts that you
        may have meant: a `jax.lax.stop_gradient`, a leaf that the loss does not read, a factor of
        zero that has a gradient itself. A cut that nobody chooses is a finding, whatever else is
        detached. So is a loss that does not read any argument that you differentiate.
      * A function with a custom rule is one operation; if the rule is right, a note names the
        function. A `jax.experimental.pallas` kernel is one operation, too.
      * `jax.debug_nans`, `jax.debug_infs` and transfer guards are off during the call, and restored
        afterwards.
      * Your arguments and models do not change.
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
