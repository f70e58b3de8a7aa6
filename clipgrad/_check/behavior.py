"""Checks of how a gradient behaves: repeated, scaled, compiled, batched, pushed forward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad._jaxpr as _jaxpr
import clipgrad._trees as _trees
from clipgrad._check.check import Check
from clipgrad._check.differences import are_on_cpu
from clipgrad._check.further import EQUALITY
from clipgrad._check.gradients import differentiated, has_rules
from clipgrad._check.points import Scales, masked_rows, random_direction
from clipgrad._check.report import Failure
from clipgrad._check.subject import CheckSubject
from clipgrad._check.tolerances import LOOSER, distance, length_along, pieces, sum_along
from clipgrad._errors import first_line

# Powers of two by which a cotangent is multiplied; half precision has no room for more.
# Nor has a loop that stops when it is near enough, in absolute terms.
LARGE, LARGE_HALF, LARGE_SOLVED = 2.0**20, 2.0**4, 2.0
HALF_EPS = 1e-4
NOT_LINEAR = "rule is not linear, the pull-back"
CLIPS = (
    " (a clip that acts there? write skip='linearity', or check the function without the clip); "
)
REFUSES = ", where the rule is written so: it is NaN in float64 too"
ALONE = 4  # outputs that are differentiated alone


class NotRun(Exception):
    """A check that cannot be run, and why."""


class Fails(Exception):
    """A check that fails without numbers, and how."""


def check_behavior(check: Check) -> None:
    """All checks of behavior that are not switched off."""
    log, without = check.log, ""
    if not has_rules(check.subject):
        without = "it has only JAX's own operations, without a custom rule"
    elif any(failure.check == "value" for failure in log.failures):
        without = "values are wrong"
    for name, behaves in BEHAVIORS.items():
        if name in check.options.skip:
            continue
        if without and name in OF_RULES:
            log.not_run[name] = without
            continue
        if not log.has_time(name):
            continue
        log.evaluations += 2
        try:
            log.failures += behaves(check)
        except NotRun as reason:
            log.not_run[name] = str(reason)
        except Exception as error:
            detail = str(error) if isinstance(error, Fails) else f"raises {first_line(error)}"
            if _is_lacking(error):
                log.not_run[name] = detail
            else:
                log.failures.append(Failure(name, check.subject.names[0], detail))


def _is_lacking(error: Exception) -> bool:
    """Whether XLA lacks an operation on this device, as products of bfloat16 of some shapes."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "UNIMPLEMENTED" in str(error)


def determinism(check: Check) -> list[Failure]:
    """Two calls of the pull-back agree, and so do two derivatives of the function."""
    first, expected = check.covectors[0], check.gradient[0]
    again = _exactly(check, check.vjp(first), expected, "the pull-back called twice")
    anew = differentiated(check.subject, check.subject.inputs)(first)
    text = "the function differentiated twice (randomness or side effects?)"
    return again or _exactly(check, anew, expected, text)


def _exactly(check: Check, got, expected, what: str) -> list[Failure]:
    """Compare what must agree to the last bit; devices that are not CPUs add in any order."""
    failures = check.compare("determinism", got, expected, what)
    if failures or np.array_equal(got, expected) or not are_on_cpu(check.subject.inputs):
        return failures
    bad = distance(got, expected) > 0
    if not bad.any():
        return []
    detail = f"{what}: {int(bad.sum())} of {bad.size} elements are not bit-identical"
    return [Failure("determinism", check.subject.element(int(np.argmax(bad))), detail)]


