"""Training: steps, skipped steps, norms by layer, scalars, and captures of the recorder."""

import functools
import os
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import clipgrad as cg
from tests.helpers import array
from tests.registry.clips import SPREAD, on_devices

PARAMS = {"net": {"w": np.float32([1, 2]), "b": np.float32([0.5])}, "head": np.float32([3])}
GRADS = jax.tree.map(lambda w: np.float32(0.1) * w, PARAMS)
# Gradients of one step each; the sixth is a spike, the eighth is NaN in one leaf.
FACTORS = np.float32([1, 1.1, 0.9, 1, 1.2, 50, 1, 1, 1.1, 30])
STEPS = jax.tree.map(lambda g: np.multiply.outer(FACTORS, g), GRADS)
STEPS["head"][7] = np.nan
# The loss of each step, with a spike where the gradient has none.
LOSSES = np.float32([1, 1.1, 1, 0.9, 30, 1, 1, 1.1, 1, 1])
SMALL = dict(window=8, min_history=3)


def trained(make, inner, devices=1, **arguments):
    """The updates and the states of ten steps; for an axis name those of two devices."""
    tx = make(inner, **arguments)

    def run(steps):
        def step(state, step):
            updates, state = tx.update(step[0], state, PARAMS, value=step[1])
            return state, (updates, cg.scalars(state))

        return jax.lax.scan(step, tx.init(PARAMS), (steps, LOSSES))[1]

    with jax.numpy_dtype_promotion("standard"):
        return on_devices(devices, run, STEPS)


def skipped(make, inner=None, **arguments):
    return trained(make, optax.sgd(1.0) if inner is None else inner, **{**SMALL, **arguments})


def watched(make, optimizer=None, **arguments):
    return trained(make, optax.sgd(1.0) if optimizer is None else optimizer, **arguments)


def loss(w, batch):
    with jax.named_scope("net"):
        h = jnp.tanh(batch["x"] @ w["w"])
    return jnp.mean((h - batch["y"]) ** 2)


def absolute(w, batch):
    return jnp.mean(jnp.abs(batch["x"] @ w["w"] - batch["y"]))


def largest(w, batch):
    return jnp.max(jnp.abs(batch["x"] @ w["w"] - batch["y"]))


def with_aux(w, batch):
    return loss(w, batch), batch["y"]


class Model(nnx.Module):
    def __init__(self):
        self.w, self.scale = nnx.Param(array([1, 2])), nnx.BatchStat(array([1, 1]))


def of_model(model, batch):
    return jnp.mean((batch["x"] @ (model.w[...] * model.scale[...]) - batch["y"]) ** 2)


WEIGHTS = {"w": np.float32([1, 2])}
BATCH = {"x": np.float32([[1, 2], [3, 1], [0, 1], [2, 2]]), "y": np.float32([1, 2, 0, 1])}


def stepped(make, loss_fn=loss, optimizer=None, weights=WEIGHTS, **arguments):
    """The metrics and the parameters after two steps, and whether the first ones were donated."""
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    with jax.numpy_dtype_promotion("standard"):
        step = make(loss_fn, optimizer, **arguments)
        first = step.init(jax.device_put(weights))
        state, metrics = step(first, BATCH)
        state, metrics = step(state, BATCH)
    arrays = [leaf for leaf in jax.tree.leaves(first) if isinstance(leaf, jax.Array)]
    return state, metrics, [leaf.is_deleted() for leaf in arrays]


def weight(batch):
    return jnp.sum(batch["x"])


def made(value):
    """A value, or what a function makes that is called when a row runs."""
    return value() if callable(value) else value


def resumed(make, tree):
    return make(made(tree))


def flat(make, tree, **arguments):
    return make(made(tree), **arguments)


HALTING = cg.skip_spikes(optax.sgd(1.0), halt=True)
LAYERED = cg.watch_updates(optax.sgd(1.0), stacked="net")


def state_after(tx, grads, params):
    return jax.jit(lambda grads: tx.update(grads, tx.init(params), params)[1])(grads)


def halted():
    return state_after(HALTING, jax.tree.map(lambda g: g * np.nan, GRADS), PARAMS)


def layered():
    params = {"net": np.ones((3, 2), np.float32)}
    return state_after(LAYERED, params, params)


NAN = {"x": BATCH["x"] * np.float32(np.nan), "y": BATCH["y"]}
STEP = cg.train_step(loss, cg.skip_spikes(optax.sgd(0.1), halt=True))


