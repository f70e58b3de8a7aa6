"""Held-out programs that look alike, checked one after another in one process.

They were written by one who had read what the checker promises, and nothing inside it.
`SEQUENCES` has functions that list `Member`s: what a member is judged to be must not depend on
which of the others were judged before it. So each list is judged from its beginning and from its
end, without forgetting anything in between.
"""
# ruff: noqa: D101, D103, E501, E731

import dataclasses
import functools
import gc
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl

from benchmarks.held_out_programs import Rnd

SEQUENCES: list[Callable[[], list["Member"]]] = []


class Member(NamedTuple):
    """A program; ``before`` runs first; ``slopes``: what `numerical_grad` must return instead."""

    name: str
    wrong: bool
    fun: Callable
    args: tuple
    options: dict[str, Any] = {}
    before: Callable[[], Any] | None = None
    slopes: Any = None


def sequence(make: Callable[[], list[Member]]) -> Callable:
    SEQUENCES.append(make)
    return make


def ruled(primal: Callable, slope: Callable) -> Callable:
    """An elementwise function with the derivative ``slope``."""
    f = jax.custom_vjp(primal)
    f.defvjp(lambda x: (primal(x), x), lambda x, g: (g * slope(x).astype(g.dtype),))
    return f


def linear(primal: Callable, transposed: Callable) -> Callable:
    """A linear function with the transpose ``transposed``."""
    f = jax.custom_vjp(primal)
    f.defvjp(lambda x: (primal(x), None), lambda _, g: (transposed(g),))
    return f


def by(function: Callable, **how: Any) -> Callable:
    """A NumPy function as a callback."""

    def call(x):
        out = lambda x: np.asarray(function(x), x.dtype)
        return jax.pure_callback(
            out, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential", **how
        )

    return call


X = Rnd(100).u(0.2, 0.9, 5)
SQUARE = Rnd(101).n(4, 4)


# ------------------------------------------------------------------------------- callbacks
@sequence
def callable_objects_that_are_equal():
    @dataclasses.dataclass(frozen=True)
    class Power:
        label: str
        n: int = dataclasses.field(compare=False)

        def __call__(self, x):
            return np.asarray(np.asarray(x) ** self.n, np.asarray(x).dtype)

    def powers(n):
        return lambda x: jax.pure_callback(
            Power("power", n), jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
        )

    return [
        Member("the square", False, ruled(powers(2), lambda x: 2 * x), (X,)),
        Member("the cube as a square", True, ruled(powers(3), lambda x: 2 * x), (X,)),
        Member("the cube", False, ruled(powers(3), lambda x: 3 * x * x), (X,)),
    ]


@sequence
def methods_of_two_objects():
    class Table:
        def __init__(self, scale):
            self.scale = scale

        def __eq__(self, other):
            return isinstance(other, Table)

        def __hash__(self):
            return 1

        def look_up(self, x):
            return np.asarray(self.scale * np.sinh(x), np.asarray(x).dtype)

    def of(table):
        return lambda x: jax.pure_callback(
            table.look_up, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
        )

    return [
        Member("of one", False, ruled(of(Table(1.0)), jnp.cosh), (X,)),
        Member("of three by one", True, ruled(of(Table(3.0)), jnp.cosh), (X,)),
        Member("of three", False, ruled(of(Table(3.0)), lambda x: 3 * jnp.cosh(x)), (X,)),
    ]


@sequence
def partial_callbacks():
    of = lambda k: by(functools.partial(np.multiply, k))
    return [
        Member("by 2", False, ruled(of(2), lambda x: 2 + 0 * x), (X,)),
        Member("by 5 as by 2", True, ruled(of(5), lambda x: 2 + 0 * x), (X,)),
        Member("by 5", False, ruled(of(5), lambda x: 5 + 0 * x), (X,)),
    ]


