"""The training step and skip_spikes, crossed: optimizers, wrappers, frameworks and arguments."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import array, assert_close
from tests.rows import each_value
from tests.training.wrappers import AROUND

pytestmark = pytest.mark.usefixtures("users_promotion")
PARAMS = {"w": array([3.0, 4.0]), "v": array([1.0, 2.0])}


def linear(params, x):
    """A loss whose gradient is its batch, in each leaf."""
    return sum(jnp.sum(w * x) for w in jax.tree.leaves(params))


# ---- keys of clips: from metrics and from a state, in any wrapper

WRAPPERS = {
    "alone": lambda tx: tx,
    "chain in a chain": lambda tx: optax.chain(optax.identity(), optax.chain(tx)),
    "named_chain": lambda tx: optax.named_chain(("first", tx), ("second", optax.identity())),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    **AROUND,
    "skip_spikes twice": lambda tx: cg.skip_spikes(cg.skip_spikes(tx)),
    "skip_spikes of MultiSteps": lambda tx: cg.skip_spikes(optax.MultiSteps(tx, 2)),
}
KEPT = [(True,), ("per_leaf",), (True, "per_leaf"), ("per_leaf", "per_leaf"), (False, True)]


def clips(kept):
    """Clips with such statistics; one without has a schedule, and so a state."""
    limit = optax.constant_schedule(1.0)
    return optax.chain(*(cg.clip_by_norm(limit, stats=stats) for stats in kept), optax.sgd(0.1))


@each_value
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_one_clip_has_the_same_keys_from_metrics_and_from_the_state(wrap, kept):
    step = cg.train_step(linear, WRAPPERS[wrap](clips(kept)))

    def run():
        state, metrics = step(step.init(PARAMS), jnp.ones(2))
        return cg.scalars(metrics), cg.scalars(state), metrics

    logged, of_state, metrics = jax.eval_shape(run)
    with_stats = [stats for stats in kept if stats]
    names = ["clip"] if len(with_stats) == 1 else [f"clip_{i}" for i in range(len(with_stats))]
    for name, stats in zip(names, with_stats, strict=True):
        keys_of_clip = [
            {key for key in keys if key.startswith(f"{name}/")} for keys in (logged, of_state)
        ]
        assert keys_of_clip[0] == keys_of_clip[1] > {f"{name}/norm", f"{name}/threshold"}
        assert (f"{name}/leaves/w/norm" in keys_of_clip[0]) == (stats == "per_leaf")
    skips = [{key for key in keys if key.startswith("skip_spikes")} for keys in (logged, of_state)]
    assert skips[0] == skips[1] and bool(skips[0]) == ("skip_spikes" in wrap)
    assert len(metrics["clips"]) == len(with_stats)


@pytest.mark.slow
def test_leaves_of_several_clips_are_in_the_metrics_and_apart_for_a_logger():
    each = [cg.clip_by_norm(m, where=n, stats="per_leaf") for n, m in (("w", 1.0), ("v", 2.0))]
    step = cg.train_step(linear, optax.chain(*each, cg.clip_by_norm(0.5, stats="per_leaf")))
    _, metrics = step(step.init(PARAMS), jnp.array([30.0, 40.0]))
    logged = cg.scalars(metrics)
    assert set(metrics["leaves"]) == {"w", "v"} and not any(k.startswith("leaves") for k in logged)
    norms = {key: float(x) for key, x in logged.items() if key.endswith("w/norm")}
    expected = {"clip_0/leaves/w/norm": 50.0, "clip_2/leaves/w/norm": 1.0}
    assert norms == pytest.approx(expected, rel=1e-6)
    assert float(logged["clip_1/leaves/v/clipped_norm"]) == pytest.approx(2.0)


def test_metrics_are_a_dictionary_and_say_so():
    step = cg.train_step(linear, optax.sgd(0.1), donate=False)
    state = step.init(PARAMS)
    _, metrics = step(state, array(np.ones(2)))
    with pytest.raises(AttributeError, match=r"write metrics\['loss'\]$"):
        _ = metrics.loss
    assert not hasattr(metrics, "losss") and isinstance(metrics, dict)
    fetched = jax.device_get(metrics)
    assert fetched["loss"] == metrics["loss"] and fetched | {"step": 1} == {**metrics, "step": 1}
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(metrics)]
    assert paths == ["['grad_norm']", "['loss']", "['nonfinite']"]
    _, stacked = jax.lax.scan(step, state, array(np.ones((3, 2))))
    assert type(stacked) is dict and stacked["loss"].shape == (3,)
    for stats in (cg.types.ClipStats.zero(), cg.types.ValueStats.of(array(np.ones(2)))):
        with pytest.raises(TypeError, match=r"write stats\.norm$"):
            stats["norm"]
        assert stats[-1] is stats.size


# ---- a skipped step undoes a model's state, and what gradients overwrite


class Counting(nnx.Module):
    def __init__(self):
        self.w, self.seen = nnx.Param(array(np.ones(2))), nnx.Variable(array(np.zeros(())))

    def __call__(self, x):
        self.seen[...] = self.seen[...] + x.sum()
        return (self.w[...] * x).sum()


def overwriting(params, x):
    """A loss whose "gradient" of a scale is the largest of a batch, its next value."""
    scale = params["_overwrite_with_gradient"]["deep"]["scale"]
    return jnp.sum(params["w"] * x) + jnp.sum(scale * jax.lax.stop_gradient(x.max()))


def with_scale():
    return {
        "w": array(np.ones(2)),
        "_overwrite_with_gradient": {"deep": {"scale": array(np.zeros(()))}},
    }


# For each framework the loss, the parameters, and what is there beside the weights: the sum or the
# largest of a batch.
MODELS = {
    "NNX": (lambda model, x: model(x), Counting, lambda params: params.seen[...], np.sum),
    "fp8": (
        overwriting,
        with_scale,
        lambda params: params["_overwrite_with_gradient"]["deep"]["scale"],
        np.max,
    ),
}
SKIPPERS = {
    "skip_spikes": cg.skip_spikes(optax.sgd(1.0)),
    "skip_spikes of an update": cg.skip_spikes(
        optax.stateless(lambda g, _: jax.tree.map(lambda x: 0 * x / (x - 2.0), g))
    ),
    "skip_spikes inside": cg.skip_spikes(
        optax.chain(cg.skip_spikes(optax.sgd(1.0), max_norm=99.0))
    ),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(1.0), 5),
    "apply_if_finite in a chain": optax.chain(
        optax.identity(), optax.apply_if_finite(optax.sgd(1.0), 5), optax.identity()
    ),
    "MultiSteps that asks": optax.MultiSteps(
        optax.sgd(1.0), 1, should_skip_update_fn=optax.skip_not_finite
    ),
}


@each_value
@pytest.mark.parametrize("name", SKIPPERS)
@pytest.mark.parametrize("framework", MODELS)
def test_a_skipped_step_leaves_the_state_of_a_model_and_what_gradients_overwrite(framework, name):
    loss, make, state_of, expected = MODELS[framework]
    step = cg.train_step(loss, SKIPPERS[name])
    bad = array([2.0, 1.0]) if name == "skip_spikes of an update" else array([jnp.nan, 1])
    bad = array([300.0, 1.0]) if name == "skip_spikes inside" else bad
    state, good = step.init(make()), array([1.0, 3.0])
    for batch, seen in ((bad, 0.0), (good, expected([1.0, 3.0]))):
        state, _ = step(state, batch)
        assert float(state_of(state.params)) == seen


def test_a_step_that_is_taken_or_only_waits_is_not_undone():
    """apply_if_finite takes what is not finite after too many; its flag outlasts the step."""
    given_up = cg.train_step(lambda m, x: m(x), optax.apply_if_finite(optax.sgd(1.0), 0))
    state, _ = given_up(given_up.init(Counting()), array([jnp.nan, 1.0]))
    assert np.isnan(state.params.seen[...])
    inside = optax.MultiSteps(optax.apply_if_finite(optax.sgd(1.0), 5), 2)
    step = cg.train_step(lambda m, x: m(jnp.where(x > 9, jnp.inf, 0) * 0 + x), inside)
    state = step.init(Counting())
    seen = []
    for value in (1.0, 1e30, 1.0):
        state, _ = step(state, array([value, 1.0]))
        seen.append(float(state.params.seen[...]))
    assert seen[0] == 2.0 and seen[2] == seen[1] + 2.0


# ---- what skip_spikes counts, measures and is judged by

MAKES_NAN = optax.stateless(lambda g, _: jax.tree.map(lambda x: x / (x - 2.0) * 0, g))
# For each reason of a skipped step the optimizer, the bad batch, and whether all was finite.
REASONS = {
    "NaN": (cg.skip_spikes(optax.sgd(1.0)), jnp.nan, False),
    "inf": (cg.skip_spikes(optax.sgd(1.0)), -jnp.inf, False),
    "above the limit": (cg.skip_spikes(optax.sgd(1.0), max_norm=9.0), 50.0, True),
    "an outlier": (cg.skip_spikes(optax.sgd(1.0), window=2), 50.0, True),
    "an outlier, no limit": (cg.skip_spikes(optax.sgd(1.0), window=2, max_norm=99.0), 50.0, True),
    "the optimizer": (cg.skip_spikes(MAKES_NAN), 2.0, False),
}


@pytest.mark.parametrize("name", REASONS)
def test_skipped_steps_in_a_row_are_counted_whatever_the_reason(name):
    tx, bad, finite = REASONS[name]
    step = cg.train_step(linear, tx)
    state, counts = step.init(PARAMS), []
    for value in (1.0, 1.0, bad, bad, bad, 1.0, bad):
        state, metrics = step(state, array([value, 0.0]))
        opt_state, metrics = jax.device_get((state.opt_state, metrics))
        for field in ("skipped", "skipped_consecutive", "nonfinite_consecutive"):
            assert metrics[field] == getattr(opt_state, field) == metrics["skip_spikes"][field]
        counts.append((int(opt_state.skipped_consecutive), int(opt_state.nonfinite_consecutive)))
    expected = [0, 0, 1, 2, 3, 0, 1]
    assert counts == [(n, n * (not finite)) for n in expected]
    assert (opt_state.skipped_count, opt_state.spike_count) == (4, 4 * finite)


HALTING = cg.train_step(linear, cg.skip_spikes(optax.sgd(1.0), max_norm=9.0, halt=True))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30], ids=str)
def test_the_norm_of_a_skipped_step_is_what_was_measured(bad):
    state, metrics = HALTING(HALTING.init({"w": array(np.ones(2))}), array([bad, 0.0]))
    assert metrics["skipped"]
    shown = [metrics["grad_norm"], state.opt_state.raw_norm]
    shown += [cg.scalars(tree)["skip_spikes/raw_norm"] for tree in (metrics, state)]
    np.testing.assert_allclose(shown, [abs(np.float32(bad))] * 4, rtol=1e-6)


LIMITS = {
    "none": ({"sigma": None}, np.finfo(np.float32).max),
    "max_norm": ({"sigma": None, "max_norm": 7.0}, 7.0),
    "history": ({"window": 4, "min_history": 2, "sigma": 3.0}, 2.0 + 3 * np.std([1, 2, 3])),
    "the lower one": ({"window": 4, "min_history": 2, "max_norm": 3.5}, 3.5),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_that_a_step_was_judged_by_is_in_state_and_metrics(name):
    options, limit = LIMITS[name]
    step = cg.train_step(linear, cg.skip_spikes(optax.sgd(1.0), **options))
    state = step.init({"w": array(np.ones(1))})
    assert state.opt_state.limit == np.finfo(np.float32).max
    for value in (1.0, 2.0, 3.0, 2.5):
        state, metrics = step(state, array([value]))
    shown = [state.opt_state.limit, metrics["skip_spikes"]["limit"]]
    shown += [cg.scalars(tree)["skip_spikes/limit"] for tree in (metrics, state)]
    np.testing.assert_allclose(shown, [limit] * 4, rtol=1e-6)


@pytest.mark.parametrize("halt", [False, True, "spike"])
def test_a_loss_that_is_not_finite_halts_though_its_gradient_is(halt):
    step = cg.train_step(lambda w, x: jnp.sum(w) + x, cg.skip_spikes(optax.sgd(1.0), halt=halt))
    for value in (np.nan, np.inf, -np.inf):
        state, metrics = step(step.init(array(np.ones(2))), value)
        state, metrics = jax.device_get((state, metrics))
        assert metrics["skipped"] == (halt is not False) == (state.params == 1).all()
        assert state.opt_state.halted == (True if halt else None)


# ---- microbatches: what they overwrite, and what they weigh


@functools.cache
def overwriting_step(parts):
    return cg.train_step(overwriting, optax.sgd(0.1), accumulate=parts)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("place", range(4))
def test_an_overwritten_parameter_gets_the_largest_of_the_microbatches(place, parts):
    x = np.ones((8, 2), np.float32)
    x[place] = 5.0
    step = overwriting_step(parts)
    state, _ = step(step.init(with_scale()), x)
    assert float(state.params["_overwrite_with_gradient"]["deep"]["scale"]) == 5.0


def mean_over_tokens(w, batch):
    x, mask = batch
    with jax.named_scope("error"):
        error = x @ w["w"] - 1.0
    return jnp.sum((error**2).astype(mask.dtype) * mask) / jnp.sum(mask)


LENGTHS = {
    "uneven": [8, 1, 3, 2, 8, 1, 5, 3],
    "an empty microbatch": [8, 0, 3, 0, 8, 0, 5, 0],
    "even": [4] * 8,
}


@pytest.mark.slow
@each_value
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_weighted_microbatches_have_the_mean_of_the_whole_batch(dtype, parts, lengths, key):
    mask = jnp.asarray(np.arange(8) < np.array(LENGTHS[lengths])[:, None])
    batch = jax.random.normal(key, (8, 8, 3), dtype), mask.astype(dtype)
    weight = lambda batch: jnp.sum(batch[1] != 0)  # noqa: E731
    options = {"error_clip": {"error": None}, "donate": False}
    whole, split = (
        cg.train_step(mean_over_tokens, optax.sgd(1.0), **options, **more)
        for more in ({}, {"accumulate": parts, "weight": weight})
    )
    params = {"w": jnp.ones(3, dtype)}
    (expected, metrics), (state, metrics_of_parts) = (
        s(s.init(params), batch) for s in (whole, split)
    )
    rtol = 1e-5 if dtype == jnp.float32 else 0.03
    assert_close(state.params, expected.params, rtol=rtol, atol=rtol)
    assert metrics_of_parts["loss"].dtype == metrics["loss"].dtype == dtype
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            *(np.float32(m[name]) for m in (metrics_of_parts, metrics)), rtol=rtol
        )
    stats = [m["error_clip"]["error"] for m in (metrics_of_parts, metrics)]
    np.testing.assert_allclose(*(s.norm for s in stats), rtol=rtol)
    assert metrics_of_parts["nonfinite"] == stats[0].nonfinite == 0


def test_train_step_counts_the_statistics_of_a_microbatch_by_its_weight():
    """Cotangents of 3 are clipped to 1; the weights 1 and 3 are shares of 1/4 and 3/4."""
    loss = lambda p, batch: 3 * jnp.sum(checkpoint_name(p * batch, "h"))  # noqa: E731
    step = cg.train_step(
        loss,
        optax.sgd(0.1),
        error_clip={"h": cg.ErrorClipByValue(max=1.0)},
        accumulate=2,
        weight=jnp.sum,
    )
    state, metrics = step(step.init(array(np.ones(1))), array([[1.0], [3.0]]))
    np.testing.assert_allclose(state.params, 1 - 0.1 * (0.25 * 1 + 0.75 * 3), rtol=1e-6)
    shares = np.linalg.norm([0.25, 0.75])
    stats = metrics["error_clip"]["h"]
    np.testing.assert_allclose([stats.norm, stats.clipped_norm], [3 * shares, shares], rtol=1e-6)


@pytest.mark.parametrize("guard", [0.0, 1.0])
def test_weights_that_are_all_zero_count_alike(guard):
    def loss(w, x):
        return jnp.sum(w * 0) / jnp.maximum(jnp.sum(x), guard)

    step = cg.train_step(loss, optax.sgd(1.0), accumulate=2, weight=jnp.sum)
    _, metrics = step(step.init(array(np.ones(2))), array(np.zeros(4)))
    assert np.isnan(metrics["loss"]) if guard == 0 else metrics["loss"] == 0


WEIGHTS = {
    "shape": (lambda x: x, ValueError, r"weight: got float32\[2\] from it, expected a number for"),
    "complex": (lambda x: x.sum() * 1j, ValueError, r"weight: got complex64\[\] from it, expected"),
    "tuple": (lambda x: (x.sum(),), ValueError, "weight: got tuple from it, expected a number"),
    "number": (3.0, TypeError, "weight: got float, expected a function of a microbatch; write"),
    "array": (
        array(np.ones(2)),
        TypeError,
        r"weight: got float32\[2\], expected a function of a micro",
    ),
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_wrong_weight_is_an_error(name, parts):
    weight, kind, match = WEIGHTS[name]
    match = match.replace("[2\\]", "[4\\]") if parts == 1 and name == "shape" else match
    with pytest.raises(kind, match=match):
        step = cg.train_step(linear, optax.sgd(0.1), accumulate=parts, weight=weight)
        step(step.init(array(np.ones(()))), array(np.ones(4)))


KEYS = {"a key": lambda n: jax.random.key(n), "an old key": lambda n: jax.random.PRNGKey(n)}


@pytest.mark.parametrize("make", KEYS.values(), ids=KEYS)
def test_a_key_in_a_batch_of_microbatches_says_how_keys_are_given(make):
    def loss(w, batch):
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(batch["rng"])
        return jnp.mean((batch["x"] + noise) @ w)

    x, params = array(np.ones((8, 3))), array(np.ones(3))
    whole, split = (cg.train_step(loss, optax.sgd(0.1), accumulate=k, donate=False) for k in (1, 2))
    match = r"batch: got one PRNG key at 'rng' with accumulate=2, .*write jax.random.split\(key, 8"
    with pytest.raises(ValueError, match=match):
        split(split.init(params), {"x": x, "rng": make(0)})
    batch = {"x": x, "rng": jax.random.split(make(0), 8)}
    trained_params = [step(step.init(params), batch)[0].params for step in (whole, split)]
    assert_close(*trained_params, rtol=1e-5)


# ---- complex parameters descend


class Wave(nnx.Module):
    def __init__(self):
        self.z = nnx.Param(array(np.zeros(2), jnp.complex64))


class Module(eqx.Module):
    z: jax.Array
    name: str = "a text"


FRAMEWORKS = {
    "tree": (
        lambda: {"z": array(np.zeros(2), jnp.complex64), "r": array(np.ones(2))},
        lambda p: p["z"],
    ),
    "NNX": (Wave, lambda p: p.z[...]),
    "Equinox": (lambda: Module(array(np.zeros(2), jnp.complex64)), lambda p: p.z),
}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.5),
    "adam": optax.adam(0.3),
    "clipped": optax.chain(cg.clip_by_global_norm(1.0), optax.sgd(0.3)),
    "skip_spikes": cg.skip_spikes(optax.sgd(0.1)),
}


@each_value
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_complex_parameters_descend(framework, optimizer, parts):
    make, wave = FRAMEWORKS[framework]

    def loss(params, target):
        return jnp.mean(jnp.sum(jnp.abs(wave(params) - target) ** 2, axis=-1))

    step = cg.train_step(loss, OPTIMIZERS[optimizer], accumulate=parts)
    state, target = step.init(make()), array(np.full((2, 2), 1 - 2j), np.complex64)
    for _ in range(40):
        state, metrics = step(state, target)
    assert metrics["loss"] < 0.1
    np.testing.assert_allclose(wave(state.params), [1 - 2j] * 2, atol=0.4)


# ---- optimizers that would not train

CLIP = cg.ClipByGlobalNorm(1.0)
ALONE = {
    "a rule": lambda: CLIP,
    "a clip": lambda: cg.clip_by_global_norm(1.0, stats=True),
    "a clip of each rule": lambda: cg.gradient_clip(cg.ClipByValue(1.0)),
    "skipped": lambda: cg.skip_spikes(cg.clip_by_norm(1.0)),
    "MultiSteps": lambda: optax.MultiSteps(cg.clip_by_norm(1.0), 2),
    "MultiSteps of a rule": lambda: optax.MultiSteps(CLIP, 2).gradient_transformation(),
}
CLASSES = {
    "alone": lambda: cg.ClipByGlobalNorm,
    "in a chain": lambda: optax.chain(cg.ClipByGlobalNorm, optax.sgd(0.1)),
    "last": lambda: optax.chain(optax.sgd(0.1), cg.ErrorClipByValue),
}
AVERAGED = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "its functions": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "a chain inside": lambda tx: optax.MultiSteps(optax.chain(optax.identity(), tx), 2),
    "a chain outside": lambda tx: optax.chain(
        optax.MultiSteps(tx, 2).gradient_transformation(), optax.identity()
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_clip_alone_is_no_optimizer(name):
    match = r"optimizer: got a clip alone, .*write optax.chain\(clip, optax.sgd\(1e-3\)\)"
    with pytest.raises(TypeError, match=match):
        cg.train_step(linear, ALONE[name]())


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_of_a_rule_is_no_rule(name):
    with pytest.raises(TypeError, match=r"the class .*optax.chain\(clipgrad\.\w+\(1.0\), optax"):
        cg.train_step(linear, CLASSES[name]()).init(PARAMS)


@pytest.mark.parametrize("name", AVERAGED)
def test_an_average_of_what_is_to_be_skipped_is_refused(name):
    match = r"optax.MultiSteps around .*write clipgrad.skip_spikes\(optax.MultiSteps\(optimizer, k"
    tx = AVERAGED[name](cg.skip_spikes(optax.sgd(1.0)))
    with pytest.raises(ValueError, match=match):
        cg.train_step(linear, tx).init(PARAMS)
    if name != "a chain outside":  # which shows it in its state alone
        with pytest.raises(ValueError, match=match):
            cg.train_step(linear, tx)
    functions = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    if name == "a chain outside":
        with pytest.raises(ValueError, match=match):
            step = cg.train_step(linear, tx)
            step(cg.types.TrainState(PARAMS, functions.init(PARAMS)), array(np.ones(2)))


def test_an_average_that_asks_before_it_adds_may_have_skip_spikes_inside():
    tx = optax.MultiSteps(
        cg.skip_spikes(optax.sgd(1.0)), 2, should_skip_update_fn=optax.skip_not_finite
    )
    step = cg.train_step(linear, tx)
    state = step.init({"w": array(np.zeros(2))})
    for value in (1.0, jnp.nan, 1.0):
        state, _ = step(state, array([value, value]))
    np.testing.assert_array_equal(state.params["w"], [-1.0, -1.0])
