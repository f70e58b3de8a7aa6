"""The training step: compiled once, right metrics, one clip after accumulation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import array, assert_close, generator
from tests.rows import each_value, first_row
from tests.training.wrappers import AROUND


@pytest.fixture(autouse=True)
def standard_promotion():
    """Of optax's optimizers, which mix integer counts with floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def data(key, n=8):
    rng = generator(key)
    params = {"w": array(rng.normal(size=(3, 5))), "v": array(rng.normal(size=5))}
    return params, (array(rng.normal(size=(n, 3))), array(50 * rng.normal(size=n)))


@pytest.mark.slow
def test_one_trace_for_a_thousand_steps_of_a_schedule(key):
    params, _ = data(key)
    traces = []

    def counted(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    schedule = optax.linear_schedule(1.0, 0.1, 1000)
    tx = optax.chain(
        cg.clip_by_global_norm(schedule), optax.adam(optax.linear_schedule(1e-2, 0, 999))
    )
    step = cg.train_step(counted, tx)
    state = step.init(params)
    xs, ys = jax.random.normal(key, (1000, 4, 3)), jax.random.normal(key, (1000, 4))
    for x, y in zip(xs, ys, strict=True):
        state, metrics = step(state, (x, y))
    assert len(traces) == 1
    assert optax.tree.get(state.opt_state, "threshold") == pytest.approx(schedule(999))
    assert np.isfinite(metrics["loss"])


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_counted(key):
    params, (x, y) = data(key)
    step = cg.train_step(loss_fn, optax.sgd(0.1))
    _, metrics = step(step.init(params), (x.at[0, 0].set(jnp.nan), y))
    assert metrics["nonfinite"] > 0


@pytest.mark.slow
def test_without_statistics_the_state_is_that_of_optax_and_the_metrics_are_three_numbers(key):
    """So a checkpoint that was written with optax's function in the chain goes on."""
    params, batch = data(key)
    old = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)).init(params)
    step = cg.train_step(loss_fn, optax.chain(cg.clip_by_global_norm(1.0), optax.sgd(0.1)))
    assert jax.tree.structure(step.init(params).opt_state) == jax.tree.structure(old)
    state, metrics = step(cg.types.TrainState(params, old), batch)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(old)
    assert set(metrics) == {"loss", "grad_norm", "nonfinite"}
    assert metrics["grad_norm"] > 1 and metrics["nonfinite"] == 0


@each_value
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("last", [True, "per_leaf"])
def test_metrics_are_those_of_the_last_clip_with_statistics(first, last, key):
    """Their keys are the same with one such clip and with two; `clips` has all."""
    params, batch = data(key)
    tx = optax.chain(
        cg.clip_by_value(2.0, stats=first),
        cg.clip_by_global_norm(1.0, stats=last),
        cg.clip_by_global_norm(1e9),
        optax.sgd(0.1),
    )
    step = cg.train_step(loss_fn, tx)
    _, metrics = jax.device_get(step(step.init(params), batch))
    *before, clip = metrics["clips"]
    assert len(before) == first
    for stats in before:  # the same norm in two places of the program: each is right to 4e-7
        np.testing.assert_allclose(stats.norm, metrics["grad_norm"], rtol=4e-7)
    assert isinstance(clip, cg.types.ClipStats) and clip.norm == metrics["measured_norm"]
    assert 1 < metrics["measured_norm"] < metrics["grad_norm"]
    np.testing.assert_allclose(metrics["clipped_norm"], 1, rtol=1e-6)
    np.testing.assert_allclose(metrics["clip_scale"], 1 / metrics["measured_norm"], rtol=1e-6)
    assert ("leaves" in metrics) == (last == "per_leaf")


