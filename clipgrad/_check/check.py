"""`check_grads`: prove a gradient right, or name the element that is wrong."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from clipgrad._check.devices import find_devices, moved
from clipgrad._check.problem import make_problem
from clipgrad._check.pullback import pull_back
from clipgrad._check.report import Failure, GradCheckError, GradCheckReport
from clipgrad._check.run import (
    BEHAVIORS,
    Log,
    Options,
    Run,
    begin,
    check_behavior,
    check_order,
    check_points,
    check_values,
    comparison,
)
from clipgrad._check.selection import Selector

MODES = ("auto", "fast", "full")
CHECKS = ("primal", "cotangent", "finite", "value", "points", "devices", *BEHAVIORS)


def check_grads(
    fun: Callable,
    args: tuple,
    kwargs: Mapping[str, Any] | None = None,
    *,
    wrt: Selector | None = None,
    no_grad: Selector | None = None,
    output: Selector | None = None,
    order: int = 1,
    mode: str = "auto",
    delta: float | None = None,
    max_relative_error: float | None = None,
    devices: Sequence[str] | None = None,
    points: int = 2,
    seed: int = 0,
    raise_on_failure: bool = True,
    skip: Sequence[str] = (),
) -> GradCheckReport:
    """Check the VJP of a function against finite differences, and how it behaves."""
    started = time.perf_counter()
    options = _options(order, mode, delta, max_relative_error, points, seed, skip)
    log = Log()
    found = find_devices(devices)
    log.not_run |= {f"device {kind}": "there is no such device here" for kind in found.absent}

    def problem_on(device: jax.Device):
        own_args, own_kwargs = moved((args, dict(kwargs or {})), device)
        return make_problem(fun, own_args, own_kwargs, wrt, no_grad, output)

    for kind, device in list(found.there.items())[:1]:
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            _check(problem_on(device), options, log, {
                other: (lambda d=d: problem_on(d), d)
                for other, d in found.there.items() if other != kind
            })
        log.devices.insert(0, kind)
    report = _report(log, time.perf_counter() - started)
    if raise_on_failure and not report.ok:
        raise GradCheckError(report)
    return report


def _check(problem, options: Options, log: Log, others: dict) -> None:
    run = begin(problem, options, log)
    if run is None:
        return
    check_behavior(run)
    check_values(run, problem.inputs, run.gradient, first=True)
    if "points" not in options.skip:
        check_points(run)
    check_order(run)
    log.evaluations += run.session.differences.evaluations
    for kind, (make, device) in others.items():
        if "devices" not in options.skip:
            _check_device(run, make, kind, device)


def _check_device(run: Run, make: Callable, kind: str, device: jax.Device) -> None:
    """The gradient computed on another device is the one found on the first."""
    with jax.default_device(device):
        problem = make()
        gradient = pull_back(problem).rows(run.covectors)
    run.log.devices.append(kind)
    run.log.evaluations += 2
    text = f"the gradient on {kind} against the one on {jax.default_backend()}"
    for row, expected in zip(gradient, run.gradient, strict=True):
        run.log.fail(comparison(run)("devices", row, expected, text), run.options)


def _report(log: Log, seconds: float) -> GradCheckReport:
    if not log.failures and not log.verified:
        reasons = "; ".join([*log.notes, *log.not_run.values()])
        log.failures.append(Failure("value", "all inputs", f"nothing was verified ({reasons})"))
    return GradCheckReport(
        failures=tuple(log.failures),
        notes=tuple(dict.fromkeys(log.notes)),
        not_run=log.not_run,
        evaluations=log.evaluations,
        seconds=seconds,
        precision=log.precision,
        devices=tuple(log.devices),
        verified=log.verified,
    )


def _options(order, mode, delta, max_relative_error, points, seed, skip) -> Options:
    if order not in (1, 2):
        raise ValueError(f"order={order!r}; expected 1, or 2 to check the VJP's own VJP too")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}; expected one of {', '.join(MODES)}")
    require_delta(delta)
    if max_relative_error is not None and not max_relative_error > 0:
        raise ValueError(f"max_relative_error={max_relative_error!r}; expected a number above 0")
    if points < 1:
        raise ValueError(f"points={points!r}; expected 1 or more")
    unknown = sorted(set(skip) - set(CHECKS))
    if unknown:
        raise ValueError(f"skip={unknown!r} names no check; expected some of {', '.join(CHECKS)}")
    return Options(order, mode, delta, max_relative_error, points, seed, frozenset(skip))


def require_delta(delta: float | None) -> None:
    """Refuse a step that is no positive number."""
    if delta is not None and not (np.isfinite(delta) and delta > 0):
        raise ValueError(f"delta={delta!r}; expected a positive number, such as 0.005, or None")
