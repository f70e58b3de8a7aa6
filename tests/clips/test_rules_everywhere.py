"""Every rule at every place where a rule can be given, under every transformation."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.helpers import CASES, array, assert_close, float64
from tests.rows import in_turn, some_of

LIMIT = 0.3


RULES = {case.name: (case, LIMIT) for case in CASES}


# The gradient of the loss by w is x^T y, and so is the cotangent of what is tagged. ``wrap`` is on
# the function that is differentiated.


def loss(w, batch):
    x, y = batch
    return jnp.sum((x @ checkpoint_name(w, "h")) * y)


def by_value(rule, w, batch, wrap):
    clipped = wrap(lambda w, batch: loss(cg.clip_cotangent(w, rule), batch))
    return jax.grad(clipped)(w, batch)


def by_decorator(rule, w, batch, wrap):
    return jax.grad(wrap(cg.error_clip({"w": rule})(loss)))(w, batch)


def by_name(rule, w, batch, wrap):
    return jax.grad(cg.error_clip_by_name(wrap(loss), {"h": rule}))(w, batch)


def with_stats(rule, w, batch, wrap):
    return cg.value_and_grad_with_stats(wrap(loss), error_clip={"h": rule})(w, batch)[1]


def everywhere(rule, w, batch, wrap):
    """One value is between: twice the weights, whose cotangent is the gradient."""
    fun = cg.error_clip_everywhere(wrap(lambda w: 2 * (2 * w)), rule)
    return jax.vjp(fun, w)[1](jax.grad(loss)(w, batch) / 2)[0] / 2


def once(rule, w, batch, wrap):
    return cg.clip_grads(jax.grad(wrap(loss))(w, batch), rule, w)[0]


def before_the_optimizer(rule, w, batch, wrap):
    tx = cg.gradient_clip(rule)
    return tx.update(jax.grad(wrap(loss))(w, batch), tx.init(w), w)[0]


def of_each_example(rule, w, batch, wrap, method="auto"):
    """One example more, whose gradient is 0."""
    both = jax.tree.map(lambda x: jnp.stack([x, jnp.zeros_like(x)]), batch)
    return cg.clip_per_example(wrap(loss), rule, reduce="sum", method=method)(w, both)[1]


def trained(rule, w, batch, wrap, error_clip=None):
    optimizer = optax.chain(cg.gradient_clip(rule), optax.trace(0.0))
    step = cg.train_step(wrap(loss), optimizer, error_clip=error_clip, donate=False)
    return optax.tree.get(step(step.init(w), batch)[0].opt_state, "trace")


def trained_with_error_clip(rule, w, batch, wrap):
    return trained(None, w, batch, wrap, {"h": rule})


PLACES = {
    "clip_cotangent": by_value,
    "error_clip": by_decorator,
    "error_clip_by_name": by_name,
    "value_and_grad_with_stats": with_stats,
    "error_clip_everywhere": everywhere,
    "clip_grads": once,
    "gradient_clip": before_the_optimizer,
    "per example, direct": functools.partial(of_each_example, method="direct"),
    "train_step": trained,
    "train_step(error_clip)": trained_with_error_clip,
}
# Where the clipped value is not known.
WITHOUT_VALUE = {
    "error_clip_by_name",
    "value_and_grad_with_stats",
    "error_clip_everywhere",
    "train_step(error_clip)",
}


def lanes(function):
    """Each of two cases by itself; the second is three times the first."""

    def each(w, batch):
        stacked = jax.tree.map(lambda x: np.stack([3 * x, x]), jax.device_get((w, batch)))
        return np.asarray(function(*stacked))[1]

    return each


def on_devices(function):
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    one = lambda *args: jax.tree.map(  # noqa: E731
        lambda x: x[None], function(*jax.tree.map(lambda x: x[0], args))
    )
    return lanes(jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("x"), out_specs=P("x"))))


def scanned(function):
    body = lambda carry, args: (carry, function(*args))  # noqa: E731
    return lanes(jax.jit(lambda *args: jax.lax.scan(body, 0, args)[1]))


WAYS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lanes(jax.jit(jax.vmap(f))),
    "scan": scanned,
    "shard_map": on_devices,
    "remat": jax.jit,
    "bfloat16": jax.jit,
    "float64": jax.jit,
}
WRAPS = {"jit": jax.jit, "remat": jax.checkpoint}


def fits(rule, place):
    case, number = RULES[rule]
    made = case.make(number)
    return not (made.needs_params and place in WITHOUT_VALUE)


ROWS = [(rule, place) for rule in RULES for place in PLACES if fits(rule, place)]
# Each rule at one place, and each place with one rule.
SOME = [row for row in zip(RULES, itertools.cycle(PLACES), strict=False) if row in ROWS]


@in_turn
@pytest.mark.parametrize(("rule", "place"), some_of(ROWS, SOME))
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_that_of_the_formula(rule, place, way):
    case, number = RULES[rule]
    made = case.make(number)
    if way == "shard_map" and any(f.name == "axis_name" for f in dataclasses.fields(made)):
        made = dataclasses.replace(made, axis_name=())
    dtype = way if way in ("bfloat16", "float64") else "float32"
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        w, x, y = (array(rng.normal(size=s), dtype) for s in ((6, 4), (3, 6), (3, 4)))
        wrap = WRAPS.get(way, lambda f: f)
        clip = WAYS[way](lambda w, batch: PLACES[place](made, w, batch, wrap))
        clipped = clip(w, (x, y))
        grads = {"w": jax.jit(jax.grad(loss))(w, (x, y))}
    expected = case.reference(float64(grads), {"w": float64(w)}, number)["w"]
    assert clipped.dtype == w.dtype and not np.allclose(expected, grads["w"])
    rtol = {"bfloat16": 2.0**-7, "float64": 1e-12}.get(dtype, 2e-6)
    assert_close(clipped, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


@pytest.mark.parametrize("place", sorted(WITHOUT_VALUE))
def test_a_rule_that_needs_the_value_is_refused_where_it_is_not_known(place):
    w, batch = array(np.ones((6, 4))), (array(np.ones((3, 6))), array(np.ones((3, 4))))
    with pytest.raises(TypeError, match="AdaptiveClip"):
        PLACES[place](cg.AdaptiveClip(0.1), w, batch, lambda f: f)


def test_every_rule_and_every_place_is_in_the_table():
    assert {rule for rule, _ in ROWS} == set(RULES) and {place for _, place in ROWS} == set(PLACES)
