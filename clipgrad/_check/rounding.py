"""The movement of a gradient by rounding: runs of its program with other roundings (`rounded`)."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad._jaxpr as _jaxpr
import clipgrad._trees as _trees
from clipgrad._check.differences import in_float64
from clipgrad._check.gradients import Gradient
from clipgrad._program import Parts, rounded_in_float64

# The roundings of plain AD as it is computed, and of a rule, which may not write off what it
# reduces; of a gradient in float64 with the constants of its own types; and of one in float64.
OWN, OF_RULE = Parts(1.0, 1.0, 1.0), Parts(1.0, 1.0, 0.0)
CONSTANTS, IN_FLOAT64 = Parts(0.0, 1.0), Parts(0.0, 0.0)
RUNS_OF_GRADIENT = 8  # their root mean square is right to about 1 / 4


def gradient_movement(
    gradient: Gradient, xs: Sequence[jax.Array], covectors: np.ndarray, parts: Parts
) -> np.ndarray:
    """The root mean square of what roundings move each element by, shape (inputs,).

    Of several cotangents it is that of the one that moves an element most.

    Args:
      gradient: the gradient.
      xs: the point.
      covectors: the cotangents, one row each.
      parts: how many roundings of their own types results and constants move by.
    """
    most, compiled = np.zeros(sum(map(_trees.real_size, xs))), None
    for covector in covectors:
        exact = gradient.leaves(xs, covector)
        given = [*xs, *_trees.cotangent_leaves(covector, gradient.outputs)]
        compiled = compiled or _moved_program(gradient, given)
        squares, leaves = np.zeros(most.size), list(map(np.asarray, given))
        with in_float64():
            for seed in range(1, 1 + RUNS_OF_GRADIENT):
                _add_squares(squares, compiled(leaves, np.uint32(seed), parts), exact)
                _trees.give_back(most.size)
        np.fmax(most, squares, out=most)
    return np.sqrt(np.divide(most, RUNS_OF_GRADIENT, out=most), out=most)


def _moved_program(gradient: Gradient, given: Sequence[jax.Array]) -> Callable[..., list]:
    """The gradient with its roundings moved, of leaves and cotangents, a seed and parts."""
    hook = _jaxpr.NoRules(jnp.float64)
    program = jax.make_jaxpr(
        lambda leaves: gradient.function.call(gradient.constants, leaves, hook)
    )(given)
    jaxpr, constants = _jaxpr.opened(program)
    platform = next(iter(given[0].devices())).platform

    def run(constants, leaves, seed, parts):
        own = _jaxpr.with_constants(jaxpr, constants)
        return rounded_in_float64(own, leaves, seed, parts, platform)

    key = ("rounded", _jaxpr.program_key(program), platform)
    compiled = _jaxpr.kept_by_key(key, lambda: _jaxpr.low_jit(run))
    return functools.partial(compiled, constants)


def _add_squares(squares: np.ndarray, leaves: list, exact: Sequence) -> None:
    """Add the squares of what differs, leaf by leaf, and release each leaf of a run."""
    stop = squares.size
    for k in range(len(leaves))[::-1]:
        off = _trees.gradient_vector([leaves.pop()]) - _trees.gradient_vector([exact[k]])
        squares[stop - off.size : stop] += np.where(np.isfinite(off), off, 0.0) ** 2
        stop -= off.size