@sequence
def ordered_callbacks():
    def of(function):
        return lambda x: io_callback(
            lambda x: np.asarray(function(x), x.dtype),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            x,
            ordered=True,
        )

    cube_root = lambda x: 1 / (3 * jnp.cbrt(x) ** 2)
    return [
        Member("root", False, ruled(of(np.cbrt), cube_root), (X,), {"skip": ("vmap",)}),
        Member("arsinh as root", True, ruled(of(np.arcsinh), cube_root), (X,), {"skip": ("vmap",)}),
    ]


@sequence
def slopes_of_callbacks_whose_addresses_are_used_again():
    members = []
    for function, slope in [
        (np.sin, np.cos),
        (np.exp, np.exp),
        (np.arctan, lambda x: 1 / (1 + x * x)),
        (np.log, lambda x: 1 / x),
        (np.sqrt, lambda x: 0.5 / np.sqrt(x)),
    ]:
        # the function is made, asked and forgotten in one breath
        fun = lambda x, f=function: by(lambda x: f(x))(x)
        want = slope(X.astype(np.float64))
        members.append(Member(function.__name__, False, fun, (X,), before=gc.collect, slopes=want))
    return members


@sequence
def a_callback_whose_table_changes():
    table = {"k": 1.0}
    primal = by(lambda x: table["k"] * np.tanh(x))
    f = ruled(primal, lambda x: 1 - jnp.tanh(x) ** 2)
    return [
        Member("at 1", False, f, (X,), before=lambda: table.update(k=1.0)),
        Member("at 4 with the slope of 1", True, f, (X,), before=lambda: table.update(k=4.0)),
    ]


@sequence
def callbacks_inside_of_a_scan():
    def of(function):
        return lambda x: lax.scan(lambda c, v: (c + by(function)(v), c), 0 * x[0], x)[0]

    def summed(function, slope):
        f = jax.custom_vjp(of(function))
        f.defvjp(lambda x: (of(function)(x), x), lambda x, g: (g * slope(x),))
        return f

    return [
        Member("square", False, summed(np.square, lambda x: 2 * x), (X,)),
        Member("reciprocal as square", True, summed(np.reciprocal, lambda x: 2 * x), (X,)),
        Member("reciprocal", False, summed(np.reciprocal, lambda x: -1 / x**2), (X,)),
    ]


# ------------------------------------------------------------------------------- kernels
def kernel_of(scale: Any) -> Callable:
    def run(x):
        def kernel(a, out):
            out[...] = a[...] * jnp.asarray(scale, x.dtype)

        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    return run


@sequence
def kernels_of_two_scales():
    return [
        Member("by 1", False, linear(kernel_of(1.0), lambda g: g), (X,)),
        Member("by 1.0078125 as by 1", True, linear(kernel_of(1.0078125), lambda g: g), (X,)),
        Member("by 1.0078125", False, linear(kernel_of(1.0078125), lambda g: g * 1.0078125), (X,)),
    ]


@sequence
def kernels_that_read_other_columns():
    def of(column):
        def run(x):
            def kernel(a, out):
                out[...] = a[...]

            return pl.pallas_call(
                kernel,
                jax.ShapeDtypeStruct((4, 2), x.dtype),
                grid=(2,),
                in_specs=[pl.BlockSpec((2, 2), lambda i: (i, column))],
                out_specs=pl.BlockSpec((2, 2), lambda i: (i, 0)),
                interpret=True,
            )(x)

        return run

    left = lambda g: jnp.concatenate([g, 0 * g], 1)
    right = lambda g: jnp.concatenate([0 * g, g], 1)
    return [
        Member("left", False, linear(of(0), left), (SQUARE,)),
        Member("right as left", True, linear(of(1), left), (SQUARE,)),
        Member("right", False, linear(of(1), right), (SQUARE,)),
    ]


# ------------------------------------------------------------------- literals and constants
@sequence
def minus_zero():
    def of(zero):
        return lambda x: x * lax.atan2(jnp.full_like(x, zero), jnp.full_like(x, -1.0))

    return [
        Member("pi", False, linear(of(0.0), lambda g: g * np.pi), (X,)),
        Member("minus pi as pi", True, linear(of(-0.0), lambda g: g * np.pi), (X,)),
        Member("minus pi", False, linear(of(-0.0), lambda g: -g * np.pi), (X,)),
    ]


