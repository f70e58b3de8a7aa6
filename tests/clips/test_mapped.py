"""Clips inside shard_map, pmap and vmap with an axis name: the result of the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.helpers import all_reduces, array, assert_close
from tests.rows import first_row

SHAPES = {"bias": (5,), "conv": (3, 2, 4), "dense": (8, 6), "rows": (4, 3), "stack": (4, 8, 2)}
every_order = pytest.mark.parametrize("ord", [1, 2, jnp.inf])


def tree(seed, scale=5.0):
    rng = np.random.default_rng(seed)
    return {n: array(scale * rng.normal(size=s)) for n, s in SHAPES.items()}


GRADS, PARAMS = tree(0), tree(1, 1.0)


def mesh_of(sizes, names):
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def mapped(f, mesh, in_specs, out_specs, **options):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options))


@pytest.mark.slow
@first_row
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


def test_leaves_over_the_same_axis_take_one_all_reduce_and_no_gather():
    specs = {"bias": P(), "dense": P("x"), "stack": P(None, "x")}
    grads = {n: GRADS[n] for n in specs}
    rule = cg.ClipByGlobalNorm(0.5, axis_name="x")
    compiled = mapped(rule, mesh_of((8,), ("x",)), (specs,), specs).lower(grads).compile()
    assert all_reduces(compiled) == 1 and "all-gather" not in compiled.as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "axis, spec",
    [(None, P("x")), (None, P(None, "x")), (-1, P(None, "x"))],
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


# bad input


@pytest.mark.parametrize("run", [jax.jit, functools.partial(jax.vmap, axis_name="y")])
@pytest.mark.parametrize(
    "clip",
    [
        lambda g: cg.global_norm(g, axis_name="x"),
        lambda g: cg.clip_by_global_norm(1.0, axis_name=("x",)).update(g, None)[0],
        lambda g: cg.AdaptiveClip(0.1, axis_name="x")(g, g),
        lambda g: cg.clip_cotangent(g, cg.ClipByGlobalNorm(1.0, axis_name="x")),
    ],
    ids=["norm", "transformation", "adaptive", "error clip"],
)
def test_an_axis_name_that_is_not_mapped_here_is_refused(clip, run):
    with pytest.raises(ValueError, match="axis_name: got 'x', which is not a mapped axis here; ex"):
        jax.grad(lambda g: jnp.sum(run(clip)(g)))(array(np.ones((8, 2))))
