"""Derivatives through clipped updates, and states of optimizers that are saved and restored."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import array, assert_close

pytestmark = pytest.mark.slow

RATE, LIMIT = 0.1, 0.05
CLIPS = [cg.clip_by_value, cg.clip_by_global_norm, cg.adaptive_grad_clip]


class Constant:
    """An adaptive threshold that is a number, so that the result is known, but has a history."""

    def init(self, norms):
        return {"window": jnp.stack([norms] * 2), "seen": jnp.zeros(norms.shape, jnp.int32)}

    def update(self, state, norms):
        window = jnp.stack([state["window"][1], norms])
        return jnp.full_like(norms, LIMIT), {"window": window, "seen": state["seen"] + 1}


# Half of them with statistics in their state; one that follows norms, one that may be skipped.
TRANSFORMATIONS = [
    *(make(LIMIT, stats=i % 2 == 0) for i, make in enumerate(CLIPS)),
    cg.clip_by_norm(Constant(), stats="per_leaf"),
    cg.skip_spikes(cg.clip_by_global_norm(LIMIT)),
]


@pytest.fixture(autouse=True)
def standard_numerics():
    """Of the optimizers and models of others."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


X = np.linspace(-2, 2, 10, dtype=np.float32).reshape(5, 2)
Y = np.array([[0], [4], [1], [3], [2]], np.float32)
PARAMS = {"b": array(np.linspace(-1, 1, 4)), "w": array(np.linspace(0.5, 2, 12).reshape(3, 4))}
GRADS = [{n: array(k * np.cos(9 * np.asarray(p))) for n, p in PARAMS.items()} for k in (1, 2)]


def inner_loss(params):
    return jnp.sum((jnp.tanh(X @ params["w"]) - Y) ** 2)


def after_two_clipped_steps(params, rate):
    """For each clip the loss after an inner loop, whose start and rate are learnt."""
    losses = []
    for clip in TRANSFORMATIONS:
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
    import orbax.checkpoint as ocp  # half a second, of the one process that runs this

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
    kinds = (cg.HistoryThreshold, cg.ZScoreThreshold, cg.EMAThreshold)
    thresholds = (cg.PercentileThreshold(90), *(kind() for kind in kinds))
    tx = cg.skip_spikes(
        optax.chain(
            cg.clip_by_global_norm(schedule, stats=True),
            *(cg.clip_by_norm(threshold, stats="per_leaf") for threshold in thresholds),
            optax.adam(RATE),
        )
    )
    tx = optax.GradientTransformation(jax.jit(tx.init), jax.jit(tx.update))
    _, saved = trained(tx, steps=2)
    restored = through_orbax(saved, jax.eval_shape(tx.init, PARAMS), tmp_path)
    clip = restored.inner_state[0]
    assert isinstance(clip, cg.types.GradientClipState) and clip.count == 2
    assert_close(trained(tx, restored), trained(tx, saved), rtol=0)