@pytest.mark.slow
def test_the_norm_that_the_clip_measured_has_a_name_of_its_own(key):
    """Where some parameters have no clip, it is not the norm of all gradients."""
    params, batch = data(key)
    tx = optax.chain(cg.clip_by_global_norm(1.0, where="w", stats=True), optax.sgd(0.1))
    step = cg.train_step(loss_fn, tx)
    _, metrics = step(step.init(params), batch)
    grads = jax.grad(loss_fn)(params, batch)
    np.testing.assert_allclose(metrics["grad_norm"], cg.global_norm(grads), rtol=1e-5)
    np.testing.assert_allclose(metrics["measured_norm"], cg.global_norm(grads["w"]), rtol=1e-5)
    assert metrics["measured_norm"] < 0.9 * metrics["grad_norm"]
    logged = cg.scalars(metrics)
    assert logged["measured_norm"] == logged["clip/norm"] == metrics["measured_norm"]


@first_row
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_accumulated_gradients_are_clipped_once_after_averaging(parts, key):
    params, batch = data(key)
    tx = optax.chain(cg.clip_by_global_norm(1.0), optax.sgd(0.1))
    whole, split = cg.train_step(loss_fn, tx), cg.train_step(loss_fn, tx, accumulate=parts)
    expected, metrics = whole(whole.init(params), batch)
    state, accumulated = split(split.init(params), batch)
    assert_close(state.params, expected.params, rtol=1e-5)
    np.testing.assert_allclose(accumulated["loss"], metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(accumulated["grad_norm"], metrics["grad_norm"], rtol=1e-5)


def test_low_precision_gradients_are_accumulated_in_float32_and_keep_their_dtype():
    params, seen = {"w": array(np.ones(()), jnp.bfloat16)}, []
    noted = optax.stateless(lambda grads, params: (seen.append(grads["w"].dtype), grads)[1])
    tx = optax.chain(noted, optax.sgd(1.0))
    step = cg.train_step(lambda p, b: p["w"] * b.mean(), tx, accumulate=512)
    batch = array(np.ones(512), jnp.bfloat16)
    state, metrics = step(step.init(params), batch)
    assert float(metrics["grad_norm"]) == 1 and float(state.params["w"]) == 0
    assert metrics["loss"].dtype == state.params["w"].dtype == jnp.bfloat16
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("parts", [1, 2])
def test_auxiliary_output(parts, key):
    params, batch = data(key)

    def with_aux(params, batch):
        return loss_fn(params, batch), {"mean": batch[0].mean()}

    step = cg.train_step(with_aux, optax.sgd(0.1), has_aux=True, accumulate=parts)
    _, metrics = step(step.init(params), batch)
    assert metrics["aux"]["mean"].shape == (() if parts == 1 else (parts,))
    np.testing.assert_allclose(np.mean(metrics["aux"]["mean"]), np.mean(batch[0]), rtol=1e-5)


def test_the_first_state_of_parameters_on_a_device_may_be_made_in_a_program_on_others():
    step = cg.train_step(lambda w, x: jnp.sum(w * x), optax.sgd(0.1))
    w = jax.device_put(np.ones(4, np.float32), jax.devices()[1])
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    state = jax.jit(lambda: step.init(w), out_shardings=jax.NamedSharding(mesh, jax.P()))()
    np.testing.assert_array_equal(state.params, 1)


def test_the_first_state_is_copied_in_place_and_compiles_nothing(compiled):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    own, spread = np.ones(41, np.float32), jax.NamedSharding(mesh, jax.P("x"))
    params = {
        "NumPy": own,
        "anywhere": jax.device_put(np.ones(43, np.float32)),
        "there": jax.device_put(np.ones(47, np.float32), jax.devices()[3]),
        "spread": jax.device_put(np.ones((8, 3), np.float32), spread),
    }
    state = cg.train_step(loss_fn, optax.sgd(0.1)).init(params)
    assert not compiled
    for name, copy in state.params.items():
        given = params[name]
        assert copy.committed == getattr(given, "committed", False), name
        if isinstance(given, jax.Array):
            assert copy.sharding == given.sharding, name
            pointers = [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in (copy, given)]
            assert pointers[0] != pointers[1], name
    own[:] = 2.0
    assert np.all(np.asarray(state.params["NumPy"]) == 1)


@pytest.mark.parametrize("donate", [True, False])
def test_buffers_are_donated_and_the_parameters_of_the_caller_are_not(donate, key):
    params, batch = data(key)
    step = cg.train_step(loss_fn, optax.sgd(0.1), donate=donate)
    state = step.init(params)
    step(state, batch)
    assert all(leaf.is_deleted() == donate for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_the_raw_norm_is_not_summed_twice(key):
    params, batch = data(key)
    tx = optax.chain(cg.clip_by_global_norm(1.0), optax.sgd(0.1))
    step = cg.train_step(loss_fn, tx)
    text = step.update.lower(step.init(params), batch).compile().as_text()
    bare = jax.jit(lambda p, b: tx.update(jax.grad(loss_fn)(p, b), tx.init(p), p)[0])
    plain = bare.lower(params, batch).compile().as_text()
    # The loss is one sum more, and NaN and inf are counted in each of the two leaves.
    assert text.count(" reduce(") <= plain.count(" reduce(") + 1 + len(params)


def without_extra_arguments(inner):
    """A wrapper of a user, which passes nothing on."""
    return optax.GradientTransformation(inner.init, lambda g, s, p=None: inner.update(g, s, p))


WRAPPERS = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "nested": lambda tx: optax.chain(
        optax.identity(),
        optax.MultiSteps(optax.apply_if_finite(tx, 3), 1).gradient_transformation(),
    ),
    **AROUND,
    "named_chain": lambda tx: optax.named_chain(("clip", tx), ("rest", optax.identity())),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda step: step >= 0),
    "of a user": without_extra_arguments,
}


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_every_wrapper_reports_all_clips_inside_and_outside_and_keeps_its_state(wrap, key):
    """With bits and a state of the optimizer alone, and nothing is traced twice."""
    params, batch = data(key)
    inner = optax.chain(cg.clip_by_global_norm(1.0, stats=True), optax.sgd(0.1))
    tx = optax.chain(cg.clip_by_value(2.0, stats=True), wrap(inner))
    step = cg.train_step(loss_fn, tx)
    state = step.init(params)
    expected, opt_state = params, tx.init(params)
    plain = jax.jit(lambda p, s: plain_step(tx, p, s, batch))
    for _ in range(2):
        state, metrics = step(state, batch)
        expected, opt_state = plain(expected, opt_state)
    outer, clip = metrics["clips"]
    np.testing.assert_allclose(clip.clipped_norm, 1, rtol=1e-6)
    assert outer.norm == metrics["grad_norm"] and outer.clipped_norm >= clip.norm * (1 - 1e-6) > 1
    assert step.update._cache_size() == 1
    chex.assert_trees_all_equal(state.params, expected)
    chex.assert_trees_all_equal_structs(state.opt_state, opt_state)


