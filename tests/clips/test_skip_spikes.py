"""skip_spikes: what is skipped, what is kept, what is forgotten; and a long disturbed training."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import RELEASED, array, assert_same
from tests.rows import each_value, first_row


@pytest.fixture(autouse=True)
def standard_promotion():
    """Of optax's optimizers, which mix integer counts with floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


LONGEST = 66


@functools.cache
def compiled(tx):
    def run(grads, params):
        def step(state, g):
            updates, new = tx.update(g, state, params)
            chex.assert_trees_all_equal_shapes_and_dtypes(state, new)
            return new, (updates, new)

        return jax.lax.scan(step, tx.init(params), grads)[1]

    return jax.jit(run)


def scan(tx, norms):
    """The updates and states of gradients of two elements that have these norms.

    All runs that are shorter than the longest have its program.
    """
    steps = len(norms)
    padded = np.zeros((max(steps, LONGEST), 1), np.float32)
    padded[:steps, 0] = norms
    updates, states = compiled(tx)(padded * np.float32([[0.6, 0.8]]), np.zeros(2, np.float32))
    return jax.tree.map(lambda x: x[:steps], jax.device_get((updates, states)))


def noise(steps, seed=0):
    return np.float32(np.exp(np.random.default_rng(seed).normal(size=steps) * 0.2))


SMALL = {"window": 16, "min_history": 8}
PLAIN, ADAM = cg.skip_spikes(optax.sgd(1.0), **SMALL), cg.skip_spikes(optax.adam(0.1), **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [optax.adam(0.1), optax.sgd(0.1, momentum=0.9)])
def test_steps_that_are_not_skipped_are_those_of_the_optimizer(inner):
    tx, params = cg.skip_spikes(inner), jnp.zeros(2)
    state, inner_state = tx.init(params), inner.init(params)
    ours, theirs = (jax.jit(f.update, compiler_options=RELEASED) for f in (tx, inner))
    for norm in noise(4):
        grads = norm * jnp.array([0.6, 0.8])
        updates, state = ours(grads, state, params)
        expected, inner_state = theirs(grads, inner_state, params)
        assert_same((updates, state.inner_state), (expected, inner_state))
    assert not state.skipped and state.skipped_count == 0
    _, states = scan(tx, noise(300))
    assert not states.skipped.any()


@first_row
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e6, 3e38], ids=str)
def test_a_skipped_step_changes_nothing_but_the_counters(bad):
    norms = noise(30)
    norms[20] = bad
    updates, states = jax.device_get(scan(ADAM, norms))
    before, after = (jax.tree.map(lambda x, i=i: x[i], states) for i in (19, 20))
    assert_same(after.inner_state, before.inner_state)
    assert_same(after.window, before.window)
    assert (updates[20] == 0).all() and (updates[19] != 0).all()
    assert after.skipped and after.skipped_count == 1
    assert after.spike_count == int(np.isfinite(bad))
    clean_updates, clean = jax.device_get(scan(ADAM, np.delete(norms, 20)))
    assert_same(states.window.norms[-1], clean.window.norms[-1])
    assert_same(updates[-1], clean_updates[-1])
    np.testing.assert_allclose(states.raw_norm[20], abs(bad), rtol=1e-6)
    chex.assert_tree_all_finite(states._replace(raw_norm=0.0))


@pytest.mark.slow
def test_the_optimizer_is_shown_zeros_in_place_of_a_bad_gradient():
    shown = []
    inner = optax.stateless(lambda updates, params: (shown.append(updates), updates)[1])
    tx = cg.skip_spikes(inner)
    tx.update(jnp.array([jnp.nan, jnp.inf]), tx.init(jnp.zeros(2)))
    assert (shown[0] == 0).all()


@pytest.mark.slow
def test_the_limit_is_mean_and_deviations_of_the_last_norms():
    norms = noise(40)
    limit = np.mean(norms[-16:]) + 6 * np.std(norms[-16:])
    for factor, skipped in ((0.999, False), (1.001, True)):
        _, states = scan(PLAIN, [*norms, factor * limit])
        assert states.skipped[-1] == skipped and not states.skipped[:-1].any()


