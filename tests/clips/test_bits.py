"""Trainings that end with optax's parameters, bit for bit, and eager updates with its bits."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import RELEASED, array, assert_close, assert_same
from tests.rows import first_row

pytestmark = [pytest.mark.usefixtures("users_promotion")]

STEPS = 30
SIZES = (37, 131, 64, 5)
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "lion": lambda: optax.lion(1e-3),
}


def by_leaf_of_optax(max_norm):
    one = optax.clip_by_global_norm(max_norm)

    def update(updates, state, params=None):
        return jax.tree.map(lambda g: one.update(g, one.init(g))[0], updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


CLIPS = {
    "value": (optax.clip, cg.clip_by_value),
    "global norm": (optax.clip_by_global_norm, cg.clip_by_global_norm),
    "norm": (by_leaf_of_optax, cg.clip_by_norm),
}
# These are equal up to 1e-6, in the update of one step.
NEAR = {
    "block RMS": (optax.clip_by_block_rms, cg.clip_by_block_rms),
    "adaptive": (optax.adaptive_grad_clip, cg.adaptive_grad_clip),
}
# Of 30 steps the first threshold acts at each, the second at some, the last at none.
THRESHOLDS = {
    "value": (1e-3, 0.05, 100.0),
    "global norm": (1e-3, 0.1, 100.0),
    "norm": (1e-3, 0.1, 100.0),
}
ROWS = [
    *((clip, optimizer, 1) for clip in CLIPS for optimizer in OPTIMIZERS),
    *((clip, optimizer, 0) for clip in CLIPS for optimizer in ("momentum", "adam")),
    *((clip, "adam", 2) for clip in CLIPS),
]
ROW_IDS = [f"{clip}-{name}-{('always', 'sometimes', 'never')[i]}" for clip, name, i in ROWS]


def first_parameters():
    keys = jax.random.split(jax.random.key(0), len(SIZES))
    return [
        {"w": jax.random.normal(key, (a, b)) / a**0.5, "b": jnp.zeros(b)}
        for key, a, b in zip(keys, SIZES[:-1], SIZES[1:], strict=False)
    ]


def loss(params, x, y):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)


def data():
    keys = jax.random.split(jax.random.key(1))
    return jax.random.normal(keys[0], (50, SIZES[0])), jax.random.normal(keys[1], (50, SIZES[-1]))


def one_step(tx, params, state, batch):
    grads = jax.grad(loss)(params, *batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def train(tx):
    """The last parameters and state of a training whose step is one compiled program."""
    params, batch = first_parameters(), data()
    state = tx.init(params)
    step = jax.jit(functools.partial(one_step, tx), compiler_options=RELEASED)
    for _ in range(STEPS):
        params, state = step(params, state, batch)
    return params, state


def scan_steps(tx, params, batch):
    def body(carry, _):
        return one_step(tx, *carry, batch), None

    return jax.lax.scan(body, (params, tx.init(params)), length=STEPS)[0]


def train_by_scan(tx):
    """The same of a training that is one compiled program."""
    run = jax.jit(functools.partial(scan_steps, tx), compiler_options=RELEASED)
    return run(first_parameters(), data())


def assert_ends_like(ours, theirs, run=train):
    """The parameters and the optimizer's own state are equal at the end."""
    (params, state), (their_params, their_state) = run(ours), run(theirs)
    assert_same(params, their_params)
    assert_same(state, their_state)


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("clip, optimizer, which", ROWS, ids=ROW_IDS)
def test_a_training_ends_with_the_bits_of_optax(clip, optimizer, which):
    theirs, ours = (
        optax.chain(make(THRESHOLDS[clip][which]), OPTIMIZERS[optimizer]()) for make in CLIPS[clip]
    )
    assert_ends_like(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("clip", CLIPS)
def test_the_thresholds_act_at_every_step_at_some_and_at_none(clip):
    def steps(threshold):
        tx = optax.chain(CLIPS[clip][1](threshold, stats=True), optax.adam(1e-2))
        return scan_steps(tx, first_parameters(), data())[1][0].clipped_count

    always, sometimes, never = jax.jit(jax.vmap(steps))(jnp.array(THRESHOLDS[clip]))
    assert always == STEPS and 5 <= sometimes <= STEPS - 5 and never == 0


@pytest.mark.slow
@pytest.mark.parametrize("clip", CLIPS)
def test_a_training_inside_of_scan_ends_with_the_bits_of_optax(clip):
    theirs, ours = (
        optax.chain(make(THRESHOLDS[clip][1]), optax.adam(1e-2)) for make in CLIPS[clip]
    )
    assert_ends_like(ours, theirs, train_by_scan)


@pytest.mark.slow
@pytest.mark.parametrize("clip, field", [("value", "max_delta"), ("global norm", "max_norm")])
def test_injected_thresholds_give_the_bits_of_optax(clip, field):
    threshold = optax.linear_schedule(THRESHOLDS[clip][0], THRESHOLDS[clip][1], STEPS)
    their_clip, our_clip = map(optax.inject_hyperparams, CLIPS[clip])
    ours = optax.chain(our_clip(threshold), optax.adam(1e-2))
    theirs = optax.chain(their_clip(**{field: threshold}), optax.adam(1e-2))
    (params, state), (their_params, their_state) = train(ours), train(theirs)
    assert_same(params, their_params)
    assert_same(state[1], their_state[1])


# Eagerly, on many trees.

SHAPES = [
    {"b": (4,), "w": (3, 4)},
    {"b": (64,), "conv": (3, 3, 4, 8), "w": (128, 64)},
]


@first_row
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("clip", CLIPS | NEAR)
def test_updates_are_those_of_optax(clip, shapes):
    rng = np.random.default_rng(0)
    for threshold, scale in itertools.product((0.01, 0.37, 0.5), (1e-3, 1.0, 30.0, 1e4)):
        grads, params = (
            {name: array(rng.normal(size=shape) * size)
             for name, shape in shapes.items()}
            for size in (scale, 1.0)
        )  # fmt: skip
        theirs, ours = (
            tx.update(grads, tx.init(params), params)[0]
            for tx in (make(threshold) for make in (CLIPS | NEAR)[clip])
        )
        (assert_same if clip in CLIPS else assert_close)(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_in_half_precision_the_norm_is_nearer_than_that_of_optax_to_float64(dtype):
    errors = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        tree = [jnp.asarray(rng.normal(size=shape), dtype) for shape in ((64, 64), (64,))]
        exact = np.sqrt(sum(np.sum(np.asarray(leaf, np.float64) ** 2) for leaf in tree))
        errors.append([abs(float(f(tree)) / exact - 1) for f in (cg.global_norm, optax.tree.norm)])
    ours, theirs = np.transpose(errors)
    assert ours.max() < 1e-6 < theirs.min() and np.median(theirs) > 5e-5