def plain_step(tx, params, opt_state, batch):
    grads = jax.grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@pytest.mark.slow
def test_a_clip_that_does_not_act_in_a_step_shows_the_last_in_which_it_did(key):
    params, batch = data(key)
    tx = optax.MultiSteps(optax.chain(cg.clip_by_global_norm(1.0, stats=True), optax.sgd(0.1)), 2)
    step = cg.train_step(loss_fn, tx)
    state, shown = step.init(params), []
    for _ in range(3):
        state, metrics = step(state, batch)
        shown.append(metrics)
    assert [float(m["clips"][0].size) for m in shown] == [0, 20, 20]
    assert shown[0]["clip_scale"] == 1 > shown[1]["clip_scale"] == shown[2]["clip_scale"]
    assert optax.tree.get(state.opt_state, "clipped_count") == 1


def test_a_loss_and_an_optimizer_that_are_swapped_are_refused():
    with pytest.raises(TypeError, match=r"loss_fn: got an optax.*; write train_step\(loss_fn, opt"):
        cg.train_step(optax.sgd(0.1), lambda params, batch: 0.0)
    with pytest.raises(TypeError, match=r"loss_fn: got float, expected a function of \(params, b"):
        cg.train_step(0.5, optax.sgd(0.1))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "wrong_state, match",
    [
        (lambda state, x: (x, state), r"state: got .*Array.*; the state comes first: write step\("),
        (lambda state, x: ({"x": x}, state), "state: got dict, expected the state of a train"),
        (lambda state, x: (state.params, x), r"got dict, .*; it is step.init\(params\): write ste"),
    ],
)
def test_anything_in_place_of_the_state_is_refused(wrong_state, match):
    step = cg.train_step(lambda w, x: jnp.sum(w["w"] * x), optax.sgd(0.1))
    with pytest.raises(TypeError, match=match):
        step(*wrong_state(step.init({"w": array(np.ones(2))}), array(np.ones(2))))


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match="optimizer: got function, expected an optax.Gradient"):
        cg.train_step(loss_fn, loss_fn)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True], ids=str)
