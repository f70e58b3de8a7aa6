"""The table of what the primitives of JAX do to floating numbers, one row for each kind.

`rounded` reads which of them round, and how; the checker, which it cannot widen; the advice and the
causes of `diagnose`, where one has no finite derivative, where none at all, and how cotangents go
back through it.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from clipgrad._programs.primitives import PrimitiveTable, TracedOnce, on_a_mesh


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


class Back(enum.Enum):
    """The way of a cotangent back, from a result of a primitive to an operand."""

    MOVED = "to the number that the result is, in another shape or type"
    READ = "to the numbers that it takes, by their places or by their sizes"
    WRITTEN = "to an array, and to what is added to numbers of it"
    OVERWRITTEN = "to an array, but not to the numbers that another takes the place of"
    CHOSEN = "to the side that a mask takes"
    CLIPPED = "not to a number beyond a bound"
    ONE_SIDED = "to the larger number"
    RANKED = "not through the places of numbers in their order, which are among its results"
    COMPARED = "not through its results, which are bool"
    MULTIPLIED = "times the other operand"
    DIVIDED = "times or over the other operand"
    CONTRACTED = "times the other operand, and added up"
    ADDED_UP = "added up, along an axis or over devices"
    OF_A_POWER = "times a number of any size"


# Where a cotangent is multiplied by another operand, by numbers of any size, and added up.
BACK_BY_FACTORS = frozenset((Back.MULTIPLIED, Back.DIVIDED, Back.CONTRACTED))
BACK_AT_ANY_SIZE = BACK_BY_FACTORS | {Back.OF_A_POWER}
BACK_IN_SUMS = frozenset((Back.ADDED_UP, Back.CONTRACTED))


class Use(enum.Enum):
    """Something that a primitive is for, besides what it does to numbers."""

    DRAWS = "its results are random"
    VARIES = "the same value, as one that may differ between devices"
    MAKES_REFERENCE = "its result is a reference"
    ENDS_REFERENCE = "its result is what a reference holds at its end"


@dataclasses.dataclass(frozen=True, eq=False)
class Numeric:
    """A row: primitives that do the same to numbers.

    Attributes:
      does: how results are rounded.
      back: how cotangents go back, if one asks.
      bad_at: the point where the derivative is not finite.
      is_flat: whether the derivative is zero everywhere.
      has_bits: whether it looks at the bits of its numbers, or is there for some types alone.
      overflows: whether it makes inf of finite numbers by its size alone.
      is_exponential: whether it does so at numbers of two or three digits.
      moves: whether an operand, such as the weights of a layer, is still what it was.
      use: what it is for.
    """

    does: Does
    back: Back | None = None
    bad_at: str | None = None
    is_flat: bool = False
    has_bits: bool = False
    overflows: bool = False
    is_exponential: bool = False
    moves: bool = False
    use: Use | None = None

    @property
    def is_product(self) -> bool:
        """Whether a device may round the operands, by the precision of the product."""
        return self.back is Back.CONTRACTED


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


def _new_ref(x: Any) -> None:
    jax.new_ref(x)


_MATRIX = (2, 2)
NUMERIC: PrimitiveTable[Numeric] = PrimitiveTable(
    "NUMERIC",
    {
        Numeric(Does.COPIES, Back.MOVED, moves=True): _named_by_jax(
            "copy reshape squeeze transpose"
        ),
        Numeric(Does.COPIES, Back.READ, moves=True): (
            *_named_by_jax("dynamic_slice gather slice"),
            TracedOnce("split", lambda x: lax.split(x, (1, 1))),
            TracedOnce("unstack", jnp.unstack, _MATRIX),
        ),
        Numeric(Does.COPIES, Back.ADDED_UP, moves=True): (
            *_named_by_jax("broadcast_in_dim"),
            TracedOnce("tile", lambda x: jnp.tile(x, 2)),
        ),
        Numeric(Does.COPIES, moves=True): _named_by_jax("iota"),
        Numeric(Does.COPIES, Back.READ): (
            *_named_by_jax(
                """concatenate cummax cummin pad reduce_max reduce_min reduce_window_max
                reduce_window_min scatter_max scatter_min select_and_gather_add"""
            ),
            TracedOnce("stack", lambda x: jnp.stack([x, x])),
        ),
        Numeric(Does.COPIES, Back.OVERWRITTEN): _named_by_jax("dynamic_update_slice scatter"),
        Numeric(Does.COPIES, Back.CHOSEN): _named_by_jax("select_n"),
        Numeric(Does.COPIES, Back.CLIPPED): _named_by_jax("clamp min"),
        Numeric(Does.COPIES, Back.ONE_SIDED): _named_by_jax("max"),
        Numeric(Does.COPIES, Back.RANKED): _named_by_jax("approx_top_k sort top_k"),
        Numeric(Does.COPIES, Back.ADDED_UP, use=Use.VARIES): (
            TracedOnce("pcast", on_a_mesh(_vary)),
            TracedOnce("vary", on_a_mesh(lambda x: x + jnp.ones(2))),
        ),
        Numeric(Does.COPIES, use=Use.MAKES_REFERENCE): (TracedOnce("new_ref", _new_ref),),
        Numeric(Does.COPIES, use=Use.ENDS_REFERENCE): (
            TracedOnce("freeze", lambda x: jax.freeze(jax.new_ref(x))),
        ),
        Numeric(Does.COPIES): (
            *_named_by_jax(
                """abs all_gather all_to_all complex conj device_put empty2 get imag name neg pmax
                pmin ppermute ragged_all_to_all real rev sharding_constraint stop_gradient
                swap"""
            ),
            TracedOnce("empty", lambda x: jnp.empty(2)),
            TracedOnce("barrier", lax.optimization_barrier),
            TracedOnce("layout", _layout),
            TracedOnce("reshard", on_a_mesh(_reshard, is_explicit=True)),
        ),
        Numeric(Does.COPIES, is_flat=True): _named_by_jax("ceil floor round sign"),
        Numeric(Does.COPIES, is_flat=True, has_bits=True): _named_by_jax("nextafter"),
        Numeric(Does.COPIES, has_bits=True): _named_by_jax("bitcast_convert_type"),
        Numeric(Does.COPIES, has_bits=True, use=Use.DRAWS): _named_by_jax("rng_uniform"),
        Numeric(Does.SUMS): (
            *_named_by_jax(
                """cumlogsumexp cumprod fft reduce_prod reduce_window_sum scatter_mul
                select_and_scatter_add"""
            ),
            TracedOnce("psum_scatter", on_a_mesh(_psum_scatter)),
        ),
        Numeric(Does.SUMS, Back.WRITTEN): (
            *_named_by_jax("scatter_add"),
            TracedOnce("scatter-sub", lambda x: x.at[0].subtract(1.0)),
        ),
        Numeric(Does.SUMS, Back.ADDED_UP): (
            *_named_by_jax("psum"),
            TracedOnce("psum", on_a_mesh(_psum, ())),
        ),
        Numeric(Does.SUMS, Back.ADDED_UP, overflows=True): _named_by_jax("cumsum"),
        Numeric(Does.SUMS, overflows=True): _named_by_jax("reduce_sum"),
        Numeric(Does.SUMS, Back.CONTRACTED, overflows=True): _named_by_jax(
            "conv_general_dilated dot_general"
        ),
        Numeric(Does.SUMS, Back.CONTRACTED): (
            TracedOnce("ragged_dot", _ragged_dot, _MATRIX),
            TracedOnce("scaled_dot", lambda x: lax.scaled_dot(x, x), _MATRIX),
        ),
        Numeric(Does.SOLVES, bad_at="singular"): _named_by_jax(
            "cholesky lu triangular_solve tridiagonal_solve"
        ),
        Numeric(Does.SOLVES, bad_at="equal values"): _named_by_jax("eig eigh svd"),
        Numeric(Does.SOLVES): (
            *_named_by_jax("hessenberg householder_product qr schur tridiagonal"),
            TracedOnce("symmetric", lambda x: lax.linalg.symmetric_product(x, x), _MATRIX),
            TracedOnce("cholesky_update", _cholesky_update, _MATRIX),
        ),
        Numeric(Does.SCALES, Back.MULTIPLIED, overflows=True): _named_by_jax("mul"),
        Numeric(Does.SCALES, Back.DIVIDED, bad_at="divisor zero"): _named_by_jax("div"),
        Numeric(Does.CASTS, Back.MOVED, overflows=True, moves=True): _named_by_jax(
            "convert_element_type"
        ),
        Numeric(Does.REDUCES): _named_by_jax("reduce_precision"),
        Numeric(Does.ROUNDS): _named_by_jax(
            """atan asinh bessel_i0e bessel_i1e cos digamma erf erf_inv erfc igamma igamma_grad_a
            igammac lgamma logistic one_minus_square? polygamma polynomial?
            regularized_incomplete_beta rem sin tan tanh zeta custom_lin"""
        ),
        Numeric(Does.ROUNDS, use=Use.DRAWS): _named_by_jax("random_gamma"),
        Numeric(Does.ROUNDS, overflows=True): _named_by_jax("add add_jaxvals sub"),
        Numeric(Does.ROUNDS, overflows=True, is_exponential=True): _named_by_jax(
            "cosh exp exp2 expm1 sinh"
        ),
        Numeric(Does.ROUNDS, Back.OF_A_POWER, overflows=True): _named_by_jax("integer_pow square"),
        Numeric(Does.ROUNDS, Back.OF_A_POWER): _named_by_jax("rsqrt"),
        Numeric(Does.ROUNDS, Back.OF_A_POWER, bad_at="zero base"): _named_by_jax("pow"),
        Numeric(Does.ROUNDS, bad_at="zero"): _named_by_jax("sqrt cbrt"),
        Numeric(Does.ROUNDS, bad_at="log of zero"): _named_by_jax("log log1p log2?"),
        Numeric(Does.ROUNDS, bad_at="one"): _named_by_jax("acos asin atanh"),
        Numeric(Does.ROUNDS, bad_at="one from above"): _named_by_jax("acosh"),
        Numeric(Does.ROUNDS, bad_at="all zero"): _named_by_jax("atan2"),
        Numeric(Does.CALLS): (
            TracedOnce("pure_callback", lambda x: jax.pure_callback(lambda x: x, x, x)),
            TracedOnce("io_callback", _io_callback),
            TracedOnce("ffi_call", lambda x: jax.ffi.ffi_call("clipgrad_probe", x)(x)),
        ),
        Numeric(Does.PRINTS): (
            TracedOnce("debug.print", lambda x: jax.debug.print("{}", x)),
            TracedOnce("debug.callback", lambda x: jax.debug.callback(lambda x: None, x)),
        ),
        Numeric(Does.COUNTS, Back.COMPARED): _named_by_jax("eq eq_to ge gt le le_to lt lt_to ne"),
        Numeric(Does.COUNTS, Back.RANKED): _named_by_jax("argmax argmin"),
        Numeric(Does.COUNTS, use=Use.DRAWS): _named_by_jax(
            "random_bits rng_bit_generator threefry2x32"
        ),
        Numeric(Does.COUNTS): _named_by_jax(
            """after_all and axis_index clz create_token is_finite not or population_count
            random_fold_in random_seed random_split reduce_and reduce_or reduce_xor shift_left
            shift_right_arithmetic shift_right_logical xor"""
        ),
    },
)


def numeric_of(equation: JaxprEqn) -> Numeric:
    """The row of an equation; a primitive without a row counts as an operation that rounds."""
    return NUMERIC.get(equation.primitive, _UNKNOWN)


_UNKNOWN = Numeric(Does.ROUNDS)


def does(equation: JaxprEqn) -> Does:
    """The effect of an equation on numbers."""
    return numeric_of(equation).does


def is_print(equation: JaxprEqn) -> bool:
    """Whether an equation prints, or calls a function for its effect alone."""
    return does(equation) is Does.PRINTS


def is_move(equation: JaxprEqn) -> bool:
    """Whether an equation only moves its operand: the same numbers in another shape or type."""
    return numeric_of(equation).moves


def is_bad_at(point: str) -> Callable[[JaxprEqn], bool]:
    """A function of an equation: whether its derivative is not finite at a point."""
    return lambda equation: numeric_of(equation).bad_at == point


def use_of(equation: JaxprEqn) -> Use | None:
    """What an equation is for, if its row says so."""
    return numeric_of(equation).use


def calls_python(equation: JaxprEqn) -> bool:
    """Whether an equation may call a function of Python, which can raise an error."""
    return does(equation) in (Does.CALLS, Does.PRINTS)
