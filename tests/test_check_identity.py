"""What a program is: two programs are kept as one only if they compute the same."""

import contextlib
import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipgrad._check.subject import make_subject
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.extend.core import Literal

import clipgrad as cg
from clipgrad._jaxpr import quick_jit
from clipgrad._jaxpr.identity import Itself, program_key
from clipgrad._jaxpr.programs import CUSTOM_RULES, called_program, opened
from tests import check_cases, check_functions, check_history, check_zoo
from tests.check_lazy import LAZY
from tests.check_zoo import custom

pytestmark = pytest.mark.usefixtures("users_promotion")

X = jnp.asarray([0.3, -0.7, 1.1])
WIDE = jnp.asarray(np.random.default_rng(0).normal(size=(16, 128)), jnp.float32)


def key(function, *args):
    return program_key(jax.make_jaxpr(lambda *a: function(*a))(*(args or (X,))))


def callback(function, call=jax.pure_callback):
    """A function of NumPy in a program; `call` gives it no derivative."""
    own = lambda v: np.asarray(function(v), np.asarray(v).dtype)  # noqa: E731
    return lambda x: call(own, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def blocks(index_map):
    """A Pallas kernel that copies blocks to where the index map says."""

    def copy(source, target):
        target[...] = source[...]

    read, written = pl.BlockSpec((8, 128), lambda i: (i, 0)), pl.BlockSpec((8, 128), index_map)
    shape = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    grid = {"grid": (2,), "in_specs": [read], "out_specs": written}
    return pl.pallas_call(copy, out_shape=shape, interpret=True, **grid)


IN_ORDER, REVERSED = blocks(lambda i: (i, 0)), blocks(lambda i: (1 - i, 0))
NEGATIVE_NAN = np.float32(np.nan).view(np.uint32) | np.uint32(1 << 31)
PRINTED_ALIKE = {
    "callbacks": (callback(np.sin), callback(np.tanh)),
    "callbacks with effects": (callback(np.sin, io_callback), callback(np.tanh, io_callback)),
    "callbacks in a loop": tuple(
        functools.partial(lax.fori_loop, 0, 2, lambda i, c, f=f: f(c))
        for f in map(callback, (np.sin, np.tanh))
    ),
    "constants of jitted functions": tuple(
        jax.jit(lambda x, w=w: x * w) for w in (np.arange(3.0), np.arange(3.0) + 1e-14)
    ),
    "neighbours": tuple(
        lambda x, k=k: x * k for k in (np.float32(1), np.nextafter(np.float32(1), np.float32(2)))
    ),
    "not a number, of both signs": tuple(
        lambda x, k=k: jnp.copysign(x, k)
        for k in (np.float32(np.nan), NEGATIVE_NAN.view(np.float32))
    ),
    "jitted functions of one name": tuple(
        jax.jit(functools.partial(lambda x, k: x * k, k=k)) for k in (2.0, 3.0)
    ),
}


@pytest.mark.parametrize("name", PRINTED_ALIKE)
def test_programs_that_print_alike_have_keys_of_their_own(name):
    one, other = PRINTED_ALIKE[name]
    assert key(one) == key(one) and key(other) == key(other)
    assert key(one) != key(other)


def test_kernels_that_write_other_blocks_have_keys_of_their_own():
    assert key(IN_ORDER, WIDE) == key(IN_ORDER, WIDE) != key(REVERSED, WIDE)


def test_the_text_of_a_large_constant_is_not_shortened():
    indices = np.arange(2000)
    other = indices.copy()
    other[1000] = 0
    takes = [jax.jit(lambda x, i=i: x[jnp.asarray(i)]) for i in (indices, other)]
    assert key(takes[0], jnp.ones(2000)) != key(takes[1], jnp.ones(2000))


@pytest.mark.parametrize("rule", [jax.custom_vjp, jax.custom_jvp])
def test_derivative_rules_do_not_count_and_nothing_that_is_kept_has_them(rule):
    def ruled(factor):
        function = rule(lambda x: jnp.sin(x))
        if rule is jax.custom_vjp:
            function.defvjp(lambda x: (jnp.sin(x), x), lambda r, g: (factor * g,))
        else:
            function.defjvp(lambda x, t: (jnp.sin(x[0]), factor * t[0]))
        return function

    assert key(ruled(1.0)) == key(ruled(2.0))
    assert key(jax.grad(lambda x: ruled(1.0)(x).sum())) != key(
        jax.grad(lambda x: ruled(2.0)(x).sum())
    )
    run = quick_jit(ruled(3.0))
    try:  # before JAX 0.12 what is compiled with options cannot be differentiated
        np.testing.assert_allclose(jax.grad(lambda x: run(x).sum())(X), jnp.cos(X), rtol=1e-5)
    except ValueError as error:
        assert "top-level" in str(error)


def test_what_a_key_compares_by_identity_it_keeps_alive():
    own = lambda v: np.sin(v)  # noqa: E731
    alive = weakref.ref(own)
    held = key(lambda x, own=own: jax.pure_callback(own, x, x))
    del own
    jax.clear_caches()
    gc.collect()
    assert alive() is not None
    del held
    gc.collect()
    assert alive() is None
    assert Itself(X) == Itself(X) != Itself(X.copy())


def test_what_cannot_be_compared_equals_itself_alone():
    def traced_constant(x):
        found.append(program_key(jax.make_jaxpr(jax.jit(lambda y: y * x))(x)))
        closed = jax.make_jaxpr(lambda y: y * x)(1.0)
        inner = opened(closed)[0].eqns[0]
        wrapped = inner.replace(params={"program": closed})
        found.append(program_key(opened(closed)[0].replace(eqns=[wrapped])))
        found.append(program_key(opened(closed)[0].replace(eqns=[wrapped])))
        return x

    found = []
    jax.jit(traced_constant)(2.0)
    assert found[1] != found[2] and found[1] == found[1]


def ruled(forward, backward):
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (forward(x), x), lambda x, g: (backward(x, g),))
    return function