def linearity(check: Check) -> list[Failure]:
    """The pull-back maps 0 to 0, multiples to multiples, negative ones too, and sums to sums.

    An element that is not finite is no multiple and no sum, and another check has said so.
    """
    first, gradient = check.covectors[0], check.gradient[0]
    ones, mask = np.ones_like(first), masked_rows(check.subject, check.options.seed)
    large = LARGE_HALF if _has_half_precision(check) else LARGE
    large = LARGE_SOLVED if np.any(check.tolerance.own) or np.any(check.tolerance.loops) else large

    def claim(got, expected, what) -> list[Failure]:
        if not is_finite:
            got, expected = (np.where(np.isfinite(gradient), x, 0) for x in (got, expected))
        return check.compare("linearity", got, expected, f"the {what}")

    is_finite, nothing = np.isfinite(gradient).all(), np.broadcast_to(np.float32(0), gradient.shape)
    zero = claim(check.vjp(0 * first), nothing, "pull-back of a zero cotangent")
    small, above = _scaled_failures(check, 1 / large), _scaled_failures(check, -large)
    parts = check.vjp(first * mask)
    parts += check.vjp(first * (1 - mask))
    sums = claim(parts, gradient, f"{NOT_LINEAR}s of masked rows of a cotangent and of the others")
    del parts  # before the next ones are there
    parts = check.vjp(ones)
    parts += gradient
    text = f"{NOT_LINEAR} of the sum of a cotangent and a constant one"
    sums += claim(check.vjp(first + ones), parts, text)
    if above and not (zero or small or sums or _scaled_failures(check, -1.0)):
        if _refuses(check, -large):
            limit = _above(check, large, _refuses)
            check.log.notes.append(
                f"linearity: the VJP is NaN above cotangents of {limit}{REFUSES}"
            )
            return []
        limit = _above(check, large, _scaled_failures)
        text = f"the VJP is not linear above cotangents of {limit}{CLIPS}"
        above = [above[0]._replace(detail=text + above[0].detail)]
    return (zero + above + small + sums)[:2]


def _refuses(check: Check, factor: float) -> bool:
    """Whether a rule gives NaN for that multiple of a cotangent, as it does in float64 too.

    So it is no overflow: the rule is written so, as the matrix exponential is for large matrices.
    """
    rule, scaled = check.rule, check.covectors[:1] * factor
    return bool(np.isnan(check.vjp.rows(scaled)).all()) and (
        rule is not None and bool(np.isnan(rule(check.subject.inputs, scaled)).all())
    )


def _has_half_precision(check: Check) -> bool:
    return bool(check.tolerance.eps.max() > HALF_EPS)


def _scaled_failures(check: Check, factor: float) -> list[Failure]:
    """The multiple of a cotangent has that multiple of its gradient."""
    expected = check.gradient[0]
    scaled = check.vjp(check.covectors[0] * factor)
    scaled /= factor
    scaled = _where_in_range(scaled, expected, factor, _has_half_precision(check))
    text = f"the {NOT_LINEAR} of the cotangent times "
    text += f"{'-' * (factor < 0)}2 ** {np.log2(abs(factor)):g}"
    return check.compare("linearity", scaled, expected, text)


def _above(check: Check, factor: float, fails: Callable[[Check, float], Any]) -> str:
    """Above which size of the cotangents a rule fails that does not below it."""
    while factor > 2 and fails(check, factor / 2):
        factor /= 2
    return f"{float(np.abs(check.covectors[0]).max()) * factor / 2:.3g}"


def _where_in_range(scaled, gradient, factor, half) -> np.ndarray:
    """Leave out what overflows or underflows because of the factor."""
    narrow = jnp.finfo(jnp.float16 if half else jnp.float32)
    finite = gradient if np.isfinite(gradient.sum()) else gradient[np.isfinite(gradient)]
    typical = length_along(finite[None], np.asarray([factor]))[0] / np.sqrt(max(finite.size, 1))
    for where in pieces(0, gradient.size):
        size = np.abs(gradient[where] * factor)
        low = (size > 0) & (size < float(narrow.tiny) * 1e3)
        outside = low | ~(size + typical <= float(narrow.max) / 16)
        scaled[where] = np.where(outside, gradient[where], scaled[where])
    return scaled


