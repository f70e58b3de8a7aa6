"""What this library makes travels: by pickle, cloudpickle, deep copy, and in exported programs."""

import copy
import pathlib
import pickle
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import array, assert_same

cloudpickle = pytest.importorskip("cloudpickle")

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.slow]

PARAMS = {"b": array([0.5]), "w": array([[3.0, 4.0]])}
SCALES = (1.0, 2.0, 90.0, 3.0)


def follow(threshold):
    """All thresholds of a run, and the last state."""
    state, values = threshold.init(jnp.zeros(2)), []
    for scale in SCALES:
        value, state = threshold.update(state, scale * jnp.array([1.0, 2.0]))
        values.append(value)
    return values, state


def optimize(tx):
    """All updates of a run, and the last state."""
    state, every = tx.init(PARAMS), []
    for scale in SCALES:
        grads = jax.tree.map(lambda p, scale=scale: scale * p, PARAMS)
        updates, state = tx.update(grads, state, PARAMS)
        every.append(updates)
    return every, state


def clip(rule):
    """A tree that is clipped before the optimizer and in the backward pass."""
    grads = jax.tree.map(lambda p: 9 * p, PARAMS)
    cotangents = jax.vjp(lambda x: cg.clip_cotangent(x, rule), PARAMS)[1](grads)
    return optimize(cg.gradient_clip(rule)), cotangents


def error(params, batch):
    h = checkpoint_name(params["w"][0] * batch, "h")
    return jnp.sum((h + params["b"]) ** 2)


def training():
    tx = optax.chain(cg.clip_by_global_norm(1.0, stats=True), optax.adam(1e-2))
    return cg.train_step(error, tx, error_clip={"h": cg.ClipByNorm(0.5)}, donate=False)


def run_steps(step):
    """All metrics of a training, and the last state."""
    state, every = step.init(PARAMS), []
    for scale in SCALES:
        state, metrics = step(state, jnp.array([scale, -1.0]))
        every.append(metrics)
    return every, state


def used_training():
    """A training step after its function was compiled."""
    step = training()
    run_steps(step)
    return step


def itself(tree):
    return tree


def values_of(entries):
    return [np.float64(entry.value) for entry in entries]


def spikes():
    clip = cg.clip_by_global_norm(cg.ZScoreThreshold(warmup=2), stats="per_leaf")
    return cg.skip_spikes(optax.chain(clip, optax.adam(1e-3)))


RULES = [
    *(cg.ClipByValue(0.5, nan=0.0), cg.ClipByNorm(np.array(0.5, np.float32), ord=jnp.inf)),
    *(cg.ClipByGlobalNorm(array(0.5)), cg.ClipByBlockRMS(0.5), cg.AdaptiveClip(0.5, axis=0)),
    cg.AutoNorm(0.5),
]
THRESHOLDS = [cg.PercentileThreshold(50, window=3), cg.EMAThreshold(warmup=2)]
# What is made, what is computed with it, and whether pickle takes it: it need not take closures,
# as optax's are, too.
CASES = {
    **{type(rule).__name__: (lambda rule=rule: rule, clip, True) for rule in RULES},
    **{type(t).__name__: (lambda t=t: t, follow, True) for t in THRESHOLDS},
    "skip_spikes of a clip": (spikes, optimize, False),
    "state of skip_spikes": (lambda: optimize(spikes())[1], itself, True),
    "TrainStep after a call": (used_training, run_steps, False),
    "TrainState and metrics": (lambda: run_steps(training()), itself, True),
    "SUGGESTED_THRESHOLDS": (lambda: cg.published.SUGGESTED_THRESHOLDS, values_of, True),
}
WAYS = {
    "cloudpickle": lambda x: pickle.loads(cloudpickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_has_travelled_computes_the_same(name):
    make, use, plain = CASES[name]
    expected = use(make())
    for way in WAYS:
        if plain or way != "pickle":
            assert_same(use(WAYS[way](make())), expected)


def test_what_has_travelled_computes_the_same_in_another_process(tmp_path):
    """As with Ray, submitit, joblib or Dask."""
    made = [(use, make()) for make, use, _ in CASES.values()]
    (tmp_path / "cases").write_bytes(cloudpickle.dumps(made))
    script = (
        "import pathlib, pickle, sys, tests.conftest\n"
        "import jax; jax.config.update('jax_numpy_dtype_promotion', 'standard')\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "cases = pickle.loads((folder / 'cases').read_bytes())\n"
        "(folder / 'results').write_bytes(pickle.dumps([use(made) for use, made in cases]))"
    )
    root = pathlib.Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script, tmp_path], cwd=root, check=True)
    results = pickle.loads((tmp_path / "results").read_bytes())
    for (use, value), result in zip(made, results, strict=True):
        assert_same(result, use(value))


# Programs that jax.export serializes. Optax registers none of its states: that is up to its users.
for state in (optax.EmptyState, optax.ScaleByAdamState):
    jax.export.register_namedtuple_serialization(state, serialized_name=f"optax.{state.__name__}")


@pytest.mark.parametrize("name", ["EMAThreshold", "state of skip_spikes"])
def test_an_exported_function_returns_a_state(name):
    make, use, _ = CASES[name]
    function = jax.jit(lambda: use(make()))
    loaded = jax.export.deserialize(jax.export.export(function)().serialize())
    assert_same(loaded.call(), function())


def test_an_exported_training_goes_on_from_the_state_that_it_returned():
    step = training()
    state, batch = step.init(PARAMS), jnp.array([1.0, -1.0])
    loaded = jax.export.deserialize(jax.export.export(step.update)(state, batch).serialize())
    for _ in range(3):
        expected = step.update(state, batch)
        state, metrics = loaded.call(state, batch)
        assert_same((state, metrics), expected)
        assert isinstance(state, cg.types.TrainState)
        assert isinstance(metrics["clips"][0], cg.types.ClipStats)
