"""Statistics of values in models of flax, Haiku and NNX, and what they cost there."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import clipgrad as cg
from tests.error_clips.tagged import X
from tests.error_clips.test_frameworks import Transformer, linen
from tests.error_clips.test_frameworks import X as inputs
from tests.helpers import assert_close
from tests.values.test_value_stats import assert_stats

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("users_promotion")]


def test_linen_modules_have_the_values_that_flax_captures():
    module = Transformer()
    params, loss = linen(module)
    captured = module.apply(params, inputs, capture_intermediates=True)[1]["intermediates"]
    outputs = {
        "/".join(("Transformer", *(k.key for k in path[:-2]))): value
        for path, value in jax.tree_util.tree_leaves_with_path(captured)
    }
    stats = jax.jit(cg.with_value_stats(loss))(params, inputs)[1]
    assert set(outputs) <= set(stats) and len(outputs) > 5
    for name, value in outputs.items():
        if stats[name].size == value.size:
            assert_stats(stats[name], [value], rtol=2e-6)


class Attention(nn.Module):
    """Attention whose logits are named by the einsum that computes them."""

    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(2, name="attn")(x)


def test_the_logits_of_unedited_attention_have_an_entry_for_each_head():
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    model = Attention()
    params = model.init(jax.random.key(1), x)
    stats = cg.with_value_stats(model.apply, watch={"**/*->...hqk": -3})(params, x)[1]
    ((name, stats_of_heads),) = stats.items()
    p = params["params"]["attn"]
    q, k = (
        np.einsum("btd,dhf->bthf", x, np.asarray(p[n]["kernel"], np.float64))
        for n in ("query", "key")
    )
    logits = np.einsum("bqhf,bkhf->bhqk", q, k) / 2
    assert_stats(stats_of_heads, [logits], 1, rtol=1e-5)


class Normalized(nnx.Module):
    """A layer with statistics of its batches."""

    def __init__(self, rngs):
        self.up, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.up(x))


def test_an_nnx_model_is_measured_and_changes_as_without():
    loss = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    one, other = Normalized(nnx.Rngs(0)), Normalized(nnx.Rngs(0))
    expected = np.asarray(X, np.float64) @ np.asarray(one.up.kernel[...], np.float64)
    value, stats = cg.with_value_stats(loss, watch=["*"])(one, X)
    assert_close(value, loss(other, X))
    assert_close(nnx.state(one), nnx.state(other))
    assert_stats(stats["up"], [expected])
    step = cg.train_step(loss, optax.sgd(0.1), watch_values=["up"])
    _, metrics = step(step.init(one), X)
    assert_stats(metrics["values"]["up"], [expected])
