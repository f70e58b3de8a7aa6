"""Slopes of a function along directions: how they are measured."""

import contextlib
import functools
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
from clipgrad._check.tolerances import (
    EVALUATIONS,
    LONG,
    ODD,
    OUTPUTS_AT_ONCE,
    RUNS_OF_FUNCTION,
    SAME_ROUNDINGS,
    SAME_VALUES,
    SLOPE_MOVES,
    TIMES,
    narrowest,
    precision,
)
from clipgrad._check.user_code import NotNearby, UserError, call_compiled, call_user
from clipgrad._check.verdict import FiniteDifferences
from clipgrad._programs import (
    Parts,
    computed_types,
    jit_by_size,
    one_promotion,
    rounded,
    rounded_in_float64,
)

AS_EXACT, AS_COMPUTED = Parts(0.0, 0.0), Parts(1.0, 1.0)


class Evaluation:
    """A function evaluated in one precision, at a point and beside it.

    Attributes:
      label: the precision, "float64" or the narrowest type that the function computes in.
      is_wide: whether it computes in float64.
      is_coarse: whether it computes in half precision or less.
      steps, quick: the steps of a slope, and the two of them that may be enough.
      count: how often the function was evaluated.
    """

    def __init__(self, function: CheckedFunction, wide: Wide | None, hold: bool = True):
        program = function.program
        types = set() if program is None else computed_types(program)
        self.label = "float64" if wide is not None else narrowest([*function.dtypes, *types])
        row = precision(self.label)
        self.is_wide, self.is_coarse, self.count = self.label == "float64", row.is_coarse, 0
        self.steps = 2.0 ** -np.asarray(row.exponents, float)
        self.steps[1::2] *= ODD
        self.quick = self.steps[row.first_look]
        self.function, self._wide = function, wide
        self._hook = held(program, wide is not None) if hold else None
        self._dtype: Any = np.float64 if self.is_wide else np.float32
        wider = vectors.wide_dtype if self.is_wide else lambda dtype: dtype
        self._like = [jax.ShapeDtypeStruct(x.shape, wider(x.dtype)) for x in function.inputs]
        self._size = int(vectors.offsets(function.outputs)[-1])
        self.batch = 2 * int(
            np.clip(OUTPUTS_AT_ONCE // max(2 * self._size, 1), 1, SLOPE_MOVES // 2)
        )
        self._run = self._looped_in_python
        if program is not None:
            self._run = jit_by_size(program, EVALUATIONS, self.is_wide)(self._looped)
        self._rounded = _programs.low_jit(self._rounded_outputs)

    def context(self) -> contextlib.AbstractContextManager:
        """The context of its precision."""
        return in_float64() if self.is_wide else contextlib.nullcontext()

    def values(self, x, along, place, moves: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The outputs after each move: of the elements in that place, by a step along `along`."""
        self.count += len(moves)
        padded = [
            np.resize(a, self.batch).astype(t) for a, t in ((moves, np.int32), (steps, self._dtype))
        ]
        x, along = (a.astype(self._dtype) for a in (x, along))
        with self.context():
            try:
                outputs = call_compiled(self._run, x, along, place, *padded, np.int32(len(moves)))
            except UserError as error:
                raise NotNearby(str(error)) from error.original
            return np.asarray(outputs, np.float64)[: len(moves)]

    def moved(self, xs: Sequence[Any], base: np.ndarray, parts: Parts) -> np.ndarray:
        """The distance that roundings move each output by; natively all of its own."""
        if self.function.program is None:
            return float(jnp.finfo(self.label).eps) * np.abs(base)
        leaves = [np.asarray(x) for x in xs]
        if not self.is_wide:
            base, leaves = vectors.to_numpy(self.function.fun(list(xs))), xs
        run = lambda seed: vectors.to_numpy(self._rounded(leaves, seed, parts))  # noqa: E731
        with self.context():
            return spread(run, base, RUNS_OF_FUNCTION)

    def _rounded_outputs(self, leaves, seed, parts):
        if self.is_wide:
            return rounded_in_float64(self.function.program, leaves, seed, parts)
        return rounded(self.function.program, leaves, seed)

    def _looped(self, x, along, place, moves, steps, count):
        def measure(k, outputs):
            values = self._outputs(x, along, place == moves[k], steps[k])
            return lax.dynamic_update_slice(outputs, values[None], (k, 0 * k))

        return lax.fori_loop(0, count, measure, jnp.zeros((self.batch, self._size), self._dtype))

    def _looped_in_python(self, x, along, place, moves, steps, count):
        each = zip(moves[:count], steps[:count], strict=True)
        return np.stack([self._outputs(x, along, place == k, h) for k, h in each])

    def _outputs(self, x, along, is_moved, step):
        leaves = vectors.leaves_of(x + step * jnp.where(is_moved, along, 0 * along), self._like)
        call = lambda xs: vectors.to_vector(call_user(self._evaluated, xs), self._dtype)  # noqa: E731
        if self._hook is None:
            return call(leaves)
        pairs = zip(vectors.leaves_of(x, self._like), leaves, strict=True)
        return jax.vmap(call, axis_name=AXIS)([jnp.stack(pair) for pair in pairs])[1]

    def _evaluated(self, leaves):
        if self._wide is not None:
            return self._wide(leaves, self._hook)
        if self._hook is None:
            return self.function.fun(leaves)
        with one_promotion():
            return _programs.evaluate(self.function.program, leaves, self._hook)


class Neighborhood:
    """The function's values at a point and beside it; none is computed before it is asked for."""

    def __init__(self, evaluation: Evaluation, xs: Sequence[Any]):
        self.evaluation, self.xs = evaluation, list(xs)

    @functools.cached_property
    def x(self) -> np.ndarray:
        """The point as a real vector."""
        return vectors.to_numpy(self.xs)

    @functools.cached_property
    def base(self) -> np.ndarray:
        """The outputs there."""
        nowhere, none = np.full(len(self.x), -1, np.int32), np.zeros(1)
        return self.evaluation.values(self.x, 0 * self.x, nowhere, none.astype(np.int32), none)[0]

    @functools.cached_property
    def noise(self) -> np.ndarray:
        """The distance that one rounding of each number moves each output by, in its type."""
        eps = float(jnp.finfo(self.evaluation.label).eps)
        moved = self.evaluation.moved(self.xs, self.base, AS_EXACT)
        return 0.5 * eps * np.abs(self.base) + moved

    def change(self, shift: np.ndarray) -> np.ndarray:
        """The most that each output moves by, ahead and behind along a shift."""
        everywhere, signs = np.zeros(len(shift), np.int32), np.asarray([1.0, -1.0])
        values = self.evaluation.values(self.x, shift, everywhere, np.zeros(2, np.int32), signs)
        return np.abs(values - self.base).max(axis=0)

    def differences(
        self,
        along: np.ndarray,
        groups: Sequence[np.ndarray],
        covectors: np.ndarray,
        steps: np.ndarray | None = None,
    ) -> FiniteDifferences:
        """The slopes along `along` of each group of elements, the others still.

        Without `steps`, by all steps, and what the function's rounding does to them. With `steps`
        the noise is not known: they serve `agree_at_once` and `off_at_once`, not `judge_slopes`.
        """
        h = self.evaluation.steps if steps is None else steps
        place = np.full(len(along), -1, np.int32)
        for k, group in enumerate(groups):
            place[group] = k
        pairs = [(k, step) for k in range(len(groups)) for step in h]
        half, parts = self.evaluation.batch // 2, []
        with progress_bar(len(pairs)) as progress:
            for start in range(0, len(pairs), half):
                moves, each = map(np.asarray, zip(*pairs[start : start + half], strict=True))
                parts.append(self._one_sided(along, place, moves, each, covectors))
                progress(len(each))
        shape = (3, len(groups), len(h), len(covectors))
        ahead, behind, width = np.concatenate(parts, axis=1).reshape(shape)
        spread = 0.0 if steps is not None else np.square(covectors) @ np.square(self.noise)
        noise = TIMES * np.sqrt(spread) / h[:, None] + np.zeros_like(ahead)
        return FiniteDifferences(ahead, behind, width, noise, h, along, groups)

    def _one_sided(self, along, place, moves, steps, covectors) -> np.ndarray:
        """The slopes ahead and behind of some moves, and half of what they differ by."""
        signs = np.asarray([1.0, -1.0])
        both = np.repeat(moves, 2), np.outer(steps, signs).ravel()
        values = self.evaluation.values(self.x, along, place, *both)
        up, down = values[::2] - self.base, self.base - values[1::2]
        width = np.abs(up - down) @ np.abs(covectors).T / 2
        return np.stack([up @ covectors.T, down @ covectors.T, width]) / steps[:, None]

    def require_same_values(self) -> None:
        """Raises `Unsupported` unless the values are the function's but for rounding."""
        outputs = vectors.to_numpy(self.evaluation.function.outputs)
        size, off = map(vectors.root_mean_square, (outputs, self.base - outputs))
        if off <= SAME_VALUES * size + np.finfo(np.float32).tiny:
            return
        moved = self.evaluation.moved(self.xs, self.base, AS_COMPUTED)
        if off > SAME_ROUNDINGS * vectors.root_mean_square(moved):
            k = int(np.argmax(np.abs(self.base - outputs)))
            raise Unsupported(
                f"its values differ from those of the function: {outputs[k]:.5g} as computed, "
                f"{self.base[k]:.5g} in float64"
            )


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
