"""Slopes of a function along directions: what is measured, and how."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import clipgrad._jaxpr as _jaxpr
from clipgrad._checker import vectors
from clipgrad._checker.float64 import AXIS, Unsupported, Wide, in_float64
from clipgrad._checker.ladder import Ladder
from clipgrad._checker.subject import CheckSubject
from clipgrad._checker.theirs import ran, theirs
from clipgrad._checker.verdict import SAME_VALUES, TIMES, narrowest
from clipgrad._program import Parts, rounded, rounded_in_float64

# Binary exponents of the steps, in units of the scale of each element: from steps that no rounding
# spoils to steps within which no kink lies; and the two of a first look.
LADDERS = {"float64": range(4, 33, 4), "float32": range(2, 11)}
LADDER_OF_HALF = range(1, 5)
QUICK = {"float64": slice(3, 5), "float32": slice(2, 4)}
QUICK_OF_HALF = slice(1, 3)
# Every other step is this multiple of a power of two, so that no period divides them all; it has 17
# binary digits, which leave room for those of a float32 beside a step of 2 ** -32.
ODD = round(1.37 * 2**16) / 2**16
# At most so many moves are measured by one call, and so many numbers come back.
MOVES, NUMBERS = 64, 2**22
RUNS = 4  # of the function with other roundings
LONG = 5000  # moves that get a progress bar, where tqdm is installed


class Evaluation:
    """A function evaluated in one precision, at a point and beside it.

    Attributes:
      label: the precision, "float64" or the function's own.
      is_wide: whether it computes in float64.
      count: how often the function was evaluated.
      base: the outputs at the present point.
    """

    def __init__(self, subject: CheckSubject, wide: Wide | None, hold: bool = True):
        self._subject, self.count, self._point = subject, 0, None
        own = narrowest([*subject.dtypes, *map(vectors.real_name, subject.outputs)])
        self.label = own if wide is None else "float64"
        self.is_wide = self.label == "float64"
        self._dtype: Any = np.float64 if self.is_wide else np.float32
        self._like = [
            jax.ShapeDtypeStruct(x.shape, vectors.wide_dtype(x.dtype) if self.is_wide else x.dtype)
            for x in subject.inputs
        ]
        self._wide, self._held = wide, hold and wide is not None and wide.stops
        self._size = int(vectors.offsets(subject.outputs)[-1])
        self._batch = int(np.clip(NUMBERS // max(self._size, 1), 1, MOVES))
        is_compiled = subject.program is not None
        self._run = _jaxpr.low_jit(self._looped) if is_compiled else self._looped_in_python
        self._noisy: Callable | None = None

    def set_point(self, xs: Sequence[Any]) -> None:
        """Evaluate the function at a point, and beside it from now on."""
        if xs is self._point:
            return
        self._point = xs
        self._x = vectors.to_numpy(xs)
        nowhere = np.full(len(self._x), -1, np.int32)
        self.base = self._sides(0 * self._x, nowhere, np.zeros(1, np.int32), np.zeros(1))[0, 0]

    def point_as_vector(self, xs: Sequence[Any]) -> np.ndarray:
        """The inputs at a point, which is the present one from now on."""
        self.set_point(xs)
        return self._x

    def change(self, shift: np.ndarray) -> np.ndarray:
        """How far each output moves at most, ahead and behind along a shift."""
        place = np.zeros(len(shift), np.int32)
        sides = self._sides(shift, place, np.zeros(1, np.int32), np.ones(1))[0]
        return np.abs(sides - self.base).max(axis=0)

    def ladder(
        self,
        along: np.ndarray,
        groups: Sequence[np.ndarray],
        covectors: np.ndarray,
        quick: bool = False,
    ) -> Ladder:
        """The slopes along `along` of each group of elements, the others still."""
        exponents = np.asarray(LADDERS.get(self.label, LADDER_OF_HALF), float)
        steps = 2.0**-exponents
        steps[1::2] *= ODD
        steps = steps[QUICK.get(self.label, QUICK_OF_HALF)] if quick else steps
        place = np.full(len(along), -1, np.int32)
        for k, group in enumerate(groups):
            place[group] = k
        size, count = np.abs(covectors).T, len(steps)
        shape = (len(groups), count, len(covectors))
        ahead, behind, width = np.zeros((3, *shape))
        moves = np.repeat(np.arange(len(groups), dtype=np.int32), count)
        with progress_bar(len(moves)) as progress:
            for start in range(0, len(moves), self._batch):
                part = slice(start, start + self._batch)
                h = np.resize(np.tile(steps, len(groups))[part], len(moves[part]))
                sides = self._sides(along, place, moves[part], h)
                up, down = (sides[:, 0] - self.base), (self.base - sides[:, 1])
                rows = moves[part], np.arange(start, start + len(h)) % count
                ahead[rows] = up @ covectors.T / h[:, None]
                behind[rows] = down @ covectors.T / h[:, None]
                width[rows] = np.abs(up - down) @ size / (2 * h[:, None])
                progress(len(h))
        noise = np.zeros(shape)
        if not quick:
            spread = np.sqrt(np.square(covectors) @ np.square(self.noise()))
            noise += TIMES * spread / steps[:, None]
        made = [(self._made(along, group, steps), group) for group in groups]
        return Ladder(ahead, behind, width, noise, steps, made)

    def central(self, along: np.ndarray, covector: np.ndarray) -> np.ndarray:
        """The slope of each element for this very step along it, times the step."""
        found = np.zeros(len(along))
        place = np.arange(len(along), dtype=np.int32)
        for start in range(0, len(along), self._batch):
            part = place[start : start + self._batch]
            sides = self._sides(along, place, part, np.ones(len(part)))
            found[part] = (sides[:, 0] - sides[:, 1]) @ covector / 2
        return found

    def noise(self, native: bool = False) -> np.ndarray:
        """What one rounding of each number moves each output by, in the type it runs in."""
        if self._known_noise[0] is self._point and not native:
            return self._known_noise[1]
        name = self._subject_type if native else self.label
        eps = float(jnp.finfo(name).eps)
        found = 0.5 * eps * np.abs(self.base) + self._moved_by_rounding(native)
        if not native:
            self._known_noise = self._point, found
        return found

    _known_noise: tuple[Any, Any] = (None, None)

    @property
    def _subject_type(self) -> str:
        return narrowest([*self._subject.dtypes, *map(vectors.real_name, self._subject.outputs)])

    def _moved_by_rounding(self, native: bool) -> np.ndarray:
        program, total = self._subject.program, np.zeros(self._size)
        if program is None:
            return np.finfo(self._dtype).eps * np.abs(self.base)
        in_wide = self.is_wide and not native
        if in_wide and self._noisy is None:
            exact = Parts(0.0, 0.0)
            self._noisy = _jaxpr.low_jit(lambda x, s: rounded_in_float64(program, x, s, exact))
        run = self._noisy if in_wide else jax.jit(lambda x, s: rounded(program, x, s))
        base = self.base if in_wide else vectors.to_numpy(self._subject.fun(list(self._point)))
        with in_float64() if in_wide else contextlib.nullcontext():
            leaves = [np.asarray(x) for x in self._point] if in_wide else list(self._point)
            for seed in range(1, RUNS + 1):
                off = vectors.to_numpy(run(leaves, np.uint32(seed))) - base
                total += np.where(np.isfinite(off), off, 0.0) ** 2
        return np.sqrt(total / RUNS)

    def require_same_values(self) -> None:
        """Raises `Unsupported` unless the values are the function's own but for rounding."""
        own = vectors.to_numpy(self._subject.outputs)
        size, off = map(vectors.root_mean_square, (own, self.base - own))
        if off > SAME_VALUES * size + np.finfo(np.float32).tiny:
            if off > 10 * vectors.root_mean_square(self.noise(native=True)):
                raise Unsupported("its values differ from those of the function")

    def _made(self, along: np.ndarray, group: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The move of a group divided by its step, as the inputs can hold it: (steps, group)."""
        if self.is_wide:
            return along[group][None]
        found = np.zeros((len(steps), len(group)))
        for k, h in enumerate(steps):
            shift = np.zeros(len(along))
            shift[group] = h * along[group]
            sides = (vectors.leaves_of(self._x + s * shift, self._like) for s in (1, -1))
            plus, minus = map(vectors.to_numpy, sides)
            found[k] = (plus - minus)[group] / (2 * h)
        return found

    def _sides(self, along, place, moves: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The outputs ahead and behind of each move, shape (moves, 2, outputs)."""
        count = len(moves)
        self.count += 2 * count
        padded = np.resize(moves, self._batch), np.resize(steps, self._batch).astype(self._dtype)
        vectors_ = [a.astype(self._dtype) for a in (self._x, along)]
        with in_float64() if self.is_wide else contextlib.nullcontext():
            found = ran(self._run, *vectors_, place, *padded, np.int32(count))
            return np.asarray(found, np.float64)[:count]

    def _looped(self, x, along, place, moves, steps, count):
        def measure(k, found):
            sides = self._both_sides(x, along, place == moves[k], steps[k])
            return lax.dynamic_update_slice(found, sides[None], (k, 0 * k, 0 * k))

        found = jnp.zeros((self._batch, 2, self._size), self._dtype)
        return lax.fori_loop(0, count, measure, found)

    def _looped_in_python(self, x, along, place, moves, steps, count):
        each = zip(moves[:count], steps[:count], strict=True)
        return np.stack([self._both_sides(x, along, place == k, h) for k, h in each])

    def _both_sides(self, x, along, moved, step):
        zero = np.zeros((), self._dtype)
        shift = step * jnp.where(moved, along, zero)
        points = (vectors.from_vector(v, self._like) for v in (x, x + shift, x - shift))
        if self._held:
            rows = [jnp.stack(leaves) for leaves in zip(*points, strict=True)]
            return jax.vmap(self._outputs, axis_name=AXIS)(rows)[1:]
        return jnp.stack([self._outputs(leaves) for leaves in list(points)[1:]])

    def _outputs(self, leaves):
        if self._wide is None:
            return vectors.to_vector(theirs(self._subject.fun, leaves), self._dtype)
        hook = self._wide.held() if self._held else None
        return vectors.to_vector(theirs(self._wide, leaves, hook), self._dtype)


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
    with tqdm(total=total, desc="slopes", leave=False, disable=None) as bar:
        yield bar.update
