"""Every clip inside every trainer and every wrapper of optax, against NumPy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import clipgrad as cg
from tests.helpers import CASES, assert_close, float64

pytestmark = pytest.mark.exhaustive

RATE, LIMIT, STEPS = 0.1, 0.05, 4
REFERENCES = {case.name: case.reference for case in CASES}
CLIPS = {
    "clip_by_value": (cg.clip_by_value, REFERENCES["ClipByValue"]),
    "clip_by_norm": (cg.clip_by_norm, REFERENCES["ClipByNorm"]),
    "clip_by_global_norm": (cg.clip_by_global_norm, REFERENCES["ClipByGlobalNorm"]),
    "clip_by_block_rms": (cg.clip_by_block_rms, REFERENCES["ClipByBlockRMS"]),
    "adaptive_grad_clip": (cg.adaptive_grad_clip, REFERENCES["AdaptiveClip"]),
}
THRESHOLDS = {
    "clip_by_value": "max",
    "clip_by_norm": "max_norm",
    "clip_by_global_norm": "max_norm",
    "clip_by_block_rms": "threshold",
    "adaptive_grad_clip": "clipping",
}


class Constant:
    """An adaptive threshold that is a number, so that the result is known, but has a history."""

    def init(self, norms):
        return {"window": jnp.stack([norms] * 2), "seen": jnp.zeros(norms.shape, jnp.int32)}

    def update(self, state, norms):
        window = jnp.stack([state["window"][1], norms])
        return jnp.full_like(norms, LIMIT), {"window": window, "seen": state["seen"] + 1}


# Half of them with statistics in their state; one that follows norms, one that may be skipped.
TRANSFORMATIONS = {
    name: make(LIMIT, stats=i % 2 == 0) for i, (name, (make, _)) in enumerate(CLIPS.items())
} | {
    "adaptive threshold": cg.clip_by_norm(Constant(), stats="per_leaf"),
    "skip_spikes": cg.skip_spikes(cg.clip_by_global_norm(LIMIT)),
}
BY_HAND = {name: reference for name, (_, reference) in CLIPS.items()} | {
    "adaptive threshold": REFERENCES["ClipByNorm"],
    "skip_spikes": REFERENCES["ClipByGlobalNorm"],
}


@pytest.fixture(autouse=True)
def standard_numerics():
    """Of the optimizers and models of others."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def by_hand(name, grads, params):
    """The leaves of the clipped gradients, in float64."""
    leaves, weights = (
        {str(i): x for i, x in enumerate(jax.tree.leaves(float64(t)))} for t in (grads, params)
    )
    clipped = BY_HAND[name](leaves, weights, LIMIT)
    return [np.reshape(x, leaves[i].shape) for i, x in clipped.items()]


# trainers


class Trainer(NamedTuple):
    """``start(tx)`` makes what ``step`` carries; ``step`` returns it and the gradients."""

    start: Callable[..., Any]
    step: Callable[..., Any]
    params: Callable[..., Any]


X, Y = np.linspace(-2, 2, 10, dtype=np.float32).reshape(5, 2), np.float32([[0], [4], [1], [3], [2]])


def squares(outputs):
    return jnp.mean((outputs - Y) ** 2)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(jnp.tanh(nn.Dense(3)(x)))


def linen_start(tx):
    params = jax.jit(Linen().init)(jax.random.key(0), X)["params"]
    return TrainState.create(apply_fn=Linen().apply, params=params, tx=tx)


def linen_step(state):
    grads = jax.grad(lambda p: squares(state.apply_fn({"params": p}, X)))(state.params)
    return state.apply_gradients(grads=grads), grads


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.second = nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def nnx_start(tx):
    model = Nnx()
    return nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))


def nnx_step(carry):
    model, optimizer = nnx.merge(*carry)
    grads = nnx.grad(lambda m: squares(m(X)))(model)
    optimizer.update(model, grads)
    return nnx.split((model, optimizer)), grads


