"""Calls: what is done for each leaf, traced and lowered once for all leaves of a kind."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.core import Tracer

F = TypeVar("F", bound=Callable[..., Any])


def one_call(*static: int, inline: bool = False) -> Callable[[F], F]:
    """A decorator: within a program that is traced, a function is one operation, a call.

    JAX traces it once for all arguments of the same shapes and dtypes. XLA writes the operations
    of a call out after its first passes, so that it may round what is fused with them otherwise
    than in optax: with ``inline`` they are written out before. Outside of such a program each
    operation runs on its own. The arguments at the positions ``static`` are hashable.
    """

    def decorate(function: F) -> F:
        compiled = jax.jit(function, static_argnums=static, inline=inline)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
            return (compiled if traced else function)(*args)

        return call  # type: ignore[return-value]

    return decorate
