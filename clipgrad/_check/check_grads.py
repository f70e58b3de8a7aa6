"""`check_grads`: check a gradient, and name the element that is wrong.

The function is called and differentiated, by itself: values, types and shapes must agree. At its
point, `check_point` lets three witnesses vote in float64 on each element, the rule, plain AD and
slopes (`majority`), and then asks whether the gradient as computed is the rule's. The same at
further points. Last, how the gradient behaves (`BEHAVIORS`) and, if asked for, the second order.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

import clipgrad._programs as _programs
from clipgrad._arrays import check_arguments, explain_call
from clipgrad._check import contract, vectors
from clipgrad._check.behavior import are_on_cpu, check_behavior, skipped
from clipgrad._check.check_point import check_point, failures_on_another_device
from clipgrad._check.checked_function import (
    DONATED,
    CheckedFunction,
    checked_function,
    donated_arguments,
    require_arrays,
)
from clipgrad._check.checked_point import CheckedPoint
from clipgrad._check.further import check_further_points, check_second_order
from clipgrad._check.log import Log
from clipgrad._check.options import Check, Mode, Options
from clipgrad._check.points import cotangents, further, point_at
from clipgrad._check.report import Failure, GradCheckError, GradCheckReport, percent
from clipgrad._check.selection import Selector
from clipgrad._check.tolerances import ANY_ORDER, MASK, precision
from clipgrad._check.traced_again import is_traced_alike
from clipgrad._check.untested import note_stops, note_unused_rules
from clipgrad._check.user_code import NotNearby, UserError, call_user
from clipgrad._check.verdict import UNSEEN
from clipgrad._check.vjp import VJP, differentiated, first_vjp
from clipgrad._check.witnesses import Witnesses, find_witnesses
from clipgrad._devices import find_devices, moved

# In errors of JAX about arrays on other devices than a mesh, a sharding or another array.
OTHER_DEVICES = ("incompatible devices", "DeviceAssignmentMismatch", "does not match the sharding")
BOUND = "a mesh, a sharding or an array that the function holds is on other devices"


@explain_call(
    eps="the step follows the scale of each element; numerical_grad(delta=...) takes one",
    delta="the step follows the scale of each element; numerical_grad(delta=...) takes one",
    nondet_tol='to allow results that are not bit-identical write skip="determinism"',
)
def check_grads(
    fun: Callable,
    args: tuple,
    kwargs: Mapping[str, Any] | None = None,
    *,
    wrt: Selector | None = None,
    no_grad: Selector | None = None,
    output: Selector | None = None,
    order: Literal[1, 2] = 1,
    mode: Mode = "auto",
    max_relative_error: float | None = None,
    tolerance: float | None = None,
    min_verified: float | None = None,
    time_budget: float | None = None,
    devices: Sequence[str] | None = None,
    points: int = 2,
    seed: int = 0,
    cotangent: Any = None,
    raise_on_failure: bool = True,
    skip: Check | Sequence[Check] = (),
) -> GradCheckReport:
    """Checks a gradient against finite differences, and names the element that is wrong.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import clipgrad as cg
      >>> cg.check_grads(jnp.tanh, (jnp.linspace(-1, 1, 5),)).ok
      True
      >>> square = jax.custom_vjp(lambda x: x * x)
      >>> square.defvjp(lambda x: (x * x, x), lambda x, g: (x * g,))
      >>> report = cg.check_grads(square, (jnp.ones(2),), raise_on_failure=False)
      >>> print(report.failures[0].detail.split("; ")[2])
      analytic/numeric is 0.5 throughout

    Args:
      fun: the function to check. It takes and returns any trees of arrays.
      args: the tuple of positional arguments, the point at which you check; for one argument write
        ``(x,)``.
      kwargs: the keyword arguments; arrays among them are checked too.
      wrt: the inputs to check: the position or name of an argument, a pattern of leaves such as
        ``"params/w"``, ``"blocks/*/kernel"`` or ``"!head"``, or several of these; ``None``: all.
      no_grad: the inputs to leave out, written the same way.
      output: the outputs to check: a position, key or pattern, or several; ``None``: all.
      order: 1, or 2 to check the second derivative as well (the VJP of the VJP).
      mode: ``"auto"`` moves single elements where your rule and plain autodiff differ, and the
        others together; ``"full"`` moves every element by itself.
      max_relative_error: Paddle's criterion, in addition to the tolerances below: the largest
        ``|numeric - analytic| / |numeric|`` that you allow at any element. Where
        ``|numeric| < 1e-3``, the limit is for ``|numeric - analytic|`` instead.
      tolerance: a relative error, from 0 to 1, that replaces ``rtol`` below everywhere. You need
        this for rules in low precision, for random rounding, and for loops that stop once their
        values converge.
      min_verified: the share of elements, from 0 to 1, that must be verified; ``None``: a half. A
        smaller share is a failure. Elements at kinks do not count.
      time_budget: a limit in seconds; ``None``: no limit, and a note after more than a minute. The
        report lists the elements that were not verified by then, and the checks that did not run.
      devices: the kinds of device to compute the gradient on, such as ``("cpu", "gpu")``; ``None``:
        every kind that your machine has. A kind is reported as not run if your machine lacks it, or
        if ``fun`` holds arrays on other devices.
      points: the number of points at which you check: ``args``, then others nearby.
      seed: the seed of the random cotangents, directions and further points.
      cotangent: the output cotangent, instead of random ones: a tree like the chosen outputs, or an
        array for a single output. You then miss errors that do not change this one product.
      raise_on_failure: ``False``: you get the report even if the check fails.
      skip: the checks to leave out, by their names in the table below, such as ``"linearity"`` for
        a function that clips on purpose.

    Returns:
      A `GradCheckReport`; ``print`` it.

    Raises:
      GradCheckError: the gradient is wrong, or nothing was verified. Its ``report`` has the
        details.
      TypeError: ``args`` is not a tuple, an argument is unknown, or the call is inside of
        ``jax.jit`` or another transformation.
      ValueError: there is nothing to check, a name is unknown, an input is not finite, or the
        function cannot be evaluated near the point.

    With random dense cotangents u, `check_grads` computes each gradient element of <u, f(x)> in
    three ways: by your rule as you wrote it, by plain autodiff without any custom rule, and by
    finite differences. All three run in float64, whatever dtype f has. An element is

    * right where the rule and the differences agree;
    * wrong where plain autodiff and the differences agree, and the rule does not;
    * disputed where the differences agree with neither. Where the function is smooth, a disputed
      element is a failure, with or without a custom rule; at kinks and jumps you get a note.

    Where plain autodiff is not possible, the differences decide. The gradient that `jax.vjp`
    computes must also equal the rule's float64 gradient. Two numbers agree if they differ by at
    most ::

        rtol max(|a|, |b|) + 50 eps rms(leaf)    or three times the measured rounding error,

    with 8 eps in float16 and 4 eps in bfloat16. In float64 ``rtol`` is 1e-6. For the computed
    gradient, the narrowest dtype inside f sets ``rtol``: 5e-4 for float32, 1e-2 for float16, 5e-2
    for bfloat16. If f cannot run in float64, the differences run in the dtype of f. They check a
    float32 gradient to ten times this tolerance. In half precision they check each leaf along
    several directions, to the precision that these directions show, at most a quarter. The first
    line of the report says which precision was reached.

    ===========  ===================================================================================
    check        requirement
    ===========  ===================================================================================
    value        every element of the gradient is right, as above
    primal       value, dtype and shape of the function called and differentiated are the same
    cotangent    dtype, shape and structure are as of the input; float0 for integers
    finite       the value and the gradient are finite
    linearity    the pull-back is linear: of -2^20 times a cotangent, of masked rows, of ones
    determinism  a second run is bit-identical, on CPUs
    jit, vmap    compiled and batched gradients equal the eager ones
    points       the gradient is right at a second point, and then again at the first
    outputs      one output alone, or one input of a rule with symbolic zeros, has its part of it
    devices      the gradient on each further kind of device agrees like that on the first
    ===========  ===================================================================================

    ``vmap`` and ``outputs`` run only if there is a custom rule (otherwise they would test JAX) and
    if all values are right. If the only rules are those of JAX, one compiled program computes the
    gradient, and ``jit`` has nothing to compare; unless its outputs differ from those of the call.

    Guarantees:
      * ``notes`` lists every element that could not be verified, and ``not_run`` every check that
        could not run. If nothing was verified, the report is not ok. An element that is off by more
        than a quarter (of the element and of the leaf) does not count as verified, even if rounding
        explains the error.
      * At a kink, a gradient between the two one-sided slopes passes with a note. Tied elements,
        such as equal maxima, are also moved together.
      * At the points nearby, no inputs are equal, zero or symmetric. If your function needs such
        inputs, they stay, and a note says so.
      * Values under `jax.lax.stop_gradient` stay fixed in all three computations, as JAX treats
        them; a note names your lines.
      * A note names the line of each rule that never ran, or that received only zero cotangents.
      * A failure names the line of the rule, and says whether the formula or the arithmetic is
        wrong.
      * The same seed gives the same report. If the gradient is right, the number of evaluations
        does not depend on the number of elements (with ``mode="auto"``). If the checker itself
        fails, you get an error.

    References:
      PaddlePaddle, Auto Gradient Checker Design, 2017,
      https://github.com/PaddlePaddle/Paddle/blob/3f5dfc67752d885d2a4bb777fa27cf04d7927e06/doc/design/auto_gradient_check.md;
      Richardson, The Approximate Arithmetical Solution by Finite Differences of Physical Problems,
      1911, https://doi.org/10.1098/rsta.1911.0009.
    """
    __tracebackhide__ = True
    check_arguments(fun, args, kwargs)
    require_arrays(args, kwargs or {})
    limits = max_relative_error, tolerance, min_verified, time_budget
    log = Log(Options(order, mode, *limits, points, seed, skipped(skip)), cotangent=cotangent)
    kinds = find_devices(devices)
    log.not_run |= {f"device {kind}": "there is no such device here" for kind in kinds.absent}

    def function_on(device: Any):
        arguments = moved((args, dict(kwargs or {})), device)
        return checked_function(fun, arguments[0], arguments[1], wrt, no_grad, output)

    with jax.default_matmul_precision("highest"), np.errstate(all="ignore"):
        _check(function_on, kinds.there, log)
    report = log.report()
    if raise_on_failure and not report.ok:
        raise GradCheckError(report)
    return report


def _check(function_on: Callable, there: Mapping[str, Any], log: Log) -> None:
    """All checks on the first device that can run the function; the others' gradients."""
    others = dict(there)
    for kind, device in there.items():
        del others[kind]
        with jax.default_device(device):
            if others and _is_bound(function_on, device):  # else no other can run it
                log.not_run[f"device {kind}"] = BOUND
                continue
            log.devices.append(kind)
            checked = _checked(function_on(device), log)
        log.failures = [_with_device(f, kind) if others else f for f in log.failures]
        for other, where in others.items():
            if checked and "devices" not in log.options.skip and log.has_time("devices"):
                _check_device(checked, function_on, other, where, log)
        return