def equinox_start(tx):
    model = eqx.nn.MLP(2, 1, 3, 1, activation=jnp.tanh, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    return arrays, tx.init(arrays), jax.tree_util.Partial(lambda: (tx, static))


def equinox_step(carry):
    arrays, state, rest = carry
    tx, static = rest()

    def loss(arrays):
        return squares(jax.vmap(eqx.combine(arrays, static))(X))

    grads = eqx.filter_grad(loss)(arrays)
    updates, state = tx.update(grads, state, arrays)
    return (eqx.apply_updates(arrays, updates), state, rest), grads


def haiku_net(x):
    return hk.Linear(1)(jnp.tanh(hk.Linear(3, name="first")(x)))


def haiku_start(tx):
    params = jax.jit(hk.transform(haiku_net).init)(jax.random.key(0), X)
    assert all(isinstance(module, dict) for module in params.values())
    return params, tx.init(params), jax.tree_util.Partial(lambda: tx)


def haiku_step(carry):
    params, state, rest = carry
    apply = hk.without_apply_rng(hk.transform(haiku_net)).apply
    grads = jax.grad(lambda p: squares(apply(p, X)))(params)
    updates, state = rest().update(grads, state, params)
    return (optax.apply_updates(params, updates), state, rest), grads


TRAINERS = {
    "linen": Trainer(linen_start, linen_step, lambda state: state.params),
    "nnx": Trainer(nnx_start, nnx_step, lambda carry: nnx.state(nnx.merge(*carry)[0], nnx.Param)),
    "equinox": Trainer(equinox_start, equinox_step, lambda carry: carry[0]),
    "haiku": Trainer(haiku_start, haiku_step, lambda carry: carry[0]),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_need_no_change(name):
    trainer = TRAINERS[name]
    carries = {
        n: trainer.start(optax.chain(clip, optax.sgd(RATE))) for n, clip in TRANSFORMATIONS.items()
    }
    traces = []

    @jax.jit
    def step(carries):
        traces.append(1)
        return {n: trainer.step(carry) for n, carry in carries.items()}

    for _ in range(STEPS):
        results, before = step(carries), jax.tree.map(jnp.asarray, carries)
        carries = {n: carry for n, (carry, _) in results.items()}
        chex.assert_trees_all_equal_shapes_and_dtypes(carries, before)
        for n, (carry, grads) in results.items():
            params = trainer.params(before[n])
            clipped = by_hand(n, grads, params)
            expected = [p - RATE * g for p, g in zip(jax.tree.leaves(params), clipped, strict=True)]
            assert_close(jax.tree.leaves(trainer.params(carry)), expected, rtol=1e-5, atol=1e-7)
            assert any((c != g).any() for c, g in zip(clipped, jax.tree.leaves(grads), strict=True))
    assert len(traces) == 1


# wrappers of optax

PARAMS = {"b": jnp.linspace(-1.0, 1.0, 4), "w": jnp.linspace(0.5, 2.0, 12).reshape(3, 4)}


def gradients(step):
    rng = np.random.default_rng(step)
    return {
        n: jnp.asarray(rng.normal(size=x.shape) * (1 + step), x.dtype) for n, x in PARAMS.items()
    }


GRADS = [gradients(step) for step in range(STEPS)]


class Wrapper(NamedTuple):
    """``wrap(clip)`` makes an optimizer; ``updates(name)`` gives what each step should do."""

    wrap: Callable[..., Any]
    updates: Callable[[str], list[Any]]
    grads: list[Any] = GRADS
    params: Any = PARAMS


def clipped(name, grads=None, params=PARAMS):
    leaves = by_hand(name, grads, params)
    return jax.tree.unflatten(jax.tree.structure(grads), leaves)


def descend(tree):
    return jax.tree.map(lambda g: -RATE * g, tree)


def zeros():
    return jax.tree.map(np.zeros_like, PARAMS)


def each(name):
    return [descend(clipped(name, g)) for g in GRADS]


def only_w(name):
    return [{"b": g["b"], **clipped(name, {"w": g["w"]}, {"w": PARAMS["w"]})} for g in GRADS]


def only_w_trains(name):
    return [{"b": zeros()["b"], "w": descend(u["w"])} for u in only_w(name)]


def every_second(name):
    means = [jax.tree.map(lambda a, b: (a + b) / 2, *GRADS[i : i + 2]) for i in (0, 2)]
    first, second = [descend(clipped(name, mean)) for mean in means]
    return [zeros(), first, zeros(), second]


def all_but_the_second(name):
    return [zeros() if i == 1 else u for i, u in enumerate(each(name))]


def of_clipped(optimizer, params=PARAMS):
    """What an optimizer makes of gradients that were clipped by hand."""

    def updates(name):
        state, results = optimizer.init(params), []
        for grads in GRADS:
            result, state = optimizer.update(
                jax.tree.map(jnp.float32, clipped(name, grads)), state, params
            )
            results.append(result)
        return results

    return updates


def chained(clip):
    return optax.chain(clip, optax.sgd(RATE))


NAN = [jax.tree.map(lambda g: g * np.nan, g) if i == 1 else g for i, g in enumerate(GRADS)]
AHEAD = optax.LookaheadParams.init_synced(PARAMS)
LABELS = {"b": "frozen", "w": "trained"}
WRAPPERS = {
    "chain": Wrapper(chained, each),
    "named_chain": Wrapper(
        lambda clip: optax.named_chain(("clip", clip), ("sgd", optax.sgd(RATE))), each
    ),
    "masked": Wrapper(lambda clip: optax.masked(clip, {"b": False, "w": True}), only_w),
    "partition": Wrapper(
        lambda clip: optax.partition(
            {"trained": chained(clip), "frozen": optax.set_to_zero()}, LABELS
        ),
        only_w_trains,
    ),
    "MultiSteps": Wrapper(
        lambda clip: optax.MultiSteps(chained(clip), 2).gradient_transformation(), every_second
    ),
    "apply_if_finite": Wrapper(
        lambda clip: optax.apply_if_finite(chained(clip), 3), all_but_the_second, NAN
    ),
    "lookahead": Wrapper(
        lambda clip: optax.lookahead(chained(clip), 2, 0.5),
        of_clipped(optax.lookahead(optax.sgd(RATE), 2, 0.5), AHEAD),
        params=AHEAD,
    ),
    "schedule_free": Wrapper(
        lambda clip: optax.contrib.schedule_free(chained(clip), RATE),
        of_clipped(optax.contrib.schedule_free(optax.sgd(RATE), RATE)),
    ),
    "adam": Wrapper(lambda clip: optax.chain(clip, optax.adam(RATE)), of_clipped(optax.adam(RATE))),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_clip_as_by_hand_and_keep_their_state(name):
    wrapper = WRAPPERS[name]
    optimizers = {n: wrapper.wrap(clip) for n, clip in TRANSFORMATIONS.items()}
    states = {n: tx.init(wrapper.params) for n, tx in optimizers.items()}

    traces = []

    @jax.jit
    def step(grads, states):
        traces.append(None)
        return {n: tx.update(grads, states[n], wrapper.params) for n, tx in optimizers.items()}

    results = []
    for grads in wrapper.grads:
        results.append(step(grads, states))
        before, states = states, {n: state for n, (_, state) in results[-1].items()}
        chex.assert_trees_all_equal_shapes_and_dtypes(before, states)
    assert len(traces) == 1
    for n in TRANSFORMATIONS:
        for result, expected in zip(results, wrapper.updates(n), strict=True):
            # Some updates are differences of parameters, which are rounded to 2.4e-7.
            assert_close(result[n][0], expected, rtol=2e-5, atol=5e-7)


def test_a_schedule_of_inject_hyperparams_on_bfloat16_gradients():
    schedule = optax.linear_schedule(LIMIT, 0.5 * LIMIT, STEPS - 1)
    optimizers = {n: optax.inject_hyperparams(make)(schedule) for n, (make, _) in CLIPS.items()}
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    states = {n: tx.init(params) for n, tx in optimizers.items()}

    traces = []

    @jax.jit
    def step(grads, states):
        traces.append(None)
        return {n: tx.update(grads, states[n], params) for n, tx in optimizers.items()}

    for i in range(STEPS):
        grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), GRADS[i])
        results, before = step(grads, states), states
        states = {n: state for n, (_, state) in results.items()}
        chex.assert_trees_all_equal_shapes_and_dtypes(before, states)
        for n, (_, reference) in CLIPS.items():
            chex.assert_trees_all_equal_shapes_and_dtypes(results[n][0], grads)
            # The oldest optax holds hyperparameters in the dtype of the parameters.
            limit = float(states[n].hyperparams[THRESHOLDS[n]])
            assert limit == pytest.approx(float(schedule(i)), rel=2**-8)
            expected = reference(float64(grads), float64(params), limit)
            assert_close(results[n][0], expected, rtol=2**-8, atol=1e-7)
    assert len(traces) == 1


def inner_loss(params):
    return jnp.sum((jnp.tanh(X @ params["w"]) - Y) ** 2)


def after_two_clipped_steps(params, rate):
    """For each clip the loss after an inner loop, whose start and rate are learnt."""
    losses = []
    for clip in TRANSFORMATIONS.values():
        p, state = params, clip.init(params)
        for _ in range(2):
            updates, state = clip.update(jax.grad(inner_loss)(p), state, p)
            p = jax.tree.map(lambda a, u: a - rate * u, p, updates)
        losses.append(inner_loss(p))
    return jnp.stack(losses)


def test_derivatives_through_the_updates_are_those_of_finite_differences():
    with jax.enable_x64(True):
        start, rate, h = {"w": jnp.array([[0.3], [-0.2]])}, jnp.float64(0.5), 1e-6
        outer = jax.jit(after_two_clipped_steps)
        by_start, by_rate = jax.jit(jax.jacrev(after_two_clipped_steps, (0, 1)))(start, rate)
        difference = (outer(start, rate + h) - outer(start, rate - h)) / (2 * h)
        np.testing.assert_allclose(by_rate, difference, rtol=1e-6)
        for i in range(2):
            up, down = ({"w": start["w"].at[i, 0].add(d)} for d in (h, -h))
            difference = (outer(up, rate) - outer(down, rate)) / (2 * h)
            np.testing.assert_allclose(by_start["w"][:, i, 0], difference, rtol=1e-6)


# checkpoints


def trained(tx, state=None, steps=1):
    params, state = PARAMS, tx.init(PARAMS) if state is None else state
    for grads in GRADS[:steps]:
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def through_orbax(tree, target, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", target)


def test_a_checkpoint_with_the_clip_of_optax_is_restored_into_ours(tmp_path):
    """That every clip has the state of optax's is in test_gradient_clip.py."""
    theirs = optax.chain(optax.clip_by_global_norm(LIMIT), optax.adam(RATE))
    ours = optax.chain(cg.clip_by_global_norm(LIMIT), optax.adam(RATE))
    _, saved = trained(theirs)
    restored = through_orbax(saved, jax.eval_shape(ours.init, PARAMS), tmp_path)
    assert isinstance(restored[0], optax.EmptyState)
    assert_close(restored, saved, rtol=0)
    assert_close(trained(ours, restored), trained(theirs, saved), rtol=1e-6)


def test_all_that_states_keep_is_saved_and_restored(tmp_path):
    schedule = optax.linear_schedule(1.0, 0.1, 8)
    kinds = (cg.PercentileThreshold, cg.HistoryThreshold, cg.ZScoreThreshold, cg.EMAThreshold)
    tx = cg.skip_spikes(
        optax.chain(
            cg.clip_by_global_norm(schedule, stats=True),
            *(cg.clip_by_norm(kind(), stats="per_leaf") for kind in kinds),
            optax.adam(RATE),
        )
    )
    tx = optax.GradientTransformation(jax.jit(tx.init), jax.jit(tx.update))
    _, saved = trained(tx, steps=2)
    restored = through_orbax(saved, jax.eval_shape(tx.init, PARAMS), tmp_path)
    clip = restored.inner_state[0]
    assert isinstance(clip, cg.types.GradientClipState) and clip.count == 2
    assert_close(trained(tx, restored), trained(tx, saved), rtol=0)
