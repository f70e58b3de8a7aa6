"""QK-clip of the attention of flax Linen, flax NNX and Equinox, as it is."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.test_qk_clip import X, assert_at_the_limit_after_a_step

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("users_promotion")]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(2, name="attn", bias_init=nn.initializers.normal())(
            x
        )


def linen():
    params = Linen().init(jax.random.key(0), X)["params"]
    loss = lambda p, x: jnp.mean(Linen().apply({"params": p}, x) ** 2)  # noqa: E731
    return loss, params, "**/*->...hqk", -3, ("attn/query/kernel", "attn/key/kernel", 1)


def in_nnx():
    attn = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    graph, params = nnx.split(attn)
    loss = lambda p, x: jnp.mean(nnx.merge(graph, p)(x) ** 2)  # noqa: E731
    return loss, params, "**/BTNH,BSNH->BNTS", 1, ("query/kernel", "key/kernel", 1)


def equinox():
    model = eqx.nn.MultiheadAttention(2, 8, use_query_bias=True, key=jax.random.key(0))
    loss = lambda m, x: jnp.mean(jax.vmap(m)(x, x, x) ** 2)  # noqa: E731
    return loss, model, "**/*->sS", None, ("query_proj/weight", "key_proj/weight", 0)


@pytest.mark.parametrize("make", [linen, in_nnx, equinox])
def test_the_largest_logit_is_at_the_limit_after_the_step_and_others_stay(make):
    before, after, limit = assert_at_the_limit_after_a_step(*make())
    np.testing.assert_allclose(after, np.minimum(before, limit), rtol=1e-5)