def _with_device(failure: Failure, kind: str) -> Failure:
    """A failure of values with the kind of the device that computed them."""
    text = f"{failure.detail}; computed on {kind}"
    return failure._replace(detail=text) if failure.check == "value" else failure


def _is_bound(function_on: Callable, device: Any) -> bool:
    """Whether a function does not run here since it is bound to other devices than its inputs'."""
    try:
        function = call_user(function_on, device)
        vjp = differentiated(function, function.inputs)
        call_user(vjp.pull, vjp.outputs)
    except UserError as error:
        text = f"{type(error.original).__name__} {error.original}"
        return any(word in text for word in OTHER_DEVICES)
    return False


def _checked(function: CheckedFunction, log: Log) -> CheckedPoint | None:
    """All checks on one device; what the function raises where it did not before is a failure."""
    try:
        return _check_there(function, log)
    except NotNearby as error:
        reasons = "; ".join([f"it raises {error}", *log.notes])
        text = f"the function cannot be evaluated at a point nearby: {reasons}"
        raise ValueError(text) from error.original
    except UserError as error:
        detail = f"it raises {error} when it is called again"
        log.failures.append(Failure("determinism", function.names[0], detail))
        return None


def _check_there(function: CheckedFunction, log: Log) -> CheckedPoint | None:
    """All checks on one device, in order; each writes to the log."""
    if donated := donated_arguments(function):
        log.failures.append(Failure("determinism", donated[0], DONATED.format(", ".join(donated))))
        return None
    log.kinds = np.full(int(vectors.offsets(function.inputs)[-1]), np.int8(UNSEEN))
    vjp = _differentiated(function, log)
    if vjp is None:
        return None
    covectors = _covectors(function, log)
    gradient = vjp.rows(covectors)  # before a trace, which may change the function's state
    witnesses = _witnesses(function, log) if log.has_time("value") else None
    if witnesses is None:
        return None
    is_still = _masks(witnesses, vjp, covectors)
    if is_still.any():
        covectors = np.where(is_still, 0.0, covectors)
        gradient = vjp.rows(covectors)
    point = point_at(witnesses, vjp, witnesses.here, covectors, log.options, gradient)
    log.measured(point)
    log.fail(contract.finite_gradient(function, point.finite))
    checked = check_point(point, log.options)
    log.first(checked)
    _note_half_precision(log)
    note_stops(function.program, log)
    if "points" not in log.options.skip:
        check_further_points(point, log)
    if all(log.are_zero) and not log.failures:
        log.note("the gradient is zero everywhere: does the output depend on the inputs?")
    check_behavior(point, log)
    check_second_order(point, log)
    if not log.failures and log.has_time("rules"):
        others = further(function, log.options.seed + 1, keeps=False)
        note_unused_rules(point, [point.xs, others][: log.options.points], log)
    log.evaluations += witnesses.here.evaluation.count
    return checked


