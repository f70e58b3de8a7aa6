"""The table of how others clip: each line runs, and does what theirs is meant to do."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import array, assert_close, float64

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "coming_from" / "trainers.md"
TABLE = PAGE.read_text().split("| code | today | in one line |\n")[1].split("\n\n")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TABLE.splitlines()
    if line.startswith("| ")
]


pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.slow]


def line_of(code, today=""):
    (line,) = [row[2].strip("`") for row in ROWS if row[0] == code and row[1].startswith(today)]
    return line


def after(line, **names):
    """The names after the line, and before it those that a training has anyway."""
    names = {"cg": cg, "jax": jax, "jnp": jnp, "optax": optax, **names}
    exec(line, names)
    return names


GRADS = {"enc": {"w": array([[3.0, 6.0], [2.0, 0.0]])}, "head": {"w": array([24.0])}}
PARAMS = {"enc": {"w": array([[0.5, 1.0], [2.0, 4.0]])}, "head": {"w": array([0.1])}}


def scaled(tree, factor):
    return jax.tree.map(lambda g: np.float64(g) * factor, tree)


def updates_of(tx, grads=GRADS, params=PARAMS):
    return tx.update(grads, tx.init(params), params)[0]


def run(tx, norms):
    state, norms_after = tx.init(jnp.zeros(1)), []
    update = jax.jit(tx.update)
    for norm in norms:
        updates, state = update(jnp.array([norm], jnp.float32), state)
        norms_after.append(abs(float(updates[0])))
    return norms_after, state


def test_maxtext_leaves_fp8_statistics_alone_and_has_its_three_norms():
    raw = {"params": GRADS, "_overwrite_with_gradient": {"scale": jnp.array([1e4])}}
    names = after(line_of("MaxText", "`apply"), raw_grads=raw)
    assert_close(names["grads"]["params"], scaled(GRADS, 1 / 25))
    assert names["grads"]["_overwrite_with_gradient"] is not None
    assert names["grads"]["_overwrite_with_gradient"]["scale"] == 1e4
    assert (names["stats"].norm, names["stats"].clipped_norm) == (25, 1)


def test_maxtext_skips_a_spike_and_goes_on():
    tx = after(line_of("MaxText", "`skip_step_on_spikes"), tx=optax.sgd(1.0))["tx"]
    norms = np.exp(np.random.default_rng(0).normal(size=80) * 0.1)
    norms[[10, 70]] = np.nan, 1e6
    updates, state = run(tx, norms)
    assert np.flatnonzero(np.equal(updates, 0)).tolist() == [10, 70] and state.skipped_count == 2


NOT_FROZEN = {"enc": {"w": True}, "head": {"w": False}}
AS_OPTAX = [
    ("Levanter", "`optax", {"max_grad_norm": 1.0}, optax.clip_by_global_norm(1.0)),
    ("Levanter", "`optax", {"max_grad_norm": 0}, optax.identity()),
    ("big_vision", "`optax", {"not_frozen": NOT_FROZEN},
     optax.masked(optax.clip_by_global_norm(1.0), NOT_FROZEN)),
]  # fmt: skip


@pytest.mark.parametrize(("code", "today", "names", "theirs"), AS_OPTAX)
def test_three_steps_are_those_of_optax(code, today, names, theirs):
    tx = after(line_of(code, today), **names)["tx"]
    state, their_state = tx.init(PARAMS), theirs.init(PARAMS)
    for _ in range(3):
        updates, state = tx.update(GRADS, state, PARAMS)
        expected, their_state = theirs.update(GRADS, their_state, PARAMS)
        assert_close(updates, expected)


def test_levanter_clips_by_its_history():
    tx = after(line_of("Levanter", "`clip_update"))["tx"]
    norms = np.float32(np.exp(np.random.default_rng(0).normal(size=200) * 0.2))
    norms[[100, 150]] = 50.0, 70.0
    updates, _ = run(tx, norms)
    assert updates[:64] == norms[:64].tolist()
    past = np.delete(np.float64(norms[22:150]), 100 - 22)
    assert updates[150] == pytest.approx(past.mean() + 3 * past.std(), rel=1e-5)


def test_dreamerv3_clips_whole_tensors():
    updates = updates_of(after(line_of("dreamerv3"))["tx"])

    def by_tensor(g, w):
        size, weight = np.linalg.norm(g), np.linalg.norm(w)
        return g / max(1, size / (0.3 * max(1e-3, weight)))

    assert_close(updates, jax.tree.map(by_tensor, float64(GRADS), float64(PARAMS)))


def test_scenic_clips_and_has_the_norm():
    names = after(line_of("scenic"), grads=GRADS)
    from jax.example_libraries import optimizers

    assert_close(names["grads"], optimizers.clip_grads(GRADS, 1.0))
    assert names["stats"].norm == 25


@pytest.mark.parametrize("scale, max_norm, factor", [
    (1e-3, 0.1, 1), (1e-2, 10.0, 1), (1.0, 0.1, 0.1 / 25), (1.0, 10.0, 10 / 25),
], ids=str)  # fmt: skip
def test_small_gradients_are_left_as_they_are(scale, max_norm, factor):
    grads = jax.tree.map(lambda g: g * scale, GRADS)
    names = after(line_of("by hand"), grads=grads, max_norm=max_norm)
    assert_close(names["grads"], scaled(grads, factor))


def test_flax_linen_train_state():
    from flax import linen as nn
    from flax.training.train_state import TrainState

    model = nn.Dense(1)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    names = after(line_of("Flax Linen"), TrainState=TrainState, model=model,
                  params=params, tx=optax.sgd(1.0))  # fmt: skip
    state = names["state"].apply_gradients(
        grads=jax.tree.map(lambda p: 9 * jnp.ones_like(p), params)
    )
    moved = jax.tree.map(jnp.subtract, params, state.params)
    assert float(cg.global_norm(moved)) == pytest.approx(1, rel=1e-5)


def test_flax_nnx_optimizer():
    from flax import nnx

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    names = after(line_of("Flax NNX"), nnx=nnx, model=model, tx=optax.sgd(1.0))
    grads = nnx.grad(lambda m: 100 * jnp.sum(m(jnp.ones((1, 2)))))(model)
    names["optimizer"].update(model, grads)
    moved = jax.tree.map(jnp.subtract, before, nnx.state(model, nnx.Param))
    assert float(cg.global_norm(moved)) == pytest.approx(1, rel=1e-5)


def test_equinox_models_hold_functions_that_are_left_alone():
    import equinox as eqx

    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    grads = eqx.filter_grad(lambda m: 1e3 * jnp.sum(m(jnp.ones(2))))(model)
    optim = optax.sgd(1.0)
    state = optax.chain(cg.adaptive_grad_clip(0.01), optim).init(eqx.filter(model, eqx.is_array))
    names = after(line_of("Equinox"), eqx=eqx, model=model, optim=optim, grads=grads, state=state)
    weight, update = model.layers[0].weight, names["updates"].layers[0].weight
    limit = 0.01 * np.linalg.norm(weight, axis=0)
    np.testing.assert_allclose(np.linalg.norm(update, axis=0), limit, rtol=1e-5)
    assert isinstance(eqx.apply_updates(model, names["updates"]), eqx.nn.MLP)


def test_every_line_of_the_table_is_run_above():
    source = pathlib.Path(__file__).read_text()
    for code, _, line in ROWS:
        assert re.search(rf'\("{re.escape(code)}"', source), code
        assert line.startswith("`") and "cg." in line
    assert ROWS


@pytest.mark.parametrize(
    "code, last, today, skipped",
    [("AXLearn", 1.0, "", [1, 2, 3, 5]), ("MaxText", 30.0, "`skip_step_on_nan", [1, 2])],
)
def test_what_is_not_finite_or_too_large_is_skipped_and_all_else_taken(code, last, today, skipped):
    tx = after(line_of(code, today), inner=optax.sgd(1.0), tx=optax.sgd(1.0))["tx"]
    updates, _ = run(tx, [1.0, np.nan, np.inf, 1e6, 30.0, 1e9])
    assert np.flatnonzero(np.equal(updates, 0)).tolist() == skipped
    assert [updates[0], updates[4]] == pytest.approx([1.0, last])
