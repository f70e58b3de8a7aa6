"""Slopes of a function along many directions, by one compiled program.

A perturbation moves one contiguous range of the input vector along a stored direction: a single
element, a block, a leaf or several. The program loops over a table of them, so that its memory
does not grow with their number and one compilation serves every mode and every point.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipgrad._check.real import from_vector, to_vector, wide_dtype
from clipgrad._check.shadow import AXIS

TABLE = 64
LOW_OPTIMIZATION = {"xla_backend_optimization_level": 0}


class Evaluation(NamedTuple):
    """A way to evaluate the function for differences.

    `call(leaves)` gives the outputs; `dtype` is that of the vectors. `held` says that `call`
    runs under `jax.vmap` with the base point in row 0. `quick` holds two binary exponents of
    steps, `ladder` those for close inspection, and `label` is for the report.
    """

    call: Callable[[list], list]
    like: Sequence[jax.ShapeDtypeStruct]
    dtype: Any
    label: str
    quick: tuple[int, int]
    ladder: tuple[int, ...]
    held: bool = False
    compiled: bool = True

    @property
    def eps(self) -> float:
        """The rounding unit of the evaluation."""
        return max(float(jnp.finfo(leaf.dtype).eps) for leaf in self.like)


class Rows(NamedTuple):
    """Perturbations: the range [start, stop), the step, and which direction; arrays of one size."""

    start: np.ndarray
    stop: np.ndarray
    step: np.ndarray
    direction: np.ndarray


class Slopes(NamedTuple):
    """What was measured for each row and cotangent; arrays of shape (rows, cotangents).

    `width` is half the difference of the one-sided slopes, summed without sign over the outputs;
    `size` is the magnitude that was subtracted; `norm` is the length of the gradient's part.
    """

    central: np.ndarray
    ahead: np.ndarray
    behind: np.ndarray
    width: np.ndarray
    size: np.ndarray
    analytic: np.ndarray
    norm: np.ndarray


class Differences:
    """Measures slopes of one function; counts its evaluations.

    Args:
      evaluation: how to evaluate the function.
      covectors: cotangents as real vectors, shape (cotangents, outputs).
      fast_compile: compile with little optimisation, for programs that run briefly.

    Attributes:
      evaluations: how often the function was evaluated.
      base: the outputs at the point last measured, as a real vector.
    """

    def __init__(self, evaluation: Evaluation, covectors: np.ndarray, fast_compile: bool = True):
        self.evaluation = evaluation
        self.covectors = covectors
        self.evaluations = 0
        self.base = np.zeros(0)
        options = LOW_OPTIMIZATION if fast_compile else None
        loop = _held_loop if evaluation.held else _loop
        self._program = jax.jit(_bound(loop, evaluation), compiler_options=options)

    def measure(
        self,
        xs: Sequence[jax.Array],
        directions: np.ndarray,
        gradient: np.ndarray,
        rows: Rows,
        progress: Callable[[int], Any] = lambda done: None,
    ) -> Slopes:
        """Measure the slopes of all rows at the point `xs`, and of `gradient` along them."""
        evaluation = self.evaluation
        leaves = [np.asarray(x).astype(s.dtype) for x, s in zip(xs, evaluation.like, strict=True)]
        parts = []
        with precision(evaluation):
            point = [jnp.asarray(leaf) for leaf in leaves]
            fixed = [
                jnp.asarray(table, evaluation.dtype)
                for table in (directions, self.covectors, gradient)
            ]
            for begin in range(0, len(rows.start), TABLE):
                part = Rows(*(column[begin : begin + TABLE] for column in rows))
                parts.append(self._run(part, point, fixed))
                progress(len(part.start))
        return Slopes(*np.moveaxis(np.concatenate(parts), 1, 0))

    def _run(self, rows: Rows, point, fixed) -> np.ndarray:
        count = len(rows.start)
        table = [np.zeros(TABLE, column.dtype) for column in rows]
        for column, values in zip(table, rows, strict=True):
            column[:count] = values
        table[2][count:] = 1.0
        self.evaluations += 3 * count if self.evaluation.held else 2 * count + 1
        if self.evaluation.compiled:
            result, base = self._program(count, table, point, *fixed)
        else:
            result, base = _eager(self.evaluation, rows, point, *fixed)
        self.base = np.asarray(base, np.float64)
        return np.asarray(result, np.float64)[:count]


@contextlib.contextmanager
def precision(evaluation: Evaluation):
    """Sixty-four bits on the CPU for a float64 evaluation; nothing otherwise."""
    if wide_dtype(evaluation.dtype) != evaluation.dtype:
        yield
        return
    with jax.enable_x64(True), on_cpu():
        yield


def on_cpu():
    """A context that computes on the CPU where there is one."""
    try:
        return jax.default_device(jax.devices("cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


def _bound(loop, evaluation):
    return lambda *inputs: loop(evaluation, *inputs)


def _moved(evaluation, point, directions, start, stop, step, direction):
    """The two perturbed points and the direction really taken, after rounding."""
    base = to_vector(point, evaluation.dtype)
    index = jnp.arange(base.size)
    chosen = (index >= start) & (index < stop)
    shift = jnp.where(chosen, directions[direction], 0) * step.astype(evaluation.dtype)
    plus, minus = (from_vector(base + sign * shift, point) for sign in (1, -1))
    taken = to_vector(plus, evaluation.dtype) - to_vector(minus, evaluation.dtype)
    return plus, minus, taken / (2 * step.astype(evaluation.dtype))


def _slopes(evaluation, values, taken, step, covectors, gradient):
    """One row of `Slopes`, from the values at the base point and ahead and behind."""
    base, plus, minus = values
    step = step.astype(evaluation.dtype)
    ahead, behind = (plus - base) / step, (base - minus) / step
    size = jnp.abs(covectors)
    return jnp.stack(
        [
            covectors @ ((plus - minus) / (2 * step)),
            covectors @ ahead,
            covectors @ behind,
            size @ jnp.abs(ahead - behind) / 2,
            size @ (jnp.abs(plus) + jnp.abs(minus)),
            gradient @ taken,
            jnp.sqrt((gradient * gradient) @ (taken * taken)),
        ]
    )


def _held_loop(evaluation, count, table, point, directions, covectors, gradient):
    call = jax.vmap(evaluation.call, axis_name=AXIS)

    def row(k, state):
        out, _ = state
        start, stop, step, direction = (column[k] for column in table)
        plus, minus, taken = _moved(evaluation, point, directions, start, stop, step, direction)
        rows = call([jnp.stack(leaves) for leaves in zip(point, plus, minus, strict=True)])
        values = jax.vmap(lambda leaves: to_vector(leaves, evaluation.dtype))(rows)
        slopes = _slopes(evaluation, values, taken, step, covectors, gradient)
        return out.at[k].set(slopes), values[0]

    return lax.fori_loop(0, count, row, _empty(evaluation, covectors))


def _loop(evaluation, count, table, point, directions, covectors, gradient):
    """Iteration 0 evaluates the base point, 2k+1 row k ahead, and 2k+2 row k behind."""

    def half(i, state):
        out, base, plus = state
        k, behind = jnp.maximum(i - 1, 0) // 2, (i % 2 == 0) & (i > 0)
        start, stop, step, direction = (column[k] for column in table)
        stop = jnp.where(i == 0, start, stop)
        ahead, back, taken = _moved(evaluation, point, directions, start, stop, step, direction)
        leaves = [jnp.where(behind, b, a) for a, b in zip(ahead, back, strict=True)]
        value = to_vector(evaluation.call(leaves), evaluation.dtype)
        base = jnp.where(i == 0, value, base)
        row = _slopes(evaluation, (base, plus, value), taken, step, covectors, gradient)
        return out.at[k].set(row), base, jnp.where(behind, plus, value)

    zero = jnp.zeros(covectors.shape[1], evaluation.dtype)
    start = (*_empty(evaluation, covectors), zero)
    return lax.fori_loop(0, 2 * count + 1, half, start)[:2]


def _eager(evaluation, rows, point, directions, covectors, gradient):
    def value(leaves):
        return to_vector(evaluation.call(leaves), evaluation.dtype)

    base, out = value(point), []
    for start, stop, step, direction in zip(*rows, strict=True):
        step = jnp.asarray(step)
        plus, minus, taken = _moved(evaluation, point, directions, start, stop, step, direction)
        values = (base, value(plus), value(minus))
        out.append(_slopes(evaluation, values, taken, step, covectors, gradient))
    return jnp.stack(out), base


def _empty(evaluation, covectors):
    table = (TABLE, len(Slopes._fields), covectors.shape[0])
    return jnp.zeros(table, evaluation.dtype), jnp.zeros(covectors.shape[1], evaluation.dtype)
