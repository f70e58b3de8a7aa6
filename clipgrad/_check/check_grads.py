"""`check_grads`: check a gradient, and name the element that is wrong."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import clipgrad._trees as _trees
from clipgrad._check.behavior import check_behavior
from clipgrad._check.check import Check, Log, prepare
from clipgrad._check.gradients import differentiated
from clipgrad._check.options import Options, require_mapping, with_hints
from clipgrad._check.report import (
    Failure,
    GradCheckError,
    GradCheckReport,
    verified_share,
)
from clipgrad._check.second_order import check_second_order
from clipgrad._check.subject import CheckSubject, make_subject, require_arrays
from clipgrad._check.values import check_further_points, check_values, note_independence
from clipgrad._devices import find_devices, moved
from clipgrad._jaxpr import kept_lightly

# Of the elements that are not at kinks, if `min_verified` is not given.
LEAST_VERIFIED = 0.5
# In errors of JAX about arrays on other devices than a mesh, a sharding or another array.
OTHER_DEVICES = ("incompatible devices", "DeviceAssignmentMismatch", "does not match the sharding")
BOUND = "a mesh, a sharding or an array that the function holds is on other devices"


@with_hints
def check_grads(
    fun: Callable,
    args: tuple,
    kwargs: Mapping[str, Any] | None = None,
    *,
    wrt: _trees.Selector | None = None,
    no_grad: _trees.Selector | None = None,
    output: _trees.Selector | None = None,
    order: int = 1,
    mode: str = "auto",
    delta: float | None = None,
    max_relative_error: float | None = None,
    tolerance: float | None = None,
    min_verified: float | None = None,
    time_budget: float | None = None,
    devices: Sequence[str] | None = None,
    points: int = 2,
    seed: int = 0,
    raise_on_failure: bool = True,
    skip: Sequence[str] = (),
) -> GradCheckReport:
    """Check the VJP of a function against finite differences, and how it behaves.

    For a random dense cotangent u, the gradient of <u, f(x)> is compared with slopes of f, which
    are evaluated in float64 for every dtype of f. An element passes if::

        |numeric - analytic| <= rtol max(|numeric|, |analytic|) + error + 50 eps rms(leaf),

    with 8 eps in float16 and 4 eps in bfloat16 instead of 50. The rule as it is written is
    evaluated in float64 and must have these slopes to float64's rtol and eps, but for the rounding
    of its constants: so the formula is right. The gradient from `jax.vjp` must then agree with that
    rule to the tolerance of the narrowest type that f computes in: rtol is 1e-6 for float64, 5e-4
    for float32, 1e-2 for float16, 5e-2 for bfloat16. If float64 cannot be had, the gradient itself
    is compared with the slopes, to ten times this rtol if f can only be evaluated in its own type.
    In "auto" the number of evaluations of a right function without kinks does not depend on the
    number of elements.

    Guarantees:
      * ``notes`` has each element that could not be verified, ``not_run`` each check that could not
        run; a report in which nothing was verified is not ok. Rounding explains what moving
        each number of plain AD by one rounding of its type moves an element by, three times; and
        for a rule whose terms cancel the same of its own operations, up to 50 roundings of the
        largest leaf's effect, there or nearby. An element off by more than a quarter of itself and
        its leaf is not verified then, nor one off by more than a hundredth if the formula could
        not be judged in float64.
      * An element that vanishes beside other leaves is verified at further points alone.
      * At a kink a gradient between the one-sided slopes passes with a note, and the element is
        held while the others are moved. At a jump nothing is verified; outputs whose values in
        float64 differ by more than rounding are left out, and a note names them.
      * Values under `jax.lax.stop_gradient` are held fixed, as JAX differentiates them; a note
        says so where it matters.
      * The same seed gives the same report.

    ===========  ===================================================================================
    check        requirement
    ===========  ===================================================================================
    value        every element of the gradient, against differences
    primal       value, dtype and shape of the function called and differentiated are the same
    cotangent    dtype, shape and structure are as of the input; float0 for integers
    finite       the value and the gradient are finite
    linearity    the pull-back is linear: of -2^20 times a cotangent, of masked rows, of ones
    determinism  a second run is bit-identical, on CPUs
    jit, vmap    compiled and batched gradients equal the eager ones
    points       the gradient is right at a second point, and then again at the first
    forward      `jax.jvp` agrees, where the function allows forward mode
    outputs      a cotangent for one output alone gives the part of that output
    alone        each input differentiated alone, if a rule is told which inputs are
    devices      each kind of device gives the same gradient
    ===========  ===================================================================================

    Without a custom rule ``vmap``, ``forward``, ``outputs`` and ``alone`` would test JAX, and they
    are not run where values are wrong. Tied elements, such as equal maxima, are also moved
    together. At further points no elements are equal or zero and no matrices symmetric; leaves keep
    signs and [0, 1], and their order unless the function is the same in any other, as a sum is.
    Only where the function is not meant for such points, they keep the symmetry of matrices, or all
    that is equal, and a note says so. A gradient that is right only for symmetric matrices passes
    at one, with a note, if the function is meant for them.

    Args:
      fun: the function, of any trees of arrays, to any tree of arrays.
      args: the tuple of its positional arguments: the point.
      kwargs: its keyword arguments; their arrays are checked too.
      wrt: which inputs to check: an argument's position or name, a path such as ``params/w`` or a
        regular expression on such paths, or several of these; None for all.
      no_grad: which inputs to leave out, written the same way.
      output: which outputs to check: a position, key or path, or several; None for all.
      order: 2 to check the second derivative as well, the VJP of the VJP.
      mode: "auto" checks every element with the help of plain AD in float64, which finite
        differences check; "fast" moves each leaf in two random directions; "full" moves every
        element.
      delta: an absolute step, for Paddle's formula at every element.
      max_relative_error: Paddle's rule: ``|numeric - analytic| / |numeric|``, or without the
        denominator where ``|numeric| < 1e-3``, may not exceed it.
      tolerance: the relative error that the backward may have, of the element or its leaf's root
        mean square: for rules that compute in low precision or round at random. It stands in for
        rtol wherever gradients are compared.
      min_verified: the least share of the elements to be verified, those at kinks left out; a half
        if it is None. Fewer is a failure.
      time_budget: seconds after which what is left is reported as not verified or not run.
      devices: kinds of device to compute the gradient on, such as ("cpu", "gpu"); None for all
        devices here. The report lists as not run a missing device, and one that a mesh, a sharding
        or an array of the function is not on.
      points: the number of points to check.
      seed: the seed of the cotangents, directions and further points.
      raise_on_failure: False to return the report also if the check fails.
      skip: checks of the table to switch off, such as "linearity" for a function that clips on
        purpose.

    Returns:
      The report.

    Raises:
      GradCheckError: the gradient is wrong, or nothing was verified; it has the report.
      TypeError: ``args`` is not a tuple, an argument is unknown, or the call is inside of
        ``jax.jit`` or another transformation; arguments of other checkers, such as ``eps``,
        ``modes`` and ``fast_mode``, raise it with the argument to write here.
      ValueError: there is nothing to check, a name is unknown, an input is not finite, or the
        function cannot be evaluated near the point.

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
      PaddlePaddle, Auto Gradient Checker Design, 2017,
      https://github.com/PaddlePaddle/Paddle/blob/3f5dfc67752d885d2a4bb777fa27cf04d7927e06/doc/design/auto_gradient_check.md;
      Richardson, The Approximate Arithmetical Solution by Finite Differences of Physical Problems,
      1911, https://doi.org/10.1098/rsta.1911.0009.
    """
    __tracebackhide__ = True
    started = time.perf_counter()
    require_mapping(kwargs)
    require_arrays(args, kwargs or {})
    own = tolerance, min_verified, time_budget
    options = Options(order, mode, delta, max_relative_error, *own, points, seed, skip)
    log = Log(options)
    found = find_devices(devices)
    log.not_run |= {f"device {kind}": "there is no such device here" for kind in found.absent}

    def subject_on(device: Any):
        own_args, own_kwargs = moved((args, dict(kwargs or {})), device)
        return make_subject(fun, own_args, own_kwargs, wrt, no_grad, output)

    with jax.default_matmul_precision("highest"), np.errstate(all="ignore"), kept_lightly():
        _check(subject_on, found.there, log)
    report = _logged_report(log, time.perf_counter() - started)
    if raise_on_failure and not report.ok:
        raise GradCheckError(report)
    return report


def _check(subject_on: Callable, there: Mapping[str, Any], log: Log) -> None:
    """All checks on the first device that can run the function; the others' gradients."""
    others = dict(there)
    for kind, device in there.items():
        del others[kind]
        try:
            with jax.default_device(device):
                subject = subject_on(device)
                if others:  # else no other can run it
                    vjp = differentiated(subject, subject.inputs)
                    vjp.pull(vjp.outputs)
        except Exception as error:
            if not others or not _is_bound(error):
                raise
            log.not_run[f"device {kind}"] = BOUND
            continue
        log.devices.append(kind)
        with jax.default_device(device):
            check = _check_there(subject, log)
        for other, where in others.items():
            if check and "devices" not in log.options.skip and log.has_time("devices"):
                _check_device(check, subject_on, other, where)
        return


