"""The rounding of a program: how far its results move if each number is rounded to a neighbor.

The one answer to the question whether a difference could be rounding.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as jax_primitives

from clipgrad._programs.elements import dtype_of, holds_floats
from clipgrad._programs.evaluate import (
    FreedValues,
    Hook,
    Part,
    ProgramValues,
    bind,
    evaluate,
    is_entered,
)
from clipgrad._programs.kinds import (
    held_programs,
    is_while,
    kind_of,
)
from clipgrad._programs.numeric import Does, does, numeric_of
from clipgrad._programs.programs import is_foreign
from clipgrad._programs.widen import Widen, computed_types

NEIGHBOR = 0.51  # x + x * (0.51 eps) rounds to a neighbor of x, whatever its leading digits
RUNS_ON = ("cpu", "gpu", "tpu")
MEASURE = "clipgrad_measure"  # the name of a `jit`
FACTOR = 0xFF51AFD7ED558CCD  # odd, without a pattern: of MurmurHash3's finalizer, by A. Appleby
# The rounding of float32 operands on CUDA and on a TPU, by the precision of their product.
PASSES = {
    "DEFAULT": (2.0**-10, 2.0**-7),
    "HIGH": (2.0**-10, 2.0**-15),
    "TF32_TF32_F32": (2.0**-10, 2.0**-10),
    "BF16_BF16_F32_X3": (2.0**-15, 2.0**-15),
    "BF16_BF16_F32": (2.0**-7, 2.0**-7),
    "BF16_BF16_BF16": (2.0**-7, 2.0**-7),
}


def rounded(program: Any, inputs: Sequence, seed: Any) -> list:
    r"""Evaluate a program, with each rounded number moved by one rounding.

    Each floating result, each term of a sum and of a product's contraction, and each constant
    becomes a neighbor, :math:`x (1 \pm \epsilon)` with the :math:`\epsilon` of its own type, and
    for the operands of products in float32 that of the passes in which the backend computes them
    (TF32 on CUDA, one pass in bfloat16 on a TPU, unless a precision is stated). The sign is a hash
    of the bits of the number, of its index in the array and of the seed: rounding is a function of
    the data, as in an arithmetic unit, and operations of one shape are one program. A sum of n
    terms moves by about :math:`\sqrt n` roundings.

    Exact operations move nothing: copies, comparisons, small whole numbers, a product with a power
    of two, a cast that changes no number, an integer, a constant with few binary digits. Arguments
    do not move. Solvers, kernels and callbacks are seen from outside: their operands and results
    move. Inside of a `while` the sign is one of the operation instead of the number, so that a loop
    that waits until nothing changes still ends. Functions that `measuring` decorates are left
    whole. Not modeled: a reduction that a backend computes in another type than the program says.

    Custom rules are entered by what they compute. The seed is an array: one compiled program serves
    all of them.
    """
    seed = mixed(jnp.asarray(seed, jnp.uint32))
    hook = _Rounding(seed, _platform(), _Seeds(seed))
    with one_promotion():
        return evaluate(program, inputs, hook)


class Distance(NamedTuple):
    """How far numbers move: by a part of themselves, and no less than a number.

    Whole numbers below the third stay: few are whole by chance.
    """

    part: Any
    least: Any
    whole: Any

    @classmethod
    def of(cls, eps: Any, least: Any) -> Self:
        """To the neighbor of a number in a type."""
        return cls(NEIGHBOR * eps, NEIGHBOR * least, 1 / (16 * eps))


class Parts(NamedTuple):
    """The roundings of its own type that each result and term moves by, and each constant.

    Beside these each moves by one rounding of float64. `reduced` is 0 where a `reduce_precision` is
    no rounding but what is computed. All may be traced.
    """

    results: Any = 1.0
    constants: Any = 1.0
    reduced: Any = 1.0


def rounded_in_float64(
    program: Any, inputs: Sequence, seed: Any, parts: Parts, platform: str = "cpu"
) -> list:
    """Evaluate a program in float64, with each rounded number moved by these parts of a rounding.

    As `rounded`, but a moved number does not vanish in the next rounding: results spread about the
    exact ones, in proportion to the roundings. The sign depends on the operation, too: two equal
    numbers of which a gradient takes the difference, as at a minimum, are off by what each lost.
    Call this where JAX has 64 bits. ``platform`` is where the program itself runs; this evaluation
    may run elsewhere.
    """
    number = jnp.int32(RUNS_ON.index(platform) if platform in RUNS_ON else 0)
    wide = Widen(jnp.float64)
    types = {name: jnp.finfo(name) for name in computed_types(program)}
    distances = {
        name: _in_float64(float(limits.eps), float(limits.smallest_subnormal), parts.results)
        for name, limits in types.items()
    }
    seed = _spread(seed)
    hook = _Rounding(seed, number, _Seeds(seed), parts, distances, wide=wide)
    with one_promotion():
        return evaluate(program, [wide.constant(x, None) for x in inputs], hook)


def _in_float64(eps: Any, least: Any, part: Any) -> Distance:
    """To the neighbor in float64 of what is off by a part of a rounding."""
    return Distance.of(eps * part + float(jnp.finfo(jnp.float64).eps), least * part)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Rounding(Hook):
    """Moves results and terms.

    In float64 and inside of a `while` each takes the next of `seeds`, which change as they are used
    and stay in the trace that made them: `inside` makes others.
    """

    seed: Any
    platform: Any
    seeds: "_Seeds" = dataclasses.field(metadata={"static": True})
    parts: Parts = Parts()
    distances: Mapping[str, Distance] = dataclasses.field(default_factory=dict)
    in_while: bool = dataclasses.field(default=False, metadata={"static": True})
    wide: Widen | None = dataclasses.field(default=None, metadata={"static": True})

    in_place = Widen.in_place
    whole = Widen.whole

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results, moved; None for a program that is entered."""
        rounding = does(equation)
        if rounding is Does.PRINTS:
            return []
        if is_measure(equation):
            return bind(equation, inputs)
        if is_entered(equation, self):
            self.seeds.next()  # here, since `inside` is called in the trace of what is inside
            return None
        if rounding is Does.COPIES or not any(map(holds_floats, equation.outvars)):
            return self._bound(equation, inputs)
        if rounding is Does.CASTS:
            return self._cast(equation, inputs)
        if rounding in (Does.SUMS, Does.SOLVES) or is_foreign(equation) or held_programs(equation):
            return self._sum(equation, inputs)
        if rounding is Does.SCALES:
            return self._scaled(equation, inputs)
        outputs = self._bound(equation, inputs)
        if rounding is not Does.REDUCES:
            return self._all(equation, outputs)
        least = float(jnp.finfo(dtype_of(equation.outvars[0])).eps)
        reduced = self.parts.reduced * 2.0 ** -equation.params["mantissa_bits"]
        return self._all(equation, outputs, jnp.maximum(reduced, least))

    def constant(self, value: Any, aval: Any) -> Any:
        """A constant of many binary digits was rounded to its type, so it moves.

        Array constants move in float64 alone: there they may be tables of a formula, but in other
        types they are data of the loss.
        """
        wide = value if self.wide is None else self.wide.constant(value, aval)
        if not holds_floats(aval) or np.ndim(value) and self.wide is None:
            return wide
        wide, short = jnp.asarray(wide), jnp.finfo(aval.dtype).nmant // 2
        if isinstance(value, Tracer) or wide.ndim:
            moved = self._to_neighbors(wide, aval.dtype, part=self.parts.constants)
            return jnp.where(_has_digits(wide, short), wide, moved)
        number = complex(value)
        parts = 2.0 ** (short + 1) * np.frexp([number.real, number.imag])[0]
        if np.all((parts == np.round(parts)) | ~np.isfinite(parts)):
            return value if self.wide is None else wide
        return self._to_neighbors(wide, aval.dtype, part=self.parts.constants)

    def values(self, jaxpr: Any) -> ProgramValues:
        return FreedValues(self, jaxpr)

    def inside(self, equation: JaxprEqn, part: Part) -> Self:
        """The hook; inside of a `while` its signs do not depend on numbers."""
        del part
        if kind_of(equation) in self.in_place:
            return self
        seeds, in_while = _Seeds(mixed(self.seeds.last)), self.in_while or is_while(equation)
        return dataclasses.replace(self, seeds=seeds, in_while=in_while)

    def _bound(self, equation: JaxprEqn, inputs: list, **changed: Any) -> list:
        if self.wide is not None:
            return list(self.wide(equation, inputs) or [])
        return bind(equation, inputs, **changed)

    def _to_neighbors(self, x: Any, dtype: Any, eps: Any = None, part: Any = None) -> Any:
        """A number of type `dtype`, narrower than `x` or not, moved by one rounding of `dtype`."""
        if not holds_floats(x) or not x.size:
            return x
        seed = self.seed
        if self.in_while or self.wide is not None:
            seed = self.seeds.next() if self.wide is not None else mixed(self.seeds.next())
        by = self._distance(jnp.finfo(dtype), eps, part)
        return _to_neighbors(x, seed, by, by_bits=not self.in_while)

    def _distance(self, limits: Any, eps: Any, part: Any) -> Distance:
        """How far numbers of a type move: by a rounding of it, or by ``eps`` of themselves."""
        type_eps, least = float(limits.eps), float(limits.smallest_subnormal)
        is_plain = eps is None or isinstance(eps, float) and eps == type_eps
        eps = type_eps if is_plain else eps
        if self.wide is None:
            return Distance.of(eps, least)
        if is_plain and part is None and limits.dtype.name in self.distances:
            return self.distances[limits.dtype.name]
        return _in_float64(eps, least, self.parts.results if part is None else part)

    def _all(self, equation: JaxprEqn, values: Sequence, eps: Any = None) -> list:
        return [
            self._to_neighbors(x, dtype_of(v), eps) if holds_floats(v) else x
            for v, x in zip(equation.outvars, values, strict=True)
        ]

    def _cast(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """A cast to fewer digits, where it changes a number."""
        (x,), (y,) = inputs, self._bound(equation, inputs)
        before, after = equation.invars[0], dtype_of(equation.outvars[0])
        digits = jnp.finfo(after).nmant
        if not holds_floats(before) or digits >= jnp.finfo(dtype_of(before)).nmant:
            return [y]
        moved = self._to_neighbors(y, after)
        return [moved if jnp.iscomplexobj(x) else jnp.where(_has_digits(x, digits), y, moved)]

    def _scaled(self, equation: JaxprEqn, inputs: list) -> list:
        """A product or a quotient, where it is not with a power of two."""
        (y,) = self._bound(equation, inputs)
        factors = [x for x in inputs if not jnp.iscomplexobj(x)]
        factors = factors[-1:] if equation.primitive is jax_primitives.div_p else factors
        if any(
            not isinstance(x, jax.Array) and np.all(np.abs(np.frexp(x)[0]) == 0.5) for x in factors
        ):
            return [y]
        (moved,) = self._all(equation, [y])
        for x in (x for x in factors if isinstance(x, jax.Array)):
            moved = jnp.where(_has_digits(x, 0), y, moved)
        return [moved]

    def _sum(self, equation: JaxprEqn, inputs: list) -> list:
        """A sum of terms that are rounded to the type of the result, or of a pass of a product."""
        kinds = {dtype_of(v) for v in equation.outvars if holds_floats(v)}
        widest = max(kinds, key=lambda dtype: jnp.finfo(dtype).nmant)
        is_product, changed = numeric_of(equation).is_product, {}
        terms = list(inputs)
        for i, (x, v) in enumerate(zip(inputs, equation.invars, strict=True)):
            if not holds_floats(v):
                continue
            dtype_of_term = dtype_of(v)
            dtype = dtype_of_term if dtype_of_term in kinds else widest
            if jnp.finfo(dtype).nmant > jnp.finfo(dtype_of_term).nmant and is_product:
                dtype_of_term, changed = dtype, {"precision": lax.Precision.HIGHEST}
                x = x.astype(dtype) if self.wide is None else x
            eps = max(float(jnp.finfo(t).eps) for t in (dtype, dtype_of_term))
            terms[i] = self._to_neighbors(x, dtype, self._pass(equation, dtype, eps))
        eps = self._partial_sums(equation, inputs)
        return self._all(equation, self._bound(equation, terms, **changed), eps)

    def _partial_sums(self, equation: JaxprEqn, inputs: list) -> Any:
        """The rounding of a sum in half precision, which a CPU rounds at each of n terms.

        Partial sums are as large as the sum on average: sqrt(n) / 5 roundings, of which a right
        pair may differ by less than half.
        """
        out: Any = equation.outvars[0].aval
        is_half = (
            equation.primitive is jax_primitives.reduce_sum_p and jnp.finfo(out.dtype).bits <= 16
        )
        if not is_half:
            return None
        count = np.size(inputs[0]) / max(1, out.size)
        times = jnp.where(self.platform == 0, max(1.0, count**0.5 / 2), 1.0)
        return float(jnp.finfo(out.dtype).eps) * times.astype(jnp.float32)

    def _pass(self, equation: JaxprEqn, dtype: Any, eps: float) -> Any:
        """The rounding of an operand: that of its product, if it is coarser."""
        single = jnp.finfo(dtype).bits == 32 and numeric_of(equation).is_product
        precision = equation.params.get("precision") or lax.Precision.DEFAULT
        first = precision[0] if isinstance(precision, tuple) else precision
        known = PASSES.get(getattr(first, "name", "")) if single else None
        if not known:
            return eps
        return lax.select_n(self.platform, *(jnp.float32(max(e, eps)) for e in (0.0, *known)))


def _spread(seed: Any) -> Any:
    """A seed that is far from another one, and from a number of an operation."""
    return jnp.asarray(seed, jnp.uint32) * jnp.uint32(0x85EBCA6B)


class _Seeds:
    """Seeds of operations, each made of the one before, so that equal operations are equal code."""

    def __init__(self, last: Any) -> None:
        self.last = last

    def next(self) -> Any:
        self.last = self.last + jnp.uint32(0x9E3779B1)
        return self.last


def _platform() -> Any:
    """0; 1 where the program runs on CUDA, 2 on a TPU."""
    forms = {"cuda": lambda: jnp.int32(1), "tpu": lambda: jnp.int32(2)}
    return lax.platform_dependent(default=lambda: jnp.int32(0), **forms)


def _has_digits(x: Any, count: int) -> Any:
    """Whether numbers have at most so many binary digits behind the first."""
    if jnp.iscomplexobj(x):
        return _has_digits(jnp.real(x), count) & _has_digits(jnp.imag(x), count)
    wide = _in_words(x)
    further = (1 << (jnp.finfo(wide.dtype).nmant - count)) - 1
    return _bits(wide) & further == 0


@functools.partial(jax.jit, static_argnames="by_bits")  # traced once for each type
def _to_neighbors(x: Any, seed: Any, by: "Distance", by_bits: bool) -> Any:
    """Each number but small whole ones, moved up or down.

    A program has this code for each of its operations, and few others: what it has, XLA compiles
    some hundred times.
    """
    wide = _in_words(x)
    real = jnp.finfo(wide.dtype).dtype
    part, least, whole = (jnp.asarray(number, real) for number in by)
    up = _is_up(wide, seed, by_bits)
    if jnp.iscomplexobj(x):
        y = x + x * jnp.where(up, part, -part)
        return jnp.where(jnp.isfinite(y), y, x)
    size = jnp.abs(wide)
    distance = jnp.maximum(size * part, least)
    y = (wide + lax.select(up, distance, -distance)).astype(x.dtype)
    is_moved = (jnp.round(wide) != wide) | (size >= whole)
    return lax.select(is_moved & jnp.isfinite(y), y, x)


def _is_up(x: Any, seed: Any, by_bits: bool) -> Any:
    """A hash of one bit for each number: of its position, the seed and, if asked for, its bits."""
    word = _word(x.dtype)
    bits = jnp.zeros(x.shape, word)
    if by_bits and jnp.iscomplexobj(x):
        bits = _bits(jnp.real(x)) + word(0x85EBCA6B) * _bits(jnp.imag(x))
    elif by_bits:
        bits = _bits(x)
    if word is jnp.uint32:
        return mixed(bits + _flat_positions(x.shape) ^ seed) >> word(31) == 1
    return _is_high(bits ^ lax.iota(word, x.size).reshape(x.shape) ^ jnp.asarray(seed, word))


def _is_high(bits: Any) -> Any:
    """A hash of one bit for each number of 64 bits, by few operations.

    The highest bit of a product depends on all bits of a factor. After two products, with a shift
    before each, a number, its neighbors, its multiples and its negative have independent bits.
    """
    for _ in range(2):
        bits = (bits ^ (bits >> jnp.uint64(32))) * jnp.uint64(FACTOR)
    return bits >= jnp.uint64(1 << 63)


def _flat_positions(shape: tuple[int, ...]) -> Any:
    """A number of 32 bits for each index, by its position in the flat array."""
    positions, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        along = lax.broadcasted_iota(jnp.uint32, shape, axis)
        positions = positions + along * jnp.uint32(stride * 2654435761 % 2**32)
        stride *= shape[axis]
    return positions


def _in_words(x: Any) -> Any:
    """Numbers of whole words, which half precision has not, in their own type or in float32."""
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


def _bits(x: Any) -> Any:
    """The bits of real numbers of whole words."""
    return lax.bitcast_convert_type(x, _word(x.dtype))


def _word(dtype: Any) -> Any:
    """The type of the bits of a number, or of one part of a complex one."""
    return jnp.uint32 if jnp.finfo(dtype).bits == 32 else jnp.uint64


def mixed(bits: Any) -> Any:
    """A hash of 32 bits for each number of 32 bits, in NumPy or in JAX."""
    for right, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):
        bits = (bits ^ (bits >> np.uint32(right))) * np.uint32(factor)
    return bits


def measuring(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Decorates what measures values, and is no part of a program: `rounded` leaves it whole."""
    function.__name__ = MEASURE
    return jax.jit(function)


def is_measure(equation: JaxprEqn) -> bool:
    """Whether it measures values, see `measuring`."""
    return equation.params.get("name") == MEASURE


@contextlib.contextmanager
def one_promotion() -> Iterator[None]:
    """A context in which the arithmetic of hooks does not depend on a user's settings of JAX."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
