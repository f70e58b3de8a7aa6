"""Functions with derivative rules of their own that close over values of the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
import clipgrad._programs as _programs
from tests.helpers import array
from tests.rows import first_row

W, DATA = array([0.3, 0.7]), array([2.0, 3.0])
WIDE = cg.ErrorClipByValue(1e9)


def solve(z, c, forward=True, backward=True, argument=False):
    """sin(z) * c, an implicit layer in small: its rules close over c, or get it as an argument."""

    @jax.custom_vjp
    def layer(z, c):
        return jnp.sin(z) * (c.astype(z.dtype) if forward else 2)

    def fwd(z, c):
        return layer(z, c), (z, c)

    def bwd(residuals, g):
        z, c = residuals
        return g * jnp.cos(z) * (c.astype(z.dtype) if backward else 2), None

    layer.defvjp(fwd, bwd)
    if argument:
        return layer(z, c)
    closed = jax.custom_vjp(lambda z: layer(z, c))
    closed.defvjp(lambda z: (layer(z, c), z), lambda z, g: (bwd((z, c), g)[0],))
    return closed(z)


def closures(z, c, argument=False):
    """Closures in fwd and bwd, and in one of them; over floats, integers, a stopped gradient."""
    mask, held = (z > 0).astype(jnp.int32), jax.lax.stop_gradient(3 * z)
    h = solve(z, c, argument=argument) + solve(z, mask, forward=False, argument=argument)
    return h * solve(z, held, backward=False, argument=argument)


def in_remat(z, c, **how):
    return jax.jit(jax.checkpoint(lambda z: closures(z, c, **how)))(z)


def in_cond(z, c, **how):
    return jax.lax.cond(c[0] > 0, lambda z: closures(z, c, **how), lambda z: z, z)


def in_vmap(z, c, **how):
    c = c[0]
    return jax.vmap(lambda z: solve(z, c, **how) * solve(z, 2 * c, forward=False, **how))(z)


def in_loop(z, c, **how):
    """The closures are over the carry, the input and the index of a step."""

    def step(h, x):
        return jnp.tanh(closures(h, x * c + jax.lax.stop_gradient(h), **how)), None

    return jax.lax.scan(jax.checkpoint(step), z, 1 / (2 + jnp.arange(3.0)))[0]


NESTS = [closures, in_remat, in_cond, in_vmap, in_loop]
ALLOWED_BY_JAX = [closures, in_vmap]


def loss_of(nest, **how):
    def loss(w, data):
        z = checkpoint_name(2 * w, "z")
        with jax.named_scope("layer"):
            y = nest(z, 3 * data, **how)
        return jnp.sum(y * y)

    return loss


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("nest", NESTS, ids=lambda nest: nest.__name__)
def test_values_and_gradients_have_the_bits_of_jax(nest):
    """Where JAX refuses the closure, they are those with the value as an argument."""
    loss = loss_of(nest)
    expected = loss_of(nest, argument=nest not in ALLOWED_BY_JAX)
    value, grad = jax.value_and_grad(expected)(W, DATA)
    watched = cg.value_and_grad_with_stats(loss, error_clip={"z": WIDE}, watch=["layer"])(W, DATA)
    assert watched[0] == value
    np.testing.assert_array_equal(watched[1], grad)
    np.testing.assert_allclose(2 * watched[2]["z"].norm, jnp.linalg.norm(grad), rtol=1e-6)
    again = cg.error_clip_everywhere(cg.error_clip_by_name(loss, {"z": WIDE}), WIDE)
    np.testing.assert_array_equal(jax.grad(again)(W, DATA), grad)


def test_every_name_that_is_listed_can_be_clipped():
    def loss(w, data):
        c = checkpoint_name(2 * data, "c")

        @jax.custom_vjp
        def layer(z):
            with jax.named_scope("inside"):
                return checkpoint_name(jnp.sin(z), "tag inside") * c

        layer.defvjp(lambda z: (layer(z), z), lambda z, g: (g * jnp.cos(z) * c,))
        with jax.named_scope("outside"):
            return jnp.sum(layer(w) ** 2)

    names = [name.name for name in cg.list_names(loss, (W, DATA))]
    assert names == ["c", "outside"]
    clipped = cg.error_clip_by_name(loss, dict.fromkeys(names, cg.ErrorClipByValue(0.5)))
    np.testing.assert_array_equal(jax.grad(clipped)(W, DATA), jax.grad(loss)(W, DATA) / 2)


def test_a_differentiated_closure_is_refused_by_name_and_line():
    """JAX refuses it too: its gradient would be zero without a word."""
    for nest in (closures, in_loop):
        clipped = cg.error_clip_by_name(loss_of(nest), {"z": WIDE})
        with pytest.raises(ValueError, match=r"at .*test_closures\.py:\d+, whose rules close over"):
            jax.grad(clipped, argnums=1)(W, DATA)
    with pytest.raises(ValueError, match=r"float32\[2\] that is differentiated.*as an argument"):
        jax.jit(jax.grad(clipped, argnums=(0, 1)))(W, DATA)


def test_a_closure_over_a_mapped_value_is_refused_by_name_and_line():
    """JAX ends the vmap before the rules of a traced program can be read."""

    def loss(w, data):
        return jnp.sum(jax.vmap(solve)(checkpoint_name(2 * w, "z"), data))

    clipped = cg.error_clip_by_name(loss, {"z": WIDE})
    np.testing.assert_array_equal(clipped(W, DATA), loss(W, DATA))
    with pytest.raises(ValueError, match=r"test_closures\.py:\d+, .* transformation.* jax\.vmap"):
        jax.grad(clipped)(W, DATA)


def test_cotangents_that_a_rule_leaves_out_stay_out():
    """A cotangent of None is no array of zeros, which sqrt would make NaN at 0."""

    def loss(w, data):
        @jax.custom_vjp
        def first(x, y):
            return data * x

        first.defvjp(lambda x, y: (data * x, None), lambda _, g: (data * g, None))
        return jnp.sum(first(checkpoint_name(w, "w"), jnp.sqrt(0 * w)))

    clipped = cg.error_clip_by_name(loss, {"w": WIDE})
    np.testing.assert_array_equal(jax.grad(clipped)(W, DATA), DATA)


def test_custom_jvp_rules_close_over_values_too():
    def loss(w, data, scale=1.0):
        h, count = checkpoint_name(2 * w, "h"), jnp.int32(3)
        layer = jax.custom_jvp(lambda x, n: (data * jnp.sin(x), n))

        @layer.defjvp
        def rule(primals, tangents):
            outputs = layer(*primals)
            return outputs, (data * jnp.cos(primals[0]) * tangents[0], tangents[1])

        return jnp.sum(layer(scale * h, count)[0])

    clipped = cg.error_clip_by_name(loss, {"h": WIDE})
    for argnums in (0, 2):
        expected = jax.grad(loss, argnums)(W, DATA, 1.0)
        # Other programs, which XLA may round differently.
        np.testing.assert_allclose(jax.grad(clipped, argnums)(W, DATA, 1.0), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"jax\.custom_jvp function .*test_closures\.py:\d+"):
        jax.grad(clipped, argnums=1)(W, DATA)


def test_diagnose_names_the_function_that_closes_over_a_value():
    def loss(w, data, bad):
        @jax.custom_vjp
        def layer(z):
            return jnp.sin(z) * data

        def bwd(z, g):
            return (g * jnp.log(bad),)

        layer.defvjp(lambda z: (layer(z), z), bwd)
        return jnp.sum(layer(2 * w))

    healthy = cg.diagnose(loss, (W, DATA, jnp.float32(2.0)))
    assert healthy.ok and "layer has a custom VJP" in str(healthy)
    sick = cg.diagnose(loss, (W, DATA, jnp.float32(-1.0)))
    assert not sick.ok and "test_closures.py" in str(sick) and "layer" in str(sick)


@pytest.mark.slow
def test_check_grads_names_what_jax_does_not_differentiate():
    loss = loss_of(solve)
    assert cg.check_grads(loss, (W, DATA), wrt=0, points=1).ok
    report = cg.check_grads(loss, (W, DATA), raise_on_failure=False)
    (failure,) = report.failures
    assert failure.check == "cotangent" and failure.where == "args[1]"
    assert "test_closures.py:" in failure.detail and "as an argument" in failure.detail


def test_a_program_without_closures_stays_the_same():
    program = jax.make_jaxpr(loss_of(closures, argument=True))(W, DATA)
    assert _programs.with_explicit_closures(program, [W, DATA]) is program
    program = jax.make_jaxpr(lambda w: solve(w, DATA))(W)
    assert _programs.with_explicit_closures(program, [W]) is program
