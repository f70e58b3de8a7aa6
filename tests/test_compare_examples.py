"""Dependence of an example on its neighbors, its place and its padding, named at the module."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipgrad as cg

pytestmark = pytest.mark.usefixtures("users_promotion")

SIZE, LENGTH, WIDTH, EXPERTS = 6, 5, 8, 3
LENGTHS = np.array([5, 3, 4, 2, 5, 3])
scope = jax.named_scope


def numbers(*shape, seed, by=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * by, "float32")


SQUARE = ("in", "q", "k", "v", "out")
PARAMS = {
    **{name: numbers(WIDTH, WIDTH, seed=i, by=0.4) for i, name in enumerate(SQUARE)},
    "experts": numbers(EXPERTS, WIDTH, WIDTH, seed=8, by=0.4),
    "router": numbers(WIDTH, EXPERTS, seed=9),
    "kernel": numbers(3, WIDTH, WIDTH, seed=10, by=0.3),
}  # fmt: skip
REAL = np.arange(LENGTH) < LENGTHS[:, None]
BATCH = {
    "x": jnp.where(REAL[..., None], numbers(SIZE, LENGTH, WIDTH, seed=11), 0),
    "real": jnp.asarray(REAL),
    "y": numbers(SIZE, WIDTH, seed=12),
}
PADDED = {**BATCH, "x": jnp.where(REAL[..., None], BATCH["x"], 3.0)}


def dense(params, name, x):
    with scope(name):
        return jnp.tanh(x @ params[name].astype(x.dtype))


def attention(params, h, batch, masks):
    q, k, v = (h @ params[name].astype(h.dtype) for name in "qkv")
    keys = batch["real"][:, None] | ~masks
    return h + jax.nn.softmax(jnp.where(keys, jnp.einsum("btd,bsd->bts", q, k), -1e9)) @ v


def packed(params, h, batch, leaks):
    """All examples in one row, with a mask by their numbers."""
    q, k, v = (h.reshape(-1, WIDTH) @ params[name] for name in "qkv")
    owner = jnp.repeat(jnp.arange(len(h)), h.shape[1])
    own = (owner[:, None] == owner) | (leaks & (owner[:, None] > owner))
    weights = jax.nn.softmax(jnp.where(own & batch["real"].ravel(), q @ k.T, -1e9))
    return h + (weights @ v).reshape(h.shape)


def recurrent(params, h, batch, axis):
    def cell(state, given):
        x, real = given
        new = jnp.tanh(x @ params["q"] + state @ params["k"])
        return jnp.where(real[:, None], new, state), new

    given = jnp.moveaxis(h, axis, 0), jnp.moveaxis(batch["real"], axis, 0)
    _, states = lax.scan(cell, jnp.zeros((h.shape[1 - axis], WIDTH)), given)
    return jnp.moveaxis(states, 0, axis)


def normalized(h, axes):
    centered = h - jnp.mean(h, axes, keepdims=True)
    return centered / jnp.sqrt(jnp.mean(centered**2, axes, keepdims=True) + 1e-5)


def convolved(params, h, batch):
    h = jnp.where(batch["real"][..., None], h, 0)
    made = lax.conv_general_dilated(h, params["kernel"], (1,), "SAME", None, None, DIMS)
    return normalized(made.reshape(*h.shape[:2], 2, -1), (1, 3)).reshape(h.shape)


DIMS = lax.conv_dimension_numbers((1, 1, 1), (1, 1, 1), ("NHC", "HIO", "NHC"))


def experts(params, h, batch, capacity):
    flat = h.reshape(-1, WIDTH)
    probs = jax.nn.softmax(flat @ params["router"])
    hot = jax.nn.one_hot(jnp.argmax(probs, -1), EXPERTS)
    hot = hot * (jnp.cumsum(hot, 0) <= capacity)
    return h + jnp.einsum("ne,nd,edf->nf", hot * probs, flat, params["experts"]).reshape(h.shape)


def running(params, h, batch):
    return jnp.cumsum(h.reshape(-1, WIDTH), 0).reshape(h.shape) / 5


def dropped(params, h, batch):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.7, h.shape), h, 0)


@jax.custom_vjp
def passed(x):
    return x


def _over_the_batch(_, g):
    return (g / jnp.sqrt(jnp.sum(g**2, 0, keepdims=True) + 1e-3),)


passed.defvjp(lambda x: (x, None), _over_the_batch)


def negatives(h, batch):
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(h @ batch["y"].T)))


def errors(h, batch):
    return jnp.sum((h - batch["y"].astype(h.dtype)) ** 2, -1)


# The parts of a model, one after the other; those that are on are numbers of one program.
PARTS = {
    "attention": lambda p, h, b: attention(p, h, b, p["on"]["masks"] == 1),
    "packed": lambda p, h, b: packed(p, h, b, p["on"]["leaks"] == 1),
    "gru": lambda p, h, b: recurrent(p, h, b, 1),
    "gru over the batch": lambda p, h, b: recurrent(p, h, b, 0),
    "LayerNorm": lambda p, h, b: normalized(h, -1),
    "BatchNorm": lambda p, h, b: normalized(h, (0, 1)),
    "norm of columns": lambda p, h, b: normalized(h, 0),
    "conv": convolved,
    "experts": lambda p, h, b: experts(p, h, b, p["on"]["capacity"]),
    "running": running,
    "maximum": lambda p, h, b: jnp.exp(h - jnp.max(h)),
    "shift": lambda p, h, b: h + 0.5 * jnp.roll(h, 1, 0),
    "dropout": dropped,
    "rule": lambda p, h, b: passed(h),
}
LOSSES = {
    "error": lambda h, batch: jnp.mean(errors(h, batch)),
    "weights": lambda h, batch: jnp.mean(errors(h, batch) * jnp.linspace(0, 1, len(h))),
    "negatives": negatives,
    "balance": lambda h, batch: 0.1 * jnp.mean(jax.nn.logsumexp(h, -1) ** 2),
}
OFF = dict.fromkeys((*PARTS, *LOSSES, "masks", "leaks", "whole pool"), 0) | {"capacity": 99}
RIGHT_LOSS = {"masks": 1, "error": 1, "balance": 1}


def loss(params, batch, parts=tuple(PARTS), losses=tuple(LOSSES)):
    on, h = params["on"], dense(params, "in", batch["x"])
    for name in parts:
        with scope(name):
            h = jnp.where(on[name] == 1, PARTS[name](params, h, batch), h)
    with scope("pool"):
        real = (batch["real"] | (on["whole pool"] == 1))[..., None].astype(h.dtype)
        h = jnp.sum(h * real, 1) / jnp.sum(real, 1)
    h, total = dense(params, "out", h), 0
    for name in losses:
        with scope(name):
            total = total + jnp.where(on[name] == 1, LOSSES[name](h, batch), 0)
    return total


RIGHT = {
    "MLP": {},
    "transformer with a mask": {"attention": 1, "LayerNorm": 1},
    "packed transformer": {"packed": 1, "LayerNorm": 1},
    "GRU": {"gru": 1},
    "convolutions and GroupNorm": {"conv": 1},
    "experts without capacity": {"experts": 1},
    "all of these": {"attention": 1, "packed": 1, "gru": 1, "conv": 1, "experts": 1},
}
ALL_KINDS = ("neighbors", "place", "padding")
# What is on, the module that is named, and the kinds of the findings.
FAULTS = {
    "a mask that leaks": ({"packed": 1, "leaks": 1}, "packed", ("neighbors", "place")),
    "padding that attends": ({"attention": 1, "masks": 0}, "attention", ("padding",)),
    "padding that is pooled": ({"whole pool": 1}, "pool", ("padding",)),
    "a capacity": ({"experts": 1, "capacity": 4}, "experts", ("neighbors", "place")),
    "a scan over the batch": (
        {"gru over the batch": 1}, "gru over the batch", ("neighbors", "place")
    ),
    "weights by place": ({"error": 0, "weights": 1}, "weights", ("place",)),
    "behind a right part": ({"attention": 1, "gru": 1, "shift": 1}, "shift", ALL_KINDS),
    **{
        name: ({name: 1}, name, kinds)
        for name, kinds in {
            "BatchNorm": ("neighbors", "padding"),
            "norm of columns": ("neighbors", "padding"),
            "running": ALL_KINDS,
            "maximum": ("neighbors", "padding"),
            "shift": ALL_KINDS,
            "dropout": ("place",),
            "rule": ("neighbors",),
            "negatives": ("neighbors",),
        }.items()
    },
}  # fmt: skip


def compared(on, fun=loss, dtype="float32", **options):
    cast = lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x  # noqa: E731
    params, batch, padding = jax.tree.map(cast, (PARAMS, BATCH, PADDED))
    flags = {name: jnp.int32(n) for name, n in {**OFF, **RIGHT_LOSS, **on}.items()}
    return cg.compare_examples(fun, {**params, "on": flags}, batch, padding=padding, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RIGHT)
def test_independent_examples_are_silent(name):
    found = compared(RIGHT[name])
    assert found.ok and not found.findings and not found.notes, str(found)
    leaves = [row for row in found.rows if row.kind == "gradient"]
    assert len(leaves) == len(PARAMS) and len(found.rows) > len(leaves)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAULTS)
def test_a_dependence_is_named_at_its_module(name):
    on, module, kinds = FAULTS[name]
    found = compared(on)
    expected = [(kind, module) for kind in kinds]
    named = [(f.kind, f.module.removesuffix("/while/body")) for f in found.findings]
    assert named == expected and not found.ok, str(found)
    for finding in found.findings:
        assert finding.file == __file__ and "so does the gradient of " in finding.message


# ---- a small model ----

small = functools.partial(loss, parts=("BatchNorm",), losses=("error", "balance"))


def losses_of_each(params, batch):
    h = dense(params, "out", dense(params, "in", batch["x"][:, 0]))
    with scope("pairs"):
        found = errors(h, batch)
        return found + jnp.where(params["on"]["shift"] == 1, jnp.roll(found, 1), 0), "aux"


def token_mean(params, batch):
    with scope("mean"):
        found = jnp.sum(dense(params, "in", batch["x"]) ** 2, -1) * batch["real"]
        count = jnp.where(params["on"]["whole pool"] == 1, jnp.sum(batch["real"]), SIZE * LENGTH)
        return jnp.sum(found) / count


# The loss, what is on, and each finding.
SMALL = {
    "float32": (small, {}, []),
    "BatchNorm": (small, {"BatchNorm": 1}, [("neighbors", "BatchNorm"), ("padding", "BatchNorm")]),
    "losses of each": (losses_of_each, {}, []),
    "losses of pairs": (losses_of_each, {"shift": 1}, [("neighbors", "pairs"), ("place", "pairs")]),
    "a mean over a constant count": (token_mean, {}, []),
    "a mean over all tokens": (token_mean, {"whole pool": 1}, [("neighbors", "mean")]),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_models(name):
    fun, on, expected = SMALL[name]
    found = compared(on, fun, has_aux=fun is losses_of_each)
    assert [(f.kind, f.module) for f in found.findings] == expected, str(found)
    assert found.ok is not expected
