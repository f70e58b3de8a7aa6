"""Checks of how a gradient behaves: repeated, scaled, compiled, batched, pushed forward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._check.compare import Comparison
from clipgrad._check.compiling import quick_jit
from clipgrad._check.problem import Problem
from clipgrad._check.pullback import Differentiate, PullBack, eagerly
from clipgrad._check.real import (
    cotangent_leaves,
    gradient_vector,
    leaves_of,
    real_size,
    stacked,
    to_numpy,
)
from clipgrad._check.report import Failure
from clipgrad._check.sampling import directions, scales

LARGE, LARGE_HALF = 2.0**20, 2.0**4
HALF_EPS = 1e-4


class Case(NamedTuple):
    """What the checks look at: two points, two cotangents, and the gradients found eagerly."""

    problem: Problem
    differentiate: Differentiate
    pull: PullBack
    covectors: np.ndarray
    gradient: np.ndarray
    compare: Comparison
    compare_second: Comparison
    second: Any
    seed: int


class Outcome(NamedTuple):
    """Failures, and why the check did not run if it did not."""

    failures: list[Failure]
    not_run: str | None = None


def determinism(case: Case) -> Outcome:
    """The same pull-back called twice, and the function differentiated twice, agree."""
    first = case.covectors[0]
    again = case.compare.exactly(
        "determinism", case.pull(first), case.gradient[0], "the pull-back called twice"
    )
    anew = case.differentiate(case.problem.inputs)(first)
    text = "the function differentiated twice (randomness or side effects?)"
    return Outcome(again or case.compare.exactly("determinism", anew, case.gradient[0], text))


def linearity(case: Case) -> Outcome:
    """The pull-back maps 0 to 0, multiples to multiples, and sums to sums."""
    first, second = case.covectors[:2]
    gradient, compare = case.gradient, case.compare
    half = compare.tolerance.eps.max() > HALF_EPS
    failures = compare(
        "linearity", case.pull(0 * first), 0 * gradient[0], "the cotangent zero pulled back"
    )
    for factor in (LARGE_HALF, 1 / LARGE_HALF) if half else (LARGE, 1 / LARGE):
        scaled = case.pull(first * factor) / factor
        text = f"the rule is not linear, the cotangent times 2 ** {np.log2(factor):g} pulled back"
        scaled = _where_in_range(scaled, gradient[0], factor, half)
        failures += compare("linearity", scaled, gradient[0], text)
    text = "the rule is not linear, the sum of two cotangents pulled back"
    failures += compare("linearity", case.pull(first + second), gradient[0] + gradient[1], text)
    return Outcome(failures[:2])


def _where_in_range(scaled, gradient, factor, half) -> np.ndarray:
    """Leave out what overflows or underflows because of the factor."""
    narrow = jnp.finfo(jnp.float16 if half else jnp.float32)
    size = np.abs(gradient) * factor
    typical = np.sqrt(np.mean(np.where(np.isfinite(size), size, 0.0) ** 2))
    low = (size > 0) & (size < float(narrow.tiny) * 1e3)
    outside = low | (size + typical > float(narrow.max) / 16) | ~np.isfinite(gradient)
    return np.where(outside, gradient, scaled)


def jit(case: Case) -> Outcome:
    """The gradient under `jax.jit` is the eager one."""
    problem, u = case.problem, cotangent_leaves(case.covectors[0], case.problem.outputs)
    text = "under jax.jit against eager"
    if case.differentiate.compiled:
        # JAX's own operations are pulled back alike: only the function need be called eagerly.
        eager = eagerly(problem, problem.inputs, quick_jit(lambda pull, cts: pull(cts)))
        return Outcome(case.compare("jit", case.gradient[0], eager(case.covectors[0]), text))

    def gradient(xs, ct):
        return jax.vjp(problem.fun, xs)[1](ct)[0]

    got, outcome = _attempt("jit", gradient, jax.eval_shape, problem, (problem.inputs, u))
    if got is None:
        return outcome
    return Outcome(case.compare("jit", gradient_vector(got), case.gradient[0], text))


def vmap(case: Case) -> Outcome:
    """Under `jax.vmap`, over points and over cotangents, rows are those found one by one."""
    problem = case.problem
    pairs = [cotangent_leaves(row, problem.outputs) for row in case.covectors[:2]]
    points = stacked([problem.inputs, case.second.xs])

    def gradients(xs, cts, x):
        both = jax.vmap(lambda x, ct: jax.vjp(problem.fun, x)[1](ct)[0])(xs, cts)
        try:
            return both, jax.vmap(lambda ct: jax.vjp(problem.fun, x)[1](ct)[0])(cts)
        except Exception:
            return both, None

    def forward(fun, xs):
        return jax.eval_shape(jax.vmap(fun), stacked([xs, xs]))

    got, outcome = _attempt(
        "vmap", gradients, forward, problem, (points, stacked(pairs), problem.inputs)
    )
    if got is None:
        return outcome
    rows, shared = got
    elsewhere = case.second.gradient[1]
    expected = [
        (case.compare, rows, 0, case.gradient[0]),
        (case.compare_second, rows, 1, elsewhere),
    ]
    if shared is not None:
        expected.append((case.compare, shared, 1, case.gradient[1]))
    failures = []
    for compare, leaves, k, other in expected:
        row = gradient_vector([np.asarray(leaf)[k] for leaf in leaves])
        failures += compare("vmap", row, other, f"under jax.vmap, row {k} against one by one")
    return Outcome(failures[:1])


def _attempt(check: str, gradient: Callable, forward: Callable, problem: Problem, inputs) -> Any:
    """Compile and run; failing that, blame the function if it fails on its own."""
    try:
        return quick_jit(gradient)(*inputs), None
    except Exception as error:
        message = first_line(error)
    try:
        forward(problem.fun, problem.inputs)
    except Exception as error:
        return None, Outcome([], f"the function itself raises {first_line(error)}")
    detail = f"the gradient raises {message}, the function does not"
    return None, Outcome([Failure(check, problem.names[0], detail)])


def forward(case: Case) -> Outcome:
    """Forward mode, one direction and several at once, agrees with reverse mode."""
    problem = case.problem
    scale = scales(problem.inputs)
    along = np.stack([directions(problem, case.seed, row) * scale for row in (0, 1)])
    tangents = stacked([leaves_of(row, problem.inputs) for row in along])

    def push(xs, vs):
        return jax.vmap(lambda v: jax.jvp(problem.fun, (xs,), (v,))[1])(vs)

    try:
        several = quick_jit(push)(problem.inputs, tangents)
    except Exception as error:
        return Outcome([], _why_no_forward(error))
    failures = [
        Failure("forward", name, f"the output has dtype {y.dtype}, its tangent {t.dtype}")
        for name, y, t in zip(problem.output_names, problem.outputs, several, strict=True)
        if y.dtype != t.dtype
    ]
    for row in (0, 1):
        tangent = to_numpy([np.asarray(leaf)[row] for leaf in several])
        failures += _agrees(case, along[row], tangent, "jax.jvp under jax.vmap")
    return Outcome(failures[:1])


def _agrees(case: Case, along, tangent, how: str) -> list[Failure]:
    pushed, pulled = case.covectors @ tangent, case.gradient @ along
    terms = np.sqrt((case.gradient**2) @ (along**2) + (case.covectors**2) @ (tangent**2))
    slack = 10 * case.compare.tolerance.along.max() * (terms + np.abs(pulled))
    off = np.abs(pushed - pulled)
    error = case.compare.rounding() if np.any(off > slack) else None
    slack = slack if error is None else slack + 30 * error @ np.abs(along)
    worst = int(np.argmax(off - slack))
    if not np.isfinite(pulled).all() or off[worst] <= slack[worst]:
        return []
    detail = (
        f"along a random direction {how} gives {pushed[worst]:.7g}, reverse {pulled[worst]:.7g}"
    )
    return [Failure("forward", case.problem.names[0], detail)]


def _why_no_forward(error: Exception) -> str:
    if "custom_vjp" in str(error):
        return "a custom_vjp function has no forward rule"
    return f"forward mode raises {first_line(error)}"


def outputs(case: Case) -> Outcome:
    """A cotangent for one output only, the others' zero or left out, gives that one's part."""
    problem = case.problem
    if len(problem.outputs) < 2:
        return Outcome([])
    places = np.cumsum([0] + [real_size(y) for y in problem.outputs])
    total, failures = np.zeros_like(case.gradient[0]), []
    for k, name in enumerate(problem.output_names):
        single = np.zeros_like(case.covectors[0])
        single[places[k] : places[k + 1]] = case.covectors[0][places[k] : places[k + 1]]
        with_zeros = case.pull(single)
        total = total + with_zeros
        if k < 4:
            alone = _one_output(problem, k, single[places[k] : places[k + 1]])
            text = f"differentiating {name} alone against zero cotangents for the other outputs"
            failures += case.compare("outputs", alone, with_zeros, text)
    text = "the cotangents of single outputs pulled back and summed against all at once"
    return Outcome((failures + case.compare("outputs", total, case.gradient[0], text))[:2])


def _one_output(problem: Problem, k: int, covector: np.ndarray) -> np.ndarray:
    _, pull = jax.vjp(lambda xs: problem.fun(xs)[k], problem.inputs)
    return gradient_vector(pull(cotangent_leaves(covector, [problem.outputs[k]])[0])[0])


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of its text."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:90]}"
