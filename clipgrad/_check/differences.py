"""Slopes of a function along many directions, by one compiled program.

A perturbation moves one contiguous range of the input vector along a stored direction: a single
element, a block, a leaf or several. The program evaluates the function in a loop over a batch of
bounded size, so that one compilation serves every mode and every point.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipgrad._check.programs import kept, low_jit, quick_jit
from clipgrad._check.tolerances import NOISE
from clipgrad._check.vectors import (
    from_rows,
    offsets,
    to_numpy,
    to_rows,
    to_vector,
    wide_dtype,
)
from clipgrad._check.widening import AXIS

BATCH = 64
# Of the points evaluated by one call, so that a large model's fit into memory beside it.
BATCH_BYTES = 2**25
LONG = 5000  # measurements that get a progress bar, where tqdm is installed


class Evaluation(NamedTuple):
    """A way to evaluate the function for differences.

    `call(constants, leaves)` gives the outputs; `dtype` is that of the vectors. `held` says that
    `call` runs under `jax.vmap` with the base point in row 0. `key` is equal for calls that are,
    None if that is not known. `quick` holds two binary exponents of steps, `finer` two more where
    kinks lie between, if the type allows them, `ladder` those for close inspection, and `label` is
    for the report.
    """

    call: Callable[[Sequence, list], list]
    like: Sequence[jax.ShapeDtypeStruct]
    dtype: Any
    label: str
    quick: tuple[int, int]
    ladder: tuple[int, ...]
    constants: Sequence = ()
    key: Any = None
    held: bool = False
    compiled: bool = True
    finer: tuple[int, int] | None = None

    @property
    def eps(self) -> float:
        """The rounding unit of the evaluation."""
        return max(float(jnp.finfo(leaf.dtype).eps) for leaf in self.like)

    @property
    def together(self) -> int:
        """How many points are evaluated at once: the base, ahead and behind, or one."""
        return 3 if self.held else 1


class Moves(NamedTuple):
    """Perturbations: the range [start, stop), the step, and which direction; arrays of one size."""

    start: np.ndarray
    stop: np.ndarray
    step: np.ndarray
    direction: np.ndarray


class Slopes(NamedTuple):
    """What was measured for each move and cotangent; arrays of shape (moves, cotangents).

    `width` is half the difference of the one-sided slopes, summed without sign over the outputs;
    `noise` is what rounding may do to a slope; `norm` is the length of the gradient's part.
    """

    central: np.ndarray
    ahead: np.ndarray
    behind: np.ndarray
    width: np.ndarray
    noise: np.ndarray
    analytic: np.ndarray
    norm: np.ndarray

    def at(self, step: np.ndarray, name: str) -> np.ndarray:
        """Of slopes of shape (rows, steps, cotangents): a field at one step for each of them."""
        return np.take_along_axis(getattr(self, name), step[:, None], axis=1)[:, 0]


class Differences:
    """Measures slopes of one function; counts its evaluations.

    Args:
      evaluation: how to evaluate the function.
      covectors: cotangents as real vectors, shape (cotangents, outputs).
      fast_compile: compile with little optimization, for programs that run briefly.

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
        size = int(offsets(evaluation.like)[-1]) + covectors.shape[1]
        self._batch = int(np.clip(BATCH_BYTES // (8 * evaluation.together * size), 2, BATCH))
        self._program = _looped(evaluation, self._batch, covectors.shape[1], fast_compile)

    def measure(
        self,
        xs: Sequence[jax.Array],
        directions: np.ndarray,
        gradient: np.ndarray,
        moves: Moves,
        progress: Callable[[int], Any] = lambda done: None,
    ) -> Slopes:
        """Measure the slopes of all moves at the point `xs`, and of `gradient` along them."""
        base, parts = self._set_base(xs), []
        for begin in range(0, len(moves.start), self._at_once):
            part = Moves(*(column[begin : begin + self._at_once] for column in moves))
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
            rows = np.broadcast_to(self._vector, (1, self.evaluation.together, self._vector.size))
            self._point, self.base = xs, self._values(rows)[0, 0]
        return self._vector

    def _slopes(self, base, directions, gradient, moves: Moves) -> Slopes:
        shape = (len(moves.start), base.size)
        plus, minus = np.empty(shape), np.empty(shape)
        plus[:], minus[:] = base, base
        for row, (start, stop, step, direction) in enumerate(zip(*moves, strict=True)):
            shift = step * directions[direction, start:stop]
            plus[row, start:stop] += shift
            minus[row, start:stop] -= shift
        plus, minus = self._rounded(plus), self._rounded(minus)
        step = moves.step[:, None]
        ahead, behind = self._ahead_and_behind(base, plus, minus)
        analytic, norm = _along(plus, minus, gradient, moves)
        first, second = (ahead - self.base) / step, (self.base - behind) / step
        magnitude = np.abs(self.covectors).T
        return Slopes(
            central=(ahead - behind) / (2 * step) @ self.covectors.T,
            ahead=first @ self.covectors.T,
            behind=second @ self.covectors.T,
            width=np.abs(first - second) @ magnitude / 2,
            noise=self._noise(ahead, behind, magnitude) / step,
            analytic=analytic,
            norm=norm,
        )

    def _noise(self, ahead, behind, magnitude) -> np.ndarray:
        """Roundings of what is subtracted, of both signs over the outputs."""
        outputs = max(self.covectors.shape[1], 1)
        size = (np.abs(ahead) + np.abs(behind)) @ magnitude
        return NOISE * self.evaluation.eps * size / np.sqrt(outputs)

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
        """The outputs at points of shape (moves, together, inputs)."""
        count, evaluation = len(points), self.evaluation
        self.evaluations += count * evaluation.together
        leaves = [_padded(leaf, self._batch) for leaf in from_rows(points, evaluation.like)]
        with precision(evaluation):
            if evaluation.compiled:
                values = self._program(evaluation.constants, count, leaves)
            else:
                rows = [[jnp.asarray(leaf[k]) for leaf in leaves] for k in range(count)]
                values = [_row(evaluation, evaluation.constants, row) for row in rows]
        return np.asarray(values, np.float64)[:count]


def _along(plus, minus, gradient: np.ndarray, moves: Moves) -> tuple[np.ndarray, np.ndarray]:
    """The gradient along each move as it was really made, and the length of its part."""
    analytic = np.zeros((len(moves.start), len(gradient)))
    norm = np.zeros_like(analytic)
    for row, (start, stop, step, _) in enumerate(zip(*moves, strict=True)):
        moved = (plus[row, start:stop] - minus[row, start:stop]) / (2 * step)
        terms = gradient[:, start:stop] * moved
        analytic[row], norm[row] = terms.sum(axis=1), np.linalg.norm(terms, axis=1)
    return analytic, norm


def _looped(evaluation: Evaluation, batch: int, outputs: int, fast_compile: bool) -> Callable:
    """The compiled program: the outputs at a number of points."""
    evaluation = evaluation._replace(constants=())

    def loop(constants, count, leaves):
        def row(k, out):
            return out.at[k].set(_row(evaluation, constants, [leaf[k] for leaf in leaves]))

        shape = (batch, evaluation.together, outputs)
        return lax.fori_loop(0, count, row, jnp.zeros(shape, evaluation.dtype))

    if not fast_compile:
        return jax.jit(loop)
    if evaluation.key is None:
        return quick_jit(loop)
    return kept(("differences", evaluation.key, batch, outputs), lambda: low_jit(loop))


def _row(evaluation: Evaluation, constants, leaves):
    dtype = evaluation.dtype
    if evaluation.held:
        call = jax.vmap(lambda xs: evaluation.call(constants, xs), axis_name=AXIS)
        return jax.vmap(lambda rows: to_vector(rows, dtype))(call(leaves))
    return to_vector(evaluation.call(constants, [leaf[0] for leaf in leaves]), dtype)[None]


def _padded(leaf: np.ndarray, count: int) -> np.ndarray:
    if len(leaf) == count:
        return leaf
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


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], object]]:
    """Yield a function that is told how much more is done; silent for short work."""
    if total < LONG:
        yield lambda done: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda done: None
        return
    with tqdm(total=total, desc="differences", leave=False, disable=None) as bar:
        yield bar.update