def _covectors(function: CheckedFunction, log: Log) -> np.ndarray:
    """Two cotangents: random ones, or the user's and its negative."""
    if log.cotangent is None:
        return cotangents(function, log.options.seed)
    covector = vectors.covector_of(log.cotangent, function.outputs)
    covector = vectors.as_held(covector, function.outputs)
    return np.stack([covector, -covector])


def _note_half_precision(log: Log) -> None:
    if log.judged_to and precision(log.precision).is_coarse:
        log.note(
            f"finite differences in {log.precision} alone show only errors of "
            f"more than {percent(log.judged_to)} of a gradient; with arguments in float32, if the "
            "function takes them, of more than 0.5%"
        )


def _differentiated(function: CheckedFunction, log: Log) -> VJP | None:
    """The VJP, if what must hold does before numbers mean anything."""
    is_alike, u = is_traced_alike(function), _covectors(function, log)[0]
    again = function.outputs if is_alike else call_user(function.fun, function.inputs)
    log.evaluations += 3
    if contract.primal(function, again, "again", 0.0 if are_on_cpu(again) else ANY_ORDER):
        text = "two calls of the function give different values (randomness or side effects?)"
        log.fail([Failure("determinism", function.output_names[0], text)])
    failures = contract.finite_values(function)
    try:
        vjp = first_vjp(function)
        first = call_user(vjp.pull, vectors.cotangent_leaves(u, function.outputs))[0]
        if vjp.compiled is None:  # what was compiled has been compared
            failures += contract.primal(function, vjp.outputs, "differentiated")
        failures += contract.same_types(function, first)
        failures += contract.integers(function, u)
    except UserError as error:
        failure = _not_differentiated(function, error)
        log.fail([failure])
        if not log.failures:
            log.note(str(failure))
        return None
    log.fail(failures)
    is_random = any(f.check == "determinism" for f in log.failures)
    pairs = [*zip(function.outputs, vjp.outputs, strict=True)]
    pairs += zip(function.inputs, first, strict=True)
    kinds = [(x.shape, vectors.is_complex(x)) == (y.shape, vectors.is_complex(y)) for x, y in pairs]
    stops = is_random or any(f.check == "finite" for f in failures) or not all(kinds)
    if not all(kinds) and not log.failures:
        log.notes += [str(f) for f in failures]
    different = any(x.dtype != y.dtype for x, y in pairs[: len(function.outputs)])
    return None if stops or different else vjp


