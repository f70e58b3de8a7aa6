"""Clips under jit with sharded leaves: the one-device result, with the fewest collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.helpers import CASES, all_reduces, array, assert_close
from tests.rows import first_row

SHAPES = {
    "bias": (8,),
    "embedding": (16, 8),
    "layers": {"in": (4, 8, 16), "norm": (4, 8), "out": (4, 16, 8)},
    "scale": (1,),
}
BOTH = ("x", "y")
# Sharded by parameter, by tensor, by both, by stages of layers that a scan stacks.
LAYOUTS = {
    "fsdp": {
        "bias": P(BOTH),
        "embedding": P(BOTH),
        "layers": {"in": P(None, BOTH), "norm": P(None, BOTH), "out": P(None, BOTH)},
        "scale": P(),
    },
    "tensor": {
        "bias": P(),
        "embedding": P(None, "y"),
        "layers": {"in": P(None, None, "y"), "norm": P(), "out": P(None, "y")},
        "scale": P(),
    },
    "both": {
        "bias": P("x"),
        "embedding": P("x", "y"),
        "layers": {"in": P(None, "x", "y"), "norm": P(None, "x"), "out": P(None, "y", "x")},
        "scale": P(),
    },
    "stages": {
        "bias": P(),
        "embedding": P("y"),
        "layers": {"in": P("x", None, "y"), "norm": P("x"), "out": P("x", "y")},
        "scale": P(),
    },
}
RULES = {case.name: case.make(0.3) for case in CASES} | {
    "AdaptiveClip(layers apart)": cg.AdaptiveClip(
        0.3, axis=lambda p, x: -2 if p.startswith("layers") else tuple(range(x.ndim - 1))
    ),
}
every_kind = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: array(scale * rng.normal(size=shape)),
        SHAPES,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


GRADS, PARAMS = tree(0, 5.0), tree(1)


def mesh_of(kind):
    return jax.make_mesh((4, 2), BOTH, axis_types=(kind, kind))


def placed(tree, mesh, layout):
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, LAYOUTS[layout]
    )


# One of each kind of group: of the tree, of leaves, of units.
FEW = ["ClipByGlobalNorm", "ClipByNorm", "AdaptiveClip(layers apart)"]


def by_rules(names, grads, params):
    return {name: cg.clip_grads(grads, RULES[name], params)[0] for name in names}


@pytest.fixture(scope="module")
def on_one_device():
    return jax.jit(functools.partial(by_rules, RULES))(GRADS, PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, kind, names",
    [
        ("fsdp", AxisType.Explicit, FEW),
        ("tensor", AxisType.Auto, FEW),
        ("both", AxisType.Auto, list(RULES)),
        ("both", AxisType.Explicit, FEW),
        ("stages", AxisType.Explicit, FEW),
    ],
    ids=["fsdp", "tensor", "both, auto", "both, explicit", "stages"],
)
def test_every_rule_gives_the_result_of_one_device(layout, kind, names, on_one_device):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        grads, params = placed(GRADS, mesh, layout), placed(PARAMS, mesh, layout)
        clipped = jax.jit(functools.partial(by_rules, names))(grads, params)
    for name in names:
        assert_close(clipped[name], on_one_device[name], rtol=1e-5)


@first_row
@every_layout
def test_every_rule_keeps_explicit_shardings(layout):
    mesh = mesh_of(AxisType.Explicit)

    def clip(grads, params):
        for name, clipped in by_rules(RULES, grads, params).items():
            for actual, grad in zip(jax.tree.leaves(clipped), jax.tree.leaves(grads), strict=True):
                assert jax.typeof(actual).sharding == jax.typeof(grad).sharding, name

    with jax.set_mesh(mesh):
        jax.eval_shape(clip, placed(GRADS, mesh, layout), placed(PARAMS, mesh, layout))


def compiled_update(tx, grads):
    return jax.jit(lambda g: tx.update(g, tx.init(g))[0]).lower(grads).compile()


@first_row
@every_kind
@every_layout
def test_a_global_norm_is_one_all_reduce_and_no_gather(layout, kind):
    """More of them, but no more than optax's, where leaves are spread over different axes."""
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        grads = placed(GRADS, mesh, layout)
        compiled = compiled_update(cg.clip_by_global_norm(1.0), grads)
        if layout in ("fsdp", "tensor"):
            assert all_reduces(compiled) == 1
        else:
            theirs = compiled_update(optax.clip_by_global_norm(1.0), grads)
            assert all_reduces(compiled) <= all_reduces(theirs)
    assert "all-gather" not in compiled.as_text() and "all-to-all" not in compiled.as_text()


