"""What a training step has around or beside a function: the same function, inside of it.

A surrounding takes a function of arrays and returns one that gives the same, so that what is said
of the function, or done to it, is said and done there too. A table draws one for each of its rows
by a seed, which is printed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tests.helpers import SEED


def detached(args):
    """A number of the arguments that no gradient passes."""
    first = next(x for x in jax.tree.leaves(args) if jnp.issubdtype(x.dtype, jnp.floating))
    return lax.stop_gradient(jnp.mean(jnp.abs(first)))


def scaled(outputs, factor):
    return jax.tree.map(lambda y: y * factor.astype(y.dtype), outputs)


def in_branches_that_are_one_function(function):
    return lambda *args: lax.switch(
        (detached(args) > 0).astype(int), [function, function, function], *args
    )


def beside_a_detached_loop(function):
    def halved_until_small(x):
        return lax.while_loop(lambda s: s > 1, lambda s: s / 2, x + 1)

    return lambda *args: scaled(function(*args), halved_until_small(detached(args)))


def beside_a_kernel(function):
    def kernel(x, out):
        out[...] = jnp.exp(-x[...])

    def surrounded(*args):
        x = detached(args).reshape(1)
        factor = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                                interpret=True)(x)  # fmt: skip
        return scaled(function(*args), factor[0])

    return surrounded


def in_a_vmap(function):
    def surrounded(*args):
        both = jax.tree.map(lambda x: jnp.stack([x, x]), args)
        return jax.tree.map(lambda y: y[0], jax.vmap(function)(*both))

    return surrounded


def in_a_scan_with_remat(function):
    def surrounded(*args):
        step = lambda carry, _: (carry, jax.checkpoint(function)(*args))  # noqa: E731
        return jax.tree.map(lambda y: y[1], lax.scan(step, 0, length=2)[1])

    return surrounded


AROUND = [
    in_branches_that_are_one_function, beside_a_detached_loop, beside_a_kernel, in_a_vmap,
    in_a_scan_with_remat,
]  # fmt: skip


def drawn(
    names: Iterable[str], around: list[Callable] = AROUND, seed: int = SEED
) -> list[tuple[str, Callable]]:
    """Each name with one of the surroundings, in turn: with another one for another seed."""
    return [(name, around[(i + seed) % len(around)]) for i, name in enumerate(names)]


def row_id(value: Any) -> str:
    return value if isinstance(value, str) else value.__name__