@pytest.mark.slow
def test_before_there_is_a_history_only_the_absolute_limit_holds():
    norms = [1.0] * 7 + [1e3, 1e6]
    # Norms of 0 are taken and forgotten; and a detector that saw the clipped norm sees no spike.
    clipped = cg.skip_spikes(optax.chain(cg.clip_by_global_norm(1.0), optax.sgd(1.0)), **SMALL)
    _, states = scan(clipped, [0.0] * 20 + norms)
    np.testing.assert_array_equal(states.skipped, [False] * 28 + [True])
    _, states = scan(cg.skip_spikes(optax.sgd(1.0), max_norm=10.0, **SMALL), norms)
    np.testing.assert_array_equal(states.skipped, [False] * 7 + [True] * 2)
    _, states = scan(cg.skip_spikes(optax.sgd(1.0)), np.ones(64).tolist() + [9.0])
    assert states.skipped[-1] and not states.skipped[:-1].any(), "half a window by default"


@pytest.mark.slow
def test_equal_norms_make_no_outlier_of_a_slightly_larger_one():
    for norm, skipped in ((1.05, False), (1.07, True)):
        _, states = scan(PLAIN, [1.0] * 20 + [norm])
        assert states.skipped[-1] == skipped


@pytest.mark.slow
def test_a_growth_for_good_is_skipped_and_shown():
    norms = np.concatenate([noise(20), 100 * noise(10, seed=1), [np.nan] * 3])
    _, states = scan(PLAIN, norms)
    assert states.skipped[20:].all() and not states.skipped[:20].any()
    np.testing.assert_array_equal(states.skipped_consecutive, [0] * 20 + [*range(1, 14)])
    np.testing.assert_array_equal(states.nonfinite_consecutive, [0] * 30 + [1, 2, 3])


def test_extra_arguments_are_passed_on():
    seen = {}

    def update(updates, state, params=None, **extra):
        seen.update(extra)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = cg.skip_spikes(inner, max_norm=10.0)
    ones = array(np.ones(2))
    jax.eval_shape(lambda: tx.update(ones, tx.init(ones), ones, value=1.0, anything=2))
    assert seen == {"value": 1.0, "anything": 2}


@pytest.mark.slow
def test_states_with_keys_integers_and_nothing_are_kept():
    key = jax.random.key(0)
    noisy = optax.GradientTransformation(
        lambda params: {"key": key, "count": jnp.zeros((), jnp.int32), "none": None},
        lambda updates, state, params=None: (
            updates,
            {"key": jax.random.split(state["key"])[0], "count": state["count"] + 1, "none": None},
        ),
    )
    tx = cg.skip_spikes(noisy)
    _, state = tx.update(jnp.array([jnp.nan]), tx.init(jnp.zeros(1)))
    assert state.inner_state["key"] == key and state.inner_state["count"] == 0
    _, state = tx.update(jnp.array([1.0]), state)
    assert state.inner_state["key"] != key and state.inner_state["count"] == 1


@first_row
@pytest.mark.parametrize("wrap", [
    lambda tx: optax.chain(cg.clip_by_value(1e9), tx, optax.identity()),
    lambda tx: optax.masked(tx, {"w": True, "v": False}),
    lambda tx: cg.skip_spikes(optax.MultiSteps(optax.sgd(1.0), 1)),
    lambda tx: cg.skip_spikes(tx),
], ids=["chain", "masked", "of MultiSteps", "twice"])  # fmt: skip
def test_it_composes(wrap):
    tx = wrap(cg.skip_spikes(optax.sgd(1.0)))
    params = {"w": array(np.ones(2)), "v": array(np.ones(2))}
    state = tx.init(params)
    for value, expected in ((1.0, -1.0), (jnp.nan, 0.0), (2.0, -2.0)):
        grads = {"w": array([value, value]), "v": array(np.ones(2))}
        updates, state = jax.jit(tx.update)(grads, state, params)
        assert (updates["w"] == expected).all()