def test_a_wrong_number_of_parts_is_refused(bad):
    with pytest.raises(ValueError, match="accumulate: got .*expected a positive integer"):
        cg.train_step(loss_fn, optax.sgd(0.1), accumulate=bad)


def test_a_batch_that_does_not_divide_is_refused(key):
    params, batch = data(key)
    step = cg.train_step(loss_fn, optax.sgd(0.1), accumulate=3)
    with pytest.raises(ValueError, match=r"batch: got a leaf of shape \(8, 3\).*accumulate=3"):
        step(step.init(params), batch)


def tagged_loss(params, batch):
    def cell(h, x):
        h = checkpoint_name(jnp.tanh(params["w"] * h + x), "h")
        return h, None

    return 5 * jnp.mean(jax.lax.scan(cell, jnp.zeros(batch.shape[0]), batch.T)[0])


def tagged_step(rule, **options):
    step = cg.train_step(tagged_loss, optax.sgd(0.1), error_clip={"h": rule}, **options)
    params = {"w": jnp.array(1.5)}
    batch = jnp.linspace(0.0, 1.0, 12).reshape(4, 3)
    return step(step.init(params), batch), params, batch


@pytest.mark.slow
def test_statistics_are_added_up_over_microbatches():
    (_, whole), _, _ = tagged_step(None)
    (_, parts), _, _ = tagged_step(None, accumulate=2)
    np.testing.assert_array_equal(parts["error_clip"]["h"].size, whole["error_clip"]["h"].size)
    # Each microbatch is a mean of its own, over half as many examples.
    np.testing.assert_allclose(
        parts["error_clip"]["h"].norm, 2 * whole["error_clip"]["h"].norm, rtol=1e-5
    )


@pytest.mark.slow
def test_a_limit_by_value_grows_with_the_number_of_microbatches():
    (whole, metrics), _, _ = tagged_step(cg.ErrorClipByValue(0.25))
    (parts, _), _, _ = tagged_step(cg.ErrorClipByValue(0.5), accumulate=2)
    np.testing.assert_allclose(parts.params["w"], whole.params["w"], rtol=1e-5)
    assert metrics["error_clip"]["h"].clipped.any()


def test_wrong_error_clips_are_refused():
    with pytest.raises(TypeError, match="error_clip: got ClipByValue.*expected a mapping from"):
        cg.train_step(tagged_loss, optax.sgd(0.1), error_clip=cg.ErrorClipByValue(1.0))
    step = cg.train_step(tagged_loss, optax.sgd(0.1), error_clip={"q": None})
    with pytest.raises(ValueError, match=r"^train_step: got 'q', expected a name .*\['h'\]"):
        step(step.init({"w": jnp.array(1.5)}), array(np.ones((4, 3))))


