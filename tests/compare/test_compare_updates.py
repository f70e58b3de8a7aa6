"""Updates of parameters whose gradients rounding decides: notes name them, and faults are found."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg

f32 = np.float32
# What optimizers make of a gradient in their first step: none depends on its size.
UPDATES = {
    "sign": jnp.sign,
    "Adam": lambda g: g / (jnp.abs(g) + f32(1e-8)),
    "RMSprop": lambda g: g * jax.lax.rsqrt(f32(0.1) * g * g + f32(1e-20)),
    "Lion": lambda g: jnp.sign(f32(0.1) * g) + f32(0.01) * g,
    "normalized": lambda g: g / (jnp.linalg.norm(g) + f32(1e-12)),
}
# Biases on which the loss does not depend: of keys, before a normalization, of all logits.
UNDECIDED = "k/b", "v/b", "n/b", "c"


def loss(p, x, is_rewritten):
    """Attention, a normalization over the batch, and a softmax."""
    q, k, v = (x @ p[n]["w"] + p[n]["b"] for n in "qkv")
    scale = f32(x.shape[-1] ** -0.5)
    weights = jax.nn.softmax(q @ k.T * scale)
    if is_rewritten:
        weights = jnp.exp((q * scale) @ k.T)
        weights = weights / weights.sum(-1, keepdims=True)
    h = (weights @ v) @ p["n"]["w"] + p["n"]["b"]
    h = (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + f32(1e-5))
    h = jnp.tanh(h) + p["c"]
    parts = jax.nn.log_softmax(h) if not is_rewritten else h - jnp.log(jnp.exp(h).sum(-1))[:, None]
    return -jnp.mean(parts[:, 0])


def step(updates, rate, p, x, is_rewritten=False, fault=None):
    """The parameters after one step of each optimizer; a fault changes one leaf of them."""
    gradient = jax.grad(loss)(p, x, is_rewritten)
    after = {
        name: jax.tree.map(lambda w, g, update=update: w - f32(rate) * update(g), p, gradient)
        for name, update in updates.items()
    }
    for stepped in after.values() if fault else ():
        (one, leaf), change = fault
        stepped[one][leaf] = change(stepped[one][leaf], p[one][leaf])
    return after


def arguments():
    seeds = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(seeds.normal(size=shape) / 2, np.float32)  # noqa: E731
    p = {n: {"w": normal(4, 4), "b": normal(1, 4)} for n in "qkvn"}
    return p | {"c": normal(1, 1)}, normal(6, 4) * 2


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        pytest.param("sign", 1e-2, marks=pytest.mark.slow),
        pytest.param("all", 1e-2, marks=pytest.mark.slow),
        pytest.param("all", 1e-4, marks=pytest.mark.slow),
    ],
)
def test_parameters_that_rounding_decides_are_notes_and_hide_no_fault(name, rate):
    updates = UPDATES if name == "all" else {name: UPDATES[name]}
    one, args = functools.partial(step, updates, rate), arguments()
    other = functools.partial(one, is_rewritten=True)
    right = cg.compare(one, other, args, argnums=None)
    assert right.ok, str(right)
    unstable = {f"{n}/{bias}" for n in updates for bias in UNDECIDED}
    assert {note.partition(":")[0] for note in right.notes} <= unstable
    # A fault of one leaf, beside what rounding decides.
    faulty = functools.partial(other, fault=(("q", "b"), lambda w, _: w * f32(1.001)))
    wrong = cg.compare(one, faulty, args, argnums=None)
    assert {f.path for f in wrong.findings} == {f"{n}/q/b" for n in updates}, str(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)
def test_a_wrong_update_of_what_rounding_decides_is_found(name):
    one, args = functools.partial(step, {name: UPDATES[name]}, 1e-2), arguments()
    decay = ("k", "b"), lambda after, before: after - f32(0.5) * before
    wrong = cg.compare(one, functools.partial(one, fault=decay), args, argnums=None)
    assert [f.path for f in wrong.findings] == [f"{name}/k/b"], str(wrong)
