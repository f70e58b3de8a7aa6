"""Bad input gets a clear error or a documented failure; an empty check is never ok."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipgrad as cg

X = jnp.asarray([0.5, 1.5])


def failed(function, *args, **options):
    report = cg.check_grads(function, args, raise_on_failure=False, **options)
    assert not report.ok
    return str(report)


NAN, INF = X.at[1].set(np.nan), X.at[0].set(np.inf)
REFUSED = [
    (TypeError, r"args is a list; expected the tuple.*\(x,\)", jnp.sin, [X], {}),
    (ValueError, "returns no floating-point array.*bool", lambda x: x > 0, (X,), {}),
    (ValueError, "args hold no floating-point array", jnp.sin, (jnp.arange(3),), {}),
    (ValueError, r"wrt='y' means no .* leaf; there are \['x or 0'", jnp.sin, (X,), {"wrt": "y"}),
    (ValueError, "no_grad=3 means no", jnp.sin, (X,), {"no_grad": 3}),
    (ValueError, "output='loss' means no", jnp.sin, (X,), {"output": "loss"}),
    (TypeError, "got 1.5; expected a position", jnp.sin, (X,), {"wrt": [1.5]}),
    (ValueError, "nothing is left to check", jnp.sin, (X,), {"no_grad": 0}),
    (ValueError, r"args\[0\]\[1\] is nan; a derivative", jnp.sin, (NAN,), {}),
    (ValueError, r"args\[0\]\[0\] is inf", jnp.sin, (INF,), {}),
    (ValueError, "order=3; expected 1, or 2", jnp.sin, (X,), {"order": 3}),
    (ValueError, "mode='slow'; expected one of auto", jnp.sin, (X,), {"mode": "slow"}),
    (ValueError, "delta=0; expected a positive", jnp.sin, (X,), {"delta": 0}),
    (ValueError, "max_relative_error=0; expected", jnp.sin, (X,), {"max_relative_error": 0}),
    (ValueError, "points=0; expected 1 or more", jnp.sin, (X,), {"points": 0}),
    (ValueError, r"skip=\['speed'\] names no check", jnp.sin, (X,), {"skip": ["speed"]}),
    (ValueError, r"devices=\('xpu',\) names no kind", jnp.sin, (X,), {"devices": ("xpu",)}),
    (ValueError, "names no kind of device", jnp.sin, (X,), {"devices": ()}),
]


@pytest.mark.parametrize(("error", "match", "function", "args", "options"), REFUSED)
def test_a_wrong_request_is_refused(error, match, function, args, options):
    with pytest.raises(error, match=match):
        cg.check_grads(function, args, **options)


def test_numerical_grad_refuses_a_wrong_delta_and_a_cotangent_of_another_shape():
    with pytest.raises(ValueError, match="delta=-1; expected a positive"):
        cg.numerical_grad(jnp.sin, (X,), delta=-1)
    with pytest.raises(ValueError, match="cotangent has shapes"):
        cg.numerical_grad(jnp.sin, (X,), cotangent=jnp.ones(3))


def test_an_excluded_input_may_hold_anything():
    mask = jnp.asarray([0.0, -np.inf])
    assert cg.check_grads(lambda x, m: x * jnp.exp(m), (X, mask), no_grad="m").ok


def test_a_value_that_is_not_finite_fails():
    assert "[finite] out[0]: the value is not finite at 1 of 2" in failed(jnp.log, X.at[0].set(-1))


def test_a_gradient_that_is_not_finite_fails():
    assert "[finite] args[0][0]: 1 of 2 elements" in failed(jnp.sqrt, X.at[0].set(0))


@pytest.mark.parametrize("mode", ["auto", "fast", "full"])
def test_what_is_not_finite_is_not_a_wrong_value_as_well(mode):
    unit = lambda h: h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-6)  # noqa: E731
    text = failed(unit, jnp.array([[1.0, 2.0], [0.0, 0.0]]), mode=mode)
    assert "2 of 4 elements of the gradient are not finite" in text and "[value]" not in text


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_a_wrong_value_beside_one_that_is_not_finite_is_found(mode):
    root = jax.custom_vjp(jnp.sqrt)
    root.defvjp(lambda x: (jnp.sqrt(x), x), lambda x, g: (g / jnp.sqrt(x),))
    text = failed(root, X.at[0].set(0), mode=mode)
    assert "1 of 2 elements of the gradient are not finite" in text
    assert "[value] args[0][1]: 1 of 2 elements wrong" in text


def test_a_random_function_is_called_that():
    rng = np.random.default_rng(0)
    text = failed(lambda x: x * rng.uniform(), X)
    assert "[determinism] out: the function called twice gives different values (random" in text


def test_a_function_with_side_effects_on_its_value_is_called_that():
    counter = itertools.count()
    assert "side effects?" in failed(lambda x: x * next(counter), X)


def test_a_function_without_reverse_mode_fails_with_the_reason():
    loop = lambda x: lax.while_loop(lambda c: c[0] < 9, lambda c: 2 * c, x)  # noqa: E731
    assert "[cotangent] args[0]: differentiation raises ValueError: Reverse-mode" in failed(loop, X)


def test_absent_devices_are_not_run_and_alone_not_ok():
    report = cg.check_grads(jnp.sin, (X,), devices=("cpu", "tpu"))
    assert report.not_run["device tpu"] == "there is no such device here"
    assert report.devices == ("cpu",)
    assert "nothing was verified" in failed(jnp.sin, X, devices=("tpu",))


def test_a_gradient_of_zero_everywhere_is_noted():
    report = cg.check_grads(jnp.round, (X,))
    assert any("zero everywhere" in note for note in report.notes)


def test_integers_keys_none_and_strings_are_passed_over():
    def function(x, index, key, none, word):
        assert none is None and word == "normal"
        return x[index] * jax.random.normal(key, index.shape)

    args = (X, jnp.asarray([1, 0]), jax.random.key(0), None, "normal")
    assert cg.check_grads(function, args).verified == 2


@pytest.mark.parametrize(
    ("wrt", "verified"),
    [(0, 6), ("p", 6), ("p/w", 4), ("args[0]['b']", 2), (["p/b", "x"], 4), (r".*w", 4), (None, 8)],
)
def test_inputs_are_chosen_by_position_name_path_or_pattern(wrt, verified):
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    report = cg.check_grads(lambda p, x: x @ p["w"] + p["b"], (params, X), wrt=wrt, points=1)
    assert report.verified == verified


@pytest.mark.parametrize("output", [0, "0", [0]])
def test_outputs_are_chosen_and_the_others_not_checked(output):
    halves = jax.custom_vjp(lambda x: (jnp.sin(x), x * x))
    halves.defvjp(lambda x: (halves(x), x), lambda x, g: (jnp.cos(x) * g[0],))
    assert cg.check_grads(halves, (X,), output=output).ok
    assert "[value]" in failed(halves, X, output=1)
