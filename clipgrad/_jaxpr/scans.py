"""Running the loop of a `scan` equation with another body."""

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn


def scan_again(
    equation: JaxprEqn, body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, elements: Any
) -> tuple[Any, Any]:
    """`jax.lax.scan` of a body with the length, direction and unrolling of an equation."""
    names = ("length", "reverse", "unroll", "_split_transpose")
    options = {name: equation.params[name] for name in names if name in equation.params}
    return lax.scan(body, carry, elements, **options)