def with_tangent(part):
    function = jax.custom_jvp(lambda x: jnp.sin(x))
    function.defjvp(lambda x, t: (jnp.sin(x[0]), part() * jnp.cos(x[0]) * t[0]))
    return function


# Functions that hold a large array, of which they use the ones that it begins with.
HOLDING = {
    "a callback": lambda held: ruled(
        lambda x: jax.pure_callback(
            lambda v: (np.sin(v) * held[0]).astype(v.dtype), x, x, vmap_method="sequential"
        ),
        lambda x, g: g * jnp.cos(x),
    ),
    "a callback that prints": lambda held: (
        lambda x: (
            jax.debug.callback(lambda v: held[:0], x),
            jnp.sin(x),
        )[1]
    ),
    "a jitted function": lambda held: jax.jit(lambda x: jnp.sin(x) * jnp.asarray(held)[:3]),
    "a backward rule": lambda held: ruled(
        lambda x: jnp.sin(x), lambda x, g: g * jnp.cos(x) * jnp.asarray(held)[:3]
    ),
    "a tangent rule": lambda held: with_tangent(lambda: jnp.asarray(held)[:3]),
    "a policy": lambda held: jax.checkpoint(
        lambda x: jnp.sin(jnp.sin(x)), policy=lambda *_, **__: held.size == 0
    ),
}


def test_what_a_function_holds_is_given_back():
    """After `jax.clear_caches()`, since JAX keeps some of it."""
    alive = {}
    for name, make in HOLDING.items():
        held = np.ones(2**16, np.float32)
        alive[name] = weakref.ref(held)
        assert cg.check_grads(make(held), (X,)).ok
        del held
    jax.clear_caches()
    gc.collect()
    assert [name for name, still in alive.items() if still() is not None] == []


