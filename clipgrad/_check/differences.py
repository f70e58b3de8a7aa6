"""Slopes of a function along many directions, by one compiled program.

A perturbation moves one contiguous range of the input vector along a stored direction: a single
element, a block, a leaf or several. The program evaluates the function in a loop over a batch of
bounded size, so that one compilation serves every mode and every point.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipgrad._check.compiling import quick_jit
from clipgrad._check.real import from_rows, offsets, to_numpy, to_rows, to_vector, wide_dtype
from clipgrad._check.shadow import AXIS

BATCH = 64
BATCH_BYTES = 2**25


class Evaluation(NamedTuple):
    """A way to evaluate the function for differences.

    `call(leaves)` gives the outputs; `dtype` is that of the vectors. `held` says that `call`
    runs under `jax.vmap` with the base point in row 0. `quick` holds two binary exponents of
    steps, `finer` two more where kinks lie between, if the type allows them, `ladder` those for
    close inspection, and `label` is for the report.
    """

    call: Callable[[list], list]
    like: Sequence[jax.ShapeDtypeStruct]
    dtype: Any
    label: str
    quick: tuple[int, int]
    ladder: tuple[int, ...]
    held: bool = False
    compiled: bool = True
    finer: tuple[int, int] | None = None

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
        self.base = self._vector = np.zeros(0)
        self._point: Any = None
        self._together = 3 if evaluation.held else 1
        size = int(offsets(evaluation.like)[-1]) + covectors.shape[1]
        self._batch = int(np.clip(BATCH_BYTES // (8 * self._together * size), 2, BATCH))
        self._program = (quick_jit if fast_compile else jax.jit)(self._loop)

    def measure(
        self,
        xs: Sequence[jax.Array],
        directions: np.ndarray,
        gradient: np.ndarray,
        rows: Rows,
        progress: Callable[[int], Any] = lambda done: None,
    ) -> Slopes:
        """Measure the slopes of all rows at the point `xs`, and of `gradient` along them."""
        base, parts = self._set_base(xs), []
        for begin in range(0, len(rows.start), self._at_once):
            part = Rows(*(column[begin : begin + self._at_once] for column in rows))
            parts.append(self._slopes(base, directions, gradient, part))
            progress(len(part.start))
        return Slopes(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def changes(self, xs: Sequence[jax.Array], shifts: np.ndarray) -> tuple[np.ndarray, ...]:
        """The change of each output from the point to each shift, and from minus the shift."""
        base, parts = self._set_base(xs), []
        for begin in range(0, len(shifts), self._at_once):
            part = shifts[begin : begin + self._at_once]
            points = self._rounded(base + part), self._rounded(base - part)
            ahead, behind = self._ahead_and_behind(base, *points)
            parts.append((ahead - self.base, self.base - behind))
        return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    @property
    def _at_once(self) -> int:
        return self._batch if self.evaluation.held else self._batch // 2

    def _set_base(self, xs) -> np.ndarray:
        if xs is not self._point:
            self._vector = to_numpy(xs)
            rows = np.repeat(self._vector[None, None], self._together, axis=1)
            self._point, self.base = xs, self._values(rows)[0, 0]
        return self._vector

    def _slopes(self, base, directions, gradient, rows: Rows) -> Slopes:
        shifts = np.zeros((len(rows.start), base.size))
        for shift, start, stop, step, direction in zip(shifts, *rows, strict=True):
            shift[start:stop] = step * directions[direction, start:stop]
        plus, minus = self._rounded(base + shifts), self._rounded(base - shifts)
        step = rows.step[:, None]
        ahead, behind = self._ahead_and_behind(base, plus, minus)
        taken = (plus - minus) / (2 * step)
        first, second = (ahead - self.base) / step, (self.base - behind) / step
        magnitude = np.abs(self.covectors).T
        return Slopes(
            central=(ahead - behind) / (2 * step) @ self.covectors.T,
            ahead=first @ self.covectors.T,
            behind=second @ self.covectors.T,
            width=np.abs(first - second) @ magnitude / 2,
            size=(np.abs(ahead) + np.abs(behind)) @ magnitude,
            analytic=taken @ gradient.T,
            norm=np.sqrt(taken**2 @ (gradient**2).T),
        )

    def _rounded(self, points: np.ndarray) -> np.ndarray:
        """The points as the function's inputs can hold them."""
        if self.evaluation.dtype == np.float64:
            return points
        return to_rows(from_rows(points, self.evaluation.like), points.ndim - 1)

    def _ahead_and_behind(self, base, plus, minus) -> tuple[np.ndarray, np.ndarray]:
        if self.evaluation.held:
            rows = np.stack([np.broadcast_to(base, plus.shape), plus, minus], axis=1)
            values = self._values(rows)
            return values[:, 1], values[:, 2]
        values = self._values(np.concatenate([plus, minus])[:, None])[:, 0]
        return values[: len(plus)], values[len(plus) :]

    def _values(self, points: np.ndarray) -> np.ndarray:
        """The outputs at points of shape (rows, together, inputs)."""
        count = len(points)
        self.evaluations += count * self._together
        leaves = [_padded(leaf, self._batch) for leaf in from_rows(points, self.evaluation.like)]
        with precision(self.evaluation):
            if self.evaluation.compiled:
                values = self._program(count, leaves)
            else:
                values = [
                    self._row([jnp.asarray(leaf[k]) for leaf in leaves]) for k in range(count)
                ]
        return np.asarray(values, np.float64)[:count]

    def _loop(self, count, leaves):
        def row(k, out):
            return out.at[k].set(self._row([leaf[k] for leaf in leaves]))

        shape = (self._batch, self._together, self.covectors.shape[1])
        return lax.fori_loop(0, count, row, jnp.zeros(shape, self.evaluation.dtype))

    def _row(self, leaves):
        dtype = self.evaluation.dtype
        if self.evaluation.held:
            values = jax.vmap(self.evaluation.call, axis_name=AXIS)(leaves)
            return jax.vmap(lambda rows: to_vector(rows, dtype))(values)
        return to_vector(self.evaluation.call([leaf[0] for leaf in leaves]), dtype)[None]


def _padded(leaf: np.ndarray, count: int) -> np.ndarray:
    out = np.zeros((count, *leaf.shape[1:]), leaf.dtype)
    out[: len(leaf)] = leaf
    return out


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