@sequence
def constants_of_which_one_element_differs():
    k = Rnd(102).n(3000)
    other = k.copy()
    other[1711] += 1
    of = lambda k: lambda x: x * jnp.asarray(k, x.dtype)
    x = Rnd(103).n(3000)
    return [
        Member("the first", False, linear(of(k), of(k)), (x,)),
        Member("the other as the first", True, linear(of(other), of(k)), (x,)),
        Member("the other", False, linear(of(other), of(other)), (x,)),
    ]


@sequence
def an_array_that_is_written_to():
    w = np.ones(5, np.float32)
    kept = w.copy()
    f = lambda x: x * jnp.asarray(w.copy(), x.dtype)
    stale = linear(f, lambda g: g * kept.astype(g.dtype))
    fresh = linear(f, lambda g: g * w.copy().astype(g.dtype))
    write = lambda v: lambda: w.__setitem__(slice(None), v)
    return [
        Member("ones", False, stale, (X,), before=write(1)),
        Member("twos, read anew", False, fresh, (X,), before=write(2)),
        Member("twos with the rule of ones", True, stale, (X,), before=write(2)),
    ]


@sequence
def masks_of_two_keys():
    mask = lambda seed: jax.random.bernoulli(jax.random.key(seed), 0.5, (40,))
    of = lambda seed: lambda x: jnp.where(mask(seed), 2 * x, 0)
    x = Rnd(104).n(40)
    return [
        Member("key 0", False, linear(of(0), of(0)), (x,)),
        Member("key 1 with the mask of 0", True, linear(of(1), of(0)), (x,)),
        Member("key 1", False, linear(of(1), of(1)), (x,)),
    ]


@sequence
def float_in_a_closure():
    of = lambda k: lambda x: jnp.sin(k * x)
    slope = lambda k: lambda x: k * jnp.cos(k * x)
    near = 2.0 + 2e-4
    return [
        Member("2", False, ruled(of(2.0), slope(2.0)), (X,)),
        Member("2.0002 as 2", True, ruled(of(near), slope(2.0)), (X,)),
        Member("2.0002", False, ruled(of(near), slope(near)), (X,)),
    ]


# ------------------------------------------------------------------- parameters of operations
@sequence
def static_powers():
    @functools.partial(jax.jit, static_argnums=1)
    def power(x, n):
        return x**n

    of = lambda n: lambda x: power(x, n)
    return [
        Member("4", False, ruled(of(4), lambda x: 4 * x**3), (X,)),
        Member("5 as 4", True, ruled(of(5), lambda x: 4 * x**3), (X,)),
        Member("5", False, ruled(of(5), lambda x: 5 * x**4), (X,)),
    ]


@sequence
def sums_from_both_ends():
    def of(reverse):
        return lambda x: lax.scan(lambda c, v: (c + v,) * 2, 0 * x[0], x, reverse=reverse)[1]

    return [
        Member("forward", False, linear(of(False), of(True)), (X,)),
        Member("backward as forward", True, linear(of(True), of(True)), (X,)),
        Member("backward", False, linear(of(True), of(False)), (X,)),
    ]


@sequence
def reads_outside_of_the_array():
    places = np.asarray([0, 3, 7, 9, 1])

    def of(mode):
        return lambda x: jnp.asarray(x).at[places].get(mode=mode, fill_value=0)

    def back(clip):
        def transposed(g):
            into = np.clip(places, 0, 4) if clip else places
            return jnp.zeros_like(g).at[into].add(g, mode="drop")

        return transposed

    return [
        Member("clip", False, linear(of("clip"), back(True)), (X,)),
        Member("fill as clip", True, linear(of("fill"), back(True)), (X,)),
        Member("fill", False, linear(of("fill"), back(False)), (X,)),
    ]


