"""What this library makes travels: by pickle, cloudpickle, deep copy, and in exported programs."""

import copy
import dataclasses
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import assert_same

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.exhaustive]

PARAMS = {"b": jnp.array([0.5]), "w": jnp.array([[3.0, 4.0]])}
SCALES = (1.0, 2.0, 90.0, 3.0)


class Case(NamedTuple):
    """An object that travels, and what is computed with it before and after.

    A new row is a name, a function that makes the object, and one that makes a tree of arrays of
    it. ``plain`` says whether pickle must do. It need not for closures, as optax's are, too: these
    travel by cloudpickle.
    """

    name: str
    make: Callable[[], Any]
    use: Callable[[Any], Any]
    plain: bool = True


def follow(threshold: Any) -> Any:
    """All thresholds of a run, and the last state."""
    state, values = threshold.init(jnp.zeros(2)), []
    for scale in SCALES:
        value, state = threshold.update(state, scale * jnp.array([1.0, 2.0]))
        values.append(value)
    return values, state


def optimize(tx: Any) -> Any:
    """All updates of a run, and the last state."""
    state, every = tx.init(PARAMS), []
    for scale in SCALES:
        grads = jax.tree.map(lambda p, scale=scale: scale * p, PARAMS)
        updates, state = tx.update(grads, state, PARAMS)
        every.append(updates)
    return every, state


def clip_examples(per_example: Any) -> Any:
    return per_example(jnp.ones(2), jnp.array([[3.0, 4.0], [0.3, 0.4]]))


def clip(rule: Any) -> Any:
    """A tree that is clipped in one call, before the optimizer and in the backward pass."""
    grads = jax.tree.map(lambda p: 9 * p, PARAMS)
    cotangents = jax.vjp(lambda x: cg.clip_cotangent(x, rule), PARAMS)[1](grads)
    return cg.clip_grads(grads, rule, PARAMS), optimize(cg.gradient_clip(rule)), cotangents


def run_steps(step: Any) -> Any:
    """All metrics of a training, and the last state."""
    state, every = step.init(PARAMS), []
    for scale in SCALES:
        state, metrics = step(state, jnp.array([scale, -1.0]))
        every.append(metrics)
    return every, state


def error(params: Any, batch: Any) -> Any:
    h = checkpoint_name(params["w"][0] * batch, "h")
    return jnp.sum((h + params["b"]) ** 2)


def training() -> cg.types.TrainStep:
    tx = optax.chain(cg.clip_by_global_norm(1.0, stats=True), optax.adam(1e-2))
    return cg.train_step(error, tx, error_clip={"h": cg.ClipByNorm(0.5)}, donate=False)


def used_training() -> cg.types.TrainStep:
    """The same after its function was compiled."""
    step = training()
    run_steps(step)
    return step


def itself(tree: Any) -> Any:
    return tree


def linear(w: Any, x: Any) -> Any:
    return w @ x


def halve(tree: Any) -> Any:
    return jax.tree.map(lambda g: 0.5 * g, tree)


def spikes(**options: Any) -> optax.GradientTransformation:
    return cg.skip_spikes(optax.adam(1e-3), **options)


def spikes_and_a_clip() -> optax.GradientTransformation:
    clip = cg.clip_by_global_norm(cg.ZScoreThreshold(warmup=2))
    return cg.skip_spikes(optax.chain(clip, optax.adam(1e-3)))


