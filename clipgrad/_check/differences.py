"""Slopes of a function along many directions, by one compiled program.

A perturbation moves one range of an order of elements along a stored direction: a single element,
a block, a leaf or several, or any others that are put in such an order. The program evaluates the
function in a loop over a batch of bounded size, so that one compilation serves every mode and every
point.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import clipgrad._jaxpr as _jaxpr
import clipgrad._trees as _trees
from clipgrad._check.tolerances import NOISE, sum_along
from clipgrad._check.widening import AXIS

BATCH = 64
# Of the points evaluated by one call, so that a large model's fit into memory beside it.
BATCH_BYTES = 2**25
# Every other step is this multiple of a power of two, so that no period divides them all; it has 17
# binary digits, which leave room for those of a float32 beside a step of 2 ** -32.
ODD = round(1.37 * 2**16) / 2**16
# Up to so many elements one program moves them in any order; for more, it needs no array of their
# places as long as the order is their own.
ANY_ORDER = 2**16
LONG = 5000  # measurements that get a progress bar, where tqdm is installed


class Evaluation(NamedTuple):
    """A way to evaluate the function for differences.

    `call(constants, leaves)` gives the outputs; `dtype` is the type of the vectors. With `held`,
    `call` runs under `jax.vmap` with the base point in row 0. `key` is equal for equal calls, and
    None if it is not known which are. `quick` has two binary exponents of steps, `ladder` those of
    the closest look, and `label` is for the report. `grain` is the type that values are rounded to
    inside, whatever their own.
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
    grain: str | None = None

    @property
    def eps(self) -> float:
        """The rounding unit of the evaluation."""
        inside = [self.grain] if self.grain else []
        return max(float(jnp.finfo(t).eps) for t in [*inside, *(leaf.dtype for leaf in self.like)])

    @property
    def together(self) -> int:
        """The number of points evaluated at once: the base, ahead and behind, or one."""
        return 3 if self.held else 1


def step_sizes(exponents: Sequence[int]) -> np.ndarray:
    """Steps of these binary exponents, every other one a little larger."""
    steps = 2.0 ** -np.asarray(exponents, np.float64)
    steps[1::2] *= ODD
    return steps


class Moves(NamedTuple):
    """Perturbations: the range [start, stop) of an order of elements, and the step along it."""

    start: np.ndarray
    stop: np.ndarray
    step: np.ndarray


class Slopes(NamedTuple):
    """The slopes of each move and cotangent; arrays of shape (moves, cotangents).

    `width` is half the difference of the one-sided slopes, summed without sign over the outputs;
    `noise` is what the rounding of outputs, which has both signs, may do to a slope; `norm` is the
    length of the gradient's part.
    """

    central: np.ndarray
    ahead: np.ndarray
    behind: np.ndarray
    width: np.ndarray
    noise: np.ndarray
    analytic: np.ndarray
    norm: np.ndarray