# One program for each of these, whose parameters are then changed one by one.
MADE_OF = {
    "sums": lambda x: jnp.sum(jnp.cumsum(x[::-1]), axis=0),
    "products": lambda x: lax.dot_general(
        jnp.outer(x, x), x, (((0,), (0,)), ((), ())), precision="highest"
    ),
    "indices": lambda x: x.at[jnp.asarray([0, 2])].add(x[jnp.asarray([1, 1])]),
    "a convolution": lambda x: lax.conv_general_dilated(
        x.reshape(1, 3, 1),
        x[:2].reshape(2, 1, 1),
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
    ),
    "loops": lambda x: lax.fori_loop(
        0, 3, lambda i, c: lax.while_loop(lambda c: c[0] < 9, lambda c: 2 * c + i, c), x
    ),
    "a scan": lambda x: lax.scan(lambda c, y: (c * y, c + 1), x[0], x, reverse=True)[1],
    "branches": lambda x: lax.cond(x[0] > 0, jnp.sin, lambda x: jnp.cos(x) * 2, x),
    "a custom rule": custom(lambda x: jnp.sin(x) * 2, lambda r, g: (g,)),
    "linear algebra": lambda x: jnp.linalg.solve(
        jnp.diag(x) + 1, jnp.linalg.cholesky(jnp.diag(x * x)) @ x
    ),
    "random numbers": lambda x: x + jax.random.normal(jax.random.key(3), x.shape, x.dtype),
    "callbacks": lambda x: io_callback(np.sin, x, jax.pure_callback(np.cos, x, x)),
    "casts": lambda x: lax.reduce_precision(x.astype(jnp.bfloat16).astype(x.dtype), 5, 10),
}


def changed_values(value):
    """Other values in the place of a parameter."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1]
    if isinstance(value, str):
        return [value + "x"]
    if isinstance(value, np.dtype):
        return [np.dtype("int8")]
    if hasattr(value, "eqns"):
        return list(changed(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [
            value._replace(**{name: new})
            for name in value._fields
            for new in changed_values(getattr(value, name))
        ]
    if isinstance(value, tuple):
        one_by_one = [
            (*value[:k], new, *value[k + 1 :])
            for k, part in enumerate(value)
            for new in changed_values(part)
        ]
        return [*one_by_one, (*value, 7)]
    if dataclasses.is_dataclass(value) and callable(value):
        return [dataclasses.replace(value, callback_func=lambda *a: value.callback_func(*a))]
    return [] if value is None else ["another"]


def changed(program):
    """The program with one thing changed: a parameter, a number, or the equations' operands."""
    jaxpr = opened(program)[0]

    def again(k, **parts):
        eqns = [*jaxpr.eqns[:k], jaxpr.eqns[k].replace(**parts), *jaxpr.eqns[k + 1 :]]
        new = jaxpr.replace(eqns=eqns)
        return (
            program.replace(jaxpr=new)
            if hasattr(program, "jaxpr") and program is not jaxpr
            else new
        )

    for k, equation in enumerate(jaxpr.eqns):
        params = dict(equation.params)
        if equation.primitive.name in CUSTOM_RULES:
            program_of = called_program(equation)
            params = {n: value for n, value in params.items() if value is program_of}
        for name, value in params.items():
            for new in changed_values(value):
                yield again(k, params=equation.params | {name: new})
        for place, atom in enumerate(equation.invars):
            if isinstance(atom, Literal) and np.issubdtype(np.asarray(atom.val).dtype, np.floating):
                near = np.nextafter(np.asarray(atom.val), np.asarray(np.inf, atom.aval.dtype))
                operands = list(equation.invars)
                operands[place] = Literal(near, atom.aval)
                yield again(k, invars=operands)
        if len(set(map(id, equation.invars))) > 1:
            yield again(k, invars=list(equation.invars)[::-1])


@pytest.mark.parametrize("name", MADE_OF)
def test_a_program_that_differs_in_one_parameter_of_one_equation_has_another_key(name):
    function = MADE_OF[name]
    program = jax.make_jaxpr(lambda x: function(x))(X)
    own, count = program_key(program), 0
    assert own.is_light
    assert own == program_key(jax.make_jaxpr(lambda x: function(x))(X))
    for other in changed(program):
        count += 1
        assert program_key(other) != own, other
    assert count > 1


# --- Answers do not depend on what was asked before


def scalar(function, slope):
    """A function by callback with a rule of NumPy's slope."""
    return custom(callback(function), lambda r, g: (g * slope(r[0]),))


