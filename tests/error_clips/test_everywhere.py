"""Clipping every cotangent equals `clip_cotangent` written behind every operation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.error_clips.tagged import MODELS, X
from tests.helpers import assert_same
from tests.rows import first_row

RULE = cg.ErrorClipByValue(0.3)
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def chain(x, clip=lambda x: x, wrap=lambda f: f):
    def inner(x):
        return clip(3 * clip(2 * x))

    return 7 * clip(jnp.sin(wrap(inner)(x)))


def hand(x):
    return cg.clip_cotangent(x, RULE)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_each_operation_sees_a_clipped_cotangent(wrap):
    everywhere = cg.error_clip_everywhere(functools.partial(chain, wrap=wrap), RULE)
    for x in (0.1, 1.5, 3.0):
        expected = jax.grad(functools.partial(chain, clip=hand))(x)
        np.testing.assert_allclose(jax.grad(everywhere)(x), expected, rtol=1e-6)


@first_row
@every_model
def test_the_value_is_unchanged_bit_by_bit(model):
    plain = functools.partial(model, tag=checkpoint_name)
    everywhere = cg.error_clip_everywhere(plain, RULE)
    assert_same(jax.jit(everywhere)(X), jax.jit(plain)(X))


def test_what_comes_from_above_and_what_goes_back_is_not_clipped():
    everywhere = cg.error_clip_everywhere(lambda x: 100 * x, RULE)
    for wrapped in (everywhere, cg.error_clip_everywhere(jax.jit(lambda x: 100 * x), RULE)):
        np.testing.assert_allclose(jax.vjp(wrapped, 1.0)[1](10.0)[0], 1000.0)


def test_the_last_state_of_a_scan_is_clipped_like_all_others():
    def run(x, clip=lambda x: x):
        return jax.lax.scan(lambda c, _: (clip(2 * c), None), x, None, length=3)[0]

    gradient = jax.vjp(cg.error_clip_everywhere(run, RULE), 1.0)[1](10.0)[0]
    np.testing.assert_allclose(gradient, 0.6, rtol=1e-6)
    np.testing.assert_allclose(gradient, jax.vjp(lambda x: run(x, hand), 1.0)[1](10.0)[0])


def test_a_result_that_is_used_inside_too_is_clipped():
    def loss(x):
        h = 2 * x
        return 100 * h, h

    everywhere = cg.error_clip_everywhere(loss, RULE)
    assert float(jax.grad(everywhere, has_aux=True)(1.0)[0]) == pytest.approx(0.6)
    assert float(jax.grad(cg.error_clip_everywhere(jax.jit(loss), RULE), has_aux=True)(1.0)[0]) == (
        pytest.approx(0.6)
    )


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_a_value_that_a_program_inside_returns_twice_is_one_value(wrap):
    def loss(x):
        first, second = wrap(lambda x: [2 * x] * 2)(x)
        return 100 * first, second

    gradient = jax.grad(cg.error_clip_everywhere(loss, RULE), has_aux=True)(1.0)[0]
    np.testing.assert_allclose(gradient, 0.6, rtol=1e-6)


def test_a_tag_is_no_operation_of_its_own():
    halve = cg.error_clip_everywhere(lambda x: 3 * checkpoint_name(2 * x, "h"), lambda g: 0.5 * g)
    assert float(jax.grad(halve)(1.0)) == 3.0


def test_a_custom_rule_is_one_operation():
    @jax.custom_vjp
    def rule(x):
        return jnp.sin(jnp.cos(x))

    rule.defvjp(lambda x: (rule(x), None), lambda _, g: (100 * g,))
    everywhere = cg.error_clip_everywhere(lambda x: 10 * rule(x), RULE)
    np.testing.assert_allclose(jax.grad(everywhere)(1.0), 30.0, rtol=1e-6)