@pytest.mark.slow
def test_a_microbatch_may_be_skipped_in_an_accumulation():
    updates, states = scan(cg.skip_spikes(optax.MultiSteps(optax.sgd(1.0), 3)), [1.0, np.nan] * 3)
    assert states.skipped_count[-1] == 3
    np.testing.assert_allclose(np.flatnonzero(updates[:, 0]), [4])
    np.testing.assert_allclose(updates[4], [-0.6, -0.8], rtol=1e-6)


# Without the rule of outliers.


@pytest.mark.slow
def test_without_outliers_only_what_is_not_finite_or_above_the_limit_is_skipped():
    norms = np.concatenate([noise(200), 99 * noise(2), [np.nan, 1e3, 1e30, -np.inf], noise(9)])
    every = [cg.skip_spikes(optax.sgd(1.0), sigma=None, max_norm=m) for m in (None, 500.0)]
    skipped = [np.flatnonzero(scan(tx, norms)[1].skipped) for tx in every]
    np.testing.assert_array_equal(skipped[0], [202, 205])
    np.testing.assert_array_equal(skipped[1], [202, 203, 204, 205])
    _, states = scan(every[1], norms)
    assert states.window is None and states.skipped_consecutive.max() == 4
    assert (states.skipped_count[-1], states.spike_count[-1]) == (4, 2)


@pytest.mark.parametrize("option", [{"window": 64}, {"window": 128}, {"min_history": 8}])
def test_a_number_for_a_history_that_is_not_kept_is_refused(option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"{name}: got {value} with sigma=None.* leave {name} out"):
        cg.skip_spikes(optax.sgd(1.0), sigma=None, **option)


def test_a_state_without_a_history_where_one_is_needed_is_refused():
    state = cg.skip_spikes(optax.sgd(1.0), sigma=None).init(array(np.ones(2)))
    with pytest.raises(ValueError, match="state: got a state without the history that sigma=6.0"):
        cg.skip_spikes(optax.sgd(1.0)).update(array(np.ones(2)), state)


# Bad input


@pytest.mark.parametrize("kwargs, match", [
    ({"window": 0}, "window: got 0, expected an integer of at least 1"),
    ({"sigma": -1.0}, "sigma: got -1.0, expected a number >= 0"),
    ({"min_history": 129}, "min_history: got 129, expected at most window, 128"),
    ({"max_norm": -1.0}, "max_norm: got -1.0"),
    ({"window": array(8, int)}, "window: got .*; for optax.inject_hyperparams name it in stat"),
    ({"min_history": cg.HistoryThreshold()}, "min_history: got HistoryThreshold.*an integer"),
], ids=str)  # fmt: skip
def test_what_is_out_of_range_is_refused(kwargs, match):
    with pytest.raises(ValueError, match=match):
        cg.skip_spikes(optax.sgd(1.0), **kwargs)


@pytest.mark.parametrize("name", ["max_norm", "sigma"])
def test_a_threshold_where_a_number_belongs_is_refused(name):
    with pytest.raises(TypeError, match=f"{name}: got PercentileThreshold.* expected a number"):
        cg.skip_spikes(optax.sgd(1.0), **{name: cg.PercentileThreshold(90)})
    injected = optax.inject_hyperparams(
        cg.skip_spikes, static_args={"window", "sigma", "max_norm"} - {name}
    )
    with pytest.raises(TypeError, match=f"{name}: got .*Array.* name it in static_args"):
        injected(optax.sgd(1.0), **{name: 1.0}).init(array(np.ones(1)))


# A training that halts.


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("halt, row, at", [
    (True, [1.0, 50.0, np.nan], 2),
    ("spike", [1.0, 50.0, np.nan], 1),
    (True, [np.inf], 0),
], ids=str)  # fmt: skip
def test_after_the_halt_nothing_changes_but_the_count(halt, row, at):
    tx = cg.skip_spikes(optax.adam(0.1), max_norm=9.0, halt=halt, **SMALL)
    updates, states = scan(tx, [*row, 1.0, 1.0, np.nan])
    first, last = (jax.tree.map(lambda x, i=i: x[i], states) for i in (at, -1))
    np.testing.assert_array_equal(states.count, np.arange(len(row) + 3) + 1)
    np.testing.assert_array_equal(states.halted, np.arange(len(row) + 3) >= at)
    assert not updates[at:].any() and first.halted_at == at
    assert (updates[0] != 0).all() or at == 0
    assert_same(last._replace(count=first.count), first)


