"""Widening a program, probing its cotangents, and following its values that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from clipgrad import _jaxpr, _names
from clipgrad._diagnose import cotangents
from clipgrad._diagnose.origins import operands_of, origins
from clipgrad._diagnose.probe import RESULT, STATE, Probe, Site

KINDS = {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "float64": jnp.float64}


def everything(x):
    """Loops, branches, a product, a rule and constants, in the type of ``x`` throughout."""
    root = jax.custom_vjp(lambda x: jnp.sqrt(x))
    root.defvjp(lambda x: (root(x), x), lambda x, g: (7 * g,))
    table = jnp.asarray([0.5, 0.25, 0.125], x.dtype)
    x = lax.reduce_precision(root(x), 8, 7) * 3 + table
    x = lax.scan(lambda c, t: (c * t, jnp.sin(c)), x[0], x)[1] + jax.jit(jnp.cos)(x)
    x = lax.cond(x[0] > 0, jnp.exp, jnp.sin, x)
    x = jax.vmap(lambda t: lax.while_loop(lambda c: c < 9, lambda c: c * 2 + t, t))(x)
    return jnp.dot(x, x, precision="default", preferred_element_type=x.dtype)


@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_a_widened_program_is_the_program_of_the_wide_type(wide):
    with jax.enable_x64(True):
        x = jnp.asarray([0.25, 0.5, 1.5], jnp.bfloat16)
        hook, program = _jaxpr.Widen(KINDS[wide]), jax.make_jaxpr(everything)(x)
        same = jnp.asarray(x, KINDS[wide])
        (found,) = jax.jit(lambda x: _jaxpr.evaluate(program, [hook.constant(x, None)], hook))(x)
        # In float64 nothing of bfloat16 is left; `reduce_precision` rounds in the program itself.
        exact = jax.make_jaxpr(lambda x: everything(x))(same)
        (expected,) = _jaxpr.evaluate(exact, [same], Exact())
    assert found.dtype == KINDS[wide]
    np.testing.assert_allclose(found, expected, rtol={"float32": 1e-5, "float64": 1e-13}[wide])


class Exact(_jaxpr.Hook):
    """Leaves rounding to fewer bits out."""

    def __call__(self, equation, inputs):
        return inputs if equation.primitive.name == "reduce_precision" else None


def test_what_is_wide_enough_stays_as_it_is():
    hook = _jaxpr.Widen(jnp.float32)
    types = {"bfloat16": "float32", "float32": "float32", "int8": "int8", "bool": "bool"}
    types |= {"float64": "float64", "complex64": "complex64"}
    assert {str(hook.wide_dtype(jnp.dtype(name))) for name in types} == set(types.values())
    wider = _jaxpr.Widen(jnp.float64).wide_dtype
    assert str(wider(jnp.dtype("complex64"))) == "complex128"
    assert wider(jnp.dtype("float32")) == np.float64
    # A Python number has more digits than its type: 0.1 in float32 is not the 0.1 that was meant.
    assert _jaxpr.Widen(jnp.float64).constant(0.1, jax.typeof(jnp.float32(0))) == 0.1


def largest(cotangent, probe):
    del probe
    return jnp.max(jnp.abs(cotangent))


def test_probes_measure_the_cotangents_of_all_steps():
    """Of ``h = w * h`` the cotangent at step t is w to the power of the steps behind it."""

    def loss(w):
        @jax.jit
        def run(w):
            return lax.scan(lambda h, t: (w * h, None), jnp.float32(1), jnp.zeros(4))[0]

        return 3 * run(w)

    program = jax.make_jaxpr(loss)(2.0)
    call = program.eqns[-2]
    place = _names.Place(call)
    scan, product = (
        next(e for e in _jaxpr.equations(program) if e.primitive.name == name)
        for name in ("scan", "mul")
    )
    place = _names.Place(scan, place)
    inner = _names.Place(product, place)
    shapes = {
        Site(STATE, place.key, 0): (4,),
        Site(RESULT, inner.key, 0): (4,),
        Site(RESULT, place.key, 0): (),
    }
    probes = {site: np.zeros(shape, np.float32) for site, shape in shapes.items()}

    def probed(w, probes):
        return _jaxpr.evaluate(program, [w], Probe(probes, largest))[0]

    value, (grad, found) = jax.jit(jax.value_and_grad(probed, argnums=(0, 1)))(2.0, probes)
    assert value == 48 and grad == 96
    powers = 3.0 * 2 ** np.arange(4)[::-1]
    expected = [2 * powers, powers, 3.0]
    for site, numbers in zip(shapes, expected, strict=True):
        np.testing.assert_allclose(found[site], numbers)


def test_a_value_is_followed_to_where_it_went_wrong():
    """1, 0.7, 0.4, 0.1, -0.2: in the third iteration, at the first step of its scan."""

    def program(x):
        def body(c):
            i, y = c
            y = lax.cond(i < 5, lambda y: y * 1, lambda y: y, y)
            step = lambda y, t: (y - 0.3 + 0 * jnp.log(y), None)  # noqa: E731
            return i + 1, lax.scan(step, y, None, length=2)[0]

        return lax.while_loop(lambda c: c[0] < 6, body, (0, x))[1]

    traced = jax.make_jaxpr(program)(1.0)
    (taint,) = origins(traced, [np.float32(1)]).results
    source = taint.source
    assert (taint.badness, source.place.operation, source.steps) == (2, "log", (2, 0))
    (read,) = operands_of(traced, [np.float32(1)], source)
    np.testing.assert_allclose(read, -0.2, atol=1e-6)


NUMBERS = {
    "finite": lambda x: x,
    "zeros": lambda x: 0 * x,
    "large": lambda x: x * np.float32(1e30),
    "NaN": lambda x: np.where(x > 2, np.float32(np.nan), x),
    "inf": lambda x: np.where(x > 2, -np.float32(np.inf), x),
    "nothing finite": lambda x: np.full_like(x, np.inf),
}


@pytest.mark.parametrize("shape", [(200,), (3, 70), (40, 2, 3)])
@pytest.mark.parametrize("kind", NUMBERS)
def test_a_large_cotangent_is_summed_up_as_a_small_one_on_the_host(kind, shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x = NUMBERS[kind](x * (np.abs(x) > 0.1))
    sent = jax.jit(cotangents._sent, static_argnums=(1, 2))
    own, counted, whole = (
        cotangents._received(sent(x, *flags))
        for flags in ((False, False), (False, True), (True, False))
    )
    is_finite = np.isfinite(x).all()
    np.testing.assert_array_equal(own.nonfinite, 0 if is_finite else np.nan)
    for received in [own, counted] if is_finite else [counted]:
        for found, expected in zip(received, whole, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 256, 256), (2**22,)])
def test_to_sum_up_a_large_cotangent_takes_no_copy_of_it(shape):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    memory = cotangents._cotangent_sums.lower(x, False).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * x.size / 8
