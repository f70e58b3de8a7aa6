"""Arithmetic of real factors with real or complex arrays, and of counters, exact in dtype."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from clipgrad._sharding import explicit_sharding


def accumulator(leaf: Any) -> str:
    """The dtype in which the squares of a leaf are summed: float32, float64 for a wide leaf."""
    # NumPy's float64 becomes float32 where JAX has no float64.
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return "float64" if jnp.finfo(dtype).bits == 64 else "float32"


def at_least_float32(dtype: Any) -> Any:
    return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def with_real_dtype(leaf: jax.Array, dtype: str) -> jax.Array:
    """The leaf with real parts of ``dtype``."""
    if not jnp.iscomplexobj(leaf):
        return leaf.astype(dtype)
    return leaf.astype({"float32": "complex64", "float64": "complex128"}[dtype])


def times(leaf: jax.Array, factor: jax.Array) -> jax.Array:
    """``leaf * factor`` for a real factor."""
    if not jnp.iscomplexobj(leaf):
        return leaf * factor
    return lax.complex(leaf.real * factor, leaf.imag * factor)


def over(leaf: jax.Array, divisor: jax.Array) -> jax.Array:
    """``leaf / divisor`` for a real divisor."""
    if not jnp.iscomplexobj(leaf):
        return leaf / divisor
    return lax.complex(leaf.real / divisor, leaf.imag / divisor)


@jax.custom_jvp
def quotient(leaf: jax.Array, divisor: jax.Array) -> jax.Array:
    """``leaf / divisor``, whose derivative has no square of the divisor: it may be out of range."""
    return over(leaf, divisor)


@quotient.defjvp
def _quotient_jvp(primals: Any, tangents: Any) -> Any:
    (leaf, divisor), (dleaf, ddivisor) = primals, tangents
    result = quotient(leaf, divisor)
    return result, over(dleaf, divisor) - times(result, ddivisor / divisor)


@jax.custom_jvp
def scaled_to(leaf: jax.Array, divisor: jax.Array, limit: jax.Array) -> jax.Array:
    """``leaf / divisor * limit``, whose derivatives have no power of the divisor.

    In second derivatives these would be out of range. Of many divisors one reciprocal each: a
    quotient of each element is what a CPU takes longest for.
    """
    parts = times(leaf, 1 / divisor) if divisor.ndim else over(leaf, divisor)
    return times(parts, limit)


@scaled_to.defjvp
def _scaled_to_jvp(primals: Any, tangents: Any) -> Any:
    (leaf, divisor, limit), (dleaf, ddivisor, dlimit) = primals, tangents
    part = quotient(leaf, divisor)
    # Of a small divisor it is not inf, of which 0 times would be a derivative.
    factor = quotient(limit, jnp.maximum(divisor, limit * 2.0**-120))
    dfactor = dlimit - factor * ddivisor
    return scaled_to(leaf, divisor, limit), times(dleaf, factor) + times(part, dfactor)


def increment_if(condition: Any, count: Any) -> jax.Array:
    """``count``, one more if ``condition`` holds; it stops at the largest number of its type."""
    count = jnp.asarray(count)
    limits = jnp.iinfo if jnp.issubdtype(count.dtype, jnp.integer) else jnp.finfo
    is_more = lax.bitwise_and(condition, lax.lt(count, number(limits(count.dtype).max, count)))
    return lax.add(count, lax.convert_element_type(is_more, count.dtype))


def real_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """``Re(conj(a) * b)``."""
    if not jnp.iscomplexobj(a):
        return a * b
    return a.real * b.real + a.imag * b.imag


def if_else(condition: jax.Array, yes: Any, no: Any) -> jax.Array:
    """`jax.numpy.where`, but no call within a program: XLA takes long to inline very many."""
    arrays = [x for x in (condition, yes, no) if isinstance(x, jax.Array)]
    if not any(isinstance(x, Tracer) for x in arrays) or any(map(explicit_sharding, arrays)):
        return jnp.where(condition, yes, no)
    dtypes = {x.dtype for x in (yes, no) if isinstance(x, jax.Array)}
    dtype = dtypes.pop() if len(dtypes) == 1 else jnp.result_type(yes, no)
    shapes = {x.shape for x in arrays}
    shape = shapes.pop() if len(shapes) == 1 else jnp.broadcast_shapes(*shapes)
    yes, no = (_filled(x, shape, dtype) for x in (yes, no))
    return lax.select(condition if not condition.ndim else _filled(condition, shape), yes, no)


def number(value: Any, like: jax.Array) -> np.ndarray:
    """A number in the dtype of an array, for the operations of `jax.lax`.

    Those of `jax.numpy` are calls, and each is traced once more for each type of its operands.
    """
    return np.asarray(value, like.dtype)


def _filled(x: Any, shape: tuple[int, ...], dtype: Any = bool) -> jax.Array:
    """An array or a number in a shape that it broadcasts to."""
    if not isinstance(x, jax.Array):
        return lax.full(shape, x, dtype)
    x = x if x.dtype == dtype else x.astype(dtype)
    return x if x.shape == shape else jnp.broadcast_to(x, shape)


def in_one_program(function: Callable[..., Any], *static: int) -> Callable[..., Any]:
    """The function, compiled as a whole under `jax.debug_infs`, which looks at each eager result.

    A square out of range is such a result, before the sum of scaled squares takes its place.
    """
    is_checked = jax.config.jax_debug_infs  # pyright: ignore[reportAttributeAccessIssue]
    return jax.jit(function, static_argnums=static) if is_checked else function


def one_program_if_eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled as a whole outside of programs: JAX checks and rounds one result.

    Within a program it is no call, which would take longer to trace.
    """
    compiled = jax.jit(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
        return function(*args) if is_traced else compiled(*args)

    return call


# Under jax_debug_nans a NaN of its own would raise.
@one_program_if_eager
def nan_unless(condition: jax.Array, x: jax.Array) -> jax.Array:
    """NaN where the condition is false."""
    return if_else(condition, x, jnp.nan)


def real_or_absolute(leaf: jax.Array) -> jax.Array:
    """Real numbers with the squares of ``|leaf|``; a real leaf itself, which needs no buffer."""
    return jnp.abs(leaf) if jnp.iscomplexobj(leaf) else leaf


def at_least(x: jax.Array, bound: jax.Array) -> jax.Array:
    """``max(x, bound)`` that keeps NaN, which XLA's CPU loops drop in a sum of maxima."""
    return if_else(x < bound, bound, x)


def finite_product(x: jax.Array, factor: jax.Array) -> jax.Array:
    """``x * factor`` for numbers from 0 on; the largest finite number instead of inf."""
    most = jnp.finfo(x.dtype).max
    return jnp.minimum(x, most / jnp.maximum(factor, 1)) * factor


def to_ordered_bits(x: jax.Array) -> jax.Array:
    """Integers in the order of numbers that are not negative, with NaN as the largest.

    A maximum of them keeps NaN, which a maximum of floating numbers loses in XLA's CPU loops.
    """
    return to_bits(jnp.abs(x))


def to_bits(x: jax.Array) -> jax.Array:
    """Integers of the same sign, but for NaN, and from 0 on in the same order."""
    integers = {4: jnp.int32, 8: jnp.int64}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, integers)