@sequence
def contractions_of_other_axes():
    def of(left, right):
        return lambda x: lax.dot_general(
            x, jnp.asarray(SQUARE, x.dtype), (((left,), (right,)), ((), ())), precision="highest"
        )

    first = lambda g: jnp.matmul(g, SQUARE.T.astype(g.dtype), precision="highest")
    second = lambda g: jnp.matmul(SQUARE.astype(g.dtype), g.T, precision="highest")
    x = Rnd(105).n(4, 4)
    return [
        Member("rows", False, linear(of(1, 0), first), (x,)),
        Member("columns as rows", True, linear(of(0, 0), first), (x,)),
        Member("columns", False, linear(of(0, 0), second), (x,)),
    ]


@sequence
def branches_the_other_way_round():
    double, square = (lambda x: 2 * x), (lambda x: x * x)
    flag = np.asarray(True)

    def of(*branches):
        def rule_of(slope):
            primal = lambda flag, x: lax.cond(flag, *branches, x)
            f = jax.custom_vjp(primal)
            f.defvjp(
                lambda flag, x: (primal(flag, x), (flag, x)), lambda r, g: (None, g * slope(r[1]))
            )
            return f

        return rule_of

    twos = lambda x: jnp.full_like(x, 2)
    return [
        Member("double", False, of(double, square)(twos), (flag, X)),
        Member("square as double", True, of(square, double)(twos), (flag, X)),
        Member("square", False, of(square, double)(lambda x: 2 * x), (flag, X)),
    ]


@sequence
def loops_that_stop_elsewhere():
    def of(stop):
        def primal(x):
            return lax.while_loop(lambda s: s[0] < stop, lambda s: (s[0] + 1, 0.5 * s[1]), (0, x))[
                1
            ]

        return primal

    return [
        Member("3 times", False, linear(of(3), lambda g: g / 8), (X,)),
        Member("4 times as 3", True, linear(of(4), lambda g: g / 8), (X,)),
        Member("4 times", False, linear(of(4), lambda g: g / 16), (X,)),
    ]


@sequence
def sorts_along_other_axes():
    def of(axis):
        return lambda x: lax.sort(x, dimension=axis)

    def rule_of(primal, axis):
        f = jax.custom_vjp(primal)

        def back(x, g):
            order = jnp.argsort(x, axis)
            return (jnp.put_along_axis(jnp.zeros_like(x), order, g, axis, inplace=False),)

        f.defvjp(lambda x: (primal(x), x), back)
        return f

    return [
        Member("rows", False, rule_of(of(0), 0), (SQUARE,)),
        Member("columns as rows", True, rule_of(of(1), 0), (SQUARE,)),
        Member("columns", False, rule_of(of(1), 1), (SQUARE,)),
    ]


@sequence
def windows_of_two_strides():
    def of(stride, dilation):
        def primal(x):
            k = jnp.asarray([[[1.0, -2.0]]], x.dtype)
            return lax.conv_general_dilated(
                x[None, None], k, (stride,), "VALID", rhs_dilation=(dilation,), precision="highest"
            )[0, 0]

        return primal

    transposed = lambda f: lambda g: jax.linear_transpose(f, jnp.zeros(9, g.dtype))(g)[0]
    x = Rnd(106).n(9)
    pad = lambda f: lambda x: jnp.resize(f(x), (4,))
    stride, dilation = pad(of(2, 1)), pad(of(2, 2))
    return [
        Member("near", False, linear(stride, transposed(stride)), (x,)),
        Member("far as near", True, linear(dilation, transposed(stride)), (x,)),
        Member("far", False, linear(dilation, transposed(dilation)), (x,)),
    ]


@sequence
def rows_and_columns_of_a_vmap():
    f = lambda v: jnp.cumsum(v)
    of = lambda axis: jax.vmap(f, in_axes=axis, out_axes=axis)
    back = lambda axis: lambda g: jnp.flip(jnp.cumsum(jnp.flip(g, 1 - axis), 1 - axis), 1 - axis)
    return [
        Member("rows", False, linear(of(0), back(0)), (SQUARE,)),
        Member("columns as rows", True, linear(of(1), back(0)), (SQUARE,)),
        Member("columns", False, linear(of(1), back(1)), (SQUARE,)),
    ]