class Differences:
    """Measures slopes of one function; counts its evaluations.

    Args:
      evaluation: how to evaluate the function.
      covectors: cotangents as real vectors, shape (cotangents, outputs).

    Attributes:
      evaluations: how often the function was evaluated.
      base: the outputs at the point last measured, as a real vector.
      constant: the outputs that depend on nothing: as long as they stay what they are, they have
        no noise.
    """

    def __init__(self, evaluation: Evaluation, covectors: np.ndarray):
        self.evaluation = evaluation
        self.covectors = covectors
        self.evaluations = 0
        self.base = np.zeros(0)
        self.constant = np.zeros(covectors.shape[1], bool)
        self._point: Any = None
        self._leaves: list[jax.Array] = []
        size = 8 * max(evaluation.together, 2) * max(covectors.shape[1], 1)
        self._batch = int(np.clip(BATCH_BYTES // size, 1, BATCH))
        self._program = _looped(evaluation, self._batch, covectors.shape[1])

    def measure(
        self,
        xs: Sequence[Any],
        direction: np.ndarray,
        gradient: np.ndarray,
        moves: Moves,
        order: np.ndarray | None = None,
    ) -> Slopes:
        """Measure the slopes of all moves at the point `xs`, and of `gradient` along them.

        A gradient of fewer rows than there are cotangents is the gradient for the first of them.
        Moves are ranges of `order`, some of the elements, or of all elements one after the other.
        """
        self.set_base(xs, direction)
        parts = []
        with progress_bar(len(moves.start)) as progress:
            for begin in range(0, len(moves.start), self._batch):
                part = Moves(*(column[begin : begin + self._batch] for column in moves))
                parts.append(self._slopes(direction, gradient, part, order))
                progress(len(part.start))
        return Slopes(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def change(self, xs: Sequence[jax.Array], shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The change of each output from the point to a shift, and from minus the shift."""
        self.set_base(xs, shift)
        whole = Moves(np.zeros(1, int), np.full(1, len(shift)), np.ones(1))
        ahead, behind = self._run(shift, whole)[0]
        return ahead - self.base, self.base - behind

    def set_base(self, xs, direction) -> None:
        """Evaluate the function at a point, not moved in a direction, if it is another point."""
        if xs is self._point:
            return
        self._point = xs
        self._leaves = [self.placed(x if are_on_cpu([x]) else np.asarray(x)) for x in xs]
        nowhere = Moves(np.zeros(1, int), np.zeros(1, int), np.zeros(1))
        self.base = self._run(direction, nowhere, runs=1)[0, 0]

    def placed(self, array: np.ndarray) -> jax.Array:
        """An array where the function is evaluated."""
        with self._types():
            return jax.device_put(array)

    def _slopes(self, direction, gradient, moves: Moves, order) -> Slopes:
        values = self._run(direction, moves, order)
        ahead, behind = values[:, 0], values[:, 1]
        step = moves.step[:, None]
        first, second = (ahead - self.base) / step, (self.base - behind) / step
        covectors = self.covectors[: len(gradient)]
        magnitude = np.abs(covectors).T
        values = np.abs(ahead) + np.abs(behind)
        if self.constant.any():
            values[self.constant & (ahead == self.base) & (behind == self.base)] = 0.0
        size = values @ magnitude / np.sqrt(max(ahead.shape[1], 1))
        analytic, norm = self._along(direction, gradient, moves, order)
        return Slopes(
            central=(ahead - behind) / (2 * step) @ covectors.T,
            ahead=first @ covectors.T,
            behind=second @ covectors.T,
            width=np.abs(first - second) @ magnitude / 2,
            noise=NOISE * self.evaluation.eps * size / step,
            analytic=analytic,
            norm=norm,
        )

    def _along(self, direction, gradient, moves: Moves, order) -> tuple[np.ndarray, np.ndarray]:
        """The gradient along each move as it was made, and the length of its terms."""

        @functools.cache
        def along(start, stop, step):
            where = slice(start, stop) if order is None else order[start:stop]
            return sum_along(gradient[:, where], self._made(np.asarray(direction), where, step))

        # In float64 every step makes the same move.
        steps = np.ones_like(moves.step) if self._is_wide else moves.step
        pairs = [along(*move) for move in zip(moves.start, moves.stop, steps, strict=True)]
        return np.stack([pair[0] for pair in pairs]), np.stack([pair[1] for pair in pairs])

    def _made(self, direction, where: Any, step: float) -> np.ndarray:
        """The move divided by its step, as the function's inputs can hold it."""
        if self._is_wide:
            return direction[where]
        shift, base = np.zeros(len(direction)), _trees.to_numpy(self._point)
        base = base.astype(self.evaluation.dtype)
        shift[where] = step * direction[where]
        like = self.evaluation.like
        sides = [_trees.from_rows(base + sign * shift, like) for sign in (1, -1)]
        plus, minus = map(_trees.to_numpy, sides)
        return (plus - minus)[where] / (2 * step)

    @property
    def _is_wide(self) -> bool:
        return _trees.wide_dtype(self.evaluation.dtype) == self.evaluation.dtype

    def _run(self, direction, moves: Moves, order=None, runs: int = 0) -> np.ndarray:
        """The outputs ahead and behind, shape (moves, 2, outputs)."""
        evaluation, count, place = self.evaluation, len(moves.start), None
        if order is not None or len(direction) <= ANY_ORDER:
            order = np.arange(len(direction)) if order is None else order
            place = np.full(len(direction), -1, np.int32)
            place[order] = np.arange(len(order))
        runs = runs or count * (1 if evaluation.held else 2)
        self.evaluations += runs * evaluation.together
        columns = (column.astype(np.int32) for column in moves[:2])
        padded = [np.resize(column, self._batch) for column in (*columns, moves.step)]
        args = (evaluation.constants, runs, self._leaves, direction, place, Moves(*padded))
        with self._types():
            return np.asarray(self._program(*args), np.float64)[:count]

    def _types(self) -> contextlib.AbstractContextManager:
        return in_float64() if self._is_wide else contextlib.nullcontext()


def _looped(evaluation: Evaluation, batch: int, outputs: int) -> Callable:
    """The program: the outputs ahead and behind of a number of moves."""
    evaluation = evaluation._replace(constants=())

    def loop(constants, runs, leaves, direction, place, moves: Moves):
        def row(k, found):
            move = Moves(*(column[k // each] for column in moves))
            signs = jnp.asarray([0, 1, -1], dtype) if each == 1 else (1 - 2 * (k % 2)).reshape(1)
            # So that none of it is widened once for all rows.
            own, along, at, _ = lax.optimization_barrier((leaves, direction, place, k))

            def points(leaf, area):
                order = lax.iota(jnp.int32, leaf.size) if at is None else at[area]
                first = area.start if at is None else 0
                inside = (order >= move.start - first) & (order < move.stop - first)
                step = jnp.asarray(move.step, dtype) * jnp.asarray(along[area], dtype)
                moved = leaf[None] + signs.astype(dtype)[:, None] * step[None]
                return jnp.where(inside, moved, leaf[None])

            values = _moved_outputs(evaluation, constants, own, points)
            return lax.dynamic_update_slice(found, values[None], (k // each, k % each, 0))

        found = jnp.zeros((batch, 2, outputs), dtype)
        if evaluation.compiled:
            return lax.fori_loop(0, runs, row, found)
        for k in range(runs):
            found = row(jnp.asarray(k), found)
        return found

    each = 1 if evaluation.held else 2  # runs for each move: all points at once, or each side
    dtype = evaluation.dtype
    if not evaluation.compiled:
        return loop
    if evaluation.key is None:
        return _jaxpr.quick_jit(loop)
    key = ("differences", evaluation.key, batch, outputs)
    return _jaxpr.kept_by_key(key, lambda: _jaxpr.low_jit(loop))


def _moved_outputs(evaluation: Evaluation, constants, leaves, points: Callable):
    """The outputs at the leaves and on both sides of them, or on one: `points` has rows for each.

    Each leaf is widened and moved by itself, so that there is no copy of all inputs; and flat: in
    more dimensions it costs several times as much in a program that is hardly optimized.
    """
    dtype, places, rows = evaluation.dtype, _trees.offsets(leaves), []
    for x, like, start, stop in zip(leaves, evaluation.like, places[:-1], places[1:], strict=True):
        moved = points(_trees.to_vector([x], dtype), slice(int(start), int(stop)))
        rows += _trees.split(moved, [like])
    call = lambda xs: _trees.to_vector(evaluation.call(constants, xs), dtype)  # noqa: E731
    if evaluation.held:
        return jax.vmap(call, axis_name=AXIS)(rows)[1:]
    return call([leaf[0] for leaf in rows])[None]


def are_on_cpu(leaves: Sequence[Any]) -> bool:
    """Whether these are JAX's arrays on CPUs, whose programs give the same bits each time."""
    placed = [isinstance(leaf, jax.Array) for leaf in leaves]
    return all(placed) and all(d.platform == "cpu" for leaf in leaves for d in leaf.devices())


def without_copy(leaf: Any) -> Any:
    """A leaf for a program on the CPU: itself if it is there, since JAX may copy a NumPy array."""
    return leaf if are_on_cpu([leaf]) and len(leaf.devices()) == 1 else np.asarray(leaf)


@contextlib.contextmanager
def in_float64():
    """A context that computes with 64 bits, on the CPU where there is one."""
    try:
        device = jax.devices("cpu")[0]
    except RuntimeError:
        device = None
    with jax.enable_x64(True), jax.default_device(device):
        yield


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with the number of moves just measured; silent for short work."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or total < LONG:
        yield lambda done: None
        return
    with tqdm(total=total, desc="differences", leave=False, disable=None) as bar:
        yield bar.update