def jit(check: Check) -> list[Failure]:
    """The gradient under `jax.jit` is the eager one."""
    subject, u = check.subject, _trees.cotangent_leaves(check.covectors[0], check.subject.outputs)
    got = _attempt_gradient(subject.pull_back, jax.eval_shape, subject, (subject.inputs, u))
    text = "under jax.jit, compared with eager"
    return check.compare("jit", _trees.gradient_vector(got), check.gradient[0], text)


def vmap(check: Check) -> list[Failure]:
    """Under `jax.vmap`, over points and over cotangents, rows are those found one by one."""
    subject = check.subject
    pairs = _trees.stacked(
        [_trees.cotangent_leaves(row, subject.outputs) for row in check.covectors[:2]]
    )
    elsewhere = check.elsewhere(1) or check.elsewhere(1, EQUALITY)
    xs, there = elsewhere or (subject.inputs, check.vjp)

    def forward(fun, xs):
        return jax.eval_shape(jax.vmap(fun), _trees.stacked([xs, xs]))

    def claim(leaves, k, other, at=None) -> list[Failure]:
        row = _trees.gradient_vector([np.asarray(leaf)[k] for leaf in leaves])
        text = f"under jax.vmap, row {k} compared with the row alone"
        return check.compare("vmap", row, other, text, at)

    both = _trees.stacked([subject.inputs, xs]), pairs
    rows = _attempt_gradient(jax.vmap(subject.pull_back), forward, subject, both)
    del both  # as large as two models
    failures = claim(rows, 0, check.gradient[0])
    failures += claim(rows, 1, there(check.covectors[1]), xs)
    del rows  # likewise
    try:
        shared = _jaxpr.quick_jit(jax.vmap(subject.pull_back, (None, 0)))(subject.inputs, pairs)
    except Exception:
        return failures[:1]
    return (failures + claim(shared, 1, check.vjp(check.covectors[1])))[:1]


def _attempt_gradient(gradient: Callable, forward: Callable, subject: CheckSubject, inputs) -> Any:
    """Compile and run; if that fails, the gradient is to blame unless the function fails too."""
    try:
        return _jaxpr.quick_jit(gradient)(*inputs)
    except Exception as error:
        message = first_line(error)
        if _is_lacking(error):
            raise
    if not has_rules(subject):
        raise NotRun(f"JAX's own derivative raises {message}")
    try:
        forward(subject.fun, subject.inputs)
    except Exception as error:
        raise NotRun(f"the function itself raises {first_line(error)}") from error
    raise Fails(f"the gradient raises {message}, but the function does not")


def forward(check: Check) -> list[Failure]:
    """Forward mode, one direction and several at once, agrees with reverse mode."""
    subject = check.subject
    push = lambda xs, v: jax.jvp(subject.fun, (xs,), (v,))[1]  # noqa: E731
    try:
        # Raises errors before much is made; inside of `jax.vmap` JAX would keep what it traced.
        jax.eval_shape(push, subject.inputs, subject.inputs)
        tangents = [_trees.rows_in_place((2, *x.shape), x.dtype) for x in subject.inputs]
        for row in (0, 1):
            leaves = _trees.from_rows(_scaled_direction(check, row), subject.inputs)
            for k in range(len(tangents)):  # each direction has the size of the model
                tangents[k][row] = leaves.pop(0)
        several = _jaxpr.quick_jit(jax.vmap(push, in_axes=(None, 0)))(subject.inputs, tangents)
        del tangents
        _trees.give_back(check.gradient.size)
    except Exception as error:
        has_none = "custom_vjp" in str(error)
        why = "a custom_vjp function has no forward rule" if has_none else first_line(error)
        raise NotRun(why if has_none else f"forward mode raises {why}") from error
    failures = [
        Failure("forward", name, f"the output has dtype {y.dtype}, its tangent {t.dtype}")
        for name, y, t in zip(subject.output_names, subject.outputs, several, strict=True)
        if y.dtype != t.dtype
    ]
    for row in (0, 1):
        tangent = _trees.to_numpy([np.asarray(leaf)[row] for leaf in several])
        failures += _agrees(check, _scaled_direction(check, row), tangent)
    return failures[:1]