ASKED = {
    "sin with its rule": (scalar(np.sin, jnp.cos), X, True),
    "tanh with its rule": (scalar(np.tanh, lambda x: 1 - jnp.tanh(x) ** 2), X, True),
    "sin with the rule of tanh": (scalar(np.sin, lambda x: 1 - jnp.tanh(x) ** 2), X, False),
    "reversed blocks": (custom(REVERSED, lambda r, g: (REVERSED(g),)), WIDE, True),
    "reversed blocks, not so in the rule": (
        custom(REVERSED, lambda r, g: (IN_ORDER(g),)),
        WIDE,
        False,
    ),
    "blocks in order": (custom(IN_ORDER, lambda r, g: (IN_ORDER(g),)), WIDE, True),
}


@pytest.mark.kinds()
@pytest.mark.parametrize("order", [1, -1])
def test_callbacks_and_kernels_are_judged_alike_in_any_order(order):
    for name, (function, x, is_right) in list(ASKED.items())[::order]:
        skip = ("vmap", "determinism", "linearity", "jit")
        report = cg.check_grads(function, (x,), raise_on_failure=False, skip=skip)
        assert report.ok == is_right, f"{name}: {report}"


def table_rows():
    """Each row of the checker's tables: its name, a function and its arguments.

    In float32, but for bugs that half precision alone has.
    """
    dtype = jnp.dtype("float32")
    cases = check_cases.WRONG | check_cases.RIGHT | check_cases.UNKNOWN
    for name, make in cases.items():
        function, args, *options = make(dtype)
        yield name, function, args, (options or [{}])[0]
    for name, (make, check) in (LAZY | check_zoo.PAIRS).items():
        *pair, args = make(dtype)
        options = {"order": 2 if check == "second order" else 1}
        yield from ((f"{name} {k}", function, args, options) for k, function in enumerate(pair))
    for name, (make, check, _, dtype_of) in check_history.HISTORY.items():
        if dtype_of != "float64":
            *pair, args = make(jnp.dtype(dtype_of))
            options = {"order": 2 if check == "second order" else 1}
            yield from ((f"{name} {k}", function, args, options) for k, function in enumerate(pair))
    for name, (function, make) in (check_functions.FUNCTIONS | check_functions.MORE).items():
        yield name, function, make(dtype), {}


def sampled_rows(seed, share):
    rows = list(table_rows())
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(rows))[: int(share * len(rows))]
    return [rows[k] for k in chosen]


# Rules that remember how often they were called: only a new one gives the same report.
REMEMBERING = ("random_gradient 0", "wrong_from_the_fourth_call_on 0")


def report_of(row, promotion):
    """The report on a row, under these settings if its own function runs under them."""
    _, function, args, options = row
    with contextlib.ExitStack() as settings:
        for setting, value in zip(PROMOTIONS, promotion, strict=True):
            settings.enter_context(setting(value))
        if promotion == STRICT and not runs(function, args, options):
            return report_of(row, USERS)
        report = cg.check_grads(function, args, raise_on_failure=False, **options)
    return [*map(str, report.failures), *report.notes, report.verified]


def runs(function, args, options):
    """Whether a function and its rules run under the settings in force."""
    of = {k: options[k] for k in ("wrt", "no_grad", "output") if k in options}
    try:
        subject = make_subject(function, args, options.get("kwargs"), **of)
        jax.vjp(subject.fun, subject.inputs)[1](subject.outputs)
    except (ValueError, TypeError) as error:
        return "promotion" not in str(error)
    return True


PROMOTIONS = jax.numpy_dtype_promotion, jax.numpy_rank_promotion
USERS, STRICT = ("standard", "allow"), ("strict", "raise")


def reports_in_order(rows, order, promotion):
    return {rows[k][0]: report_of(rows[k], promotion) for k in order}


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", [0.03, pytest.param(1.0, marks=pytest.mark.product)])
def test_rows_in_two_orders_and_under_two_promotions_in_one_process_have_equal_reports(share):
    """JAX's settings of promotion are those of a user's function alone."""
    rows = sampled_rows(0, share)
    orders = [np.random.default_rng(seed).permutation(len(rows)) for seed in (1, 2)]
    first = reports_in_order(rows, orders[0], USERS)
    anew = dict(zip((row[0] for row in rows), sampled_rows(0, share), strict=True))
    rows = [anew[row[0]] if row[0] in REMEMBERING else row for row in rows]
    assert first == reports_in_order(rows, orders[1], STRICT)
