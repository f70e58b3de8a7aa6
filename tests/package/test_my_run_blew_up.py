"""The page "My run blew up": its program ends at the line, and each of its loops is captured."""

import pathlib
import re
import runpy

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import clipgrad as cg

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "my_run_blew_up.md").read_text()
SHOWN = re.sub(r"<!--.*?-->", "", PAGE, flags=re.DOTALL)
PROGRAMS = re.findall(r"```python\n(.*?)```", SHOWN, re.DOTALL)

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.slow]


def test_the_program_ends_with_the_line_the_step_and_the_example(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(PROGRAMS[0])
    monkeypatch.chdir(tmp_path)
    runpy.run_path("train.py", run_name="__main__")
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)[1]
    assert capsys.readouterr().out == shown
    assert re.match("step 57, train.py:22: div at 0, 0 .*\nexample 21 .device data=5.: its", shown)
    assert PROGRAMS[0].splitlines()[21].endswith("mask.sum(axis=1, keepdims=True)")


def test_a_climb_of_one_percent_a_step_is_no_spike():
    assert "does not detect a slow climb, such as one percent per step" in PAGE
    tx = cg.skip_spikes(optax.sgd(1.0))

    def step(state, i):
        noise = jax.random.uniform(
            jax.random.fold_in(jax.random.key(0), i.astype(int)), minval=0.95, maxval=1.05
        )
        updates, state = tx.update(jnp.full(4, 1.01**i * noise), state, jnp.ones(4))
        return state, jnp.any(updates != 0)

    _, taken = jax.jit(lambda: jax.lax.scan(step, tx.init(jnp.ones(4)), jnp.arange(600.0)))()
    assert taken.all()


@pytest.fixture(scope="module")
def page():
    names = {}
    exec("\n".join(PROGRAMS), names)
    return names


# Loops of other libraries.


def loss_of(outputs):
    return jnp.mean(jnp.log(outputs))


def flax_loop(recorder, batches):
    model = nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones)
    tx = cg.skip_spikes(optax.adam(1e-3), halt=True)
    state = TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), jnp.ones((4, 3))), tx=tx
    )

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: loss_of(state.apply_fn(p, batch)))(state.params)
        return state.apply_gradients(grads=grads), loss

    step = jax.jit(step, donate_argnums=0)
    for batch in batches:
        state, loss = step(state, batch)
        recorder.record(state, batch, loss=loss)
    recorder.close()


def nnx_loop(recorder, batches):
    model = nnx.Linear(3, 1, use_bias=False, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, cg.skip_spikes(optax.adam(1e-3), halt=True), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: loss_of(m(batch)))(model)
        optimizer.update(model, grads)
        return loss

    for batch in batches:
        loss = step(model, optimizer, batch)
        recorder.record(optimizer, batch, params=nnx.state(model, nnx.Param), loss=loss)
    recorder.close()


def equinox_loop(recorder, batches):
    model = eqx.nn.Linear(3, 1, use_bias=False, key=jax.random.key(0))
    model = eqx.tree_at(lambda m: m.weight, model, jnp.ones((1, 3)))
    tx = cg.skip_spikes(optax.adam(1e-3), halt=True)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, opt_state, batch):
        loss, grads = eqx.filter_value_and_grad(lambda m: loss_of(jax.vmap(m)(batch)))(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    for batch in batches:
        model, opt_state, loss = step(model, opt_state, batch)
        recorder.record(opt_state, batch, params=model, loss=loss)
    recorder.close()


def scaled_loop(recorder, batches):
    tx = cg.skip_spikes(optax.adam(1e-3), halt=True)
    params = {"w": jnp.ones(3)}
    state = {"params": params, "opt_state": tx.init(params), "scale": DynamicScale(scale=4.0)}

    @jax.jit
    def step(state, batch):
        grad = state["scale"].value_and_grad(lambda p: loss_of(batch @ p["w"]))
        scale, finite, loss, grads = grad(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        taken = finite | (state["scale"].scale <= 1)
        old = state["params"], state["opt_state"]
        new = optax.apply_updates(state["params"], updates), opt_state
        params, opt_state = jax.tree.map(lambda n, o: jnp.where(taken, n, o), new, old)
        return {"params": params, "opt_state": opt_state, "scale": scale}, loss

    for i, batch in enumerate(batches):
        state, loss = step(state, batch)
        recorder.record(state, batch, step=i, loss=loss)
    recorder.close()


def batches(*bad):
    """Batches of which some have a row whose logarithm is not finite."""
    for i in range(9):
        batch = np.full((8, 3), 1 + i, np.float32)
        batch[5] *= i not in bad
        yield batch


# The loops, and their bad batches. A loss scale of 4 is halved twice before it is 1.
LOOPS = {"optax": (3,), "flax": (3,), "nnx": (3,), "equinox": (3,), "scaled": (3, 4, 5)}


@pytest.mark.parametrize("name", LOOPS)
def test_each_loop_is_captured(name, page, tmp_path):
    loop = (page | globals())[f"{name}_loop"]
    with pytest.raises(cg.HaltedError) as error, cg.FlightRecorder(tmp_path) as recorder:
        if name == "scaled":
            loop(recorder, batches(2))
            assert not recorder.captures
        loop(recorder, batches(*LOOPS[name]))
    capture, bad = cg.load_capture(error.value.path), LOOPS[name][-1]
    assert capture.step == bad and np.isneginf(capture.meta["statistics"]["loss"][-1])
    leaves = jax.tree.leaves(capture.params)
    assert leaves and all(np.isfinite(x).all() for x in leaves)
    assert any((np.asarray(x) != 1).any() for x in leaves if x.size == 3)
    np.testing.assert_array_equal(capture.batch, list(batches(bad))[bad])


def test_a_training_goes_on_from_a_capture(page, tmp_path):
    step = cg.train_step(
        lambda p, x: loss_of(x @ p["w"]), cg.skip_spikes(optax.adam(1e-3), halt=True)
    )
    state, batch = step.init({"w": jnp.ones(3)}), next(batches())
    with cg.FlightRecorder(tmp_path, raise_on_halt=False) as recorder:
        for factor in (1, 0, 1):
            state, _ = step(state, factor * batch)
            recorder.record(state, factor * batch)
    state, metrics = page["go_on"](step, *recorder.captures, state, batch)
    assert not metrics["skipped"] and not state.opt_state.halted and state.opt_state.count >= 3


def test_a_run_that_died_is_replayed_from_a_checkpoint(page, tmp_path):
    """The state after step 49 is all that is left of a run that died at step 57."""
    tx = optax.adam(3e-3)

    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(page["loss"])(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = page["init"](jax.random.key(0))
    state = tx.init(params)
    for _, batch in zip(range(50), page["batches"](64), strict=False):
        params, state = step(params, state, batch)
    with pytest.raises(cg.HaltedError) as error:
        page["replay"](tmp_path, params, state, 50)
    capture = cg.load_capture(error.value.path)
    assert capture.step == 57 and all(np.isfinite(x).all() for x in jax.tree.leaves(capture.params))
    diagnosis = cg.diagnose(page["loss"], capture.args, examples="batch")
    assert diagnosis.findings[0].operation == "div" and [e.index for e in diagnosis.examples] == [
        21
    ]
