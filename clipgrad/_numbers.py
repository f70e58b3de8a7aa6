"""Arithmetic of real factors with real or complex arrays, exact in dtype."""

from typing import Any

import jax
import jax.numpy as jnp


def accumulator(leaf: Any) -> str:
    """The dtype in which the squares of a leaf are summed: float32, float64 for a wide leaf."""
    return "float64" if jnp.finfo(leaf.dtype).bits == 64 else "float32"


def widen(leaf: jax.Array, dtype: str) -> jax.Array:
    """The leaf with real parts of ``dtype``."""
    if not jnp.iscomplexobj(leaf):
        return leaf.astype(dtype)
    return leaf.astype({"float32": "complex64", "float64": "complex128"}[dtype])


def times(leaf: jax.Array, factor: jax.Array) -> jax.Array:
    """``leaf * factor`` for a real factor."""
    if not jnp.iscomplexobj(leaf):
        return leaf * factor
    return jax.lax.complex(leaf.real * factor, leaf.imag * factor)


def over(leaf: jax.Array, divisor: jax.Array) -> jax.Array:
    """``leaf / divisor`` for a real divisor."""
    if not jnp.iscomplexobj(leaf):
        return leaf / divisor
    return jax.lax.complex(leaf.real / divisor, leaf.imag / divisor)


def square(leaf: jax.Array) -> jax.Array:
    """``|leaf| ** 2``, real."""
    if not jnp.iscomplexobj(leaf):
        return jnp.square(leaf)
    return jnp.square(leaf.real) + jnp.square(leaf.imag)


def real_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """``Re(conj(a) * b)``."""
    if not jnp.iscomplexobj(a):
        return a * b
    return a.real * b.real + a.imag * b.imag


def power_of_two(exponent: int, dtype: Any) -> jax.Array:
    """``2 ** exponent`` as a scalar whose value XLA doesn't know.

    It would make ``(x * x) * (c * c)`` of ``(x * c) * (x * c)`` if ``c`` were a constant.
    """
    return jax.lax.optimization_barrier(jnp.array(2.0**exponent, dtype))