def _witnesses(function: CheckedFunction, log: Log) -> Witnesses | None:
    """The witnesses; None where the function fails another way as it is compiled."""
    try:
        witnesses = find_witnesses(function, log.notes)
    except UserError:
        compiled = call_user(_programs.low_jit(function.fun), function.inputs)
        failures = contract.primal(function, compiled, "compiled")
        log.fail([failure._replace(check="jit") for failure in failures])
        if log.failures:
            return None
        raise
    log.precision = witnesses.here.evaluation.label
    if witnesses.narrow not in map(vectors.real_name, function.inputs):
        text = "the function computes in {0} inside, so the tolerances are those of {0}"
        log.notes.append(text.format(witnesses.narrow))
    return witnesses


def _masks(witnesses: Witnesses, vjp: VJP, covectors: np.ndarray) -> np.ndarray:
    """The outputs that no step moves, such as a mask of -1e30 in scores: they get no cotangent.

    The rounding of so large a number would hide the slopes of all others. What depends on nothing
    has no gradient; one that has keeps its cotangent.
    """
    here = witnesses.here
    size, x = np.abs(here.base), here.x
    is_still = np.zeros(size.shape, bool)
    if size.max(initial=0.0) > MASK * np.median(size):
        change = here.change(np.where(x == 0, 1.0, x) / 16)
        is_still = (change == 0) & (size > MASK * size.max(initial=0.0, where=change > 0))
    return is_still & ~(is_still.any() and vjp(covectors[0] * is_still).any())


