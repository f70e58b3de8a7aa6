"""A flag that is known when other numbers are, and what is done with it.

XLA orders a program by what it needs, and `jax.lax.optimization_barrier` is gone by then. What
needs the flag begins after these numbers, and no compiler knows that it is always false.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._compat import by_platform, to_varying, varying_axes


def delay_flag(numbers: Sequence[jax.Array]) -> jax.Array:
    """False, known when these numbers are."""
    found = [jnp.isnan(x) & jnp.isinf(x) for x in numbers]
    return functools.reduce(jnp.logical_or, found, jnp.array(False))


def in_branch(function: Callable[..., Any], arguments: tuple, flag: jax.Array) -> Any:
    """The result of a function; on a CPU in a branch that is taken as long as the flag is false.

    A GPU would wait for the host there, and several devices would exchange the flag.
    """
    leaves, structure = jax.tree.flatten(arguments)
    axes = frozenset[str]().union(*map(varying_axes, leaves))

    @jax.jit
    def run(*leaves: jax.Array) -> Any:
        """Traced once for all platforms."""
        return function(*structure.unflatten(leaves))

    shapes = jax.eval_shape(run, *leaves)

    def zeros(*leaves: jax.Array) -> Any:
        return jax.tree.map(lambda x: to_varying(jnp.zeros(x.shape, x.dtype), axes), shapes)

    def branch(flag: jax.Array, *leaves: jax.Array) -> Any:
        return jax.lax.cond(flag, zeros, run, *leaves)

    def plain(flag: jax.Array, *leaves: jax.Array) -> Any:
        return run(*leaves)

    return by_platform(flag, *leaves, cpu=branch, gpu=plain, default=plain)
