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
from clipgrad._check.vectors import from_rows, is_complex, offsets, to_vector, wide_dtype
from clipgrad._check.widening import AXIS

BATCH = 64
# Of the points evaluated by one call, so that a large model's fit into memory beside it.
BATCH_BYTES = 2**25
LONG = 5000  # measurements that get a progress bar, where tqdm is installed


class Evaluation(NamedTuple):
    """A way to evaluate the function for differences.

    `call(constants, leaves)` gives the outputs; `dtype` is that of the vectors. With `held`, `call`
    runs under `jax.vmap` with the base point in row 0. `key` is equal for equal calls, and None if
    it is not known which are. `quick` has two binary exponents of steps, `finer` those of two
    smaller steps if the type allows them, `ladder` those of the closest look, and `label` is for
    the report.
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
    """Perturbations: the range [start, stop) of the input vector, and the step along it."""

    start: np.ndarray
    stop: np.ndarray
    step: np.ndarray


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
        self.base = np.zeros(0)
        self._point: Any = None
        self._wide = [_like(x, evaluation.dtype) for x in evaluation.like]
        size = 8 * max(evaluation.together, 2) * max(covectors.shape[1], 1)
        self._batch = int(np.clip(BATCH_BYTES // size, 1, BATCH))
        self._program = _looped(evaluation, self._batch, covectors.shape[1], fast_compile)

    def measure(
        self,
        xs: Sequence[jax.Array],
        direction: np.ndarray,
        gradient: np.ndarray,
        moves: Moves,
        progress: Callable[[int], Any] = lambda done: None,
    ) -> Slopes:
        """Measure the slopes of all moves at the point `xs`, and of `gradient` along them.

        A gradient of fewer rows than there are cotangents is that of the first of them.
        """
        self._set_base(xs)
        along, rows = from_rows(direction, self._wide), from_rows(gradient, self._wide)
        parts = []
        for begin in range(0, len(moves.start), self._batch):
            part = Moves(*(column[begin : begin + self._batch] for column in moves))
            parts.append(self._slopes(along, rows, part))
            progress(len(part.start))
        return Slopes(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def changes(self, xs: Sequence[jax.Array], shifts: np.ndarray) -> tuple[np.ndarray, ...]:
        """The change of each output from the point to each shift, and from minus the shift."""
        self._set_base(xs)
        whole = Moves(np.zeros(1, int), np.full(1, shifts.shape[1]), np.ones(1))
        nothing = from_rows(np.zeros((1, shifts.shape[1])), self._wide)
        moved = [self._run(from_rows(shift, self._wide), nothing, whole)[0] for shift in shifts]
        moved = np.concatenate(moved)
        return moved[:, 0] - self.base, self.base - moved[:, 1]

    def _set_base(self, xs) -> None:
        if xs is self._point:
            return
        self._point = xs
        self._leaves = [
            np.asarray(x).astype(like.dtype, copy=False)
            for x, like in zip(xs, self.evaluation.like, strict=True)
        ]
        nowhere = Moves(np.zeros(1, int), np.zeros(1, int), np.zeros(1))
        zero = [np.zeros(x.shape, x.dtype) for x in self._wide]
        nothing = [leaf[None] for leaf in zero]
        self.base = self._run(zero, nothing, nowhere)[0][0, 0]

    def _slopes(self, along, gradient, moves: Moves) -> Slopes:
        values, analytic, norm = self._run(along, gradient, moves)
        ahead, behind = values[:, 0], values[:, 1]
        step = moves.step[:, None]
        first, second = (ahead - self.base) / step, (self.base - behind) / step
        covectors = self.covectors[: analytic.shape[1]]
        magnitude = np.abs(covectors).T
        return Slopes(
            central=(ahead - behind) / (2 * step) @ covectors.T,
            ahead=first @ covectors.T,
            behind=second @ covectors.T,
            width=np.abs(first - second) @ magnitude / 2,
            noise=self._noise(ahead, behind, magnitude) / step,
            analytic=analytic / step,
            norm=norm / step,
        )

    def _noise(self, ahead, behind, magnitude) -> np.ndarray:
        """The rounding of outputs that are subtracted; their errors are of both signs."""
        outputs = max(self.covectors.shape[1], 1)
        size = (np.abs(ahead) + np.abs(behind)) @ magnitude
        return NOISE * self.evaluation.eps * size / np.sqrt(outputs)

    def _run(self, along, gradient, moves: Moves) -> tuple[np.ndarray, ...]:
        """Outputs ahead and behind, and the gradient along each move as it was really made."""
        evaluation, count = self.evaluation, len(moves.start)
        self.evaluations += count * max(evaluation.together, 2)
        padded = Moves(*(_padded(column, self._batch) for column in moves))
        padded = padded._replace(
            start=padded.start.astype(np.int32), stop=padded.stop.astype(np.int32)
        )
        args = (evaluation.constants, count, self._leaves, along, gradient, padded)
        with precision(evaluation):
            found = self._program(*args)
            return tuple(np.asarray(part, np.float64)[:count] for part in found)


def _looped(evaluation: Evaluation, batch: int, outputs: int, fast_compile: bool) -> Callable:
    """The program: the outputs ahead and behind of a number of moves."""
    evaluation = evaluation._replace(constants=())

    def loop(constants, count, base, along, gradient, moves: Moves):
        def row(k, found):
            move = Moves(*(column[k] for column in moves))
            values, *slopes = _moved(evaluation, constants, base, along, gradient, move)
            return [out.at[k].set(new) for out, new in zip(found, [values, *slopes], strict=True)]

        dtype, rows = evaluation.dtype, len(gradient[0])
        shapes = (batch, 2, outputs), (batch, rows), (batch, rows)
        empty = [jnp.zeros(shape, dtype) for shape in shapes]
        if evaluation.compiled:
            return lax.fori_loop(0, count, row, empty)
        for k in range(count):
            empty = row(k, empty)
        return empty

    if not evaluation.compiled:
        return loop
    if not fast_compile:
        return jax.jit(loop)
    if evaluation.key is None:
        return quick_jit(loop)
    key = ("differences", evaluation.key, batch, outputs)
    return kept(key, lambda: low_jit(loop))


def _moved(evaluation: Evaluation, constants, base, along, gradient, move: Moves):
    """The outputs ahead and behind; the gradient's slope and its length along the move."""
    dtype = evaluation.dtype
    shifts = _shifts(along, move, dtype)
    signs = jnp.asarray([0, 1, -1] if evaluation.held else [1, -1], dtype)
    points = [
        (x.astype(shift.dtype)[None] + jnp.multiply.outer(signs.astype(shift.dtype), shift)).astype(
            x.dtype
        )
        for x, shift in zip(base, shifts, strict=True)
    ]
    made = [
        (leaf[-2].astype(shift.dtype) - leaf[-1].astype(shift.dtype)) / 2
        for leaf, shift in zip(points, shifts, strict=True)
    ]
    rows = [_product([leaf[k] for leaf in gradient], made, dtype) for k in range(len(gradient[0]))]
    analytic, norm = (jnp.stack(column) for column in zip(*rows, strict=True))
    call = lambda xs: to_vector(evaluation.call(constants, xs), dtype)  # noqa: E731
    if evaluation.held:
        return jax.vmap(call, axis_name=AXIS)(points)[1:], analytic, norm
    if evaluation.compiled:
        return lax.map(call, points), analytic, norm
    values = jnp.stack([call([leaf[k] for leaf in points]) for k in range(2)])
    return values, analytic, norm


