"""Is the resumed run the same run? Each fault of a restart is named, and right ones are silent."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.compare_trainers import AXIS, mesh

pytestmark = pytest.mark.usefixtures("users_promotion")

RNG = np.random.default_rng(5)
SCHEDULE = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 1e-3, 9))
BATCHES = [
    {"x": RNG.normal(size=(8, 4)).astype("float32"), "y": RNG.normal(size=8).astype("float32")}
    for _ in range(6)
]


def loss(params, mean, key, batch):
    keep = jax.random.bernoulli(key, 0.8, (8, 4))
    x = jnp.where(keep, batch["x"] - mean[None], 0.0)
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - batch["y"]) ** 2)


@jax.jit
def step(state, batch):
    """A trainer with all that trainers carry."""
    use, key = jax.random.split(state["key"])
    value, grads = jax.value_and_grad(loss)(state["params"], state["mean"], use, batch)
    grads = jax.tree.map(lambda held, g: held + g / state["scale"], state["held"], grads)
    updates, opt = SCHEDULE.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    ema = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state["ema"], params)
    held = jax.tree.map(lambda g: 0.1 * g, grads)
    mean = 0.9 * state["mean"] + 0.1 * jnp.mean(batch["x"], 0)
    new = {"params": params, "opt": opt, "key": key, "ema": ema, "held": held, "mean": mean}
    new |= {"scale": state["scale"] * 1.5, "step": state["step"] + 1}
    return new, {"loss": value}


def begin():
    params = {name: jnp.asarray(RNG.normal(size=s), "float32") for name, s in SHAPES.items()}
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {"params": params, "opt": SCHEDULE.init(params), "ema": params, "held": zeros}
    state |= {"key": jax.random.key(1), "mean": jnp.zeros(4), "scale": jnp.float32(1.0)}
    return state | {"step": jnp.int32(0)}


SHAPES = {"up": (4, 8), "down": (8,)}


@pytest.fixture(scope="module")
def saved():
    """The state after two steps, and the batches that follow."""
    with jax.numpy_dtype_promotion("standard"):
        state = begin()
        for batch in BATCHES[:2]:
            state, _ = step(state, batch)
    return state, BATCHES[2:4]


def with_part(*keys, new):
    """Replaces a part of the state, by what it was."""

    def restore(state, batches):
        def at(tree, keys):
            if not keys:
                return new(tree)
            if hasattr(tree, "_replace"):
                return tree._replace(**{keys[0]: at(getattr(tree, keys[0]), keys[1:])})
            if isinstance(tree, tuple):
                return (*tree[: keys[0]], at(tree[keys[0]], keys[1:]), *tree[keys[0] + 1 :])
            return {**tree, keys[0]: at(tree[keys[0]], keys[1:])}

        return at(state, keys), batches

    return restore


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def narrow(x):
    return x.astype("bfloat16")


def spread(x, *spec):
    return jax.device_put(x, NamedSharding(mesh(), P(*spec)))


def later(by):
    return lambda state, batches: (state, BATCHES[2 + by : 4 + by])


def fed(change):
    return lambda state, batches: (state, [batches[0], change(batches[1])])


ADAM = ("opt", "inner_state", 0)
FAULTS = {
    "the key of dropout begins anew": (with_part("key", new=lambda k: jax.random.key(1)), "key"),
    "first moments lost": (with_part(*ADAM, "mu", new=zeros), "opt/inner_state/0/mu/down"),
    "the count of Adam lost": (with_part(*ADAM, "count", new=zeros), "opt/inner_state/0/count"),
    "the average is dropped": (lambda s, b: ({**s, "ema": s["params"]}, b), "ema/down"),
    "rounded to bfloat16": (
        with_part("params", "up", new=lambda x: narrow(x).astype(x.dtype)), "params/up",
    ),
    "left in bfloat16": (with_part("params", "up", new=narrow), "params/up"),
    "a leaf transposed": (
        with_part("params", "up", new=lambda x: x.T.reshape(x.shape)), "params/up",
    ),
    "the layout is lost": (with_part("params", "up", new=lambda x: spread(x, None, AXIS)),
                           "params/up"),
    "one bit of a leaf": (
        with_part("params", "down", new=lambda x: x.at[3].set(jnp.nextafter(x[3], 9.0))),
        "params/down",
    ),
    "the data are one ahead": (later(1), "batches/0/x"),
    "the second batch is shuffled": (
        fed(lambda b: {k: v[::-1] for k, v in b.items()}), "batches/1/x",
    ),
    "a label is another": (fed(lambda b: {**b, "y": b["y"] * (np.arange(8) != 3)}), "batches/1/y"),
}  # fmt: skip


def as_numpy(state, batches):
    """A checkpoint of NumPy's arrays; keys as their data."""
    key = jax.random.key_data(state["key"])
    stored = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, {**state, "key": key})))
    restored = jax.tree.map(jnp.asarray, stored)
    return {**restored, "key": jax.random.wrap_key_data(restored["key"])}, batches


RIGHT = {
    "the same": lambda state, batches: (state, batches),
    "a copy": lambda state, batches: (jax.tree.map(jnp.copy, state), copy.deepcopy(batches)),
    "through NumPy": as_numpy,
    "batches on the device": lambda s, b: (s, jax.tree.map(jnp.asarray, b)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_restart_loses_is_named_first(name, saved):
    restore, path = FAULTS[name]
    found = cg.compare_resumed(step, saved, restore(*saved))
    paths = [finding.path for finding in found.findings]
    assert not found.ok and path.removeprefix("state/") == paths[0].removeprefix("state/"), paths
    # What follows from it is not named.
    top = {p.removeprefix("state/").split("/")[0] for p in paths}
    assert top == {path.split("/")[0]}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_restart_has_no_findings(name, saved):
    found = cg.compare_resumed(step, saved, RIGHT[name](*saved), rtol=0.0)
    assert found.ok and not found.findings and not found.unmatched, str(found)
    assert any(row.module == "step 2/1/loss" for row in found.rows)


def test_what_is_not_in_the_state_is_found_at_its_step(saved):
    """A step that counts in Python, as a loader or a random generator outside of the state does."""
    calls = []

    def hidden(state, batch):
        new, metrics = step(state, batch)
        if not isinstance(new["step"], jax.core.Tracer):
            calls.append(1)
        return new, {"loss": metrics["loss"] + (len(calls) > 3)}

    found = cg.compare_resumed(hidden, saved, saved, rtol=0.0)
    assert [f.path for f in found.findings] == ["step 2/1/loss"], str(found)


def test_a_part_that_is_missing_is_no_agreement(saved):
    state = {name: part for name, part in saved[0].items() if name != "ema"}
    found = cg.compare_resumed(step, saved, (state, saved[1]))
    assert not found.ok and "output state/ema/up, only in fun" in found.unmatched


@pytest.mark.parametrize(
    ("resumed", "error", "message"),
    [
        (lambda s, b: s, TypeError, r"resumed: got dict, expected \(state, batches\)"),
        (lambda s, b: (s, b[:1]), ValueError, "got 1 batches beside 2, expected as many"),
        (lambda s, b: (donated(s), b), ValueError, "overwritten, at resumed.*copy the state"),
    ],
)
def test_wrong_runs_are_said(resumed, error, message, saved):
    with pytest.raises(error, match=message):
        cg.compare_resumed(step, saved, resumed(*saved))


def donated(state):
    key = jnp.copy(state["mean"])
    key.delete()
    return {**state, "mean": key}