# training


def loss(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def training():
    rng = np.random.default_rng(0)
    w, v, x, y = (rng.normal(size=s) for s in ((8, 16), (16, 2), (32, 8), (32, 2)))
    return {"in": array(w), "out": array(v)}, (array(x), array(9 * y))


OPTIMIZERS = {
    "global norm": lambda: optax.chain(cg.clip_by_global_norm(0.1, stats=True), optax.sgd(0.1)),
    "adaptive": lambda: optax.chain(cg.adaptive_grad_clip(0.01), optax.sgd(0.1)),
}


PLACES = {
    "sharded": (AxisType.Auto, {"in": P("x", "y"), "out": P(("x", "y"))}),
    "replicated": (AxisType.Auto, {"in": P(), "out": P()}),
    "explicit": (AxisType.Explicit, {"in": P(), "out": P(None, "y")}),
}


@functools.cache
def after_one_step(name):
    params, batch = training()
    step = cg.train_step(loss, OPTIMIZERS[name]())
    return step(step.init(params), batch)[0].params


@first_row
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("accumulate, place", [(1, "sharded"), *((4, place) for place in PLACES)])
def test_a_training_step_over_devices_clips_once_after_averaging(accumulate, place, name):
    params, batch = training()
    step = cg.train_step(loss, OPTIMIZERS[name](), accumulate=accumulate)
    kind, specs = PLACES[place]
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        sharded = {n: jax.device_put(w, NamedSharding(mesh, specs[n])) for n, w in params.items()}
        over = jax.device_put(batch, NamedSharding(mesh, P("x")))
        state = step.init(sharded)
        compiled = step.update.lower(state, over).compile()
        state, metrics = compiled(state, over)
    assert_close(state.params, after_one_step(name), rtol=1e-5, atol=1e-6)
    if name == "global norm":
        np.testing.assert_allclose(metrics["clipped_norm"], 0.1, rtol=1e-6)
        # Each device works on its own part of every microbatch.
        assert place == "sharded" or "all-gather" not in compiled.as_text()


@pytest.mark.slow
def test_gradients_that_are_not_added_up_yet_are_refused(users_promotion):
    """Those of weights that are the same on all devices, as for an accumulation."""
    mesh = mesh_of(AxisType.Explicit)
    calls = {name: lambda g, rule=rule: rule(g, g) for name, rule in RULES.items()}
    calls |= {"global_norm": cg.global_norm, "clip_grads": lambda g: cg.clip_grads(g, None)}

    def gradient(use, w, x):
        def loss(w):
            return jnp.sum(jnp.einsum("bi,ij->bj", x, jax.reshard(w, P(None, None, reduced={"x"}))))

        return use(jax.grad(loss)(jax.reshard(w, P(None, None, reduced={"x"}))))

    with jax.set_mesh(mesh):
        arrays = jax.reshard(jnp.ones((4, 4)), P()), jax.reshard(jnp.ones((16, 4)), P("x"))
        for call in calls.values():
            with pytest.raises(ValueError, match=r"U:x.*not yet added up.*jax.reshard"):
                jax.jit(functools.partial(gradient, call))(*arrays)
        whole = lambda g: cg.global_norm(jax.reshard(g, P()))  # noqa: E731
        assert jax.jit(functools.partial(gradient, whole))(*arrays) == 64