@pytest.mark.slow
def test_integers_and_booleans_among_the_parameters_stay_as_they_are(key):
    """Buffers of a model, such as indices and counters."""
    params, batch = data(key)
    buffers = {"table": jnp.arange(3), "flag": jnp.array([True, False])}

    def loss(params, batch):
        return loss_fn({k: params[k] for k in ("w", "v")}, batch) * params["table"].sum()

    tx = cg.skip_spikes(optax.chain(cg.clip_by_global_norm(1.0), optax.adamw(0.1)))
    for options in ({}, {"accumulate": 2, "error_clip": {}}):
        step = cg.train_step(loss, tx, **options)
        state, metrics = step(step.init(params | buffers), batch)
        chex.assert_trees_all_equal({k: state.params[k] for k in buffers}, buffers)
        plain = cg.train_step(lambda p, b: 3 * loss_fn(p, b), tx, **options)
        expected, plain_metrics = plain(plain.init(params), batch)
        assert_close({k: state.params[k] for k in params}, expected.params, rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], plain_metrics["grad_norm"], rtol=1e-5)
        assert step(state, batch)[0].params["table"].dtype == jnp.int32
    whole = cg.types.TrainState(params | buffers, tx.init(params | buffers))
    with pytest.raises(ValueError, match="state: got an optimizer state of another structure"):
        step(whole, batch)


def test_keys_of_random_numbers_among_the_parameters_are_refused(key):
    step = cg.train_step(loss_fn, optax.sgd(0.1))
    with pytest.raises(TypeError, match="params: got a leaf of dtype key<.*> at 'rng', expected n"):
        step.init({"rng": key})


@pytest.mark.slow
def test_what_a_gradient_overwrites_is_handled_as_by_flax(key):
    """Scales and histories of 8-bit floats: neither clipped, measured, trained nor averaged."""
    linen = pytest.importorskip("flax.linen")
    from flax.training.train_state import TrainState

    dense = linen.Dense(8, dot_general_cls=linen.Fp8DirectDotGeneralOp)
    x = 30 * jax.random.normal(key, (8, 8))
    variables = jax.jit(dense.init)(key, x)
    loss = lambda params, x: jnp.mean(dense.apply(params, x) ** 2)  # noqa: E731
    theirs = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01))
    gradient = jax.jit(jax.grad(loss))
    flax = TrainState.create(apply_fn=dense.apply, params=variables, tx=theirs)
    apply = jax.jit(lambda state, x: state.apply_gradients(grads=jax.grad(loss)(state.params, x)))
    ours = optax.chain(cg.clip_by_global_norm(0.1, stats=True), optax.adamw(0.01))
    step = cg.train_step(loss, cg.skip_spikes(ours), donate=False)
    state = step.init(variables)
    for scale in (1.0, 2.0):
        flax = apply(flax, scale * x)
        state, metrics = step(state, scale * x)
    chex.assert_trees_all_equal(state.params, flax.params)
    assert metrics["measured_norm"] == metrics["grad_norm"] > 0.1

    skipped, _ = step(state, jnp.nan * x)
    chex.assert_trees_all_equal(skipped.params, state.params)

    halves = cg.train_step(loss, ours, accumulate=2)
    accumulated, _ = halves(halves.init(variables), x)
    (history,) = (
        leaf for path, leaf in jax.tree.leaves_with_path(accumulated.params)
        if "input_amax_history" in jax.tree_util.keystr(path)
    )  # fmt: skip
    assert history[0] == jnp.abs(x).max()

    grads = gradient(variables, x)
    clipped, stats = cg.clip_grads(grads, cg.ClipByGlobalNorm(0.1), nonfinite="zero")
    chex.assert_trees_all_equal(*(t["_overwrite_with_gradient"] for t in (clipped, grads)))
    np.testing.assert_allclose(stats.norm, cg.global_norm(grads["params"]), rtol=1e-6)
    with pytest.raises(ValueError, match="where: got '_over.*expected one that selects a leaf"):
        cg.clip_grads(grads, cg.ClipByValue(1.0), where="_overwrite_with_gradient")
    spikes = cg.skip_spikes(optax.sgd(0.1), max_norm=float(stats.norm) * 1.01)
    assert not spikes.update(grads, spikes.init(grads))[1].skipped
