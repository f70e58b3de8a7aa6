"""The findings on a loss or a gradient that is not finite, by its tape."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from clipgrad._diagnose.discharge import discharged
from clipgrad._diagnose.finding_texts import (
    bad_reads,
    data_finding,
    function_finding,
    has_bad_result,
    hidden_finding,
    is_suspect,
    sum_finding,
    value_finding,
    vjp_finding,
)
from clipgrad._diagnose.guilty import (
    faults,
    infinite_argument,
    origin,
    runs_once,
    value_at,
)
from clipgrad._diagnose.levels import INF, level
from clipgrad._diagnose.measure import Measured
from clipgrad._diagnose.openings import OPENINGS
from clipgrad._diagnose.origins import (
    Argument,
    Constant,
    Fault,
    Operation,
    Origin,
    Raised,
    Sum,
)
from clipgrad._diagnose.program_units import SCAN
from clipgrad._diagnose.records import GradientFinding
from clipgrad._diagnose.sources import sources
from clipgrad._diagnose.tape import Entry, OperationRaised, Tape
from clipgrad._errors import first_line
from clipgrad._losses import TracedLoss


def tape_of(traced: TracedLoss) -> Tape:
    """The tape of a loss, with its cotangents."""
    inputs = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in traced.inputs]
    active = [i in traced.chosen for i in range(len(inputs))]
    tape = Tape(discharged(traced.program), inputs, active, openings=OPENINGS)
    tape.backward([jnp.ones_like(tape.results[0])])
    return tape


def raised_in(traced: TracedLoss) -> Raised | None:
    """The first operation of a loss that raises an error, forward or backward; None if none does.

    It is the outermost call on the line of the user's, who knows of no other.
    """
    try:
        tape_of(traced)
    except OperationRaised as error:
        entry, within = error.entry, error.entry.tape.within
        while within and runs_once(within.entry):
            outer = within.entry
            if outer.place.location[:2] != entry.place.location[:2]:
                break
            entry, within = outer, outer.tape.within
        return Raised(entry, error.is_backward)
    return None


def broken(
    traced: TracedLoss, measured: Measured, trends: Sequence[GradientFinding]
) -> list[GradientFinding]:
    """The findings of NaN and inf: in the value, and then in the backward pass.

    A sum over the steps of a scan in which cotangents grow is not finite for that reason.
    """
    pairs = zip(traced.chosen, measured.grads, strict=True)
    bad = [i for i, grad in pairs if np.any(grad.nonfinite)]
    if np.isfinite(measured.loss) and not bad:
        return []
    reason, hidden = "", None
    try:
        tape = tape_of(traced)
        findings = _findings(traced, tape, measured.loss, bad, trends)
        hidden = None if findings else _overflow_in(tape)
    except (TypeError, ValueError, NotImplementedError, OperationRaised) as error:
        findings, reason = [], f" ({first_line(error)})"
    if findings or any(trend.kind == "grows" for trend in trends):
        return findings
    if not np.isfinite(measured.loss):
        what = f"the compiled loss is {measured.loss}, but each operation alone has a finite "
        what += f"value{reason}"
        return [function_finding("value", what, traced)]
    names = ", ".join(traced.names[i] for i in bad)
    if hidden is not None:
        return [hidden_finding(hidden, names)]
    what = f"the gradient of {names} is not finite; diagnose did not find the operation{reason}"
    return [function_finding("vjp", what, traced)]


def _overflow_in(tape: Tape) -> Operation | None:
    """The operation that makes the first inf of a loss that is finite, as it is divided by it."""
    for entry in tape.entries:
        for variable, y in zip(entry.equation.outvars, entry.outs, strict=True):
            root = origin(tape, variable, INF) if level(y) == INF else None
            if root and not isinstance(root, Argument):
                return root if isinstance(root, Operation) else None
    return None


def _findings(
    traced: TracedLoss,
    tape: Tape,
    loss: float,
    bad: Sequence[int],
    trends: Sequence[GradientFinding],
) -> list[GradientFinding]:
    findings, source = [], None
    atom = tape.jaxpr.outvars[0]
    if not np.isfinite(loss) and (wanted := level(tape.read(atom))):
        source, then = value_at(tape, atom, wanted)
        findings.append(value_finding(source, traced, then))
    of_cotangents = faults(tape, [tape.jaxpr.invars[i] for i in bad])
    of_cotangents = [fault for fault in of_cotangents if not _is_excused(fault, source)]
    if not of_cotangents:
        return findings
    # The first in the backward pass; an argument comes last.
    fault = max(of_cotangents, key=lambda fault: fault.order)
    if isinstance(fault, Sum):
        grows = any(t.kind == "grows" and t.operation == SCAN for t in trends)
        return findings if grows else [*findings, sum_finding(fault, traced)]
    return [*findings, _of_vjp(fault, traced)]


def _is_excused(fault: Fault, source: Origin | None) -> bool:
    """Whether a fault may follow from the value that the loss has its NaN or inf from."""
    if source is None or isinstance(fault, Sum):
        return source is not None
    entry = fault.entry
    return _is_inside(source, entry) or any(map(level, [*entry.ins, *entry.outs]))


def _is_inside(source: Origin, entry: Entry) -> bool:
    """Whether what a value is from is an entry, or in a program inside of it."""
    match source:
        case Operation(of_value) | Constant(Entry() as of_value):
            return of_value.order[: len(entry.order)] == entry.order
    return False


def _of_vjp(fault: Operation, traced: TracedLoss) -> GradientFinding:
    """The finding on a VJP; if it reads NaN or inf of data, the finding on these."""
    entry = fault.entry
    reads = bad_reads(entry)
    if not reads:
        is_hidden = has_bad_result(entry) and not is_suspect(entry)
        return vjp_finding(fault, fault if is_hidden else None)
    root, _ = value_at(entry.tape, reads[0], level(entry.tape.read(reads[0])))
    if isinstance(root, Operation):
        root = infinite_argument(root) or root
    match root:
        case Constant():
            return vjp_finding(fault)
        case Argument():
            return data_finding(root, entry, (), traced)
        case Operation(source):
            if any(source.active):
                return vjp_finding(fault, root)
            arguments = sources(source.tape, source.equation.invars).arguments
            return data_finding(root, entry, sorted(arguments), traced)
