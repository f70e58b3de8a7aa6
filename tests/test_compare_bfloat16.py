"""Public models in bfloat16: what is lost, held against gradients and values in float64."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from benchmarks.flax_models import Transformer

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("users_promotion")]


def data(*shape, dtype):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), dtype)


def cast(tree, dtype):
    """The arrays of a tree in another type; their numbers are those of bfloat16."""
    is_float = lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    narrow = lambda x: x.astype(jnp.bfloat16).astype(dtype)  # noqa: E731
    return jax.tree.map(lambda x: narrow(x) if is_float(x) else x, tree)


def transformer(dtype):
    """Two blocks of Linen."""
    model = Transformer(scanned=False, blocks=2)
    params = model.init(jax.random.key(0), data(2, 16, 32, dtype="float32"))
    loss = lambda p, x: jnp.mean(jnp.tanh(model.apply(p, x)) ** 2)  # noqa: E731
    return loss, (cast(params, dtype), data(2, 16, 32, dtype=dtype))


def normalized(dtype):
    """An MLP of Haiku behind a layer norm, of data far from zero."""
    net = hk.without_apply_rng(
        hk.transform(lambda x: hk.nets.MLP([32, 32, 8])(hk.LayerNorm(-1, True, True)(x)))
    )
    params = net.init(jax.random.key(0), data(8, 16, dtype="float32"))
    x = (40 + data(8, 16, dtype="float32")).astype(jnp.bfloat16).astype(dtype)
    return lambda p, x: jnp.mean(net.apply(p, x) ** 2), (cast(params, dtype), x)


MODELS = {
    "transformer of Linen": transformer,
    "MLP of Haiku": normalized,
}


def gradients(make, dtype):
    """The gradient of the model made in a type, by path."""
    loss, args = make(dtype)
    leaves = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(*args))
    assert all(x.dtype == dtype for _, x in leaves)
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in leaves]
    values = [np.asarray(x.astype(jnp.float64)) for _, x in leaves]
    return dict(zip(names, values, strict=True))


def errors(make):
    """The relative error of each leaf in bfloat16, and whether it is zero but for rounding."""
    with jax.enable_x64(True):
        exact, near = gradients(make, "float64"), gradients(make, "bfloat16")
    whole = max(np.abs(x).max() for x in exact.values())
    return {
        name: (np.linalg.norm(near[name] - x) / np.linalg.norm(x), np.abs(x).max() < 1e-9 * whole)
        for name, x in exact.items()
    }


MODULES = {"MLP of Haiku": ["layer_norm"]}


@pytest.mark.parametrize("name", MODELS)
def test_the_rounding_of_each_leaf_is_that_of_its_gradient(name):
    found = cg.compare(MODELS[name]("bfloat16")[0], "float32", MODELS[name]("bfloat16")[1])
    lost = {finding.path: finding.ratio for finding in found.findings if finding.path}
    zero = {note.split(":")[0] for note in found.notes if note.endswith("zero but for rounding")}
    for path, (error, is_zero) in errors(MODELS[name]).items():
        assert is_zero == (path in zero)
        if path in lost or (error > 0.055 and not is_zero):
            np.testing.assert_allclose(lost[path], error, rtol=0.1, err_msg=path)
    assert found.ok == (not lost)
    modules = [finding.module for finding in found.findings if not finding.path]
    assert modules == MODULES.get(name, []), str(found)
