"""`check_grads`: prove a gradient right, or name the element that is wrong."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from clipgrad._check.devices import find_devices, moved
from clipgrad._check.habits import require_mapping, with_hints
from clipgrad._check.log import Log
from clipgrad._check.options import Options
from clipgrad._check.problem import Problem, make_problem
from clipgrad._check.pullback import differentiator
from clipgrad._check.report import Failure, GradCheckError, GradCheckReport
from clipgrad._check.run import (
    Run,
    check_behavior,
    check_order,
    check_points,
    check_values,
    comparison,
)
from clipgrad._check.selection import Selector
from clipgrad._check.start import begin


@with_hints
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
    """Check the VJP of a function against finite differences, and how it behaves.

    With u a random dense cotangent, the gradient of <u, f(x)> that `jax.vjp` hands back is compared
    with slopes of f, evaluated in float64 whatever its dtype. An element passes if::

        |numeric - analytic| <= rtol max(|numeric|, |analytic|) + error + 50 eps rms(leaf),

    rtol being 1e-6 for float64, 5e-4 for float32, 1e-2 for float16, 5e-2 for bfloat16, by the
    narrowest type that f computes in. Steps follow the scale of each element; two of them are
    extrapolated and give the error. An analytic gradient between the one-sided slopes of a kink
    passes with a note. The cost of "auto" does not grow with the number of elements.

    Guarantees:
      * What could not be verified is in ``notes``, what could not be run in ``not_run``; a report
        in which nothing was verified is not ok.
      * The same seed gives the same report.

    ===========  ===================================================================================
    check        what must hold
    ===========  ===================================================================================
    value        every element of the gradient, against differences
    primal       value, dtype and shape of the function called and differentiated are the same
    cotangent    dtype, shape and structure are those of the input; float0 for integers
    finite       the value and the gradient are finite
    linearity    the pull-back is linear in the cotangent: no stray clip, no constant
    determinism  the same again gives the same bits
    jit, vmap    compiled and batched gradients are the eager ones
    points       the gradient is right at a second point too, and then at the first again
    forward      `jax.jvp` agrees, where the function allows forward mode
    outputs      a cotangent for one output only gives that one's part
    devices      each kind of device gives the same gradient
    ===========  ===================================================================================

    A function without any custom rule that traces to the same operations again and under
    `jax.vmap` has its gradient compiled as one program, to be compared with the eager one;
    ``vmap``, ``forward`` and ``outputs`` are JAX's own affair there and are not run. Where several
    elements are at kinks of one output, as equal maxima are, they are looked at together too.

    Args:
      fun: the function, of any trees of arrays, to any tree of arrays.
      args: the tuple of its positional arguments: the point.
      kwargs: its keyword arguments; their arrays are checked too.
      wrt: which inputs to check: an argument's position or name, a path such as ``params/w`` or a
        regular expression on such paths, or several of these; None for all.
      no_grad: which inputs to leave out, written the same way.
      output: which outputs to check: a position, key or path, or several; None for all.
      order: 2 to check the VJP's own VJP too.
      mode: "auto" looks at every element with the help of plain AD in float64, and at that by
        differences; "fast" takes two random directions for each leaf; "full" moves every element.
      delta: an absolute step, for Paddle's formula at every element.
      max_relative_error: Paddle's rule: ``|numeric - analytic| / |numeric|``, or without the
        denominator where ``|numeric| < 1e-3``, may not exceed it.
      devices: kinds of device to compute the gradient on, such as ("cpu", "gpu"); None for all
        there are. One that is not there is reported as not run.
      points: how many points to check.
      seed: of the cotangents, directions and further points.
      raise_on_failure: False to have the report returned whatever it says.
      skip: names of checks of the table to switch off, such as "linearity" for a function that
        clips on purpose.

    Returns:
      The report.

    Raises:
      GradCheckError: the gradient is wrong, or nothing was verified; it holds the report.
      TypeError: ``args`` is not a tuple, or an argument is unknown; arguments of other checkers,
        such as ``eps``, ``modes`` and ``fast_mode``, are answered by what to write here.
      ValueError: there is nothing to check, a name is unknown, or an input is not finite.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import clipgrad as cg
      >>> cg.check_grads(jnp.tanh, (jnp.linspace(-1, 1, 5),)).ok
      True
      >>> square = jax.custom_vjp(lambda x: x * x)
      >>> square.defvjp(lambda x: (x * x, x), lambda x, g: (x * g,))
      >>> report = cg.check_grads(square, (jnp.ones(2),), raise_on_failure=False)
      >>> print(report.failures[0].detail.split("; ")[-1])
      analytic/numeric is 0.5 throughout

    References:
      PaddlePaddle, ``check_grad`` in Fluid's operator tests, 2017; Richardson, The Approximate
      Arithmetical Solution by Finite Differences, 1911.
    """
    __tracebackhide__ = True
    started = time.perf_counter()
    require_mapping(kwargs)
    options = Options(order, mode, delta, max_relative_error, points, seed, skip)
    log = Log()
    found = find_devices(devices)
    log.not_run |= {f"device {kind}": "there is no such device here" for kind in found.absent}

    def problem_on(device: Any):
        own_args, own_kwargs = moved((args, dict(kwargs or {})), device)
        return make_problem(fun, own_args, own_kwargs, wrt, no_grad, output)

    for kind, device in list(found.there.items())[:1]:
        others = {other: d for other, d in found.there.items() if other != kind}
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            with np.errstate(all="ignore"):
                _check(problem_on(device), options, log, others, problem_on)
        log.devices.insert(0, kind)
    report = _report(log, time.perf_counter() - started)
    if raise_on_failure and not report.ok:
        raise GradCheckError(report)
    return report


def _check(problem: Problem, options: Options, log: Log, others, problem_on) -> None:
    run = begin(problem, options, log)
    if run is None:
        return
    check_values(run, problem.inputs, run.gradient, first=True)
    if "points" not in options.skip:
        check_points(run)
    check_behavior(run)
    check_order(run)
    log.evaluations += run.session.differences.evaluations
    for kind, device in others.items():
        if "devices" not in options.skip:
            _check_device(run, problem_on, kind, device)


def _check_device(run: Run, problem_on: Callable, kind: str, device: Any) -> None:
    """The gradient computed on another device is the one found on the first."""
    with jax.default_device(device):
        problem = problem_on(device)
        gradient = differentiator(problem)(problem.inputs).rows(run.covectors)
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
