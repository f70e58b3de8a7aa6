"""Statistics, metrics and states as the flat dictionary that loggers take."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import clipgrad as cg
from tests.helpers import array
from tests.rows import first_row

pytestmark = pytest.mark.usefixtures("users_promotion")
FIELDS = {"norm", "clipped_norm", "scale", "clipped", "fraction", "nonfinite", "all_zero"}
PARAMS = {"w": array([3.0, 4.0]), "b": array(np.zeros(2))}


def loss(params, batch):
    with jax.named_scope("layer"):
        h = params["w"] * batch
    return jnp.sum(h**2) + params["b"].sum()


def names_below(numbers, path):
    return {name.removeprefix(path + "/") for name in numbers if name.startswith(path + "/")}


@pytest.mark.slow
def test_statistics_are_below_their_names():
    _, _, stats = cg.value_and_grad_with_stats(loss)(PARAMS, jnp.ones(2))
    numbers = cg.scalars(stats)
    assert set(numbers) == {f"layer/{field}" for field in FIELDS}
    assert float(numbers["layer/norm"]) == 10.0
    assert cg.scalars(stats["layer"])["norm"] == numbers["layer/norm"]


@first_row
@pytest.mark.parametrize("lengths", [(), (3,), (2, 3)], ids=str)
def test_values_have_at_most_one_axis(lengths):
    def scanned(x, lengths):
        if not lengths:
            with jax.named_scope("cell"):
                return 2 * x
        return lax.scan(lambda h, _: (scanned(h, lengths[1:]), None), x, None, lengths[0])[0]

    _, _, stats = cg.value_and_grad_with_stats(lambda x: scanned(x, lengths))(1.0)
    norm = cg.scalars(stats)["cell/norm"]
    assert norm.shape == (() if not lengths else (np.prod(lengths),))
    np.testing.assert_array_equal(norm, np.ravel(stats["cell"].norm))


@pytest.mark.parametrize("compile", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_metrics_of_a_training_step(compile):
    optimizer = optax.chain(cg.clip_by_global_norm(1.0, stats=True), optax.adam(1e-3))
    step = cg.train_step(
        lambda p, b: (loss(p, b), {"accuracy": jnp.array(0.5), "image": jnp.zeros((2, 2))}),
        optimizer,
        error_clip={"layer": cg.ErrorClipByValue(1.0)},
        has_aux=True,
    )
    _, metrics = step(step.init(PARAMS), array(np.ones(2)))
    numbers = compile(cg.scalars)(metrics)
    assert names_below(numbers, "error_clip/layer") == FIELDS
    assert names_below(numbers, "clip") == FIELDS | {
        "count",
        "clipped_count",
        "nonfinite_count",
    } | {"threshold"}
    rest = {name for name in numbers if name.count("/") == 0}
    norms = {"grad_norm", "measured_norm", "clipped_norm"}
    assert rest == {"loss", "nonfinite", "clip_scale"} | norms
    assert names_below(numbers, "aux") == {"accuracy"}
    assert float(numbers["clip/norm"]) == float(metrics["grad_norm"])
    assert float(numbers["error_clip/layer/clipped"]) == 1.0


@pytest.mark.slow
def test_the_state_of_an_optimizer_gives_its_clips_and_nothing_else():
    clip = cg.clip_by_global_norm(optax.constant_schedule(1.0), stats=True)
    optimizer = cg.skip_spikes(optax.chain(clip, optax.adam(1e-3)))
    state = optimizer.init(PARAMS)
    _, state = optimizer.update(PARAMS, state, PARAMS)
    numbers = cg.scalars(state)
    assert names_below(numbers, "clip") == FIELDS | {
        "count",
        "clipped_count",
        "nonfinite_count",
        "threshold",
    }
    assert "skip_spikes/skipped_count" in numbers
    assert all(name.startswith(("clip/", "skip_spikes/")) for name in numbers)
    assert float(numbers["clip/norm"]) == 5.0
    assert set(cg.scalars(cg.types.TrainState(PARAMS, state))) == set(numbers)


@pytest.mark.slow
def test_statistics_of_each_leaf_are_below_the_clip():
    clip = cg.clip_by_norm(1.0, stats="per_leaf")
    _, state = clip.update(PARAMS, clip.init(PARAMS))
    assert float(cg.scalars(state)["clip/leaves/w/norm"]) == 5.0


def test_the_state_of_another_library_is_left_out():
    state = (optax.adam(1e-3).init(PARAMS), optax.sgd(0.1, momentum=0.9).init(PARAMS))
    with pytest.raises(ValueError, match="got tuple without statistics or numbers, expected stat"):
        cg.scalars(state)


def test_two_values_of_one_name_are_an_error():
    _, _, stats = cg.value_and_grad_with_stats(loss)(PARAMS, array(np.ones(2)))
    with pytest.raises(ValueError, match="two values with the name 'layer/norm', expected one; w"):
        cg.scalars((stats, stats))


def test_clips_are_numbered_below_each_name_by_itself():
    step = cg.train_step(
        loss,
        optax.chain(
            cg.clip_by_value(2.0, stats=True),
            cg.clip_by_global_norm(1.0, stats=True),
            optax.sgd(0.1),
        ),
    )
    metrics = step(step.init(PARAMS), array(np.ones(2)))[1]
    numbers = cg.scalars({"generator": metrics, "discriminator": metrics})
    for name in ("generator", "discriminator"):
        assert {f"{name}/clip_0/norm", f"{name}/clip_1/norm"} <= set(numbers)
    assert not [name for name in numbers if "clip_2" in name]


@pytest.mark.parametrize(
    "tree", [{}, None, (), "metrics", 3.0, {"z": array(np.ones(()), jnp.complex64)}], ids=str
)
def test_nothing_to_log_is_an_error(tree):
    with pytest.raises(ValueError, match="without statistics or numbers, expected statistics"):
        cg.scalars(tree)


def test_one_array_alone_is_named_as_the_clip():
    clip = cg.clip_by_norm(1.0, stats="per_leaf")
    x = array([3.0, 4.0])
    _, state = jax.jit(clip.update)(x, clip.init(x))
    numbers = cg.scalars(state)
    assert float(numbers["clip/norm"]) == 5.0
    assert not any("//" in name for name in numbers)


@pytest.mark.slow
def test_the_state_of_an_nnx_optimizer_is_that_of_its_arrays():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = cg.skip_spikes(optax.chain(cg.clip_by_global_norm(1.0, stats=True), optax.adam(0.1)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(lambda w: 3 * jnp.ones_like(w), nnx.state(model)))
    numbers = cg.scalars({"loss": 2.0, "state": optimizer.opt_state})
    assert numbers["loss"] == 2 and jnp.isclose(numbers["state/clip/norm"], 27**0.5)
    assert numbers["state/skip_spikes/skipped"] == 0 and numbers["state/clip/clipped_count"] == 1