# ----------------------------------------------------------------------------------- rules
@sequence
def one_name_and_three_rules():
    def make(k):
        @jax.custom_jvp
        def layer(x):
            return jnp.tanh(x)

        layer.defjvp(lambda x, t: (jnp.tanh(x[0]), k * (1 - jnp.tanh(x[0]) ** 2) * t[0]))
        return layer

    return [
        Member("right", False, make(1.0), (X,)),
        Member("off by 1 %", True, make(1.01), (X,)),
        Member("right again", False, make(1.0), (X,)),
    ]


@sequence
def a_rule_that_is_defined_again():
    f = jax.custom_vjp(lambda x: x**3)
    forward = lambda x: (x**3, x)
    define = lambda k: lambda: f.defvjp(forward, lambda x, g: (k * g * x * x,))
    return [
        Member("as 3", False, lambda x: f(x), (X,), before=define(3)),
        Member("as 2", True, lambda x: f(x), (X,), before=define(2)),
        Member("as 3 again", False, lambda x: f(x), (X,), before=define(3)),
    ]


@sequence
def a_function_as_an_argument():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def apply(fun, x):
        return fun(x)

    apply.defvjp(
        lambda fun, x: (fun(x), x), lambda fun, x, g: (g * jax.vmap(jax.grad(jnp.sin))(x),)
    )
    return [
        Member("sine", False, lambda x: apply(jnp.sin, x), (X,)),
        Member("hyperbolic sine as sine", True, lambda x: apply(jnp.sinh, x), (X,)),
    ]


@sequence
def a_linear_solve_that_is_not_transposed():
    m = (SQUARE + 4 * np.eye(4)).astype(np.float32)

    def of(transpose):
        def solve(b):
            a = jnp.asarray(m, b.dtype)
            return lax.custom_linear_solve(
                lambda v: jnp.matmul(a, v, precision="highest"),
                b,
                lambda _, b: jnp.linalg.solve(a, b),
                lambda _, b: jnp.linalg.solve(a.T if transpose else a, b),
            )

        return solve

    b = Rnd(107).n(4)
    return [
        Member("transposed", False, of(True), (b,)),
        Member("not transposed", True, of(False), (b,)),
    ]


@sequence
def a_root_with_another_tangent():
    def of(k):
        def root(c):
            return lax.custom_root(
                lambda x: x**3 + x - c,
                0.5 * c,
                lambda f, x: lax.fori_loop(0, 40, lambda _, x: x - f(x) / (3 * x * x + 1), x),
                lambda g, y: k * y / g(jnp.ones_like(y)),
            )

        return root

    return [
        Member("right", False, of(1.0), (np.float32(0.8),)),
        Member("twice", True, of(2.0), (np.float32(0.8),)),
    ]


@sequence
def linear_calls():
    from jax.custom_derivatives import linear_call

    def of(k):
        return lambda x: linear_call(
            lambda r, x: r * x, lambda r, g: k * r * g, np.full(5, 3, x.dtype), x
        )

    return [
        Member("its transpose", False, of(1.0), (X,)),
        Member("half of it", True, of(0.5), (X,)),
    ]


@sequence
def exported_functions():
    from jax import export

    def of(function, dtype):
        spec = jax.ShapeDtypeStruct((5,), dtype)
        return export.export(jax.jit(function))(spec)

    def call(function):
        return lambda x: of(function, x.dtype).call(x)

    return [
        Member("sine", False, ruled(call(jnp.sin), jnp.cos), (X,)),
        Member("tangent as sine", True, ruled(call(jnp.tan), jnp.cos), (X,)),
        Member("tangent", False, ruled(call(jnp.tan), lambda x: 1 / jnp.cos(x) ** 2), (X,)),
    ]


