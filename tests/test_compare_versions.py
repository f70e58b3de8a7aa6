"""Equal versions of one loss, and their twins: layouts, vmap, frameworks, kernels."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.compare_trainers import AXIS, mesh, numbers

pytestmark = pytest.mark.usefixtures("users_promotion")

PARAMS = {"w": numbers(8, 16, seed=30) / 3, "v": numbers(16, 8, seed=31) / 4}
BATCH = (numbers(16, 8, seed=32), numbers(16, 8, seed=33))
ARGS = (PARAMS, BATCH)


def mlp(params, batch, by=1.0):
    with jax.named_scope("first"):
        h = jnp.tanh(batch[0] @ params["w"])
    with jax.named_scope("second"):
        z = h @ params["v"] * by
    return jnp.mean((z - batch[1]) ** 2)


def wide(tree):
    """The tree in float64."""
    return jax.tree.map(lambda x: x.astype("float64"), tree)


def placed(tree, *spec):
    return jax.device_put(tree, NamedSharding(mesh(), P(*spec)))


LAYOUTS = {
    "data parallel": lambda: (placed(PARAMS), placed(BATCH, AXIS)),
    "tensor parallel": lambda: (
        {"w": placed(PARAMS["w"], None, AXIS), "v": placed(PARAMS["v"], AXIS)}, placed(BATCH),
    ),
    "FSDP": lambda: (placed(PARAMS, AXIS), placed(BATCH, AXIS)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["data parallel", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in
                                ("tensor parallel", "FSDP"))]
)  # fmt: skip
def test_sharded_arrays_are_compared_with_those_of_one_device(name):
    layout = LAYOUTS[name]()
    found = cg.compare(mlp, mlp, ARGS, other_args=layout)
    assert found.ok and len(found.rows) == 2 and not found.unmatched, str(found)
    found = cg.compare(mlp, functools.partial(mlp, by=1.01), ARGS, other_args=layout)
    assert found.findings[0].module == "second"


def test_what_is_of_one_device_alone_is_not_matched():
    def loss(params, batch, axis=None):
        with jax.named_scope("part"):
            value = mlp(params, batch)
        return value if axis is None else lax.pmean(value, axis)

    specs = (P(), P(AXIS))
    mapped = jax.shard_map(
        functools.partial(loss, axis=AXIS), mesh=mesh(), in_specs=specs, out_specs=P()
    )
    found = cg.compare(loss, mapped, ARGS)
    assert found.ok
    assert "module part: not the same on each device, in one version" in found.unmatched


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", [lambda g: lax.psum(g, AXIS), lambda g: g / 8])
def test_a_psum_that_is_missing_or_doubled_in_the_backward_pass(rule):
    found = cg.compare(backward(lambda g: g), backward(rule), ARGS)
    assert {f.kind for f in found.findings} == {"grads"} and not found.ok
    assert {f.path for f in found.findings} == {"w", "v"}


def test_vmap_is_compared_with_a_batch():
    def one(params, x, y):
        return mlp(params, (x, y))

    def mapped(params, batch):
        return jnp.mean(jax.vmap(one, (None, 0, 0))(params, *batch))

    with jax.enable_x64(True):
        for args in ARGS, wide(ARGS):
            found = cg.compare(mlp, mapped, args)
            assert found.ok and len(found.rows) == 2 and not found.unmatched


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / 4) @ v


def kernel(q, k, v, scale=4.0):
    """Attention in blocks of queries, with the running maximum and sum of flash attention."""

    def body(q_ref, k_ref, v_ref, out_ref):
        q = q_ref[...]
        largest = jnp.full((q_ref.shape[0], 1), -jnp.inf, q.dtype)
        total, found = jnp.zeros_like(largest), jnp.zeros_like(q)
        for i in range(0, k_ref.shape[0], 4):
            scores = q @ k_ref[i : i + 4, :].T / scale
            new = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
            weights, old = jnp.exp(scores - new), jnp.exp(largest - new)
            total = total * old + jnp.sum(weights, axis=-1, keepdims=True)
            found = found * old + weights @ v_ref[i : i + 4, :]
            largest = new
        out_ref[...] = found / total

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype), interpret=True)(
        q, k, v
    )


def flash(scale=4.0):
    run = jax.custom_vjp(functools.partial(kernel, scale=scale))
    run.defvjp(lambda *xs: (kernel(*xs, scale=scale), xs),
               lambda xs, g: jax.vjp(attention, *xs)[1](g))  # fmt: skip
    return run


@pytest.mark.exhaustive
def test_flash_attention_is_compared_with_its_reference():
    def loss(params, x, attend):
        with jax.named_scope("attention"):
            x = attend(x @ params["q"], x @ params["k"], x @ params["v"])
        with jax.named_scope("out"):
            return jnp.mean((x @ params["v"]) ** 2)

    params = {name: numbers(16, 16, seed=40 + i) / 4 for i, name in enumerate("qkv")}
    against = functools.partial(functools.partial, loss)
    args = (params, numbers(12, 16, seed=43))
    with jax.enable_x64(True):
        for given in args, wide(args):
            found = cg.compare(against(attend=flash()), against(attend=attention), given)
            assert found.ok and not found.findings, str(found)
            found = cg.compare(against(attend=flash(4.1)), against(attend=attention), given)
            assert (found.findings[0].kind, found.findings[0].module) == ("value", "attention")
