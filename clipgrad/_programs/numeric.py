"""The table of what the primitives of JAX do to floating numbers, one row for each kind.

`rounded` reads which of them round, and how; the checker, which it cannot widen; the advice and the
causes of `diagnose`, where one has no finite derivative, and where none at all.
"""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from clipgrad._programs.primitives import PrimitiveNames, PrimitiveTable, TracedOnce, on_a_mesh


class Does(enum.Enum):
    """The effect of a primitive on numbers, and so how its results are rounded."""

    COPIES = "its results are some of its operands"
    SUMS = "adds or multiplies many terms, each of which may be rounded"
    SOLVES = "is off by what a rounding of its operands moves"
    SCALES = "is exact where a factor is a power of two"
    CASTS = "rounds where the type of its result has fewer digits"
    REDUCES = "rounds to the digits that it says"
    ROUNDS = "each number of its result is rounded once"
    CALLS = "is a function outside of JAX"
    PRINTS = "has no result"
    COUNTS = "has no floating result, or random bits"


@dataclasses.dataclass(frozen=True, eq=False)
class Numeric:
    """A row: primitives that do the same to numbers.

    Attributes:
      does: how results are rounded.
      bad_at: the point where the derivative is not finite.
      is_flat: whether the derivative is zero everywhere.
      is_product: whether a device may round the operands, by the precision of the product.
      has_bits: whether it looks at the bits of its numbers, or is there for some types alone.
      overflows: whether it makes inf of finite numbers by its size alone.
      moves: whether an operand, such as the weights of a layer, is still what it was.
    """

    does: Does
    bad_at: str | None = None
    is_flat: bool = False
    is_product: bool = False
    has_bits: bool = False
    overflows: bool = False
    moves: bool = False


def _named_by_jax(names: str) -> tuple[str, ...]:
    return tuple(f"{name.rstrip('?')}_p{'?' * name.endswith('?')}" for name in names.split())


def _psum(x: Any) -> Any:
    return lax.psum(x, "d")


def _psum_scatter(x: Any) -> Any:
    return lax.psum_scatter(x, "d", tiled=True)


def _vary(x: Any) -> Any:
    return lax.pcast(jnp.ones(2), "d", to="varying")


def _layout(x: Any) -> Any:
    from jax.experimental.layout import Layout, with_layout_constraint

    return with_layout_constraint(x, Layout((0,)))


def _io_callback(x: Any) -> Any:
    from jax.experimental import io_callback

    return io_callback(lambda x: x, x, x)


def _reshard(x: Any) -> Any:
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec("d"))


def _ragged_dot(x: Any) -> Any:
    return lax.ragged_dot(x, jnp.ones((1, 2, 2), "float32"), jnp.ones(1, "int32"))


def _cholesky_update(x: Any) -> Any:
    return lax.linalg.cholesky_update(x, jnp.ones(2, "float32"))


