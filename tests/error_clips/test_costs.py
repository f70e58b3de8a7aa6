"""The error clip costs nothing: asserted from compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import RELEASED, array
from tests.rows import first_row, some_of

W = array(np.full((64, 64), 0.1))
X = array(np.full((32, 64), 0.1))
# XLA computes a small matrix product again for each of its uses, instead of reading it.
LARGE = array(np.full((128, 256), 0.1))


def mlp(w, x, clip):
    h = clip(jnp.tanh(x @ w))
    return jnp.sum(clip(jnp.tanh(h @ w)) ** 2)


def rnn(w, x, clip):
    def step(h, row):
        h = clip(jnp.tanh(h @ w + row))
        return h, None

    return jnp.sum(jax.lax.scan(step, jnp.zeros(64), x)[0] ** 2)


def compiled(model, clip):
    return jax.jit(jax.grad(lambda w: model(w, X, clip))).lower(W).compile(RELEASED)


@pytest.mark.slow
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


def tagged(model):
    """The model with the tag ``h`` on its last layer but one, or on each step."""

    def tag(x):
        return checkpoint_name(x, "h")

    return {
        "mlp": lambda w: jnp.sum(jnp.tanh(tag(jnp.tanh(LARGE @ w)) @ w) ** 2),
        "rnn": lambda w: rnn(w, X, tag),
    }[model]


def weights(model):
    return array(np.full((256, 256), 0.1)) if model == "mlp" else W


def compiled_watch(model, use):
    """The gradient with what ``use`` takes of the statistics, or the plain gradient."""
    loss = tagged(model)

    def watched(w):
        value, grads, stats = cg.value_and_grad_with_stats(loss)(w)
        return value, grads, use(stats["h"])

    fun = jax.value_and_grad(loss) if use is None else watched
    return jax.jit(fun).lower(weights(model)).compile(RELEASED)


WATCHED = {"mlp": LARGE.size, "rnn": X.size}


@pytest.mark.slow
@pytest.mark.parametrize("model", WATCHED)
def test_statistics_that_are_not_used_cost_nothing(model):
    plain, unused = compiled_watch(model, None), compiled_watch(model, lambda stats: ())
    assert unused.cost_analysis()["bytes accessed"] == plain.cost_analysis()["bytes accessed"]
    assert unused.memory_analysis().temp_size_in_bytes == plain.memory_analysis().temp_size_in_bytes
    assert unused.as_text().count(" fusion(") == plain.as_text().count(" fusion(")


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("model", WATCHED)
@pytest.mark.parametrize("use", ["before", None], ids=["norms", "all"])
def test_watching_costs_a_read_of_the_cotangents_and_one_buffer_at_most(model, use):
    """Besides, there are the statistics themselves and scalars.

    XLA's analysis counts the branch for numbers out of range, which is not taken, as well: ten
    times the size of the cotangents in all. That branch takes the cotangent as it is in memory,
    where the compiler would otherwise have computed it within the next operation.
    """
    plain = compiled_watch(model, None)
    watched = compiled_watch(model, lambda stats: getattr(stats, use) if use else stats)
    slots = 1 if model == "mlp" else len(X)
    small = 1024 + slots * 256
    traffic = [c.cost_analysis()["bytes accessed"] for c in (watched, plain)]
    assert traffic[0] - traffic[1] <= 10 * WATCHED[model] * 4 + small
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (watched, plain)]
    buffers = 1 if jax.__version_info__ >= (0, 10, 2) else 3  # what XLA of 0.10.0 keeps
    assert sizes[0] - sizes[1] <= small + (buffers * WATCHED[model] * 4 if model == "mlp" else 0)
    assert watched.as_text().count(" while(") == plain.as_text().count(" while(")


@pytest.mark.parametrize("model", some_of(WATCHED, ["mlp"]))
def test_a_value_rule_by_name_costs_what_the_clip_by_hand_costs(model):
    rules = {"h": cg.ErrorClipByValue(0.5)}
    clipped = jax.jit(jax.value_and_grad(cg.error_clip_by_name(tagged(model), rules)))
    clipped, plain = clipped.lower(weights(model)).compile(RELEASED), compiled_watch(model, None)
    for cost in (
        lambda c: c.cost_analysis()["bytes accessed"],
        lambda c: c.memory_analysis().temp_size_in_bytes,
        lambda c: c.as_text().count(" fusion("),
    ):
        assert cost(clipped) == cost(plain)
