"""numerical_grad is Paddle's get_numerical_gradient, for trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.helpers import array

X = array([0.5, -1.5, 2.0])


def model(params, x):
    return {"y": params["w"] * x, "z": jnp.sum(x) * params["b"]}


PARAMS = {"w": array([1.5, -0.5, 3.0]), "b": array(3), "n": 7}


def test_it_is_the_central_difference_with_paddles_step():
    x = np.asarray(X, np.float64)
    expected = ((x + 0.005) ** 3 - (x - 0.005) ** 3) / 0.01
    np.testing.assert_allclose(
        cg.numerical_grad(lambda x: x**3, (X,), wrt=0, delta=0.005), expected, rtol=1e-10
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_it_is_precise_whatever_the_dtype(dtype):
    x = X.astype(dtype)
    numeric = cg.numerical_grad(lambda x: jnp.sin(x), (x,), wrt="x")
    assert numeric.dtype == np.float64
    np.testing.assert_allclose(numeric, np.cos(np.asarray(x, np.float64)), rtol=1e-8)


def test_beside_a_kink_the_slope_is_that_of_its_own_side():
    x = array([1e-6, -1e-6, 2.0])
    np.testing.assert_allclose(cg.numerical_grad(jax.nn.relu, (x,))[0], [1, 0, 1], atol=1e-9)


def test_it_never_uses_the_functions_own_rule():
    wrong = jax.custom_vjp(lambda x: x * x)
    wrong.defvjp(lambda x: (x * x, x), lambda x, g: (g * 7,))
    np.testing.assert_allclose(cg.numerical_grad(wrong, (X,), wrt=0), 2 * X, rtol=1e-6)


def test_the_result_has_the_structure_of_what_is_differentiated():
    everything = cg.numerical_grad(model, (PARAMS, X))
    assert jax.tree.structure(everything) == jax.tree.structure(({"w": 0, "b": 0, "n": None}, 0))
    assert everything[0]["w"].shape == (3,) and everything[0]["b"].shape == ()


@pytest.mark.parametrize("wrt", ["params/w", "0/w", "args[0]['w']"])
def test_a_path_gives_that_leaf(wrt):
    np.testing.assert_allclose(cg.numerical_grad(model, (PARAMS, X), wrt=wrt), X, rtol=1e-6)


def test_several_give_a_tuple_and_outputs_are_chosen():
    params, x = cg.numerical_grad(model, (PARAMS, X), wrt=("params", 1), output="y")
    np.testing.assert_allclose(params["w"], X, rtol=1e-6)
    np.testing.assert_allclose(params["b"], 0, atol=1e-9)
    np.testing.assert_allclose(x, PARAMS["w"], rtol=1e-6)


def test_a_cotangent_weighs_the_outputs():
    weights = array([1.0, 10.0, 100.0])
    numeric = cg.numerical_grad(lambda x: x * x, (X,), wrt=0, cotangent=weights)
    np.testing.assert_allclose(numeric, 2 * X * weights, rtol=1e-6)


@pytest.mark.slow
def test_complex_gradients_follow_jax():
    z = jnp.asarray([1 + 2j, 3 - 1j])
    weights = jnp.asarray([1j, 2 + 0j])
    square = lambda z: z * z * (1 + 1j)  # noqa: E731
    expected = jax.vjp(square, z)[1](weights)[0]
    numeric = cg.numerical_grad(square, (z,), wrt=0, cotangent=weights)
    np.testing.assert_allclose(numeric, expected, rtol=1e-5)
    real = cg.numerical_grad(lambda z: jnp.abs(z) ** 2, (z,), wrt=0)
    np.testing.assert_allclose(real, jax.grad(lambda z: jnp.sum(jnp.abs(z) ** 2))(z), rtol=1e-5)


@pytest.mark.slow
def test_keyword_arguments_are_arguments_and_have_gradients_by_their_names():
    x, y = jnp.asarray([1.0, 2.0]), jnp.asarray([3.0, 5.0])
    product = lambda x, y, scale=1: scale * x * y  # noqa: E731
    (of_x,) = cg.numerical_grad(product, (x,), {"y": y, "scale": 2})
    np.testing.assert_allclose(of_x, 2 * y, rtol=1e-6)
    of_y = cg.numerical_grad(product, (x,), kwargs={"y": y}, wrt="y")
    np.testing.assert_allclose(of_y, x, rtol=1e-6)
    both = cg.numerical_grad(lambda *, x, y: x * y["w"], (), {"x": x, "y": {"w": y}})
    np.testing.assert_allclose(both["y"]["w"], x, rtol=1e-6)
    several = cg.numerical_grad(product, (x,), {"y": y}, wrt=["x", "y"], delta=0.005)
    np.testing.assert_allclose(several, [y, x], rtol=1e-5)


@pytest.mark.parametrize("delta", [None, 0.005])
def test_a_function_that_changes_state_is_an_error(delta):
    calls = []

    def counting(x):
        calls.append(1)
        return x * len(calls)

    with pytest.raises(ValueError, match="at the same point: the function changes state"):
        cg.numerical_grad(counting, (array(np.ones(2)),), delta=delta)


def test_a_donated_argument_is_an_error_that_says_what_to_pass():
    square = jax.jit(lambda x, y: x * y, donate_argnums=0)
    text = r"args\[0\] is donated: .* pass the function without donate_argnums"
    with pytest.raises(ValueError, match=text):
        cg.numerical_grad(square, (array(np.ones(2)), array(np.ones(2))))
    with pytest.raises(cg.GradCheckError, match=text):
        cg.check_grads(square, (array(np.ones(2)), array(np.ones(2))))


@pytest.mark.slow
def test_what_is_left_out_of_the_numerical_gradient_is_none():
    args = ({"w": np.float32([1.0, 2.0]), "b": np.float32([3.0])}, np.float32(2.0))
    fun = lambda p, x: x * jnp.sum(p["w"] ** 2) + jnp.sum(p["b"])  # noqa: E731
    for wrt in ("!b", ("!b",), ("**", "!b")):
        params, x = cg.numerical_grad(fun, args, wrt=wrt)
        np.testing.assert_allclose(params["w"], [4.0, 8.0], rtol=1e-5)
        assert params["b"] is None and x.shape == ()
    np.testing.assert_allclose(cg.numerical_grad(fun, args, wrt="w"), [4.0, 8.0], rtol=1e-5)