@pytest.mark.slow
def test_after_resume_a_step_is_what_it_would_have_been():
    tx, twin = cg.skip_spikes(optax.adam(0.1), halt=True, **SMALL), ADAM
    grads, bad = jnp.array([0.6, 0.8]), jnp.array([jnp.nan, 1.0])
    state, expected = tx.init(grads), twin.init(grads)
    update, update_of_twin = jax.jit(tx.update), jax.jit(twin.update)
    for g in (grads, bad, grads, grads):
        _, state = update(g, state)
    for g in (grads, bad):
        _, expected = update_of_twin(g, expected)
    resumed = jax.jit(cg.resume)({"tx": (state, None)})["tx"][0]
    assert not resumed.halted and resumed.halted_at == -1 and resumed.count == 4
    assert_same(update(grads, resumed)[0], update_of_twin(grads, expected)[0])
    assert_same(cg.resume(resumed), resumed)


def test_a_loss_that_is_not_finite_halts_if_it_is_known():
    for halt, halted in ((True, True), ("spike", True), (False, None)):
        tx = cg.skip_spikes(optax.sgd(1.0), halt=halt)
        update = jax.jit(lambda g, tx=tx: tx.update(g, tx.init(g), value=jnp.float32(jnp.nan)))
        _, state = update(array(np.ones(2)))
        assert state.halted == halted and state.skipped == bool(halt)


def test_states_with_a_flag_and_without_are_not_mixed_up():
    plain, halting = cg.skip_spikes(optax.sgd(1.0)), cg.skip_spikes(optax.sgd(1.0), halt=True)
    assert len(jax.tree.leaves(plain.init(array(np.ones(1))))) == 9
    with pytest.raises(ValueError, match="state: got a state without the flag that halt=True"):
        halting.update(array(np.ones(1)), plain.init(array(np.ones(1))))
    with pytest.raises(ValueError, match=r"tree: got tuple without a state of skip_spikes\(halt="):
        cg.resume((plain.init(array(np.ones(1))),))
    inside = cg.skip_spikes(halting)
    _, state = jax.jit(inside.update)(array([jnp.nan]), inside.init(array(np.ones(1))))
    assert cg.resume(state).inner_state.halted.dtype == bool
    for wrong in ("nan", 1, None):
        with pytest.raises(ValueError, match=f'halt: got {wrong!r}, expected True .*"spike"'):
            cg.skip_spikes(optax.sgd(1.0), halt=wrong)


@pytest.mark.slow
def test_the_training_step_says_what_was_skipped():
    tx = cg.skip_spikes(optax.chain(cg.clip_by_global_norm(1.0), optax.adam(0.1)), max_norm=1e3)
    traces = []

    def loss(params, batch):
        traces.append(1)
        return jnp.sum(params * batch)

    step = cg.train_step(loss, tx)
    state = step.init(jnp.ones(2))
    for value, skipped in ((1.0, False), (jnp.nan, True), (1e4, True), (2.0, False)):
        before = np.asarray(state.params)
        state, metrics = step(state, array([value, value]))
        assert metrics["skipped"] == skipped == (state.params == before).all()
        assert metrics["nonfinite_consecutive"] == np.isnan(value)
    assert state.opt_state.skipped_count == 2 and len(traces) == 1


def test_skip_spikes_judges_the_norm_over_the_axes_of_axis_name():
    """Two lanes of the norms 3 and 4 have 5 together, which is too much, and which neither has."""

    def skipped(**axis_name):
        tx = cg.skip_spikes(optax.sgd(1.0), max_norm=4.5, sigma=None, **axis_name)
        update = lambda grads: tx.update(grads, tx.init(grads))[1].skipped  # noqa: E731
        return jax.jit(jax.vmap(update, axis_name="x"))(array([[3.0], [4.0]]))

    assert skipped(axis_name=jax.P("x")).all() and not skipped().any()


