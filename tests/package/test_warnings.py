"""Each warning points at the user's line, whatever calls the function that warns."""

import threading
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import array

ONES = array(np.ones(3))
TX, RULE = cg.clip_by_global_norm(1.0), cg.ClipByGlobalNorm(1.0)
PART, BATCH = "leaves that vary over 'x'", "inside jax.vmap"
OWN, PERCENT = "computes gradients itself", "percentiles are from 0 to 100"


def on_part(f):
    """A function of a part of the gradient on each device, of which a clip without a name warns."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    jax.eval_shape(mapped, jax.ShapeDtypeStruct((4,), jnp.float32))


def batched(x):
    return jnp.sum(jax.vmap(lambda x: checkpoint_name(x * x, "h"))(x))


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(ONES)

    def __call__(self, x):
        return batched(self.w * x)


class Equation(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return batched(self.w * x)


def chained(g):
    tx = optax.chain(optax.identity(), TX)
    return tx.update(g, tx.init(g))[0]


def wrapped(g):
    tx = optax.apply_if_finite(optax.masked(TX, True), 3)
    return tx.update(g, tx.init(g))[0]


def of_train_state(g):
    state = TrainState.create(apply_fn=lambda: None, params={"w": g}, tx=TX)
    return state.apply_gradients(grads={"w": g}).params["w"]


def of_nnx(g):
    model = nnx.Dict(w=nnx.Param(g))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    optimizer.update(model, nnx.state(model))
    return model.w[...]


BY_NAME = cg.error_clip_by_name(batched, {"h": RULE})
# Functions that warn, each a call in this file, and the text.
WAYS = {
    "update": (lambda: on_part(lambda g: TX.update(g, TX.init(g))[0]), PART),
    "rule": (lambda: on_part(RULE), PART),
    "rule in a function": (lambda: on_part(lambda g: RULE(g)), PART),
    "clip_grads": (lambda: on_part(lambda g: cg.clip_grads(g, RULE)[0]), PART),
    "global_norm": (lambda: on_part(lambda g: g / cg.global_norm(g)), PART),
    "leaf": (lambda: on_part(lambda g: cg.clip_grads(g, cg.ClipByNorm(1.0))[0]), PART),
    "chain": (lambda: on_part(chained), PART),
    "wrappers of optax": (lambda: on_part(wrapped), PART),
    "jit": (lambda: on_part(jax.jit(lambda g: RULE(g))), PART),
    "filter_jit": (lambda: on_part(eqx.filter_jit(lambda g: RULE(g))), PART),
    "TrainState": (lambda: on_part(of_train_state), PART),
    "nnx.Optimizer": (lambda: on_part(of_nnx), PART),
    "skip_spikes": (lambda: on_part(lambda g: _skipped(g)), PART),
    "cotangent": (
        lambda: on_part(lambda x: jax.vjp(lambda x: cg.clip_cotangent(x, RULE), x)[1](x)[0]), PART
    ),
    "by name": (lambda: BY_NAME(ONES), BATCH),
    "by name, grad": (lambda: jax.grad(BY_NAME)(ONES), BATCH),
    "by name, jit": (lambda: jax.jit(jax.grad(BY_NAME))(ONES), BATCH),
    "by name, nnx.grad": (
        lambda: nnx.grad(cg.error_clip_by_name(lambda m, x: m(x), {"h": RULE}))(
            Model(), ONES
        ),
        BATCH,
    ),
    "by name, eqx": (
        lambda: eqx.filter_grad(cg.error_clip_by_name(lambda m, x: m(x), {"h": RULE}))(
            Equation(ONES), ONES
        ),
        BATCH,
    ),
    "watch": (
        lambda: cg.value_and_grad_with_stats(BY_NAME.__wrapped__, watch=["h"])(ONES), ""
    ),
    "train_step": (lambda: _stepped(), BATCH),
    "everywhere": (
        lambda: cg.error_clip_everywhere(jax.grad(batched), RULE)(ONES), OWN
    ),
    "gradient by name": (
        lambda: cg.error_clip_by_name(jax.grad(batched), {"h": cg.ClipByValue(1.0)})(ONES),
        OWN,
    ),
    "percentile": (lambda: cg.PercentileThreshold(0.9), PERCENT),
    "linen": (lambda: _of_linen(), BATCH),
}  # fmt: skip


def _skipped(g):
    tx = cg.skip_spikes(optax.chain(TX, optax.identity()), axis_name="x")
    return tx.update(g, tx.init(g), g)[0]


def _stepped():
    step = cg.train_step(lambda w, x: batched(w * x), optax.sgd(0.1), error_clip={"h": RULE})
    return step(step.init(ONES), ONES)


def _of_linen():
    class Batched(nn.Module):
        @nn.compact
        def __call__(self, x):
            return batched(nn.Dense(3)(x[None])[0])

    params = Batched().init(jax.random.key(0), ONES)
    loss = cg.error_clip_by_name(lambda p, x: Batched().apply(p, x), {"h": RULE})
    return jax.grad(loss)(params, ONES)


@pytest.mark.usefixtures("users_promotion")
@pytest.mark.parametrize("name", WAYS)
def test_a_warning_points_at_the_line_of_the_user(name):
    call, text = WAYS[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    ours = [w for w in seen if text and text in str(w.message)]
    assert bool(ours) == bool(text), [str(w.message) for w in seen]
    assert {w.filename for w in ours} <= {__file__}


def test_a_thread_without_a_line_of_the_user_warns_too():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        thread = threading.Thread(target=cg.PercentileThreshold, args=(0.5,))
        thread.start()
        thread.join()
    assert len(seen) == 1


def test_a_warning_is_shown_once_for_each_line_and_can_be_an_error():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            cg.PercentileThreshold(0.5)
        cg.PercentileThreshold(0.5)
    assert len(seen) == 2
    with pytest.warns(UserWarning, match="for this share write 50"):
        assert np.all(cg.PercentileThreshold(0.5).percentile == 0.5)
