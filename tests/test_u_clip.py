"""`u_clip`: what is cut off is added to the next gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import CASES, assert_close, float64, tree_of


def run(tx, steps, params=None):
    state, found = tx.init(steps[0] if params is None else params), []
    for grads in steps:
        updates, state = tx.update(grads, state, params)
        found.append(updates)
    return found, state


@pytest.mark.kinds()
@pytest.mark.ci("case")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_the_algorithm_of_the_paper_with_every_rule(case, key):
    params = tree_of(jax.random.fold_in(key, 9))
    steps = [tree_of(jax.random.fold_in(key, i), scale=10.0 ** (2 - i)) for i in range(4)]
    tx = cg.u_clip(case.make(0.3))
    found, state = run(optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update)), steps,
                       params)  # fmt: skip
    carry = jax.tree.map(np.zeros_like, float64(params))
    for updates, grads in zip(found, steps, strict=True):
        total = jax.tree.map(np.add, float64(grads), carry)
        expected = case.reference(total, float64(params), np.float32(0.3))
        carry = jax.tree.map(np.subtract, total, expected)
        assert_close(updates, expected, rtol=1e-5, atol=1e-6)
    assert_close(state.carry, carry, rtol=1e-5, atol=1e-5)


def test_the_rounding_of_half_precision_is_not_lost_either():
    step = jnp.full(3, 1 + 2.0**-7, jnp.bfloat16)
    found, state = run(cg.u_clip(cg.clip_by_norm(0.7)), [step] * 50)
    assert found[0].dtype == jnp.bfloat16 and state.carry.dtype == jnp.float32
    given, got = (sum(np.float64(x) for x in xs) for xs in ([step] * 50, found))
    np.testing.assert_allclose(got + np.float64(state.carry), given, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("rule", [cg.ClipByGlobalNorm(1.0), cg.ClipByValue(1.0)], ids=str)
def test_one_bad_step_is_seen_and_forgotten(rule, bad):
    steps = [jnp.array([3.0, 4.0]), jnp.array([bad, 1.0]), jnp.zeros(2), jnp.zeros(2)]
    found, state = run(cg.u_clip(rule), steps)
    assert all(np.isfinite(u).all() for u in found[2:]) and np.isfinite(state.carry).all()
    assert (found[2] != 0).all()  # what was cut off before is not lost
    assert np.isfinite(found[1]).all() == (bad == np.inf and isinstance(rule, cg.ClipByValue))


def test_the_state_is_carried_by_scan_and_keeps_its_structure():
    tx = optax.chain(cg.u_clip(cg.clip_by_global_norm(1.0, stats=True)), optax.trace(0.9))
    params = {"w": jnp.zeros(2)}

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update({"w": grads}, state, params)
        return (optax.apply_updates(params, updates), state), None

    xs = jnp.array([[30.0, 40.0], [0.0, 0.1]])
    (_, state), _ = jax.jit(lambda c: jax.lax.scan(step, c, xs))((params, tx.init(params)))
    assert_close(
        optax.tree.get(state, "carry")["w"], np.array([30 - 1.2, 40 - 1.6 + 0.1]), rtol=1e-3
    )
    assert optax.tree.get(state, "clipped_count") == 2


def test_a_training_step_has_the_statistics_of_the_clip_inside():
    optimizer = optax.chain(cg.u_clip(cg.ClipByGlobalNorm(1.0)), optax.sgd(1.0))
    step = cg.train_step(lambda w, x: jnp.sum(w * x), optimizer)
    state = step.init(jnp.zeros(2))
    for norm in (5.0, 9.0):  # 3, 4 and then 3, 4 besides the 2.4, 3.2 that were cut off
        state, metrics = step(state, jnp.array([3.0, 4.0]))
        assert_close(metrics["measured_norm"], norm, rtol=1e-6)
        assert_close(metrics["clipped_norm"], 1.0)


def test_a_norm_that_is_known_is_not_that_of_the_sum():
    tx = cg.u_clip(cg.ClipByGlobalNorm(1.0))
    state = tx.init(jnp.zeros(2))
    for _ in range(2):
        updates, state = tx.update(jnp.array([3.0, 4.0]), state, grad_norm=5.0)
        assert_close(updates, np.array([0.6, 0.8]))


def test_what_is_not_a_clip_or_not_its_state_is_refused():
    with pytest.raises(TypeError, match="rule: got 1.0 of type float, expected a ClipRule"):
        cg.u_clip(1.0)
    with pytest.raises(TypeError, match="did you mean an instance"):
        cg.u_clip(cg.ClipByGlobalNorm)
    tx = cg.u_clip(cg.ClipByValue(1.0))
    for state in (tx.init({"w": jnp.zeros(3)}), tx.init(None), optax.EmptyState()):
        with pytest.raises(ValueError, match=r"state: got a carry .*the state of init\(params\)"):
            tx.update({"w": jnp.zeros(2)}, state)


def test_leaves_without_gradients_stay_and_have_no_carry():
    tree = {"i": jnp.arange(2), "k": jax.random.key(0), "n": None, "w": jnp.array([3.0, 4.0])}
    tx = cg.u_clip(cg.ClipByGlobalNorm(1.0))
    updates, state = tx.update(tree, tx.init(tree))
    assert all(updates[name] is tree[name] for name in "ikn")
    assert state.carry["i"] is None and state.carry["w"].shape == (2,)
