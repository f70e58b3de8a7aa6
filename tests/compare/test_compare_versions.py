"""Equal versions of one loss, and their twins: layouts, vmap, frameworks, kernels."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.compare.compare_layouts import ARGS, LAYOUTS, mlp
from tests.compare.compare_trainers import AXIS, mesh

pytestmark = pytest.mark.usefixtures("users_promotion")


def wide(tree):
    """The tree in float64."""
    return jax.tree.map(lambda x: x.astype("float64"), tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["data parallel", *(pytest.param(n, marks=pytest.mark.slow) for n in
                                ("tensor parallel", "FSDP"))]
)  # fmt: skip
def test_sharded_arrays_are_compared_with_those_of_one_device(name):
    layout = LAYOUTS[name]()
    comparison = cg.compare(mlp, mlp, ARGS, other_args=layout)
    assert comparison.ok and len(comparison.rows) == 2 and not comparison.unmatched, str(comparison)
    comparison = cg.compare(mlp, functools.partial(mlp, by=1.01), ARGS, other_args=layout)
    assert comparison.findings[0].module == "second"


@pytest.mark.slow
def test_what_is_of_one_device_alone_is_not_matched():
    def loss(params, batch, axis=None):
        with jax.named_scope("part"):
            value = mlp(params, batch)
        return value if axis is None else lax.pmean(value, axis)

    specs = (P(), P(AXIS))
    mapped = jax.shard_map(
        functools.partial(loss, axis=AXIS), mesh=mesh(), in_specs=specs, out_specs=P()
    )
    comparison = cg.compare(loss, mapped, ARGS)
    assert comparison.ok
    assert "module part: not the same on each device, in one version" in comparison.unmatched


def normalized(axes, scale=1.0):
    """Layers over devices, whose hidden values differ between them."""

    def loss(params, batch):
        x, y = batch
        for name, axis in zip(("first", "second"), axes, strict=True):
            with jax.named_scope(name):
                mean = x.mean(0, keepdims=True)
                x = jnp.tanh(x - (mean if axis is None else lax.pmean(mean, axis))) * scale
        with jax.named_scope("head"):
            return lax.pmean(jnp.mean((x @ params["w"][:, :1]) ** 2) + y.mean(), AXIS)

    specs = (P(), P(AXIS))
    return jax.shard_map(loss, mesh=mesh(), in_specs=specs, out_specs=P())


@pytest.mark.slow
def test_values_that_differ_between_devices_are_compared_device_by_device(tmp_path):
    comparison = cg.compare(normalized((AXIS, AXIS)), normalized((AXIS, None)), ARGS)
    assert comparison.findings[0].module == "second", comparison
    assert [row.module for row in comparison.rows][:1] == ["first"]
    assert cg.compare(normalized((AXIS, None)), normalized((AXIS, None)), ARGS).ok
    path = tmp_path / "run"
    cg.save_run(normalized((AXIS, AXIS)), ARGS, path)
    assert cg.compare(path, normalized((AXIS, AXIS)), ARGS).ok
    assert cg.compare(path, normalized((AXIS, None)), ARGS).findings[0].kind == "value"


def backward(rule):
    @jax.custom_vjp
    def passed(w):
        return w

    passed.defvjp(lambda w: (w, None), lambda _, g: (rule(g),))

    def loss(params, batch):
        with jax.named_scope("weights"):
            params = jax.tree.map(passed, params)
        return lax.pmean(mlp(params, batch), AXIS)

    specs = (P(), P(AXIS))
    return jax.shard_map(loss, mesh=mesh(), in_specs=specs, out_specs=P(), check_vma=False)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [lambda g: lax.psum(g, AXIS), lambda g: g / 8])
def test_a_psum_that_is_missing_or_doubled_in_the_backward_pass(rule):
    comparison = cg.compare(backward(lambda g: g), backward(rule), ARGS)
    assert {f.kind for f in comparison.findings} == {"grads"} and not comparison.ok
    assert {f.path for f in comparison.findings} == {"w", "v"}


@pytest.mark.slow
def test_vmap_is_compared_with_a_batch():
    def one(params, x, y):
        return mlp(params, (x, y))

    def mapped(params, batch):
        return jnp.mean(jax.vmap(one, (None, 0, 0))(params, *batch))

    with jax.enable_x64(True):
        for args in ARGS, wide(ARGS):
            comparison = cg.compare(mlp, mapped, args)
            assert comparison.ok and len(comparison.rows) == 2 and not comparison.unmatched
