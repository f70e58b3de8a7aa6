"""Gradient transformations: state, schedules, selection, policies, optax around them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import clipgrad as cg
from tests.helpers import CASES, RELEASED, array, assert_close, assert_same, tree_of
from tests.rows import crossed, each_value, first_row

CLIPS = {
    "clip_by_value": (cg.clip_by_value, optax.clip),
    "clip_by_norm": (cg.clip_by_norm, None),
    "clip_by_global_norm": (cg.clip_by_global_norm, optax.clip_by_global_norm),
    "clip_by_block_rms": (cg.clip_by_block_rms, optax.clip_by_block_rms),
    "adaptive_grad_clip": (cg.adaptive_grad_clip, optax.adaptive_grad_clip),
}
# The others agree up to 1e-6.
WITH_ITS_BITS = ("clip_by_value", "clip_by_global_norm")
every_clip = pytest.mark.parametrize("name", CLIPS)
SHAPES = [
    {"w": (3, 4), "b": (4,)},
    {"a": (8, 16), "b": (16,), "c": (16, 4), "d": (4,)},
    {"conv": (3, 3, 4, 8), "w": (128, 64), "b": (64,)},
]


def update(tx, grads, params=None, state=None, **extra):
    return tx.update(grads, tx.init(params) if state is None else state, params, **extra)


@pytest.mark.slow
@each_value
@pytest.mark.parametrize("name", [name for name, (_, theirs) in CLIPS.items() if theirs])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("threshold", [0.01, 0.5])
def test_it_equals_optax_under_jit(name, shapes, threshold):
    ours, theirs = CLIPS[name]
    run = [
        jax.jit(lambda g, p, f=f: update(f(threshold), g, p)[0], compiler_options=RELEASED)
        for f in (ours, theirs)
    ]
    rng = np.random.default_rng(0)
    for scale in (1e-3, 1.0, 30.0, 1e4):
        grads, params = (
            {k: jnp.asarray(rng.normal(size=s) * c, jnp.float32) for k, s in shapes.items()}
            for c in (scale, 1.0)
        )
        ours, theirs = (f(grads, params) for f in run)
        compare = assert_same if name in WITH_ITS_BITS else assert_close
        compare(ours, theirs)


@every_clip
def test_the_state_is_that_of_the_optax_function(name):
    params = {"w": array(np.ones((2, 2)))}
    tx = CLIPS[name][0](0.1)
    assert tx.init(params) == optax.EmptyState()
    with jax.numpy_dtype_promotion("standard"):
        ours = optax.chain(tx, optax.adam(1e-3)).init(params)
        theirs = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3)).init(params)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)


@pytest.mark.slow
@each_value
@every_clip
@pytest.mark.parametrize(
    "threshold", [0.5, optax.linear_schedule(1.0, 0.0, 4)], ids=["number", "schedule"]
)
@pytest.mark.parametrize("stats", [True, False])
def test_the_state_keeps_its_structure_in_a_scan(name, threshold, stats, key):
    tx = CLIPS[name][0](threshold, stats=stats)
    params = tree_of(key, jnp.bfloat16)

    def body(state, grads):
        updates, new = tx.update(grads, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, new)
        return new, updates

    grads = jax.tree.map(lambda x: jnp.stack([x] * 3), tree_of(key, jnp.bfloat16, 9.0))
    state, updates = jax.lax.scan(body, tx.init(params), grads)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, grads)
    if isinstance(state, cg.types.GradientClipState):
        assert state.count == 3
        assert (state.stats is None) == (not stats)


def test_statistics_are_kept_and_found(key):
    tx = optax.chain(cg.clip_by_global_norm(1.0, stats=True), optax.sgd(1.0))
    params = {"w": array(np.zeros(2))}
    update, state = jax.jit(tx.update), tx.init(params)
    for scale, clipped, bad in ((0.1, 0, 0), (1.0, 1, 0), (2.0, 2, 0), (np.nan, 3, 1)):
        _, state = update({"w": array(np.multiply([3.0, 4.0], scale))}, state, params)
        assert int(optax.tree.get(state, "clipped_count")) == clipped
        assert int(optax.tree.get(state, "nonfinite_count")) == bad
        np.testing.assert_allclose(optax.tree.get(state, "stats").norm, 5 * scale, rtol=1e-6)
    assert optax.tree.get(state, "threshold") == 1


def test_a_schedule_is_evaluated_at_the_number_of_updates():
    schedule = optax.linear_schedule(1.0, 0.0, transition_steps=4)
    tx = cg.clip_by_global_norm(schedule)
    state = tx.init(array(np.zeros(2)))
    update = jax.jit(tx.update)
    for step in range(6):
        updates, state = update(array([3.0, 4.0]), state)
        np.testing.assert_allclose(np.linalg.norm(updates), 1 - min(step, 4) / 4, rtol=1e-6)
        assert float(state.threshold) == 1 - min(step, 4) / 4 and int(state.count) == step + 1


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("rule", [
    lambda t: cg.ClipByValue(t), lambda t: cg.ClipByValue(1.0, min=lambda s: -t(s)),
    lambda t: cg.ClipByNorm(t), lambda t: cg.ClipByBlockRMS(t), lambda t: cg.AdaptiveClip(t),
    lambda t: cg.AdaptiveClip(0.1, eps=t),
], ids=range(6))  # fmt: skip
def test_every_threshold_can_be_a_schedule(rule, key):
    grads, params = tree_of(key, scale=9.0), tree_of(jax.random.fold_in(key, 1), scale=1e-2)
    tx = cg.gradient_clip(rule(lambda step: 0.5 / (1.0 + jnp.float32(step))))
    state = tx.init(params)
    for step in range(3):
        updates, state = tx.update(grads, state, params)
        constant = rule(lambda _, step=step: 0.5 / (1.0 + step))
        fixed = cg.gradient_clip(constant)
        assert_close(updates, fixed.update(grads, fixed.init(params), params)[0])


# where

TREE = {
    "layer": {"bias": array([30.0]), "kernel": array([3.0, 4.0])},
    "head": array([9.0]),
}


@pytest.mark.parametrize(
    "where, error, match",
    [
        (lambda tree: False, TypeError, "where: got False from the function, expected a mask"),
        ({"layer": False, "head": False}, ValueError, "where: got a mask, expected one"),
        ({"layer": True}, ValueError, "where: got a mask of the structure .* expected a prefix"),
        ([True, False], ValueError, "where: got a mask of the structure .* expected a prefix"),
        ({"layer": 1, "head": 0}, TypeError, "where: got [01] of type int in the mask"),
    ],
    ids=range(5),
)
def test_a_wrong_where_is_refused(where, error, match):
    with pytest.raises(error, match=match):
        cg.clip_grads(TREE, cg.ClipByValue(1.0), where=where)
    with pytest.raises(error, match=match):
        cg.clip_by_value(1.0, where=where).init(TREE)


def test_a_clip_of_units_leaves_out_what_where_leaves_out():
    params, where = jax.tree.map(np.ones_like, TREE), {"layer": True, "head": np.False_}
    clip = jax.jit(lambda g: cg.clip_grads(g, cg.AdaptiveClip(0.5), params, where=where))
    clipped, stats = jax.device_get(clip(TREE))
    assert_same(clipped["head"], np.asarray(TREE["head"]))
    assert clipped["layer"]["bias"] == 0.5
    assert stats.size == 3


# nonfinite

BAD = {"a": array([jnp.nan, 3.0]), "b": array([-jnp.inf, 4.0]), "c": array([0.0])}


@pytest.mark.slow
def test_zero_replaces_what_is_not_finite_before_the_norm():
    clipped, stats = cg.clip_grads(BAD, cg.ClipByGlobalNorm(1.0), nonfinite="zero")
    np.testing.assert_allclose(clipped["a"], [0, 0.6], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], [0, 0.8], rtol=1e-6)
    assert (stats.norm, stats.nonfinite) == (5, 2)
    value, stats = cg.clip_grads(BAD, cg.ClipByValue(1.0), nonfinite="zero")
    np.testing.assert_array_equal(value["b"], [0, 1])
    assert stats.nonfinite == 2


def test_error_names_the_leaves():
    with pytest.raises(
        FloatingPointError, match=r"NaN or inf in 'a' \(1 of 2 elements\), 'b' \(1 of"
    ):
        cg.clip_grads(BAD, cg.ClipByValue(1.0), nonfinite="error")
    cg.clip_grads(TREE, cg.ClipByValue(1.0), nonfinite="error")
    cg.clip_grads(BAD, cg.ClipByValue(1.0), nonfinite="error", where="c")


def test_error_is_an_error_of_checkify_under_jit():
    tx = cg.clip_by_global_norm(1.0, nonfinite="error")
    checked = jax.jit(checkify.checkify(lambda grads: update(tx, grads)[0]))
    error, _ = checked(BAD)
    with pytest.raises(
        checkify.JaxRuntimeError, match="1 elements of the gradient 'a' are NaN or inf"
    ):
        error.throw()
    checked({k: array(np.ones(2)) for k in "ab"})[0].throw()


def test_an_unknown_policy_is_refused():
    for call in (
        lambda: cg.clip_grads(TREE, cg.ClipByValue(1.0), nonfinite="ignore"),
        lambda: cg.clip_by_value(1.0, nonfinite="ignore"),
    ):
        with pytest.raises(
            ValueError, match="got 'ignore', expected one of propagate, zero, error"
        ):
            call()


# bad input


@pytest.mark.parametrize(
    "number", [0.5, np.float32(0.5), array(0.5)], ids=lambda x: type(x).__name__
)
def test_a_number_in_place_of_a_rule_is_a_limit_of_the_norm(number):
    loss = lambda w, x: jnp.sum(w * x)  # noqa: E731
    for call in (
        lambda: cg.gradient_clip(number),
        lambda: cg.clip_grads(TREE, number),
        lambda: cg.clip_per_example(loss, number),
    ):
        with pytest.raises(TypeError, match=r"did you mean ClipByGlobalNorm\(0.5\)\?"):
            call()


@pytest.mark.parametrize("bad", [0.1, cg.ClipByValue, "norm"], ids=str)
def test_what_is_no_rule_is_refused(bad):
    for call in (lambda: cg.gradient_clip(bad), lambda: cg.clip_grads(TREE, bad)):
        with pytest.raises(
            TypeError, match="expected a ClipRule, a function of the gradients or None"
        ):
            call()


def test_swapped_arguments_and_arrays_in_place_of_a_rule_are_refused_without_their_numbers():
    with pytest.raises(TypeError, match=r"grads: got ClipByNorm.* write clip_grads\(grads, rule\)"):
        cg.clip_grads(cg.ClipByNorm(1.0), TREE)
    for bad, got in ((TREE, "dict"), (array(np.ones(2)), r"float32\[2\]")):
        with pytest.raises(TypeError, match=f"rule: got {got}, expected a ClipRule"):
            cg.gradient_clip(bad)


def test_a_state_without_the_statistics_that_are_asked_for_is_refused():
    with pytest.raises(ValueError, match="state: got EmptyState with stats=True, expected the"):
        cg.clip_by_norm(1.0, stats=True).update(array(np.ones(2)), optax.EmptyState())


def test_adaptive_clipping_without_parameters_is_refused():
    tx = cg.adaptive_grad_clip(0.1)
    with pytest.raises(
        ValueError, match=r"params: got None with AdaptiveClip.*update\(grads, state, params\)"
    ):
        tx.update(TREE, tx.init(TREE))


@pytest.mark.parametrize(
    "params, match",
    [
        ({"a": array(np.ones(3))}, r"params: got \(3,\) for a, expected the shape .*, \(2,\)"),
        (
            {"b": array(np.ones(2))},
            "params: got another structure, expected the structure of the gradients",
        ),
        ({"a": None}, "params: got None for a"),
    ],
    ids=range(3),
)
def test_parameters_that_do_not_fit_are_refused(params, match):
    with pytest.raises(ValueError, match=match):
        cg.clip_grads({"a": array(np.ones(2))}, cg.AdaptiveClip(0.1), params)


def test_a_schedule_outside_of_a_gradient_clip_is_refused():
    for call in (
        lambda: cg.clip_grads(TREE, cg.ClipByNorm(lambda s: 1.0)),
        lambda: cg.ClipByNorm(lambda s: 1.0)(TREE),
    ):
        with pytest.raises(TypeError, match="max_norm: got a schedule"):
            call()


def test_none_is_off():
    assert_same(update(cg.gradient_clip(None), TREE)[0], TREE)
    assert_same(cg.clip_grads(TREE, None)[0], TREE)


def test_a_function_of_a_user_sees_only_the_selected_leaves():
    tree = {"f": array([2.0]), "i": array([3], np.int32), "n": None}
    halve = lambda grads: jax.tree.map(lambda g: 0.5 * g, grads)  # noqa: E731
    tx = cg.gradient_clip(halve, stats=True)
    updates, state = update(tx, tree, tree)
    assert updates["f"] == 1 and updates["i"] is tree["i"] and state.threshold is None


# optax around it


@pytest.mark.parametrize("name", ["clip_by_norm", "clip_by_global_norm", "clip_by_block_rms"])
def test_the_slope_at_the_threshold_is_that_of_a_gradient_within(name):
    """As in optax: half of it, the mean of both sides, would be that of a maximum."""
    tx = CLIPS[name][0](1.0)

    @jax.jit
    @jax.grad
    def slope(g):
        return jnp.sum(update(tx, {"w": g})[0]["w"])

    assert [slope(jnp.float32(g)) for g in (0.0, 0.5, 1.0, 2.0)] == [1, 1, 1, 0]


def test_the_argument_of_optax_is_an_error_that_says_ours():
    with pytest.raises(TypeError, match=r"clip_by_value: got max_delta=1.0, expected max=1.0"):
        cg.clip_by_value(max_delta=1.0)


# A rule is a transformation.


class Halved(cg.ClipRule):
    def __call__(self, grads, params=None):
        return jax.tree.map(lambda g: 0.5 * g, grads)


TRANSFORMING = {
    **{case.name: case.make(0.3) for case in CASES},
    "a schedule": cg.ClipByGlobalNorm(optax.linear_schedule(1.0, 0.5, 4)),
    "an adaptive threshold": cg.ClipByNorm(cg.PercentileThreshold(50, window=4)),
    "of a user": Halved(),
}
AROUND = {
    "chain": lambda rule: optax.chain(rule, optax.sgd(1.0)),
    "masked": lambda rule: optax.masked(rule, {"bias": True, "conv": False, "dense": True}),
    "partition": lambda rule: optax.partition(
        {"a": rule, "b": optax.identity()}, {"bias": "a", "conv": "b", "dense": "a"}
    ),
    "MultiSteps": lambda rule: optax.MultiSteps(optax.chain(rule, optax.sgd(1.0)), 2),
    "apply_if_finite": lambda rule: optax.apply_if_finite(rule, 3),
    "skip_spikes": cg.skip_spikes,
}


@crossed(6)
@pytest.mark.parametrize("rule", TRANSFORMING.values(), ids=TRANSFORMING)
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_a_rule_is_the_transformation_that_gradient_clip_makes_of_it(rule, around, key):
    grads, params = tree_of(key, scale=5.0), tree_of(jax.random.fold_in(key, 1))
    del grads["empty"], params["empty"]
    with jax.numpy_dtype_promotion("standard"):
        results = []
        for tx in (around(rule), around(cg.gradient_clip(rule))):
            update, state = jax.jit(tx.update), jax.jit(tx.init)(params)
            for _ in range(2):
                updates, state = update(grads, state, params)
            results.append((updates, state))
    assert_same(*results)


def test_a_rule_that_does_nothing_says_what_it_lacks():
    with pytest.raises(NotImplementedError, match="ClipRule: got a rule without __call__"):
        cg.clip_grads(array(np.ones(2)), cg.ClipRule())


# -- Arguments of `update` reach an inner optimizer that names them, through every wrapper.


def seeing():
    """An optimizer that names all that `train_step` gives, keeps it, and has no other parameter."""

    def update(updates, state, params=None, *, value, grad, value_fn):
        del state, params
        shown = value, jnp.sum(grad["w"]), value_fn(grad)
        return updates, {"given": jnp.stack(shown)}

    return optax.GradientTransformationExtraArgs(lambda _: {"given": jnp.zeros(3)}, update)


def seeing_of_a_user():
    """An optimizer that names what a loop of a user gives."""

    def update(updates, state, params=None, *, value, temperature):
        del state, params
        return updates, {"given": jnp.stack([value, temperature])}

    return optax.GradientTransformationExtraArgs(lambda _: {"given": jnp.zeros(2)}, update)


WRAPPERS = {
    "bare": lambda core: core,
    "named chain": lambda core: optax.named_chain(("a", core), ("b", optax.scale(1.0))),
    "masked": lambda core: optax.masked(core, {"w": True}),
    "multi_transform": lambda core: optax.multi_transform({"a": core}, {"w": "a"}),
    "MultiSteps": lambda core: optax.MultiSteps(core, 1),
    "apply_if_finite": lambda core: optax.apply_if_finite(core, 3),
    "skip_spikes of it": lambda core: cg.skip_spikes(
        optax.MultiSteps(core, 1).gradient_transformation(), halt=True
    ),
    "schedule_free": lambda core: optax.contrib.schedule_free(core, 0.1),
    "flatten": optax.flatten,
}


@pytest.mark.usefixtures("users_promotion")
@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_all_that_a_step_gives_reaches_the_optimizer_in_every_wrapper(wrapper):
    def loss(p, x):
        return jnp.sum(p["w"] * x)

    step = cg.train_step(loss, WRAPPERS[wrapper](seeing()))
    state, metrics = step(step.init({"w": jnp.array([1.0, 2.0])}), jnp.full(2, 3.0))
    seen = optax.tree.get(state.opt_state, "given")
    assert metrics["loss"] == 9 and seen.tolist() == [9, 6, 18]


@pytest.mark.usefixtures("users_promotion")
@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_arguments_that_only_an_inner_optimizer_names_reach_it(wrapper):
    inner, params = WRAPPERS[wrapper](seeing_of_a_user()), {"w": jnp.ones(2)}
    tx = cg.skip_spikes(inner, halt=True)
    _, state = tx.update(params, tx.init(params), params, value=1.0, temperature=2.0)
    assert optax.tree.get(state, "given").tolist() == [1, 2]


@pytest.mark.usefixtures("users_promotion")
@pytest.mark.slow
def test_what_a_wrapper_takes_for_itself_does_not_reach_an_optimizer_without_a_parameter():
    tx, params = cg.skip_spikes(seeing_of_a_user()), {"w": jnp.ones(2)}
    extra = {"value": 1.0, "temperature": 2.0, "grad_norm": 1.0, "unknown": 3.0}
    _, state = tx.update(params, tx.init(params), params, **extra)
    assert optax.tree.get(state, "given").tolist() == [1, 2]


@pytest.mark.usefixtures("users_promotion")
@pytest.mark.slow
def test_extra_arguments_reach_the_optimizer_through_multi_steps():
    params = {"w": jnp.ones(2)}
    loss = lambda p, x: jnp.sum(p["w"]) + jax.lax.stop_gradient(x)  # noqa: E731
    for outside in (True, False):
        inner = cg.skip_spikes(optax.sgd(1.0), sigma=None, halt=True)
        inner = inner if outside else optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau())
        multi = optax.MultiSteps(inner, 2)
        if outside:  # which `train_step` refuses
            opt_state = multi.init(params)
            for x in (0.0, jnp.nan):
                value, grads = jax.value_and_grad(loss)(params, jnp.float32(x))
                updates, opt_state = multi.update(grads, opt_state, params, value=value)
            assert opt_state.inner_opt_state.skipped and (updates["w"] == 0).all()
        else:
            step = cg.train_step(loss, cg.skip_spikes(multi, halt=True))
            state = step.init(params)
            for x in (0.0, jnp.nan):
                state, metrics = step(state, jnp.float32(x))
            assert metrics["skipped"] and (state.params["w"] == 1).all()
            opt_state = state.opt_state
        assert (opt_state.gradient_step, opt_state.mini_step) == (int(outside), int(not outside))
    assert optax.MultiSteps(optax.sgd(1.0), 2).has_updated(state.opt_state) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        state.opt_state.nothing  # noqa: B018