def after(batches, factor=1.0):
    """The state after steps with some batches, of which the last may be bad."""
    with jax.numpy_dtype_promotion("standard"):
        state = STEP.init(jax.tree.map(lambda w: jnp.array(w) * factor, WEIGHTS))
        for batch in batches:
            state, _ = STEP(state, batch)
    return state


def leaves_of_capture(capture):
    names = "state", "batch", "key", "step", "extra"
    return {name: jax.tree.leaves(getattr(capture, name)) for name in names}


def recorded(make, directory="captures", **arguments):
    """The folder and the captures of two bad steps, and how often the recorder raised."""
    raised = 0
    with tempfile.TemporaryDirectory() as folder:
        recorder = make(os.path.join(folder, directory), **arguments)
        for factor in (1.0, 2.0):
            try:
                good, bad = cg.resume(after([BATCH], factor)), after([BATCH, NAN], factor)
                recorder.record(good, BATCH)
                recorder.record(bad, NAN)
                recorder.close()
            except cg.HaltedError:
                raised += 1
        return os.listdir(folder), len(os.listdir(os.path.join(folder, directory))), raised


def recording(make, state=None, batch=NAN, **more):
    """What the capture of one step holds, if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = cg.FlightRecorder(folder)
        state = after([BATCH, NAN]) if state is None else made(state)  # a recorder keeps no state
        try:
            make(recorder, state, batch, **{name: made(x) for name, x in more.items()})
            recorder.close()
        except cg.HaltedError as error:
            return leaves_of_capture(cg.load_capture(error.path))
    return "no capture"


@functools.cache
def a_capture(factor):
    folder, state = tempfile.mkdtemp(), after([BATCH, NAN], factor)
    try:
        with cg.FlightRecorder(folder) as recorder:
            recorder.record(state, NAN)
    except cg.HaltedError as error:
        return error.path


class Weights(NamedTuple):
    w: np.ndarray


def loaded(make, factor=1.0, path=None, **arguments):
    arguments = {name: made(value) for name, value in arguments.items()}
    return make(a_capture(1.0) if path is None else a_capture(path), **arguments).state


def restored(make, like=WEIGHTS, **arguments):
    return make(cg.load_capture(a_capture(1.0)), like, **arguments)


ROWS = {
    "skip_spikes": (
        skipped, {}, dict(inner=optax.sgd(2.0)), dict(max_norm=0.4, window=None, min_history=None),
        dict(window=3), dict(sigma=0.5), dict(min_history=7), dict(where="net"),
        SPREAD, dict(halt="spike"), dict(judge="loss"),
    ),
    "watch_updates": (
        watched, {}, dict(optimizer=optax.sgd(2.0)), dict(by="leaf"),
        dict(stacked="net/w", by="leaf"),
        SPREAD,
    ),
    "train_step": (
        stepped, {}, dict(loss_fn=absolute), dict(optimizer=optax.sgd(0.2)),
        dict(error_clip={"net": cg.ClipByValue(1e-3)}), dict(watch_values=["net"]),
        dict(accumulate=2, loss_fn=largest), dict(weight=weight, accumulate=2),
        dict(has_aux=True, loss_fn=with_aux),
        dict(donate=False), dict(wrt=nnx.BatchStat, loss_fn=of_model, weights=Model()),
    ),
    "resume": (resumed, {}, dict(tree=halted)),
    "FlightRecorder": (
        recorded, {}, dict(directory="runs"), dict(max_captures=1), dict(raise_on_halt=False),
    ),
    "FlightRecorder.record": (
        recording, {}, dict(state=lambda: after([BATCH, NAN], 2.0)),
        dict(batch=NAN | {"y": 2 * NAN["y"]}),
        dict(key=lambda: jax.random.key(3)), dict(step=7),
        dict(bad=True, state=lambda: after([BATCH]), batch=BATCH),
        dict(extra=np.float32(1)),
    ),
    "load_capture": (loaded, {}, dict(path=2.0), dict(like=lambda: after([BATCH, NAN]))),
    "Capture.restore": (
        restored, {}, dict(like=Weights(WEIGHTS["w"])),
        dict(name="batch", like=BATCH),
    ),
    "scalars": (flat, dict(tree=layered), dict(tree=halted), dict(layers=True)),
}  # fmt: skip
WITHOUT = {
    ("skip_spikes", "max_norm"): dict(window=None, min_history=None),
    ("resume", "tree"): dict(tree=lambda: HALTING.init(PARAMS)),
}