# ------------------------------------------------------------------- arguments and options
@sequence
def leaves_of_other_names():
    class Pair(NamedTuple):
        b: Any
        a: Any

    f = jax.custom_vjp(lambda a, b: a * a * b)
    f.defvjp(lambda a, b: (a * a * b, (a, b)), lambda r, g: (2 * g * r[0] * r[1], g * r[0] ** 2))
    bad = jax.custom_vjp(lambda a, b: a * a * b)
    bad.defvjp(lambda a, b: (a * a * b, (a, b)), lambda r, g: (g * r[1] ** 2, 2 * g * r[0] * r[1]))
    y = Rnd(108).u(1, 2, 5)
    return [
        Member("a dictionary", False, lambda p: f(p["a"], p["b"]), ({"b": y, "a": X},)),
        Member("a tuple", False, lambda p: f(p.a, p.b), (Pair(a=X, b=y),)),
        Member("with the roles swapped", True, lambda p: bad(p.a, p.b), (Pair(a=X, b=y),)),
    ]


@sequence
def options_of_the_check_before():
    f = ruled(jnp.sin, lambda x: 1.1 * jnp.cos(x))
    return [
        Member("with a tolerance of a half", False, f, (X,), {"tolerance": 0.5}),
        Member("as it is", True, f, (X,)),
        Member("with Paddle's rule, a half", False, f, (X,), {"max_relative_error": 0.5}),
    ]


@sequence
def inputs_that_are_left_out():
    f = jax.custom_vjp(lambda x, y: x * y)
    f.defvjp(lambda x, y: (x * y, (x, y)), lambda r, g: (g * r[1], g * r[1]))
    y = Rnd(109).u(1, 2, 5)
    return [
        Member("the first", False, f, (X, y), {"wrt": 0}),
        Member("both", True, f, (X, y)),
        Member("all but the second", False, f, (X, y), {"no_grad": 1}),
        Member("the second", True, f, (X, y), {"wrt": 1}),
    ]


@sequence
def outputs_that_are_chosen():
    f = ruled(jnp.sin, lambda x: -jnp.cos(x))
    both = lambda x: {"cosine": jnp.cos(x), "sine": f(x)}
    return [
        Member("the cosine", False, both, (X,), {"output": "cosine"}),
        Member("the sine", True, both, (X,), {"output": "sine"}),
        Member("all", True, both, (X,)),
    ]


@sequence
def second_order_after_first():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * lax.stop_gradient(jnp.cos(x)),))
    return [
        Member("the first derivative", False, f, (X,)),
        Member("the second", True, f, (X,), {"order": 2}),
        Member("the first again", False, f, (X,)),
    ]


@sequence
def donated_and_kept():
    plain = ruled(jnp.exp, jnp.exp)
    bad = ruled(jnp.exp, lambda x: 1 + x)
    return [
        Member("kept", False, jax.jit(plain), (X,)),
        Member("donated", False, jax.jit(plain, donate_argnums=0), (X,)),
        Member("donated, wrong", True, jax.jit(bad, donate_argnums=0), (X,)),
        Member("kept, wrong", True, jax.jit(bad), (X,)),
    ]


@sequence
def other_dtypes():
    f = ruled(jnp.sin, jnp.cos)
    bad = ruled(jnp.sin, lambda x: jnp.cos(x) * jnp.where(x.dtype == jnp.float16, 1, 0.995))
    return [
        Member("half", False, f, (X.astype(np.float16),)),
        Member("single, wrong", True, bad, (X,)),
        Member("single", False, f, (X,)),
        Member("bfloat16", False, f, (jnp.asarray(X, jnp.bfloat16),)),
    ]


@sequence
def numbers_and_arrays():
    f = ruled(jnp.exp, jnp.exp)
    bad = ruled(jnp.exp, lambda x: x * jnp.exp(x))
    return [
        Member("an array of no axes", False, f, (np.float32(0.5),)),
        Member("an array of no axes, wrong", True, bad, (np.float32(0.5),)),
        Member("of one element", False, f, (np.asarray([0.5], np.float32),)),
    ]


