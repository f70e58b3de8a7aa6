"""Clips by name among callbacks, inner gradients, loops, roots, references and exports."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import array, assert_close
from tests.rows import first_row

X = array([0.5, 1.0, 2.0])
RULE = cg.ErrorClipByValue(0.1)


def tag(x):
    return checkpoint_name(x, "h")


def clip(x):
    return cg.clip_cotangent(x, RULE)


def clipped(fun):
    return cg.error_clip_by_name(fun, {"h": RULE})


def gradient_penalty(x, tag):
    def inner(x):
        return jnp.sum(jnp.sin(tag(x**2)))

    return jnp.sum(jax.grad(inner)(x) ** 2) + jnp.sum(jax.grad(jax.checkpoint(inner))(x))


def callback(x, tag):
    kind = jax.ShapeDtypeStruct((3,), jnp.float32)
    return jnp.sum(tag(x * 2) * jax.pure_callback(np.sin, kind, X))


def reference(x, tag):
    ref = jax.new_ref(jnp.zeros(3))
    ref[...] = tag(x * 2) ** 2
    return jnp.sum(ref[...])


def complex_numbers(x, tag):
    return 9 * jnp.sum(jnp.abs(tag(jax.lax.complex(x, 2 * x))))


def beside_a_root(a, tag):
    def solve(f, x):
        return lax.fori_loop(0, 20, lambda i, x: x - f(x) / (3 * x**2), x)

    root = lax.custom_root(lambda x: x**3 - a[0], 1.0, solve, lambda g, y: y / g(1.0))
    return jnp.sum(9 * root * tag(a * 2))


PROGRAMS = [callback, reference, complex_numbers, beside_a_root]


@first_row
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_the_gradient_is_that_of_clips_written_by_hand(program):
    gradient = jax.grad(clipped(lambda x: program(x, tag)))(X)
    assert_close(gradient, jax.grad(lambda x: program(x, clip))(X), rtol=1e-5)
    assert not np.allclose(gradient, jax.grad(lambda x: program(x, tag))(X))


@pytest.mark.slow
def test_a_gradient_that_the_function_takes_itself_is_part_of_its_value():
    plain = lambda x: gradient_penalty(x, tag)  # noqa: E731
    np.testing.assert_array_equal(clipped(plain)(X), plain(X))
    assert not np.allclose(jax.grad(clipped(plain))(X), jax.grad(plain)(X))


def test_what_the_inner_gradient_of_a_remat_computes_again_is_kept_apart():
    def plain(x, prevent_cse=True):
        inner = jax.checkpoint(lambda p: jnp.sum(tag(p[0] * p[1]) ** 2), prevent_cse=prevent_cse)
        return jnp.sum(jax.grad(inner)((x, jnp.cos(x)))[0])

    for prevent_cse in (True, ((True, False),), False):
        one, two = (
            jax.jit(f, static_argnums=1).lower(X, prevent_cse).as_text()
            for f in (plain, clipped(plain))
        )
        barriers = [
            [line.rsplit(" : ")[-1] for line in text.splitlines() if "optimization_barrier" in line]
            for text in (one, two)
        ]
        assert barriers[0] == barriers[1] and bool(barriers[0]) == bool(prevent_cse)


def loop(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, tag(c[1] * 2)), (0, x))[1]


def test_a_while_loop_takes_no_step_of_a_scan_from_its_name():
    def loss(x):
        return lax.scan(lambda c, row: (tag(c * row), None), jnp.max(loop(lax.stop_gradient(x))), x)

    stats = cg.value_and_grad_with_stats(lambda x: loss(x)[0])(X)[2]["h"]
    np.testing.assert_array_equal(stats.size, np.ones(3))


def jvp_rule(x):
    rule = jax.custom_jvp(lambda x: tag(jnp.sin(x)))
    rule.defjvp(lambda p, t: (jnp.sin(p[0]), t[0]))
    return rule(x)


def solver(x):
    matrix = jnp.eye(3) * x[:, None]
    return lax.custom_linear_solve(
        lambda v: matrix @ v,
        X,
        lambda _, b: jnp.linalg.solve(tag(matrix), b),
        lambda _, b: jnp.linalg.solve(matrix.T, b),
    )


@pytest.mark.parametrize(
    ("fun", "primitive"),
    [
        (jax.jit(jvp_rule), "custom_jvp_call"),
        (solver, "custom_linear_solve"),
    ],
    ids=["custom_jvp", "the solver of a linear solve"],
)
def test_a_name_that_cannot_be_reached_is_an_error_that_names_the_primitive(fun, primitive):
    for transformed in (clipped(fun), cg.value_and_grad_with_stats(lambda x: jnp.sum(fun(x)))):
        with pytest.raises(ValueError, match=rf"got 'h', which tags .* inside of {primitive}, exp"):
            transformed(X)