def test_train_step_says_skipped_if_one_of_two_skip_spikes_did():
    never, always = (cg.skip_spikes(optax.identity(), max_norm=x, sigma=None) for x in (9.0, 0.0))
    for pair in ((never, always), (always, never)):
        step = cg.train_step(lambda w, x: jnp.sum(w * x), optax.chain(*pair, optax.sgd(1.0)))
        _, metrics = step(step.init(array(np.ones(2))), array(np.ones(2)))
        assert metrics["skipped"] and metrics["skipped_consecutive"] == 1


def test_where_says_what_is_judged():
    tx = cg.skip_spikes(optax.sgd(1.0), max_norm=10.0, where="!meta")
    grads = {"meta": array([99.0]), "w": array([3.0])}
    updates, state = jax.jit(lambda grads: tx.update(grads, tx.init(grads), grads))(grads)
    assert state.raw_norm == 3 and updates["meta"] == -99


# What is judged: the gradient, the update, or the loss.


def judged_by(judge, **options):
    """Adam of whose updates the norm is the rate, however large the gradient is."""
    schedule = lambda i: jnp.where(i == 20, 1.0, 0.01) * (1 + 0.01 * jnp.cos(1.0 * i))  # noqa: E731
    inner = optax.chain(optax.scale_by_sign(), optax.scale_by_learning_rate(schedule))
    options = SMALL | options
    return cg.skip_spikes(inner, judge=judge, **options)


def judged_run(judge, jump, steps=24, **options):
    """What is skipped in a run whose gradient, update or loss jumps in step 20."""
    tx = judged_by(judge, **options)
    inner_step = jnp.arange(steps)

    def step(carried, i):
        grads = jnp.array([3.0, 4.0]) * (1 + 0.1 * jnp.cos(1.0 * i))
        value = 2.0 + 0.1 * jnp.sin(1.0 * i)
        grads = jnp.where((i == 20) & (jump == 0), 1e4, 1.0) * grads
        value = jnp.where((i == 20) & (jump == 2), 1e4, value)
        # The count of the schedule stands still in a step that is skipped.
        _, state = tx.update(grads, carried, grads, value=value)
        return state, state

    return jax.lax.scan(step, tx.init(jnp.zeros(2)), inner_step)[1]


JUDGED = ["gradient", "update", "loss"]


@pytest.mark.parametrize("judge", JUDGED)
def test_the_jump_of_what_is_judged_is_skipped_and_no_other(judge):
    run = jax.jit(lambda jump: judged_run(judge, jump))
    for jump, name in enumerate(JUDGED):
        states = jax.device_get(run(jump))
        # The update jumps in every run, by its schedule.
        jumps = name == judge or judge == "update"
        assert states.skipped[20] == jumps and not states.skipped[:20].any(), name
        assert (states.judged is None) == (judge == "gradient")
        number = states.raw_norm if judge == "gradient" else states.judged
        np.testing.assert_array_equal(states.skipped, number > states.limit)
    past = np.asarray(number[4:20], np.float64)
    limit = past.mean() + 6 * max(past.std(), abs(past.mean()) / 100)
    np.testing.assert_allclose(states.limit[20], limit, rtol=1e-5)


LOSSES = {
    "positive": lambda noise: 2 + noise,
    "negative": lambda noise: -50 + noise,
    "negative and wide": lambda noise: -1000 + 100 * noise,
    "around zero": lambda noise: noise - 0.5,
    "constant": lambda noise: 3 + 0 * noise,
    "large": lambda noise: 1e30 * (2 + noise),
}