def from_bits(bits: jax.Array) -> jax.Array:
    """The numbers, from 0 on, that `to_bits` was given."""
    floats = {4: jnp.float32, 8: jnp.float64}[bits.dtype.itemsize]
    return lax.bitcast_convert_type(bits, floats)


_BITS_OF_INF = 0x7F800000  # in float32


def flags_of_bits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers that are 1 where ``x`` is NaN or inf, and 1 where it is 0; elsewhere they are 0.

    They are the signs of differences. A TPU's compiler stores what a comparison gives, and then
    what is compared, before it is added up; float64, of which a TPU has no bits, is compared.
    """
    if x.dtype != jnp.float32:
        return (~jnp.isfinite(x)).astype(x.dtype), (x == 0).astype(x.dtype)
    bits = to_ordered_bits(x)
    is_finite = lax.shift_right_logical(bits - _BITS_OF_INF, 31)
    is_zero = lax.shift_right_logical(bits - 1, 31)
    return (1 - is_finite).astype(x.dtype), is_zero.astype(x.dtype)


def largest(
    x: jax.Array, axis: int | tuple[int, ...] | None = None, total: jax.Array | None = None
) -> jax.Array:
    """The largest element along axes, at least 0: NaN if an element is, also over devices.

    XLA's maximum over devices drops NaN, but no sum does. ``total`` is a sum that is NaN where an
    element is, if there is one; else magnitudes are added up.
    """
    total = jnp.sum(jnp.abs(x), axis) if total is None else total
    return nan_unless(~jnp.isnan(total), jnp.max(x, axis, initial=0))


def larger(a: jax.Array, b: jax.Array) -> jax.Array:
    """The larger of numbers from 0 on: NaN if one is, also in XLA's CPU loops."""
    return nan_unless(~jnp.isnan(a + b), jnp.maximum(a, b))


def widest(leaves: Sequence[Any]) -> str:
    """The dtype of a norm over all of these leaves."""
    return max([accumulator(leaf) for leaf in leaves], default="float32")
