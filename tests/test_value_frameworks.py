"""Statistics of values in models of flax, Haiku and NNX, and what they cost there."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import clipgrad as cg
from tests.helpers import assert_close
from tests.tagged import X
from tests.test_frameworks import Recurrent, Scanned, Transformer, linen
from tests.test_frameworks import X as inputs
from tests.test_value_stats import assert_stats

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("users_promotion")]


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


@pytest.mark.parametrize("module", [Scanned(), Recurrent()], ids=["layers", "steps"])
def test_scanned_linen_modules_have_an_entry_for_each_step(module):
    params, loss = linen(module)
    stats = jax.jit(cg.with_value_stats(loss, watch=["**"]))(params, inputs)[1]
    listed = {name.name: name for name in cg.list_names(loss, (params, inputs))}
    assert {n: s.rms.shape for n, s in stats.items()} == {n: r.scans for n, r in listed.items()}
    assert any(stats[name].rms.ndim for name in stats)


def test_haiku_modules_have_the_values_that_they_return():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 16, 3])(x)))
    params = jax.jit(model.init)(jax.random.key(0), inputs)
    outputs = {}

    def keep(next_fun, args, kwargs, context):
        out = next_fun(*args, **kwargs)
        outputs[context.module.module_name.replace("~/", "")] = out
        return out

    with hk.intercept_methods(keep):
        model.apply(params, inputs)
    stats = jax.jit(cg.with_value_stats(model.apply))(params, inputs)[1]
    assert set(outputs) <= set(stats)
    for name, value in outputs.items():
        assert_stats(stats[name], [value])


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
    ((name, found),) = stats.items()
    p = params["params"]["attn"]
    q, k = (
        np.einsum("btd,dhf->bthf", x, np.asarray(p[n]["kernel"], np.float64))
        for n in ("query", "key")
    )
    logits = np.einsum("bqhf,bkhf->bhqk", q, k) / 2
    assert_stats(found, [logits], 1, rtol=1e-5)


@pytest.mark.parametrize("module", [Transformer(), Scanned()], ids=["unrolled", "scanned"])
def test_unused_statistics_cost_nothing_and_used_ones_never_wait_for_the_host(module):
    params, loss = linen(module)
    measured = cg.with_value_stats(loss, watch=["**"])

    def compiled(fun, has_aux):
        return jax.jit(jax.value_and_grad(fun, has_aux=has_aux)).lower(params, inputs).compile()

    plain = compiled(loss, False)
    unused = compiled(lambda *args: measured(*args)[0], False)
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (plain, unused)]
    assert sizes[0] == sizes[1]
    costs = [c.cost_analysis() for c in (plain, unused)]
    assert costs[0]["bytes accessed"] == costs[1]["bytes accessed"]
    used = compiled(measured, True).as_text()
    assert "callback" not in used and "outfeed" not in used and "send(" not in used


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