def _check_device(
    checked: CheckedPoint, function_on: Callable, kind: str, device: Any, log: Log
) -> None:
    """The gradient computed on another device has the numbers that judge the first one's."""
    with jax.default_device(device):
        if _is_bound(function_on, device):
            log.not_run[f"device {kind}"] = BOUND
            return
        function = function_on(device)
        gradient = first_vjp(function).rows(checked.point.covectors)
    log.devices.append(kind)
    log.evaluations += 2
    log.fail(failures_on_another_device(checked, gradient, kind, log.options))


def _not_differentiated(function: CheckedFunction, error: UserError) -> Failure:
    """The failure where `jax.vjp` raises an error."""
    closing = [] if function.program is None else _programs.closing_functions(function.program)
    detail = f"differentiation raises {error}"
    if closing:
        detail = (
            f"jax.vjp raises {type(error.original).__name__}: the derivative rules of "
            f"{', '.join(closing)} close over a traced value; pass it to the function as an "
            "argument, or leave what it depends on out with wrt or no_grad"
        )
    return Failure("cotangent", _not_differentiable(function), detail)


def _not_differentiable(function: CheckedFunction) -> str:
    """The name of the first input by which `jax.vjp` raises an error where it is alone."""
    for k, name in enumerate(function.names):
        try:
            call_user(jax.vjp, function.alone(k), function.inputs[k])
        except UserError:
            return name
    return function.names[0]
