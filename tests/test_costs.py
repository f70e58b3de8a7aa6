"""The error clip costs nothing: asserted from compiled programs."""

import jax
import jax.numpy as jnp
import pytest

import clipgrad as cg

W = jnp.full((64, 64), 0.1)
X = jnp.full((32, 64), 0.1)


def mlp(w, x, clip):
    h = clip(jnp.tanh(x @ w))
    return jnp.sum(clip(jnp.tanh(h @ w)) ** 2)


def rnn(w, x, clip):
    def step(h, row):
        h = clip(jnp.tanh(h @ w + row))
        return h, None

    return jnp.sum(jax.lax.scan(step, jnp.zeros(64), x)[0] ** 2)


def compiled(model, clip):
    return jax.jit(jax.grad(lambda w: model(w, X, clip))).lower(W).compile()


@pytest.mark.parametrize("model", [mlp, rnn])
@pytest.mark.parametrize(
    "rule", [cg.ErrorClipByValue(0.5), cg.ErrorClipByValue(0.5, -0.1, nan=0.0)], ids=str
)
def test_a_value_rule_adds_no_fusion_no_traffic_and_no_memory(model, rule):
    def identity(x):
        return x

    def clip(x):
        return cg.clip_cotangent(x, rule)

    plain, clipped = compiled(model, identity), compiled(model, clip)
    assert clipped.as_text().count(" fusion(") == plain.as_text().count(" fusion(")
    assert clipped.as_text().count(" while(") == plain.as_text().count(" while(")
    bytes_accessed = [c.cost_analysis()["bytes accessed"] for c in (clipped, plain)]
    assert bytes_accessed[0] == bytes_accessed[1]
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (clipped, plain)]
    assert sizes[0] == sizes[1]
    gradients = [jax.grad(lambda w, c=c: model(w, X, c))(W) for c in (identity, clip)]
    assert not jnp.allclose(*gradients)


@pytest.mark.parametrize("model", [mlp, rnn])
def test_a_rule_that_is_off_is_the_same_program(model):
    plain, off = (
        compiled(model, clip).as_text()
        for clip in (lambda x: x, lambda x: cg.clip_cotangent(x, None))
    )

    def instructions(text):
        return [line.split(", metadata")[0] for line in text.splitlines()[1:] if " = " in line]

    assert instructions(plain) == instructions(off)