def _scaled_direction(check: Check, row: int) -> np.ndarray:
    """A random direction by the scale of each element, in the type of these."""
    scales = Scales(check.subject.inputs)
    return scales.times(random_direction(check.subject, check.options.seed, row, scales.dtype))


def _agrees(check: Check, along, tangent) -> list[Failure]:
    pushed, terms = sum_along(check.covectors, tangent)
    pulled, lengths = sum_along(check.vjp.rows(check.covectors), along)
    terms = np.hypot(lengths, terms)
    slack = LOOSER * check.tolerance.along.max() * (terms + np.abs(pulled))
    off = np.abs(pushed - pulled)
    if np.any(off > slack):
        noise = check.noise(check.subject.inputs)
        for part in pieces(0, along.size):
            errors = noise(np.arange(part.start, part.stop))
            slack = slack + 2 * errors @ np.abs(along[part])
    k = int(np.argmax(off - slack))
    if not np.isfinite(pulled).all() or off[k] <= slack[k]:
        return []
    numbers = f"{pushed[k]:.7g}, reverse {pulled[k]:.7g}"
    detail = f"along a random direction jax.jvp under jax.vmap gives {numbers}"
    return [Failure("forward", check.subject.names[0], detail)]


def outputs(check: Check) -> list[Failure]:
    """A cotangent for one output only, the others' zero or left out, gives that one's part."""
    subject, first = check.subject, check.covectors[0]
    places, failures = _trees.offsets(subject.outputs), []
    if len(subject.outputs) < 2:
        return failures
    total = np.zeros_like(check.gradient[0])
    for k, name in enumerate(subject.output_names):
        single, where = np.zeros_like(first), slice(places[k], places[k + 1])
        single[where] = first[where]
        with_zeros = check.vjp(single)
        total = total + with_zeros
        if k < ALONE:
            pull = jax.vjp(lambda xs, k=k: subject.fun(xs)[k], subject.inputs)[1]
            own = pull(_trees.cotangent_leaves(first[where], [subject.outputs[k]])[0])[0]
            text = f"{name} differentiated alone, compared with zero cotangents for the others"
            failures += check.compare("outputs", _trees.gradient_vector(own), with_zeros, text)
    text = "the sum of the pull-backs of single outputs, compared with all at once"
    return (failures + check.compare("outputs", total, check.gradient[0], text))[:2]


def alone(check: Check) -> list[Failure]:
    """Each input differentiated with the others held has the gradient that it has among them."""
    subject, gradient, failures = check.subject, check.gradient[0], []
    found = [] if subject.program is None else _jaxpr.equations(subject.program)
    is_told = subject.program is None or any(e.params.get("symbolic_zeros") for e in found)
    if len(subject.inputs) < 2 or not is_told:  # a rule, which of its arguments are differentiated
        return failures
    cotangents = _trees.cotangent_leaves(check.covectors[0], subject.outputs)
    for k, (start, stop) in enumerate(subject.ranges):
        pull = jax.vjp(subject.alone(k), subject.inputs[k])[1]
        got = gradient.copy()
        got[start:stop] = _trees.gradient_vector(pull(cotangents))
        text = f"{subject.names[k]} differentiated alone compared with all inputs at once"
        failures += check.compare("alone", got, gradient, text)
    return failures[:2]


BEHAVIORS: dict[str, Callable[[Check], list[Failure]]] = {
    behaves.__name__: behaves
    for behaves in (determinism, linearity, jit, vmap, forward, outputs, alone)
}
# Without a custom rule they would test JAX, and of wrong values they say nothing new.
OF_RULES = {"vmap", "forward", "outputs", "alone"}