_MATRIX = (2, 2)
NUMERIC: PrimitiveTable[Numeric] = PrimitiveTable(
    "NUMERIC",
    {
        Numeric(Does.COPIES, moves=True): (
            *_named_by_jax(
                """broadcast_in_dim copy dynamic_slice gather iota reshape slice squeeze
                transpose"""
            ),
            TracedOnce("split", lambda x: lax.split(x, (1, 1))),
            TracedOnce("unstack", jnp.unstack, _MATRIX),
            TracedOnce("tile", lambda x: jnp.tile(x, 2)),
        ),
        Numeric(Does.COPIES): (
            *_named_by_jax(
                """abs all_gather all_to_all approx_top_k clamp complex concatenate conj cummax
                cummin device_put dynamic_update_slice empty2 get imag max min name neg pad pmax
                pmin ppermute ragged_all_to_all real reduce_max reduce_min reduce_window_max
                reduce_window_min rev scatter scatter_max scatter_min select_and_gather_add select_n
                sharding_constraint sort stop_gradient swap top_k"""
            ),
            TracedOnce("stack", lambda x: jnp.stack([x, x])),
            TracedOnce("empty", lambda x: jnp.empty(2)),
            TracedOnce("barrier", lax.optimization_barrier),
            TracedOnce("layout", _layout),
            TracedOnce("reshard", on_a_mesh(_reshard, is_explicit=True)),
            TracedOnce("pcast", on_a_mesh(_vary)),
        ),
        Numeric(Does.COPIES, is_flat=True): _named_by_jax("ceil floor round sign"),
        Numeric(Does.COPIES, is_flat=True, has_bits=True): _named_by_jax("nextafter"),
        Numeric(Does.COPIES, has_bits=True): _named_by_jax("bitcast_convert_type rng_uniform"),
        Numeric(Does.SUMS): (
            *_named_by_jax(
                """cumlogsumexp cumprod fft psum reduce_prod reduce_window_sum scatter_add
                scatter_mul select_and_scatter_add"""
            ),
            TracedOnce("scatter-sub", lambda x: x.at[0].subtract(1.0)),
            TracedOnce("psum", on_a_mesh(_psum, ())),
            TracedOnce("psum_scatter", on_a_mesh(_psum_scatter)),
        ),
        Numeric(Does.SUMS, overflows=True): _named_by_jax("cumsum reduce_sum"),
        Numeric(Does.SUMS, is_product=True, overflows=True): _named_by_jax(
            "conv_general_dilated dot_general"
        ),
        Numeric(Does.SUMS, is_product=True): (
            TracedOnce("ragged_dot", _ragged_dot, _MATRIX),
            TracedOnce("scaled_dot", lambda x: lax.scaled_dot(x, x), _MATRIX),
        ),
        Numeric(Does.SOLVES): (
            *_named_by_jax(
                """cholesky eig eigh hessenberg householder_product lu qr schur svd
                triangular_solve tridiagonal tridiagonal_solve"""
            ),
            TracedOnce("symmetric", lambda x: lax.linalg.symmetric_product(x, x), _MATRIX),
            TracedOnce("cholesky_update", _cholesky_update, _MATRIX),
        ),
        Numeric(Does.SCALES, overflows=True): _named_by_jax("mul"),
        Numeric(Does.SCALES): _named_by_jax("div"),
        Numeric(Does.CASTS, overflows=True, moves=True): _named_by_jax("convert_element_type"),
        Numeric(Does.REDUCES): _named_by_jax("reduce_precision"),
        Numeric(Does.ROUNDS): _named_by_jax(
            """atan atan2 asinh bessel_i0e bessel_i1e cos cosh digamma erf erf_inv erfc
            igamma igamma_grad_a igammac lgamma logistic one_minus_square? polygamma polynomial?
            random_gamma regularized_incomplete_beta rem rsqrt sin sinh tan tanh zeta custom_lin"""
        ),
        Numeric(Does.ROUNDS, overflows=True): _named_by_jax(
            "add add_jaxvals exp exp2 expm1 integer_pow square sub"
        ),
        Numeric(Does.ROUNDS, bad_at="zero"): _named_by_jax("sqrt cbrt"),
        Numeric(Does.ROUNDS, bad_at="zero base"): _named_by_jax("pow"),
        Numeric(Does.ROUNDS, bad_at="log of zero"): _named_by_jax("log log1p log2?"),
        Numeric(Does.ROUNDS, bad_at="one"): _named_by_jax("acos asin atanh"),
        Numeric(Does.ROUNDS, bad_at="one from above"): _named_by_jax("acosh"),
        Numeric(Does.CALLS): (
            TracedOnce("pure_callback", lambda x: jax.pure_callback(lambda x: x, x, x)),
            TracedOnce("io_callback", _io_callback),
            TracedOnce("ffi_call", lambda x: jax.ffi.ffi_call("clipgrad_probe", x)(x)),
        ),
        Numeric(Does.PRINTS): (
            TracedOnce("debug.print", lambda x: jax.debug.print("{}", x)),
            TracedOnce("debug.callback", lambda x: jax.debug.callback(lambda x: None, x)),
        ),
        Numeric(Does.COUNTS): _named_by_jax(
            """after_all and argmax argmin axis_index clz create_token eq eq_to ge gt is_finite le
            le_to lt lt_to ne not or population_count random_bits random_fold_in random_seed
            random_split reduce_and reduce_or reduce_xor rng_bit_generator shift_left
            shift_right_arithmetic shift_right_logical threefry2x32 xor"""
        ),
    },
)


def numeric_of(equation: JaxprEqn) -> Numeric:
    """The row of an equation; of a primitive without one, that of an operation that rounds."""
    return NUMERIC.get(equation.primitive, _UNKNOWN)


_UNKNOWN = Numeric(Does.ROUNDS)


def does(equation: JaxprEqn) -> Does:
    """The effect of an equation on numbers."""
    return numeric_of(equation).does


def is_print(equation: JaxprEqn) -> bool:
    """Whether an equation prints, or calls a function for its effect alone."""
    return does(equation) is Does.PRINTS


def is_move(equation: JaxprEqn) -> bool:
    """Whether an operand of an equation is still what it was, in another shape or type."""
    return numeric_of(equation).moves


def is_bad_at(point: str) -> PrimitiveNames:
    """The names of the primitives whose derivative is not finite at a point."""
    return PrimitiveNames(lambda: NUMERIC, lambda row: row.bad_at == point)


OVERFLOWING = PrimitiveNames(lambda: NUMERIC, lambda row: row.overflows)