def _like(leaf, dtype) -> jax.ShapeDtypeStruct:
    """The leaf with real numbers of `dtype`, complex if it is."""
    return jax.ShapeDtypeStruct(
        leaf.shape, np.result_type(dtype, 1j) if is_complex(leaf) else dtype
    )


def _shifts(along, move: Moves, dtype) -> list:
    """The step along the part of the direction that lies in the range of the move."""
    shifts = []
    for leaf, start in zip(along, offsets(along)[:-1], strict=True):
        parts = 2 if is_complex(leaf) else 1
        index = int(start) + parts * jnp.arange(leaf.size, dtype=move.start.dtype)
        index = index.reshape(leaf.shape)
        inside = [(index + k >= move.start) & (index + k < move.stop) for k in range(parts)]
        if parts == 1:
            wide = leaf.astype(dtype)
            shifts.append(jnp.where(inside[0], move.step.astype(dtype) * wide, 0))
        else:
            step = move.step.astype(dtype)
            real = jnp.where(inside[0], step * leaf.real.astype(dtype), 0)
            imaginary = jnp.where(inside[1], step * leaf.imag.astype(dtype), 0)
            shifts.append(lax.complex(real, imaginary))
    return shifts


def _product(gradient, made, dtype) -> tuple[jax.Array, jax.Array]:
    """The inner product of a gradient with a move, and the length of its terms."""
    total, squares = jnp.zeros((), dtype), jnp.zeros((), dtype)
    for g, moved in zip(gradient, made, strict=True):
        parts = [(g, moved)]
        if jnp.iscomplexobj(moved):
            parts = [(g.real, moved.real), (g.imag, moved.imag)]
        for a, b in parts:
            terms = a.astype(dtype) * b.astype(dtype)
            total, squares = total + jnp.sum(terms), squares + jnp.sum(terms * terms)
    return total, jnp.sqrt(squares)


def _padded(column: np.ndarray, count: int) -> np.ndarray:
    out = np.zeros(count, column.dtype)
    out[: len(column)] = column
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
    """Yield a function to call with the number of moves just measured; silent for short work."""
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
