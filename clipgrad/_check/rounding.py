"""The movement of a gradient by rounding: runs of its program with other roundings (`rounded`)."""

from collections.abc import Sequence

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
    """The root mean square of what roundings move a gradient by, shape (cotangents, inputs).

    Args:
      gradient: the gradient.
      xs: the point.
      covectors: the cotangents, one row each.
      parts: how many roundings of their own types results and constants move by.
    """
    exact = gradient(xs, covectors)
    given = [[*xs, *_trees.cotangent_leaves(row, gradient.outputs)] for row in covectors]
    hook = _jaxpr.NoRules(jnp.float64)
    program = jax.make_jaxpr(
        lambda leaves: gradient.function.call(gradient.constants, leaves, hook)
    )(given[0])
    jaxpr, constants = _jaxpr.opened(program)
    platform = next(iter(xs[0].devices())).platform

    def run(constants, leaves, seed, parts):
        own = _jaxpr.with_constants(jaxpr, constants)
        return rounded_in_float64(own, leaves, seed, parts, platform)

    key = ("rounded", _jaxpr.program_key(program), platform)
    compiled, moved = _jaxpr.kept_by_key(key, lambda: _jaxpr.low_jit(run)), 0.0
    with in_float64():
        given = [list(map(np.asarray, leaves)) for leaves in given]
        for seed in range(1, 1 + RUNS_OF_GRADIENT):
            runs = (compiled(constants, leaves, np.uint32(seed), parts) for leaves in given)
            off = _trees.gradient_rows(runs, len(given)) - exact
            moved = moved + np.where(np.isfinite(off), off, 0.0) ** 2
    return np.sqrt(moved / RUNS_OF_GRADIENT)
