"""The findings on a loss or a gradient that is not finite, by its tape."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from clipgrad._diagnose.discharge import discharged
from clipgrad._diagnose.findings import (
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
    Found,
    faults,
    infinite_argument,
    origin,
    runs_once,
    value_at,
)
from clipgrad._diagnose.levels import INF, level
from clipgrad._diagnose.measure import Measured
from clipgrad._diagnose.records import GradientFinding
from clipgrad._diagnose.sources import sources
from clipgrad._diagnose.tape import OperationRaised, Tape
from clipgrad._diagnose.units import SCAN
from clipgrad._errors import first_line
from clipgrad._losses import TracedLoss


def tape_of(given: TracedLoss) -> Tape:
    """The tape of a loss, with its cotangents."""
    inputs = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in given.inputs]
    active = [i in given.chosen for i in range(len(inputs))]
    tape = Tape(discharged(given.program), inputs, active)
    tape.backward([jnp.ones_like(tape.results[0])])
    return tape


def raised_in(given: TracedLoss) -> Found | None:
    """The first operation of a loss that raises an error, forward or backward; None if none does.

    It is the outermost call on the line of the user's, who knows of no other.
    """
    try:
        tape_of(given)
    except OperationRaised as error:
        entry, within = error.entry, error.entry.tape.within
        while within and runs_once(within.entry):
            outer = within.entry
            if outer.place.location[:2] != entry.place.location[:2]:
                break
            entry, within = outer, outer.tape.within
        return Found("raises", entry, is_backward=error.is_backward)
    return None


def broken(
    given: TracedLoss, measured: Measured, trends: Sequence[GradientFinding]
) -> list[GradientFinding]:
    """The findings of NaN and inf: in the value, and then in the backward pass.

    A sum over the steps of a scan in which cotangents grow is not finite for that reason.
    """
    pairs = zip(given.chosen, measured.grads, strict=True)
    bad = [i for i, grad in pairs if np.any(grad.nonfinite)]
    if np.isfinite(measured.loss) and not bad:
        return []
    reason, hidden = "", None
    try:
        tape = tape_of(given)
        findings = _findings(given, tape, measured.loss, bad, trends)
        hidden = None if findings else _overflow_in(tape)
    except (TypeError, ValueError, NotImplementedError, OperationRaised) as error:
        findings, reason = [], f" ({first_line(error)})"
    if findings or any(trend.kind == "grows" for trend in trends):
        return findings
    if not np.isfinite(measured.loss):
        what = f"the compiled loss is {measured.loss}, but each operation alone has a finite "
        what += f"value{reason}"
        return [function_finding("value", what, given)]
    names = ", ".join(given.names[i] for i in bad)
    if hidden is not None:
        return [hidden_finding(hidden, names)]
    what = f"the gradient of {names} is not finite; diagnose did not find the operation{reason}"
    return [function_finding("vjp", what, given)]


def _overflow_in(tape: Tape) -> Found | None:
    """The operation that makes the first inf of a loss that is finite, as it is divided by it."""
    for entry in tape.entries:
        for variable, y in zip(entry.equation.outvars, entry.outs, strict=True):
            if level(y) == INF and (root := origin(tape, variable, INF)).entry:
                return None if root.is_constant else root
    return None


def _findings(
    given: TracedLoss,
    tape: Tape,
    loss: float,
    bad: Sequence[int],
    trends: Sequence[GradientFinding],
) -> list[GradientFinding]:
    findings, source = [], None
    atom = tape.jaxpr.outvars[0]
    if not np.isfinite(loss) and (wanted := level(tape.read(atom))):
        source, then = value_at(tape, atom, wanted)
        findings.append(value_finding(source, given, then))
    found = faults(tape, [tape.jaxpr.invars[i] for i in bad])
    found = [fault for fault in found if not _is_excused(fault, source)]
    if not found:
        return findings
    # The first in the backward pass; an argument comes last.
    fault = max(found, key=lambda f: f.entry.order if f.entry else ())
    if fault.kind == "sum":
        grows = any(t.kind == "grows" and t.operation == SCAN for t in trends)
        return findings if grows else [*findings, sum_finding(fault, given)]
    return [*findings, _of_vjp(fault, given)]


def _is_excused(fault: Found, source: Found | None) -> bool:
    """Whether a fault may follow from the value that the loss has its NaN or inf from."""
    if source is None or fault.kind == "sum":
        return source is not None
    entry, other = fault.entry, source.entry
    contains = other is not None and other.order[: len(entry.order)] == entry.order
    return contains or any(map(level, [*entry.ins, *entry.outs]))


def _of_vjp(fault: Found, given: TracedLoss) -> GradientFinding:
    """The finding on a VJP; if it reads NaN or inf of data, the finding on these."""
    entry = fault.entry
    reads = bad_reads(entry)
    if not reads:
        is_own = has_bad_result(entry) and not is_suspect(entry)
        return vjp_finding(fault, Found("value", entry) if is_own else None)
    root, _ = value_at(entry.tape, reads[0], level(entry.tape.read(reads[0])))
    if root.is_constant:
        return vjp_finding(fault)
    root = (root.entry and infinite_argument(root)) or root
    if root.entry and depends(root, given):
        return vjp_finding(fault, root)
    read = root.entry
    arguments = sources(read.tape, read.equation.invars).arguments if read else ()
    return data_finding(root, entry, sorted(arguments), given)


def depends(found: Found, given: TracedLoss) -> bool:
    """Whether what the loss is differentiated by reaches a value."""
    return found.number in given.chosen if found.entry is None else any(found.entry.active)
