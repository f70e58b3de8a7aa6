"""Dependence of an example on its neighbors, its place and its padding, named at the module."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._compare.versions import VersionProgram

examples = importlib.import_module("clipgrad._compare.examples")

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
    return h + jax.nn.softmax(jnp.where(keys, q @ jnp.swapaxes(k, 1, 2), -1e9)) @ v


def normalized(h, axes):
    centered = h - jnp.mean(h, axes, keepdims=True)
    return centered / jnp.sqrt(jnp.mean(centered**2, axes, keepdims=True) + 1e-5)


def experts(params, h, batch, capacity):
    flat = h.reshape(-1, WIDTH)
    probs = jax.nn.softmax(flat @ params["router"])
    hot = jax.nn.one_hot(jnp.argmax(probs, -1), EXPERTS)
    hot = hot * (jnp.cumsum(hot, 0) <= capacity)
    made = jnp.sum((hot * probs).T[..., None] * (flat @ params["experts"]), 0)
    return h + made.reshape(h.shape)


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
    "LayerNorm": lambda p, h, b: normalized(h, -1),
    "BatchNorm": lambda p, h, b: normalized(h, (0, 1)),
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
OFF = dict.fromkeys((*PARTS, *LOSSES, "masks", "whole pool"), 0) | {"capacity": 99}
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
    "transformer and experts": {"attention": 1, "LayerNorm": 1, "experts": 1},
}
ALL_KINDS = ("neighbors", "place", "padding")
# What is on, the module that is named, and the kinds of the findings.
FAULTS = {
    "padding that attends": ({"attention": 1, "masks": 0}, "attention", ("padding",)),
    "padding that is pooled": ({"whole pool": 1}, "pool", ("padding",)),
    "a capacity": ({"experts": 1, "capacity": 4}, "experts", ("neighbors", "place")),
    "weights by place": ({"error": 0, "weights": 1}, "weights", ("place",)),
    "behind right parts": ({"attention": 1, "experts": 1, "shift": 1}, "shift", ALL_KINDS),
    **{
        name: ({name: 1}, name, kinds)
        for name, kinds in {
            "BatchNorm": ("neighbors", "padding"),
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


@pytest.fixture
def kept(monkeypatch):
    """One compiled program of all parts, for all that may be on."""

    def program(own, *args, **options):
        if not KEPT:
            KEPT.append(VersionProgram(own, *args, **options))
        KEPT[0]._given = own.subject
        return KEPT[0]

    monkeypatch.setattr(examples, "VersionProgram", program)


KEPT = []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RIGHT)
def test_independent_examples_are_silent(name, kept):
    found = compared(RIGHT[name])
    assert found.ok and not found.findings and not found.notes, str(found)
    leaves = [row for row in found.rows if row.kind == "gradient"]
    assert len(leaves) == len(PARAMS) and len(found.rows) > len(leaves)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAULTS)
def test_a_dependence_is_named_at_its_module(name, kept):
    on, module, kinds = FAULTS[name]
    found = compared(on)
    expected = [(kind, module) for kind in kinds]
    assert [(f.kind, f.module) for f in found.findings] == expected and not found.ok, str(found)
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


# The loss, what is on, the type, and each finding.
SMALL = {
    "right": (small, {}, "float32", []),
    "BatchNorm": (
        small, {"BatchNorm": 1}, "float32", [("neighbors", "BatchNorm"), ("padding", "BatchNorm")]
    ),
    "losses of each": (losses_of_each, {}, "float32", []),
    "losses of pairs": (
        losses_of_each, {"shift": 1}, "float32", [("neighbors", "pairs"), ("place", "pairs")]
    ),
    "a mean over a constant count": (token_mean, {}, "float32", []),
    "a mean over all tokens": (token_mean, {"whole pool": 1}, "float32", [("neighbors", "mean")]),
    "right in half precision": (small, {}, "bfloat16", []),
    "BatchNorm in half precision": (
        small, {"BatchNorm": 1}, "bfloat16", [("neighbors", "BatchNorm"), ("padding", "BatchNorm")]
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.exhaustive] * ("half" in n or "mean" in n)) for n in SMALL],
)
def test_small_models(name):
    fun, on, dtype, expected = SMALL[name]
    found = compared(on, fun, dtype, has_aux=fun is losses_of_each)
    assert [(f.kind, f.module) for f in found.findings] == expected, str(found)
    assert found.ok is not bool(expected)


def shared(params, x):
    h = 2 * x  # outside of modules
    with scope("norm"):
        h = h / jnp.sqrt(1e-6 + jnp.mean(h**2, 0))
    return jnp.mean((h @ params) ** 2)


W, X = numbers(4, 2, seed=1), numbers(6, 4, seed=2)


def test_one_example_beside_all_others_and_arrays_on_devices():
    x = jax.device_put(X, jax.devices()[1])
    found = cg.compare_examples(shared, jax.device_put(W, jax.devices()[1]), x, examples=2)
    (finding,) = found.findings
    assert (finding.kind, finding.module, finding.file) == ("neighbors", "norm", __file__)
    assert "the gradient of the argument (" in finding.message and "this is meant" in str(found)


@pytest.mark.parametrize(
    ("fun", "x", "message"),
    [
        (shared, X.at[0, 0].set(jnp.nan), "is not finite; diagnose"),
        (lambda w, x: jnp.sum(w**2) + jnp.mean(x), X, "no gradient depends on the examples"),
    ],
)
def test_what_cannot_be_judged_is_no_agreement(fun, x, message):
    found = cg.compare_examples(fun, W, x)
    assert not found.ok and [f.kind for f in found.findings] == ["not judged"]
    assert message in found.findings[0].message


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((shared, W, X[:1]), {}, r"batch: got arrays of shapes .*at least two examples"),
        ((shared, W, (X, X[:3])), {}, "expected one leading axis for all"),
        ((shared, W, jnp.ones((6, 4))), {}, "got examples that are all equal"),
        ((shared, W, X), {"examples": 6}, "examples: got 6 of 6 examples, expected some of"),
        ((shared, W, X), {"examples": range(6)}, "and not all"),
        ((shared, W, X), {"padding": X}, "padding: got the batch itself, expected other numbers"),
        ((shared, W, X), {"padding": X[:, :2]}, "padding: got .*other shapes write compare"),
        ((lambda w, x: x @ w, W, X), {}, r"fun: got float32\[6, 2\] from it, expected a floating"),
        ((lambda w, x: (jnp.mean(x @ w), 1), W, X), {}, "write has_aux=True"),
    ],
)
def test_wrong_usage_is_said(given, options, message):
    with pytest.raises(ValueError, match=message):
        cg.compare_examples(*given, **options)
