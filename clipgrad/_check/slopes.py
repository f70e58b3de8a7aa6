"""Slopes of a function along directions: how they are measured."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import clipgrad._programs as _programs
from clipgrad._check import vectors
from clipgrad._check.checked_function import CheckedFunction
from clipgrad._check.float64 import AXIS, Unsupported, Wide, held, in_float64
from clipgrad._check.theirs import NotNearby, TheirError, ran, theirs
from clipgrad._check.verdict import SAME_VALUES, TIMES, Ladder, narrowest
from clipgrad._programs import (
    Parts,
    computed_types,
    one_promotion,
    rounded,
    rounded_in_float64,
)

# Binary exponents of the steps, in units of the scale of each element: from steps that no rounding
# spoils to steps within which no kink lies; and the two of a first look.
EXPONENTS = {"float64": range(4, 33, 4), "float32": range(2, 11), "float16": range(1, 5)}
TWO_STEPS = {"float64": slice(3, 5), "float32": slice(2, 4), "float16": slice(1, 3)}
# Every other step is this multiple of a power of two, so that no period divides them all; it has 17
# binary digits, which leave room for those of a float32 beside a step of 2 ** -32.
ODD = round(1.37 * 2**16) / 2**16
# At most so many moves are measured by one call, and so many numbers come back.
SLOPE_MOVES, OUTPUTS_AT_ONCE = 128, 2**23
RUNS_OF_FUNCTION = 4  # of the function with other roundings
LONG = 5000  # moves that get a progress bar, where tqdm is installed
AS_EXACT, AS_COMPUTED = Parts(0.0, 0.0), Parts(1.0, 1.0)


class Evaluation:
    """A function evaluated in one precision, at a point and beside it.

    Attributes:
      label: the precision, "float64" or the narrowest type that the function computes in.
      is_wide: whether it computes in float64.
      is_half: whether it computes in half precision or less.
      steps, quick: the steps of a ladder, and the two of them that may be enough.
      count: how often the function was evaluated.
      x, base: the present point as a real vector, and the outputs there.
    """

    def __init__(self, function: CheckedFunction, wide: Wide | None, hold: bool = True):
        program = function.program
        types = set() if program is None else computed_types(program)
        own = narrowest([*function.dtypes, *types])
        self.label = "float64" if wide is not None else own
        self.is_wide, self.count = self.label == "float64", 0
        self.is_half = self.label not in ("float64", "float32")
        name = "float16" if self.is_half else self.label
        self.steps = 2.0 ** -np.asarray(EXPONENTS[name], float)
        self.steps[1::2] *= ODD
        self.quick = self.steps[TWO_STEPS[name]]
        self._subject, self._wide = function, wide
        self._hook = held(program, wide is not None) if hold else None
        self._dtype: Any = np.float64 if self.is_wide else np.float32
        wider = vectors.wide_dtype if self.is_wide else lambda dtype: dtype
        self._like = [jax.ShapeDtypeStruct(x.shape, wider(x.dtype)) for x in function.inputs]
        self._size = int(vectors.offsets(function.outputs)[-1])
        self._batch = 2 * int(
            np.clip(OUTPUTS_AT_ONCE // max(2 * self._size, 1), 1, SLOPE_MOVES // 2)
        )
        is_traced = function.program is not None
        self._run = _programs.low_jit(self._looped) if is_traced else self._looped_in_python
        self._rounded = _programs.low_jit(self._rounded_outputs)
        self._point: Sequence[Any] = ()
        self._noise: Any = None

    def set_point(self, xs: Sequence[Any]) -> None:
        """Evaluate the function at a point, and beside it from now on."""
        if xs is not self._point:
            self._point, self.x, self._noise = xs, vectors.to_numpy(xs), None
            nowhere = np.full(len(self.x), -1, np.int32)
            self.base = self._values(0 * self.x, nowhere, np.zeros(1, np.int32), np.zeros(1))[0]

    def change(self, shift: np.ndarray) -> np.ndarray:
        """The most that each output moves by, ahead and behind along a shift."""
        everywhere, signs = np.zeros(len(shift), np.int32), np.asarray([1.0, -1.0])
        values = self._values(shift, everywhere, np.zeros(2, np.int32), signs)
        return np.abs(values - self.base).max(axis=0)

    def ladder(
        self,
        along: np.ndarray,
        groups: Sequence[np.ndarray],
        covectors: np.ndarray,
        steps: np.ndarray | None = None,
    ) -> Ladder:
        """The slopes along `along` of each group of elements, the others still.

        Without `steps`, by all steps, and what the function's rounding does to them.
        """
        place, h = np.full(len(along), -1, np.int32), self.steps if steps is None else steps
        for k, group in enumerate(groups):
            place[group] = k
        size, sides, signs = np.abs(covectors).T, [], np.asarray([1.0, -1.0])
        pairs = [(k, step) for k in range(len(groups)) for step in h]
        with progress_bar(len(pairs)) as progress:
            for start in range(0, len(pairs), self._batch // 2):
                moves, each = map(
                    np.asarray, zip(*pairs[start : start + self._batch // 2], strict=True)
                )
                values = self._values(
                    along, place, np.repeat(moves, 2), np.outer(each, signs).ravel()
                )
                up, down = values[::2] - self.base, self.base - values[1::2]
                three = up @ covectors.T, down @ covectors.T, np.abs(up - down) @ size / 2
                sides.append(np.stack(three) / each[:, None])
                progress(len(each))
        shape = (3, len(groups), len(h), len(covectors))
        ahead, behind, width = np.concatenate(sides, axis=1).reshape(shape)
        spread = 0.0 if steps is not None else np.square(covectors) @ np.square(self.noise())
        noise = TIMES * np.sqrt(spread) / h[:, None] + np.zeros_like(ahead)
        return Ladder(ahead, behind, width, noise, h, along, groups)

    def noise(self) -> np.ndarray:
        """The distance that one rounding of each number moves each output by, in its type."""
        if self._noise is None:
            eps = float(jnp.finfo(self.label).eps)
            self._noise = 0.5 * eps * np.abs(self.base) + self._moved(AS_EXACT)
        return self._noise

    def _moved(self, parts: Parts) -> np.ndarray:
        """The distance that roundings move each output by; natively all of its own."""
        if self._subject.program is None:
            return float(jnp.finfo(self.label).eps) * np.abs(self.base)
        leaves, base = [np.asarray(x) for x in self._point], self.base
        if not self.is_wide:
            base, leaves = vectors.to_numpy(self._subject.fun(list(self._point))), self._point
        run = lambda seed: vectors.to_numpy(self._rounded(leaves, seed, parts))  # noqa: E731
        with in_float64() if self.is_wide else contextlib.nullcontext():
            return spread(run, base, RUNS_OF_FUNCTION)

    def _rounded_outputs(self, leaves, seed, parts):
        if self.is_wide:
            return rounded_in_float64(self._subject.program, leaves, seed, parts)
        return rounded(self._subject.program, leaves, seed)

    def require_same_values(self) -> None:
        """Raises `Unsupported` unless the values are the function's own but for rounding."""
        own = vectors.to_numpy(self._subject.outputs)
        size, off = map(vectors.root_mean_square, (own, self.base - own))
        if off > SAME_VALUES * size + np.finfo(np.float32).tiny:
            if off > 10 * vectors.root_mean_square(self._moved(AS_COMPUTED)):
                k = int(np.argmax(np.abs(self.base - own)))
                raise Unsupported(
                    f"its values differ from those of the function: {own[k]:.5g} as computed, "
                    f"{self.base[k]:.5g} in float64"
                )

    def _values(self, along, place, moves: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The outputs after each move: of the elements in that place, by a step along `along`."""
        self.count += len(moves)
        padded = [
            np.resize(a, self._batch).astype(t)
            for a, t in ((moves, np.int32), (steps, self._dtype))
        ]
        x, along = (a.astype(self._dtype) for a in (self.x, along))
        with in_float64() if self.is_wide else contextlib.nullcontext():
            try:
                found = ran(self._run, x, along, place, *padded, np.int32(len(moves)))
            except TheirError as error:
                raise NotNearby(str(error)) from error.original
            return np.asarray(found, np.float64)[: len(moves)]

    def _looped(self, x, along, place, moves, steps, count):
        def measure(k, found):
            values = self._outputs(x, along, place == moves[k], steps[k])
            return lax.dynamic_update_slice(found, values[None], (k, 0 * k))

        return lax.fori_loop(0, count, measure, jnp.zeros((self._batch, self._size), self._dtype))

    def _looped_in_python(self, x, along, place, moves, steps, count):
        each = zip(moves[:count], steps[:count], strict=True)
        return np.stack([self._outputs(x, along, place == k, h) for k, h in each])

    def _outputs(self, x, along, is_moved, step):
        leaves = vectors.leaves_of(x + step * jnp.where(is_moved, along, 0 * along), self._like)
        call = lambda xs: vectors.to_vector(theirs(self._evaluated, xs), self._dtype)  # noqa: E731
        if self._hook is None:
            return call(leaves)
        pairs = zip(vectors.leaves_of(x, self._like), leaves, strict=True)
        return jax.vmap(call, axis_name=AXIS)([jnp.stack(pair) for pair in pairs])[1]

    def _evaluated(self, leaves):
        if self._wide is not None:
            return self._wide(leaves, self._hook)
        if self._hook is None:
            return self._subject.fun(leaves)
        with one_promotion():
            return _programs.evaluate(self._subject.program, leaves, self._hook)


def spread(run: Callable[[np.uint32], np.ndarray], base: np.ndarray, runs: int) -> np.ndarray:
    """The root mean square of what some runs, each with a seed of its own, are off from a base."""
    total = np.zeros(base.shape)
    for seed in range(1, runs + 1):
        off = run(np.uint32(seed)) - base
        total += np.where(np.isfinite(off), off, 0.0) ** 2
    return np.sqrt(total / runs)


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
