"""Where low precision loses: held against gradients in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.compare_models import with_vjp


def numbers(*shape, seed, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def cancelling(params, x):
    """A variance as the difference of two moments, of values far from zero."""
    with jax.named_scope("hidden"):
        h = jnp.tanh(x @ params["w"])
    with jax.named_scope("far"):
        h = h + params["far"]
    with jax.named_scope("variance"):
        v = jnp.mean(h * h, axis=-1) - jnp.mean(h, axis=-1) ** 2
    with jax.named_scope("out"):
        return jnp.mean(v * params["scale"])


def careful(params, x):
    with jax.named_scope("hidden"):
        h = jnp.tanh(x @ params["w"])
    with jax.named_scope("far"):
        h = h + params["far"]
    with jax.named_scope("variance"):
        v = jnp.mean((h - jnp.mean(h, axis=-1, keepdims=True)) ** 2, axis=-1)
    with jax.named_scope("out"):
        return jnp.mean(v * params["scale"])


def arguments(far, dtype="bfloat16"):
    params = {
        "w": numbers(4, 6, seed=1, dtype=dtype),
        "far": jnp.full((1, 6), far, dtype),
        "scale": numbers(8, seed=2, dtype=dtype),
    }
    return params, numbers(8, 4, seed=3, dtype=dtype)


def errors(fun, args):
    """The share of each leaf's gradient that is rounding, by its own gradient in float64."""
    near = jax.grad(fun)(*args)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), args)
        exact = jax.grad(fun)(*wide)
        return {
            name: np.linalg.norm(np.asarray(near[name], np.float64) - g) / np.linalg.norm(g)
            for name, g in exact.items()
        }


@pytest.mark.kinds()
@pytest.mark.parametrize("other", ["float64", "float32"])
def test_cancellation_is_found_in_its_module_and_in_the_leaves_behind_it(other):
    args = arguments(30.0)
    found = cg.compare(cancelling, other, args)
    assert not found.ok and {f.kind for f in found.findings} == {"rounding"}
    assert found.findings[0].module == "variance" and found.findings[0].factor > 10
    assert found.findings[0].file == __file__
    lost = {f.path: f.ratio for f in found.findings if f.path}
    exact = errors(cancelling, args)
    assert set(lost) <= {name for name, error in exact.items() if error > 0.04}
    assert "scale" in lost
    np.testing.assert_allclose(lost["scale"], exact["scale"], rtol=0.35)


@pytest.mark.exhaustive
def test_the_careful_twin_and_small_values_lose_nothing():
    assert cg.compare(cancelling, "float64", arguments(0.0)).ok
    assert cg.compare(careful, "float64", arguments(0.0)).ok
    found = cg.compare(cancelling, "float64", arguments(30.0, "float32"))
    assert found.ok, str(found)


def test_rtol_is_the_share_of_a_gradient_that_may_be_rounding():
    assert cg.compare(cancelling, "float32", arguments(30.0), rtol=1e9).ok
    found = cg.compare(cancelling, "float32", arguments(0.0), rtol=1e-5)
    assert {f.path for f in found.findings if f.path} == {"w", "far", "scale"} and not found.ok


def test_custom_rules_stay():
    """A wrong rule is the same in both types: no precision is lost there."""

    def twice(grads):
        return jax.tree.map(lambda g: g * 2, grads)

    def loss(w, x):
        return jnp.mean(with_vjp(jnp.tanh, twice)(x @ w) ** 2)

    args = numbers(4, 3, seed=7, dtype="bfloat16"), numbers(5, 4, seed=8, dtype="bfloat16")
    assert cg.compare(loss, "float64", args).ok


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"other": "float16"}, "other: got 'float16', expected the name of a wider dtype"),
        ({"other": "float32", "names": {"a": "b"}}, "both runs are of fun"),
        ({"other": "float32", "other_args": (1,)}, "both runs are of fun"),
        ({"other": "float32", "argnums": None}, "argnums: got None with other='float32'"),
    ],
)
def test_wrong_arguments_with_a_dtype_are_told(kwargs, words):
    with pytest.raises(ValueError, match=words):
        cg.compare(cancelling, args=arguments(0.0), **kwargs)
