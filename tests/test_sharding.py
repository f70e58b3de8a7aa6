"""Gradient clips over several devices: the one-device result, with one all-reduce."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.helpers import CASES, all_reduces, assert_close

SPECS = {"bias": P(None), "conv": P(None, None, "y"), "dense": P("x", "y"), "rows": P("x")}
SHAPES = {"bias": (5,), "conv": (3, 2, 4), "dense": (8, 6), "rows": (4, 3)}


def tree(key, scale=5.0):
    keys = jax.random.split(key, len(SHAPES))
    return {
        n: scale * jax.random.normal(k, s) for k, (n, s) in zip(keys, SHAPES.items(), strict=True)
    }


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))


def placed(tree, mesh):
    return {n: jax.device_put(x, NamedSharding(mesh, SPECS[n])) for n, x in tree.items()}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_jit_with_shardings_gives_the_result_of_one_device(case, kind, key):
    grads, params = tree(key), tree(jax.random.fold_in(key, 1), 1.0)
    rule, mesh = case.make(0.3), mesh_of(kind)
    expected, stats = cg.clip_grads(grads, rule, params)
    with jax.set_mesh(mesh):
        arguments = placed(grads, mesh), placed(params, mesh)
        clipped, measured = jax.jit(lambda g, p: cg.clip_grads(g, rule, p))(*arguments)
        if kind == AxisType.Explicit:
            for name, leaf in clipped.items():
                assert jax.typeof(leaf).sharding == jax.typeof(arguments[0][name]).sharding
    assert_close(clipped, expected, rtol=1e-5)
    np.testing.assert_allclose(measured.norm, stats.norm, rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_the_global_norm_is_one_all_reduce_and_no_gather(kind, key):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        grads = {k: v for k, v in placed(tree(key), mesh).items() if k in ("dense", "rows")}
        if kind == AxisType.Auto:
            grads = {k: jax.device_put(v, NamedSharding(mesh, P("x"))) for k, v in grads.items()}
        tx = cg.clip_by_global_norm(1.0)
        compiled = jax.jit(lambda g: tx.update(g, tx.init(g))[0]).lower(grads).compile()
    if kind == AxisType.Auto:
        assert all_reduces(compiled) == 1
    assert "all-gather" not in compiled.as_text()


def test_a_value_clip_needs_no_collective(key):
    mesh = mesh_of(AxisType.Auto)
    tx = cg.clip_by_value(1.0)
    compiled = (
        jax.jit(lambda g: tx.update(g, tx.init(g))[0]).lower(placed(tree(key), mesh)).compile()
    )
    assert all_reduces(compiled) == 0 and "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("ord", [1, 2, 3, jnp.inf])
def test_replicated_leaves_are_counted_once_in_shard_map(ord, key):
    grads = {"replicated": jnp.array([3.0, -4.0]), "sharded": jax.random.normal(key, (8, 3))}
    specs = {"replicated": P(), "sharded": P("x")}
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rule = cg.ClipByGlobalNorm(0.5, ord=ord, axis_name="x")

    def clip(grads):
        clipped, stats = cg.clip_grads(grads, rule)
        return clipped, cg.global_norm(grads, ord, axis_name="x"), stats

    mapped = jax.shard_map(clip, mesh=mesh, in_specs=(specs,), out_specs=(specs, P(), P()))
    if ord != 2:
        mapped = jax.shard_map(lambda g: (*clip(g)[:2], 0), mesh=mesh, in_specs=(specs,),
                               out_specs=(specs, P(), P()))  # fmt: skip
    clipped, norm, stats = jax.jit(mapped)(grads)
    plain = cg.ClipByGlobalNorm(0.5, ord=ord)
    expected, one = cg.clip_grads(grads, plain)
    assert_close(clipped, expected, rtol=2e-6)
    np.testing.assert_allclose(norm, cg.global_norm(grads, ord), rtol=1e-6)
    if ord == 2:
        assert_close(stats, one, rtol=1e-6, atol=1e-38)
        text = jax.jit(mapped).lower(grads).compile()
        assert "all-gather" not in text.as_text()


def test_two_mesh_axes_and_leaves_spread_over_either(key):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    grads = tree(key)
    rule = cg.ClipByGlobalNorm(0.5, axis_name=("x", "y"))
    mapped = jax.shard_map(rule, mesh=mesh, in_specs=(SPECS,), out_specs=SPECS)
    assert_close(jax.jit(mapped)(grads), cg.ClipByGlobalNorm(0.5)(grads), rtol=2e-6)


def test_adaptive_units_that_are_spread_over_an_axis(key):
    grads, params = tree(key)["dense"], tree(jax.random.fold_in(key, 1))["dense"]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rule = cg.AdaptiveClip(0.1, axis_name="x")
    mapped = jax.shard_map(rule, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))
    expected = cg.AdaptiveClip(0.1)(grads, params)
    assert_close(jax.jit(mapped)(grads, params), expected, rtol=2e-6)


def test_pmap_and_vmap_with_an_axis_name(key):
    grads = tree(key)["dense"]
    rule = cg.ClipByGlobalNorm(0.5, axis_name="i")
    for mapping in (jax.pmap, jax.vmap):
        clipped = mapping(rule, axis_name="i")(grads)
        assert_close(clipped, cg.ClipByGlobalNorm(0.5)(grads), rtol=2e-6)


def test_a_training_step_over_devices(key):
    mesh = mesh_of(AxisType.Auto)
    x = jax.random.normal(key, (16, 8))
    params = {"w": jax.random.normal(key, (8, 4))}

    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"]) ** 2)

    import optax

    step = cg.train_step(loss, optax.chain(cg.clip_by_global_norm(0.1), optax.sgd(1.0)))
    expected, _ = step(step.init(params), x)
    sharded = {"w": jax.device_put(params["w"], NamedSharding(mesh, P("x", "y")))}
    state, metrics = step(step.init(sharded), jax.device_put(x, NamedSharding(mesh, P("x"))))
    assert_close(state.params, expected.params, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["clipped_norm"], 0.1, rtol=1e-6)
