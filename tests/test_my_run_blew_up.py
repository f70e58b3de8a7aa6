"""The page "My run blew up": its program ends at the line, and each of its loops is captured."""

import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "my_run_blew_up.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LOOPS = re.findall(r"^def (\w+_loop)\(", PAGE, re.MULTILINE)

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.exhaustive]


def test_the_program_ends_with_the_line_the_step_and_the_example(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(PROGRAMS[0])
    monkeypatch.chdir(tmp_path)
    runpy.run_path("train.py", run_name="__main__")
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)[1]
    assert capsys.readouterr().out == shown
    assert re.match("step 57, train.py:20: div at 0, 0 .*\nexample 21 .device data=5.: its", shown)
    assert PROGRAMS[0].splitlines()[19].endswith("mask.sum(axis=1, keepdims=True)")


def test_a_climb_of_one_percent_a_step_is_no_spike():
    assert "does not see a climb of one percent a step" in PAGE
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


def batches(*bad):
    """Batches of which some have a row whose logarithm is not finite."""
    for i in range(9):
        batch = np.full((8, 3), 1 + i, np.float32)
        batch[5] *= i not in bad
        yield batch


# A loss scale of 4 is halved twice before it is 1.
BAD = {name: (3,) for name in LOOPS} | {"scaled_loop": (3, 4, 5)}


@pytest.mark.parametrize("name", LOOPS)
def test_each_loop_is_captured(name, page, tmp_path):
    with pytest.raises(cg.HaltedError) as error, cg.FlightRecorder(tmp_path) as recorder:
        if name == "scaled_loop":
            page[name](recorder, batches(2))
            assert not recorder.captures
        page[name](recorder, batches(*BAD[name]))
    capture = cg.load_capture(error.value.path)
    bad = BAD[name][-1]
    assert capture.step == bad and np.isneginf(capture.meta["statistics"]["loss"][-1])
    leaves = jax.tree.leaves(capture.params)
    assert leaves and all(np.isfinite(x).all() for x in leaves)
    assert any((np.asarray(x) != 1).any() for x in leaves if x.size == 3)
    if name == "levanter_loop":
        assert capture.batch["index"] == bad
    else:
        (batch,) = jax.tree.leaves(capture.batch)
        np.testing.assert_array_equal(batch, list(batches(bad))[bad])


def test_a_spike_is_captured_with_its_example(page, tmp_path, capsys):
    page["report_spike"](tmp_path)
    shown = PAGE.split("## A spike")[1].split("```text\n")[1].split("```")[0]
    assert capsys.readouterr().out == shown
    assert "step 45" in shown and "example 5:" in shown


def test_a_run_that_died_is_replayed_from_a_checkpoint(page, tmp_path):
    """The state after step 49 is all that is left of a run that died at step 57."""
    import optax

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
    found = cg.diagnose(page["loss"], capture.args, examples="batch")
    assert found.findings[0].operation == "div" and [e.index for e in found.examples] == [21]


def test_every_kind_of_loop_is_on_the_page():
    kinds = "optax flax nnx equinox haiku multi_steps scaled maxtext levanter".split()
    assert LOOPS == [f"{kind}_loop" for kind in kinds]