@functools.cache
def limits_of_losses():
    tx = cg.skip_spikes(optax.sgd(1.0), judge="loss", **SMALL)

    def step(state, value):
        _, state = tx.update(jnp.ones(2), state, value=value)
        return state, (state.skipped, state.limit)

    return jax.jit(lambda x: jax.lax.scan(step, tx.init(jnp.ones(2)), x)[1])


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_any_sign_has_a_limit(name):
    values = LOSSES[name](np.random.default_rng(0).uniform(size=40))
    values[30] += 100 * max(1.0, np.abs(values[:30]).max())
    skipped, limits = jax.device_get(limits_of_losses()(np.float32(values)))
    np.testing.assert_array_equal(np.flatnonzero(skipped), [30])
    past = values[14:30]
    limit = past.mean() + 6 * max(past.std(), abs(past.mean()) / 100)
    np.testing.assert_allclose(limits[30], limit, rtol=1e-4)


@each_value
@pytest.mark.parametrize("judge", JUDGED)
@pytest.mark.parametrize("halt", [False, True, "spike"])
def test_an_update_that_is_not_finite_is_skipped_before_it_spoils_anything(halt, judge):
    """Adam of a zero gradient in float16 is 0 / 0."""
    tx = cg.skip_spikes(optax.adam(1e-3), halt=halt, judge=judge)
    step = cg.train_step(lambda p, x: jnp.sum(p["w"] * x) + jnp.sum(p["v"]), tx)
    params = {"w": array(np.ones(2), jnp.float16), "v": array(np.ones(2), jnp.float16)}
    state, metrics = step(step.init(params), array([0.0, 1.0], jnp.float16))
    assert_same(state.params, params)
    assert metrics["skipped"] and np.isfinite(metrics["skip_spikes"]["raw_norm"])
    assert metrics["skipped_consecutive"] == metrics["nonfinite_consecutive"] == 1
    assert state.opt_state.spike_count == 0
    if halt:
        assert state.opt_state.halted and state.opt_state.halted_at == 0
        flags = {path: bool(x) for path, x in state.opt_state.nonfinite_leaves.items()}
        assert flags == {"w": True, "v": False}
        resumed = cg.resume(state)
        assert not resumed.opt_state.halted and resumed.opt_state.halted_at == -1
    if judge == "update":
        assert np.isnan(metrics["skip_spikes"]["judged"])


@pytest.mark.slow
@pytest.mark.parametrize("judge", JUDGED)
def test_multi_steps_and_lbfgs_may_be_inside_whatever_is_judged(judge):
    multi = cg.skip_spikes(optax.MultiSteps(optax.sgd(1.0), 2), judge=judge)
    step = cg.train_step(lambda w, x: jnp.sum(w * x), multi)
    state = step.init(jnp.zeros(2))
    for value in (1.0, jnp.nan, 1.0):
        state, _ = step(state, array([value, value]))
    np.testing.assert_array_equal(state.params, [-1.0, -1.0])
    newton = cg.train_step(
        lambda w, x: jnp.sum((w - x) ** 2), cg.skip_spikes(optax.lbfgs(), judge=judge)
    )
    state = newton.init(jnp.zeros(2))
    for _ in range(3):
        state, metrics = newton(state, jnp.array([1.0, 2.0]))
    assert not metrics["skipped"] and metrics["loss"] < 1e-4


def test_what_is_judged_wrongly_is_an_error():
    with pytest.raises(ValueError, match="judge: got 'norm', expected one of 'gradient', 'update'"):
        cg.skip_spikes(optax.sgd(1.0), judge="norm")
    tx = cg.skip_spikes(optax.sgd(1.0), judge="loss", max_norm=-3.0)
    state = jax.jit(tx.init)(array(np.ones(2)))
    for value, got in ((None, "none"), (array(np.ones(2)), r"float32\[2\]")):
        with pytest.raises(ValueError, match=rf'value: got {got} with judge="loss", .*value=loss'):
            jax.eval_shape(lambda value: tx.update(jnp.ones(2), state, value=value), value)
    skipped = jax.jit(lambda value: tx.update(jnp.ones(2), state, value=value)[1].skipped)
    assert [bool(skipped(value)) for value in (-2.0, -4.0, jnp.nan, jnp.inf)] == [1, 0, 1, 1]