def _is_bound(error: Exception) -> bool:
    """Whether a function does not run since it is bound to other devices than its arguments'."""
    return any(word in f"{type(error).__name__} {error}" for word in OTHER_DEVICES)


def _check_there(subject: CheckSubject, log: Log) -> Check | None:
    """All checks on one device, in order; each writes to the log."""
    check = prepare(subject, log)
    if check is None:
        return None
    check_values(check, check.point())
    check.gradient = check.gradient[:1].copy()  # `vjp` gives the second one again
    if "points" not in log.options.skip and log.has_time("points"):
        check_further_points(check)
    note_independence(check)
    check_behavior(check)
    check_second_order(check)
    log.evaluations += check.differences.evaluations
    return check


def _check_device(check: Check, subject_on: Callable, kind: str, device: Any) -> None:
    """The gradient computed on another device is the one found on the first."""
    try:
        with jax.default_device(device):
            subject = subject_on(device)
            gradient = differentiated(subject, subject.inputs).rows(check.covectors)
    except Exception as error:
        if not _is_bound(error):
            raise
        check.log.not_run[f"device {kind}"] = BOUND
        return
    check.log.devices.append(kind)
    check.log.evaluations += 2
    text = f"the gradient on {kind}, compared with the one on {check.log.devices[0]}"
    for row, expected in zip(gradient, check.vjp.rows(check.covectors), strict=True):
        check.log.fail(check.compare("devices", row, expected, text))


def _logged_report(log: Log, seconds: float) -> GradCheckReport:
    least = LEAST_VERIFIED if log.options.min_verified is None else log.options.min_verified
    share, notes = verified_share(log), dict.fromkeys(log.notes or log.not_run.values())
    reasons = "; ".join(notes)
    if not log.failures and not (log.verified or log.at_kinks):
        log.failures.append(Failure("value", "all inputs", f"nothing was verified ({reasons})"))
    elif not log.failures and share < least:
        detail = f"{share:.0%} of the elements were verified, of {least:.0%} at least ({reasons})"
        log.failures.append(Failure("value", "all inputs", detail))
    same = "not_run evaluations precision verified at_kinks elements".split()
    return GradCheckReport(
        # Those first that explain others: what is random is wrong in many ways.
        failures=tuple(sorted(log.failures, key=lambda f: f.check != "determinism")),
        notes=tuple(dict.fromkeys(log.notes)),
        seconds=seconds,
        devices=tuple(log.devices),
        **{name: getattr(log, name) for name in same},
    )
