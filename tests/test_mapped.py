"""Clips inside shard_map, pmap and vmap with an axis name: the result of the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.helpers import all_reduces, assert_close

SHAPES = {"bias": (5,), "conv": (3, 2, 4), "dense": (8, 6), "rows": (4, 3), "stack": (4, 8, 2)}
# Over neither, the second, both, the first, and the first of two axes behind the layers.
SPECS = {
    "bias": P(),
    "conv": P(None, None, "y"),
    "dense": P("x", "y"),
    "rows": P("x"),
    "stack": P(None, ("x", "y")),
}
every_order = pytest.mark.parametrize("ord", [1, 2, 3, jnp.inf])


def tree(seed, scale=5.0):
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(scale * rng.normal(size=s), jnp.float32) for n, s in SHAPES.items()}


GRADS, PARAMS = tree(0), tree(1, 1.0)


def mesh_of(sizes, names):
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def mapped(f, mesh, in_specs, out_specs, **options):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options))


@pytest.mark.exhaustive
@pytest.mark.kinds()
@every_order
def test_replicated_leaves_are_counted_once(ord):
    grads = {"replicated": jnp.array([3.0, -4.0]), "sharded": GRADS["dense"]}
    specs = {"replicated": P(), "sharded": P("x")}
    rule = cg.ClipByGlobalNorm(0.5, ord=ord, axis_name="x")

    def clip(grads):
        return rule(grads), cg.global_norm(grads, ord, axis_name="x")

    clipped, norm = mapped(clip, mesh_of((8,), ("x",)), (specs,), (specs, P()))(grads)
    assert_close(clipped, cg.ClipByGlobalNorm(0.5, ord=ord)(grads), rtol=2e-6)
    np.testing.assert_allclose(norm, cg.global_norm(grads, ord), rtol=1e-6)


@pytest.mark.exhaustive
@every_order
def test_leaves_over_one_axis_over_two_and_over_none(ord):
    rule = cg.ClipByGlobalNorm(0.5, ord=ord, axis_name=("x", "y"))
    clipped = mapped(rule, mesh_of((4, 2), ("x", "y")), (SPECS,), SPECS)(GRADS)
    assert_close(clipped, cg.ClipByGlobalNorm(0.5, ord=ord)(GRADS), rtol=2e-6)


@pytest.mark.exhaustive
def test_the_transformation_and_its_statistics():
    tx = cg.clip_by_global_norm(0.5, axis_name=("x", "y"), stats=True)
    alone = cg.clip_by_global_norm(0.5, stats=True)
    expected, state = jax.jit(lambda g: alone.update(g, alone.init(g)))(GRADS)
    update = mapped(
        lambda g: tx.update(g, tx.init(g)), mesh_of((4, 2), ("x", "y")), (SPECS,), (SPECS, P())
    )
    clipped, actual = update(GRADS)
    assert_close(clipped, expected, rtol=2e-6)
    assert_close(actual, state, rtol=1e-6, atol=1e-38)


def test_leaves_over_the_same_axis_take_one_all_reduce_and_no_gather():
    specs = {"bias": P(), "dense": P("x"), "stack": P(None, "x")}
    grads = {n: GRADS[n] for n in specs}
    rule = cg.ClipByGlobalNorm(0.5, axis_name="x")
    compiled = mapped(rule, mesh_of((8,), ("x",)), (specs,), specs).lower(grads).compile()
    assert all_reduces(compiled) == 1 and "all-gather" not in compiled.as_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "axis, spec",
    [(None, P("x")), (None, P(None, "x")), (-1, P(None, "x")), ({".*": None}, P("x"))],
    ids=str,
)
def test_adaptive_units_over_devices(axis, spec):
    """Units that are spread over the axis, and units that each lie on one device."""
    grads, params = ({"w": jnp.tile(t["dense"], (1, 4))} for t in (GRADS, PARAMS))
    spread = axis is not None or spec == P("x")
    rule = cg.AdaptiveClip(0.1, axis=axis, axis_name="x" if spread else ())
    clip = mapped(rule, mesh_of((8,), ("x",)), ({"w": spec},) * 2, {"w": spec})
    expected = cg.AdaptiveClip(0.1, axis=axis)(grads, params)
    assert_close(clip(grads, params), expected, rtol=2e-6)
    assert (expected["w"] != grads["w"]).any()


@pytest.mark.kinds()
@pytest.mark.parametrize(
    "rule, spec",
    [
        (cg.ClipByValue(0.5), P("x")),
        (cg.ClipByNorm(0.5, axis=-1, axis_name=()), P("x")),
        (cg.ClipByNorm(0.5), P()),
        (cg.ClipByBlockRMS(0.5), P()),
    ],
    ids=repr,
)
def test_groups_that_lie_on_one_device_need_no_axis(rule, spec):
    clip = mapped(rule, mesh_of((8,), ("x",)), (spec,), spec)
    assert_close(clip(GRADS["dense"]), rule(GRADS["dense"]), rtol=2e-6)


# training


def loss(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def training():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s) for s in ((8, 16), (16, 2), (32, 8), (32, 2))]
    w, v, x, y = (jnp.asarray(a, jnp.float32) for a in arrays)
    return {"in": w, "out": v}, (x, 9 * y)


@functools.cache
def expected_updates():
    params, batch = training()
    tx = optax.chain(cg.clip_by_global_norm(0.1), optax.sgd(1.0))
    return tx.update(jax.grad(loss)(params, batch), tx.init(params), params)[0]


@pytest.mark.exhaustive
def test_sharded_parameters_with_accumulation_in_shard_map():
    """ZeRO: each device holds rows of each parameter, and MultiSteps averages before the clip."""
    params, (x, y) = training()
    clip = cg.clip_by_global_norm(0.1, axis_name="i", stats=True)
    steps = optax.MultiSteps(optax.chain(clip, optax.sgd(1.0)), 4)

    def run(params, batch):
        def body(state, part):
            whole = jax.tree.map(lambda p: jax.lax.all_gather(p, "i", tiled=True), params)
            grads = jax.grad(loss)(whole, part)
            rows = jax.tree.map(lambda g: jax.lax.psum_scatter(g, "i", tiled=True) / 8, grads)
            updates, state = steps.update(rows, state, params)
            return state, updates

        state, updates = jax.lax.scan(body, steps.init(params), batch)
        return jax.tree.map(lambda u: u[-1], updates), optax.tree.get(state, "clipped_count")[None]

    batch = x.reshape(4, 8, 8), y.reshape(4, 8, 2)
    spec = {"in": P("i"), "out": P("i")}
    step = mapped(run, mesh_of((8,), ("i",)), (spec, P(None, "i")), (spec, P("i")), check_vma=False)
    with jax.numpy_dtype_promotion("standard"):
        updates, clipped = step(params, batch)
    assert_close(updates, expected_updates(), rtol=1e-5, atol=1e-7)
    assert (clipped == 1).all()


# bad input


@pytest.mark.parametrize("under", ["nothing", "jit", "another axis"])
@pytest.mark.parametrize(
    "clip",
    [
        lambda g: cg.ClipByGlobalNorm(1.0, axis_name="x")(g),
        lambda g: cg.clip_by_global_norm(1.0, axis_name=("x",)).update(g, None)[0],
        lambda g: cg.AdaptiveClip(0.1, axis_name="x")(g, g),
        lambda g: cg.clip_cotangent(g, cg.ClipByGlobalNorm(1.0, axis_name="x")),
    ],
    ids=["rule", "transformation", "adaptive", "error clip"],
)
def test_an_axis_name_that_is_not_mapped_here_is_refused(clip, under):
    grads = jnp.ones((8, 2))
    run = {"jit": jax.jit, "another axis": functools.partial(jax.vmap, axis_name="y")}
    with pytest.raises(ValueError, match="axis_name: got 'x', which is not a mapped axis here; ex"):
        jax.grad(lambda g: jnp.sum(run.get(under, lambda f: f)(clip)(g)))(grads)