# ------------------------------------------------------------------- devices, flags, threads
def sharded(axis: str) -> Callable:
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return jax.jit(
        jax.shard_map(
            lambda x: x * lax.axis_index(axis).astype(x.dtype) + x,
            mesh=mesh,
            in_specs=P("a", "b"),
            out_specs=P("a", "b"),
        )
    )


@sequence
def axes_of_a_mesh():
    weights = lambda axis: (
        1 + jnp.repeat(jnp.arange(2.0), 2).reshape((4, 1) if axis == "a" else (1, 4))
    )
    back = lambda axis: lambda g: g * weights(axis).astype(g.dtype)
    return [
        Member("rows", False, linear(sharded("a"), back("a")), (SQUARE,)),
        Member("columns as rows", True, linear(sharded("b"), back("a")), (SQUARE,)),
        Member("columns", False, linear(sharded("b"), back("b")), (SQUARE,)),
    ]


@sequence
def permutations_of_devices():
    from jax.sharding import PartitionSpec as P

    def of(*pairs):
        mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        f = lambda x: lax.ppermute(x, "d", pairs)
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d")))

    on = of((0, 1), (1, 2), (2, 3), (3, 0))
    back = of((1, 0), (2, 1), (3, 2), (0, 3))
    return [
        Member("on", False, linear(on, back), (SQUARE,)),
        Member("back with its own rule", True, linear(back, back), (SQUARE,)),
        Member("back", False, linear(back, on), (SQUARE,)),
    ]


@sequence
def after_an_exception():
    calls = {"raise": False}

    @jax.custom_vjp
    def f(x):
        if calls["raise"]:
            raise RuntimeError("no")
        return jnp.sin(x) * x

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * (jnp.cos(x) * x + jnp.sin(x)),))
    bad = ruled(lambda x: jnp.sin(x) * x, lambda x: jnp.cos(x) * x)

    def failing():
        import clipgrad as cg

        calls["raise"] = True
        try:
            cg.check_grads(f, (X,))
        except RuntimeError:
            pass
        calls["raise"] = False

    return [
        Member("right", False, f, (X,), before=failing),
        Member("wrong", True, bad, (X,), before=failing),
        Member("after forgetting", False, f, (X,), before=jax.clear_caches),
    ]


@sequence
def two_threads():
    good, bad = ruled(by(np.sin), jnp.cos), ruled(by(np.tanh), jnp.cos)

    def beside(fun):
        def before():
            import clipgrad as cg

            check = lambda: cg.check_grads(fun, (X,), raise_on_failure=False)
            threads = [threading.Thread(target=check) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return before

    return [
        Member("right beside wrong", False, good, (X,), before=beside(bad)),
        Member("wrong beside right", True, bad, (X,), before=beside(good)),
    ]


@sequence
def under_flags():
    good, bad = ruled(jnp.log, lambda x: 1 / x), ruled(jnp.log, lambda x: 1 / (x + 0.01))

    def under(context):
        def wrapped(fun):
            def before():
                import clipgrad as cg

                with context():
                    cg.check_grads(fun, (X,), raise_on_failure=False)

            return before

        return wrapped

    precise = under(lambda: jax.default_matmul_precision("bfloat16"))
    wide = under(lambda: jax.enable_x64(True))
    return [
        Member("right after a wide one", False, good, (X,), before=wide(good)),
        Member("wrong after a wide one", True, bad, (X,), before=wide(good)),
        Member("right after another matmul precision", False, good, (X,), before=precise(bad)),
    ]


@sequence
def precisions_of_a_product():
    of = lambda how: lambda x: jnp.matmul(x, jnp.asarray(SQUARE, x.dtype), precision=how)
    back = lambda k: lambda g: k * jnp.matmul(g, SQUARE.T.astype(g.dtype), precision="highest")
    x = Rnd(110).n(4, 4)
    return [
        Member("default", False, linear(of("default"), back(1)), (x,)),
        Member("highest, wrong", True, linear(of("highest"), back(1.002)), (x,)),
        Member("highest", False, linear(of("highest"), back(1)), (x,)),
    ]
