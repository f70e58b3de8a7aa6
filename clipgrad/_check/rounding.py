"""The movement of a gradient by rounding: runs of its program with other roundings (`rounded`)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad._jaxpr as _jaxpr
import clipgrad._trees as _trees
from clipgrad._check.beside import Beside, kept_beside
from clipgrad._check.differences import in_float64, without_copy
from clipgrad._check.gradients import Gradient
from clipgrad._program import Parts, rounded_in_float64

# The roundings of plain AD as it is computed, and of a rule, which may not write off what it
# reduces; of a gradient in float64 with the constants of its own types; and of one in float64.
OWN, OF_RULE = Parts(1.0, 1.0, 1.0), Parts(1.0, 1.0, 0.0)
CONSTANTS, IN_FLOAT64 = Parts(0.0, 1.0), Parts(0.0, 0.0)
RUNS_OF_GRADIENT = 8  # their root mean square is right to about 1 / 4


def gradient_movement(
    gradient: Gradient,
    xs: Sequence[jax.Array],
    covectors: np.ndarray,
    parts: Parts,
    near: Any = None,
) -> np.ndarray:
    """The root mean square of what roundings move each element by, shape (inputs,).

    Of several cotangents it is that of the one that moves an element most.

    Args:
      gradient: the gradient.
      xs: the point.
      covectors: the cotangents, one row each.
      parts: how many roundings of their own types results and constants move by.
      near: gradients as they were computed, beside which the exact ones take less memory; or
        these.
    """
    most: Any = np.float32(0)
    size = sum(map(_trees.real_size, xs))
    near = np.empty((len(covectors), size)) if near is None else near
    for row, covector in enumerate(covectors):
        given = [*xs, *_trees.cotangent_leaves(covector, gradient.outputs)]
        exact = near[row : row + 1]
        if not isinstance(near, Beside):
            exact = kept_beside(exact, lambda _, u=covector: gradient.leaves(xs, u))
        gradient.moved = gradient.moved or _moved_program(gradient, given)
        dtype = np.float32 if isinstance(exact, Beside) else np.float64
        with in_float64():
            leaves = list(map(without_copy, given))
            terms = list(exact.terms if isinstance(exact, Beside) else exact)
            found = [jax.device_put(np.zeros(_trees.real_size(x), dtype)) for x in xs]
            for seed in range(1, 1 + RUNS_OF_GRADIENT):
                found = gradient.moved(leaves, np.uint32(seed), parts, terms, found)
                _trees.give_back(size)
        del exact, terms
        own = np.empty(size, dtype)
        for start, stop in _trees.areas(xs)[::-1]:
            own[start:stop] = found.pop()
            _trees.give_back(size)  # each is released at once
        most = np.fmax(most, own, out=own)
    return np.divide(most, np.sqrt(RUNS_OF_GRADIENT), out=most)


def _moved_program(gradient: Gradient, given: Sequence[jax.Array]) -> Callable[..., list]:
    """Adds a run of the gradient to the distances of its leaves, squarely, in their own memory.

    A function of leaves and cotangents, a seed, parts, terms whose sum is the exact gradient, and
    the distances.
    """
    hook = _jaxpr.NoRules(jnp.float64)
    program = jax.make_jaxpr(
        lambda leaves: gradient.function.call(gradient.constants, leaves, hook)
    )(given)
    jaxpr, constants = _jaxpr.opened(program)
    platform = next(iter(given[0].devices())).platform

    def run(constants, leaves, seed, parts, terms, found):
        own = _jaxpr.with_constants(jaxpr, constants)
        moved = rounded_in_float64(own, leaves, seed, parts, platform)
        return [
            _with_distance(distances, _trees.to_vector([jnp.conj(x)], x.real.dtype), terms, area)
            for distances, x, area in zip(found, moved, _trees.areas(moved), strict=True)
        ]

    key = ("rounded", _jaxpr.program_key(program), platform)
    compiled = _jaxpr.kept_by_key(key, lambda: _jaxpr.low_jit(run, donate_argnums=5))
    return functools.partial(compiled, constants)


def _with_distance(distances: Any, moved: Any, terms: Sequence, area: tuple[int, int]) -> Any:
    """The distances with that of a part of a gradient from the sum of terms."""
    for term in terms:
        moved = moved - term[slice(*area)].astype(moved.dtype)
    off = moved.astype(distances.dtype)
    return jnp.hypot(distances, jnp.where(jnp.isfinite(off), off, jnp.zeros_like(off)))