THRESHOLDS = {
    "PercentileThreshold": lambda: cg.PercentileThreshold(50, window=3),
    "HistoryThreshold": lambda: cg.HistoryThreshold(window=2, feed="clipped"),
    "ZScoreThreshold": lambda: cg.ZScoreThreshold(warmup=2, max_norm=50.0),
    "EMAThreshold": lambda: cg.EMAThreshold(warmup=2),
}
RULES = {
    "ClipByValue(min, nan)": lambda c: cg.ClipByValue(c, -c, nan=0.0),
    "ClipByNorm": lambda c: cg.ClipByNorm(c, ord=jnp.inf, axis=-1),
    "ClipByGlobalNorm": lambda c: cg.ClipByGlobalNorm(c),
    "ClipByBlockRMS": lambda c: cg.ClipByBlockRMS(c),
    "AutoNorm": lambda c: cg.AutoNorm(c),
    "AdaptiveClip(axis)": lambda c: cg.AdaptiveClip(c, axis=0),
}
LIMITS = {
    "number": 0.5,
    "NumPy array": np.array(0.5, np.float32),
    "JAX array": jnp.array(0.5),
}
CLIPS = {
    "adaptive_grad_clip": lambda: cg.adaptive_grad_clip(0.5, axis=0),
    "a clip with where": lambda: cg.clip_by_global_norm(0.5, where="w", nonfinite="zero"),
    "a clip with a schedule": lambda: cg.clip_by_norm(optax.linear_schedule(1.0, 0.1, 4)),
    "a clip with statistics by leaf": lambda: cg.clip_by_value(0.5, stats="per_leaf"),
    "an adaptive clip by leaf": lambda: cg.clip_by_block_rms(
        cg.EMAThreshold(warmup=2), stats="per_leaf"),
    "a clip by a function": lambda: cg.gradient_clip(halve),
}  # fmt: skip
CASES = [
    *(
        Case(f"{name} by a {kind}", lambda make=make, c=c: make(c), clip)
        for name, make in RULES.items()
        for kind, c in LIMITS.items()
        if kind == "number" or name == "ClipByNorm"
    ),
    *(Case(name, make, optimize, plain=False) for name, make in CLIPS.items()),
    *(
        Case(f"state of {name}", lambda make=make: optimize(make())[1], itself)
        for name, make in CLIPS.items()
    ),
    Case("TrainStep after a call", used_training, run_steps, plain=False),
    Case("TrainState and metrics", lambda: run_steps(training()), itself),
    Case("ClipStats", lambda: cg.types.ClipStats.of(PARAMS, PARAMS), itself),
    *(Case(name, make, follow) for name, make in THRESHOLDS.items()),
    *(
        Case(f"state of {name}", lambda make=make: follow(make())[1], itself)
        for name, make in THRESHOLDS.items()
    ),
    Case("skip_spikes of a clip", spikes_and_a_clip, optimize, plain=False),
    Case("state of skip_spikes", lambda: optimize(spikes(window=4))[1], itself),
    Case("clip_per_example", lambda: cg.clip_per_example(linear, cg.ClipByNorm(1.0)),
         clip_examples, plain=False),
    Case("SUGGESTED_THRESHOLDS", lambda: cg.published.SUGGESTED_THRESHOLDS,
         lambda entries: [np.float64(entry.value) for entry in entries]),
]  # fmt: skip
WAYS = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "cloudpickle": lambda x: pickle.loads(cloudpickle.dumps(x)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_has_travelled_computes_the_same(case):
    expected = case.use(case.make())
    for way in WAYS:
        if case.plain or way != "pickle":
            assert_same(case.use(WAYS[way](case.make())), expected)


@pytest.mark.parametrize("name", RULES | THRESHOLDS)
def test_a_rule_or_a_threshold_that_has_travelled_is_equal_and_still_frozen(name):
    made = RULES[name](0.5) if name in RULES else THRESHOLDS[name]()
    for way in WAYS.values():
        assert way(made) == made and hash(way(made)) == hash(made)
        assert jax.tree.structure(way(made)) == jax.tree.structure(made)
        with pytest.raises(dataclasses.FrozenInstanceError):
            way(made).max = 1.0


def test_what_has_travelled_computes_the_same_in_another_process(tmp_path):
    """As with Ray, submitit, joblib or Dask."""
    (tmp_path / "cases").write_bytes(cloudpickle.dumps([(c.use, c.make()) for c in CASES[::3]]))
    script = (
        "import pathlib, pickle, sys, tests.conftest\n"
        "import jax; jax.config.update('jax_numpy_dtype_promotion', 'standard')\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "cases = pickle.loads((folder / 'cases').read_bytes())\n"
        "(folder / 'results').write_bytes(pickle.dumps([use(made) for use, made in cases]))"
    )
    root = pathlib.Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", script, tmp_path], cwd=root, check=True)
    results = pickle.loads((tmp_path / "results").read_bytes())
    for case, result in zip(CASES[::3], results, strict=True):
        assert_same(result, case.use(case.make()))


# Programs that jax.export serializes. Optax registers none of its states: that is up to its users.

for state in (optax.EmptyState, optax.ScaleByAdamState):
    jax.export.register_namedtuple_serialization(state, serialized_name=f"optax.{state.__name__}")

STATES = {
    **{name: (lambda make=make: follow(make())) for name, make in THRESHOLDS.items()},
    "skip_spikes": lambda: optimize(spikes(window=4))[1],
    "skip_spikes without outliers": lambda: optimize(spikes(sigma=None))[1],
    "ClipStats": lambda: cg.types.ClipStats.of(PARAMS, PARAMS),
    "clip_grads": lambda: cg.clip_grads(PARAMS, cg.ClipByNorm(0.5)),
    "a probe": lambda: jax.grad(
        lambda probe: jnp.sum(cg.clip_cotangent(PARAMS["w"], cg.ClipByNorm(0.5), probe=probe))
    )(cg.types.ClipStats.zero()),
    **{
        name: (lambda make=make: optimize(make())[1])
        for name, make in CLIPS.items()
        if isinstance(make().init(PARAMS), cg.types.GradientClipState)
    },
    "TrainState and metrics": lambda: run_steps(training()),
}


@pytest.mark.parametrize("name", STATES)
def test_an_exported_function_returns_a_state(name):
    exported = jax.export.export(jax.jit(STATES[name]))()
    loaded = jax.export.deserialize(exported.serialize())
    assert_same(loaded.call(), jax.jit(STATES[name])())


def test_an_exported_training_goes_on_from_the_state_that_it_returned():
    step = training()
    state, batch = step.init(PARAMS), jnp.array([1.0, -1.0])
    loaded = jax.export.deserialize(jax.export.export(step.update)(state, batch).serialize())
    for _ in range(3):
        expected = step(state, batch)
        state, metrics = loaded.call(state, batch)
        assert_same((state, metrics), expected)
        assert isinstance(state, cg.types.TrainState) and isinstance(
            metrics["clips"][0], cg.types.ClipStats
        )
