"""How to evaluate the function for differences: the best way that works on it."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad._jaxpr as _jaxpr
from clipgrad._check.differences import Differences, Evaluation, Rows
from clipgrad._check.problem import Problem, leaf_dtypes
from clipgrad._check.real import real_dtype, to_numpy, wide_dtype
from clipgrad._check.sampling import DIRECTIONS, directions, scales
from clipgrad._check.shadow import Shadow, Unsupported, make_shadow
from clipgrad._check.tolerance import narrowest

WIDE_QUICK, WIDE_FINER, WIDE_LADDER = (16, 18), (22, 24), tuple(range(4, 33, 4))
SINGLE_QUICK, SINGLE_LADDER = (4, 5), tuple(range(2, 11))
HALF_QUICK, HALF_LADDER = (2, 3), (1, 2, 3, 4)
PROBE = (10, 33)
LOOSE = 0.1
CAST = "float64 (inputs cast)"


class Chosen(NamedTuple):
    """The measuring program, the shadow if there is one, and remarks on what was not possible."""

    differences: Differences
    shadow: Shadow | None
    notes: list[str]


class _NotSmooth(Exception):
    """A float64 evaluation that computes in a narrower type inside."""


def choose(problem: Problem, covectors: np.ndarray, fast_compile: bool) -> Chosen:
    """Try the evaluations in order, down to running them, and return the first that works."""
    notes: list[str] = []
    shadow = None
    for label, make in _candidates(problem, problem.program is not None):
        try:
            evaluation, shadow = make()
            differences = Differences(evaluation, covectors, fast_compile)
            _probe(problem, differences)
            return Chosen(differences, shadow, notes)
        except Exception as error:
            notes.append(f"{label} is not possible ({_reason(error)})")
    raise ValueError("the function cannot be evaluated at a perturbed point; " + "; ".join(notes))


def _candidates(problem: Problem, traceable: bool) -> Iterator:
    if traceable:
        yield "the float64 shadow", lambda: _shadowed(problem)
    yield "casting the inputs to float64", lambda: (_cast(problem, traceable), None)
    yield "evaluation in native precision", lambda: (_native(problem, traceable), None)


def _wide_like(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, wide_dtype(x.dtype)) for x in problem.inputs]


def _shadowed(problem: Problem) -> tuple[Evaluation, Shadow]:
    shadow = make_shadow(problem.program)
    call = shadow.held if shadow.stops else shadow.fun
    evaluation = wide_evaluation(call, _wide_like(problem), "float64", held=shadow.stops)
    return evaluation, shadow


def wide_evaluation(call, like, label: str, held: bool = False, compiled: bool = True):
    """An evaluation in float64."""
    steps = WIDE_QUICK, WIDE_LADDER
    return Evaluation(call, like, np.float64, label, *steps, held, compiled, WIDE_FINER)


def _cast(problem: Problem, traceable: bool) -> Evaluation:
    if traceable and not jax.config.read("jax_enable_x64") and _calls_back(problem):
        raise Unsupported("a callback runs in a thread of its own, where 64-bit types are off")
    return wide_evaluation(problem.fun, _wide_like(problem), CAST, compiled=traceable)


def _calls_back(problem: Problem) -> bool:
    found = _jaxpr.equations(problem.program)
    return any("callback" in equation.primitive.name for equation in found)


def _native(problem: Problem, traceable: bool) -> Evaluation:
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in problem.inputs]
    name = narrowest([*leaf_dtypes(problem), *(real_dtype(y).name for y in problem.outputs)])
    steps = {"float64": (WIDE_QUICK, WIDE_LADDER), "float32": (SINGLE_QUICK, SINGLE_LADDER)}
    quick, ladder = steps.get(name, (HALF_QUICK, HALF_LADDER))
    dtype = np.float64 if name == "float64" else np.float32
    return Evaluation(problem.fun, like, dtype, name, quick, ladder, compiled=traceable)


def _probe(problem: Problem, differences: Differences) -> None:
    """Run it once: same values as the function's own, and no narrow type hidden inside."""
    scale = scales(problem.inputs)
    along = np.tile(directions(problem, 0, 0) * scale, (DIRECTIONS, 1))
    rows = Rows(np.zeros(2, int), np.full(2, scale.size), 2.0 ** -np.array(PROBE), np.zeros(2, int))
    gradient = np.zeros((len(differences.covectors), scale.size))
    slopes = differences.measure(problem.inputs, along, gradient, rows)
    _same_values(problem, differences.base)
    if differences.evaluation.label != CAST:
        return
    far, near = slopes.central
    noise = differences.evaluation.eps * slopes.size[1] * 2.0 ** PROBE[1]
    jumps = np.abs(near - far) > 10 * np.abs(far) + 10 * noise
    if np.any(jumps | ((near == 0) & (np.abs(far) > 10 * noise))):
        raise _NotSmooth("it computes in a narrower type inside")


def _same_values(problem: Problem, values: np.ndarray) -> None:
    own = to_numpy(problem.outputs)
    size = np.sqrt(np.mean(own**2))
    off = np.sqrt(np.mean((own - values) ** 2))
    if np.isfinite(own).all() and not off <= LOOSE * size + jnp.finfo(np.float32).tiny:
        raise _NotSmooth("its values differ from the function's own")


def _reason(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    if isinstance(error, (_NotSmooth, Unsupported)):
        return text
    return f"{type(error).__name__}: {text[:80]}"
