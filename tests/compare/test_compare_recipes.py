"""The recipes of docs/two_versions.md: a resumed run, and each example alone."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import array
from tests.rows import first_rows

pytestmark = pytest.mark.usefixtures("users_promotion")

RNG = np.random.default_rng(5)
ADAM = optax.adam(1e-2)
BATCHES = [
    {"x": RNG.normal(size=(8, 4)).astype("float32"), "y": RNG.normal(size=8).astype("float32")}
    for _ in range(5)
]
PARAMS = {"up": RNG.normal(size=(4, 8)), "down": RNG.normal(size=8)}


def loss(params, key, batch):
    x = jnp.where(jax.random.bernoulli(key, 0.8, (8, 4)), batch["x"], 0.0)
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def step(state, batch):
    use, key = jax.random.split(state["key"])
    value, grads = jax.value_and_grad(loss)(state["params"], use, batch)
    updates, opt = ADAM.update(grads, state["opt"])
    new = {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}
    return new | {"step": state["step"] + 1}, {"loss": value}


def going_on(state, batches):
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics)
    return {"state": state, "losses": losses}


def same(run, saved, restored):
    return cg.compare(run, run, saved, other_args=restored, argnums=None, rtol=0.0)


def as_it_is(*saved):
    return saved


@pytest.fixture(scope="module")
def saved():
    """The state after two steps, and the batches that follow."""
    params = jax.tree.map(lambda x: array(x), PARAMS)
    state = {"params": params, "opt": jax.jit(ADAM.init)(params), "key": jax.random.key(1)}
    state["step"] = jnp.int32(0)
    advance = jax.jit(step)
    with jax.numpy_dtype_promotion("standard"):
        for batch in BATCHES[:2]:
            state, _ = advance(state, batch)
    return state, BATCHES[2:4]


def at(name, change):
    """Changes a leaf of the parameters."""
    return lambda s: s | {"params": s["params"] | {name: change(s["params"][name])}}


def rounded(x):
    return x.astype("bfloat16").astype(x.dtype)


def next_number(x):
    return x.at[3].set(jnp.nextafter(x[3], 9.0))


def of_state(change):
    return lambda state, batches: (change(state), batches)


def of_batches(change):
    return lambda state, batches: (state, change(batches))


# What is restored from a state and its batches, and the paths that are named.
LOST = {
    "the key begins anew": (of_state(lambda s: s | {"key": jax.random.key(1)}), {"0/key"}),
    "the count is lost": (
        of_state(lambda s: s | {"opt": (s["opt"][0]._replace(count=jnp.int32(0)), s["opt"][1])}),
        {"0/opt/0/count"},
    ),
    "a leaf is rounded": (of_state(at("up", rounded)), {"0/params/up"}),
    "a leaf is transposed": (of_state(at("up", lambda x: x.T.reshape(x.shape))), {"0/params/up"}),
    "one bit of a leaf": (of_state(at("down", next_number)), {"0/params/down"}),
    "a leaf is lost": (
        of_state(lambda s: {k: x for k, x in s.items() if k != "step"}), {"0/step"},
    ),
    "one batch ahead": (
        of_batches(lambda b: BATCHES[3:5]), {"1/0/x", "1/0/y", "1/1/x", "1/1/y"},
    ),
    "a shuffled batch": (
        of_batches(lambda b: [b[0], {k: v[::-1] for k, v in b[1].items()}]), {"1/1/x", "1/1/y"},
    ),
}  # fmt: skip


@first_rows(2)
@pytest.mark.parametrize("name", LOST)
def test_what_a_restart_loses_is_named_by_its_path(name, saved):
    restore, paths = LOST[name]
    comparison = same(as_it_is, saved, restore(*saved))
    assert not comparison.ok and {f.path for f in comparison.findings} == paths, str(comparison)


def test_a_type_that_is_restored_otherwise_is_a_note(saved):
    state = saved[0] | {"step": saved[0]["step"].astype("float32")}
    comparison = same(as_it_is, saved, (state, saved[1]))
    assert comparison.ok and comparison.notes == ("0/step: int32 in fun, float32 in other",), str(
        comparison
    )


@pytest.mark.slow
def test_a_right_restart_is_silent(saved):
    through = jax.tree.map(np.asarray, saved[0] | {"key": jax.random.key_data(saved[0]["key"])})
    through["key"] = jax.random.wrap_key_data(through["key"])
    for state in (saved[0], copy.deepcopy(saved[0]), through):
        comparison = same(as_it_is, saved, (state, saved[1]))
        assert comparison.ok and not comparison.findings and not comparison.notes, str(comparison)
    assert same(going_on, saved, (through, jax.tree.map(jnp.asarray, saved[1]))).ok
    comparison = same(going_on, saved, LOST["one bit of a leaf"][0](*saved))
    assert not comparison.ok and "losses/0/loss" in {f.path for f in comparison.findings}


def alone(loss):
    """The mean of the losses of the examples of a batch, each alone."""

    def mean(params, batch):
        one = lambda example: loss(params, jax.tree.map(lambda a: a[None], example))  # noqa: E731
        return jnp.mean(jax.vmap(one)(batch))

    return mean


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-1, 0])
def test_a_loss_that_depends_on_neighbors_is_not_the_mean_of_its_examples(axis):
    def normalized(params, batch):
        h = batch["x"] @ params["up"]
        h = (h - h.mean(axis, keepdims=True)) / (h.std(axis, keepdims=True) + 1e-3)
        return jnp.mean((jnp.tanh(h) @ params["down"] - batch["y"]) ** 2)

    params = jax.tree.map(lambda x: jnp.asarray(x, "float32"), PARAMS)
    comparison = cg.compare(normalized, alone(normalized), (params, BATCHES[0]))
    assert comparison.ok is (axis == -1), str(comparison)
