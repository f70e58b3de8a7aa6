"""How many programs a check compiles, and that what runs again is told where it is another one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipgrad as cg
from clipgrad._check.traced_again import is_same_program
from tests.check.check_zoo import normal
from tests.helpers import array
from tests.rows import some_of


def layers(weights, x, position):
    """A loss of scanned layers, which also takes an integer."""
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
    return (h**2).sum() * position


def test_the_loop_of_a_loss_is_compiled_once_outside_of_jit(compiled):
    # For the loss alone; an integer makes the check ask for types.
    args = normal(3, 2, 3, 3, dtype=jnp.float32), array(np.ones((2, 3))), 2
    assert cg.check_grads(lambda *args: layers(*args), args, wrt=0).ok
    assert sum(count for name, count in compiled.items() if "scan" in name) == 1


# Each has a size of which no other test has programs; `softplus` has a rule of JAX.
@pytest.mark.parametrize(("function", "size"), [(jnp.sin, 23), (jax.nn.softplus, 29)])
def test_value_and_gradient_without_a_users_rule_are_one_program(compiled, function, size):
    # Of each operation there is a program of the call, and none of its derivative.
    x = array(np.linspace(1.0, 2.0, size))
    assert cg.check_grads(lambda x: jnp.sum(jnp.square(function(x))), (x,)).ok
    assert compiled["jit(square)"] == 1
    assert not {"jit(mul)", "jit(cos)", "jit(logistic)", "jit(add_any)"} & set(compiled)


def attention(bias, size=19):
    """A loss whose gradient by the bias of the keys is 0: each softmax adds up to 1."""
    queries, keys, values = np.float32(np.random.default_rng(1).normal(size=(3, 5, size)))
    weights = jax.nn.softmax(queries @ (keys + bias[None]).T / np.float32(3))
    return jnp.sum(jnp.sin(weights @ values))


def cancelling(x):
    """A loss whose gradient is not 0, of terms that cancel."""
    return jnp.sum(jnp.square(jnp.exp(x * jnp.float32(2**-17)) - jnp.float32(1)))


@pytest.mark.parametrize(("loss", "programs"), [(attention, 0), (cancelling, 1)])
def test_a_gradient_of_0_is_explained_without_the_program_that_rounds_all_numbers(
    compiled, loss, programs
):
    report = cg.check_grads(loss, (array(np.linspace(0.5, 1.5, 19)),))
    assert any("off by rounding" in note for note in report.notes)
    assert compiled["jit(rounded_gradient)"] == programs


@jax.custom_gradient
def tenth_too_large_if_eager(x):
    """Which JAX wraps in functions of its own."""
    return jnp.sin(x), lambda g: (
        g * jnp.cos(x) * (1.0 if isinstance(x, jax.core.Tracer) else 1.1),
    )


def test_a_rule_of_custom_gradient_runs_outside_of_jit():
    x = array(np.linspace(0.1, 0.7, 4))
    report = cg.check_grads(tenth_too_large_if_eager, (x,), raise_on_failure=False)
    assert "value" in {failure.check for failure in report.failures}


@pytest.mark.slow
def test_a_program_in_half_precision_with_fewer_roundings_is_differentiated_once(
    compiled,
):
    x = array(np.random.default_rng(0).normal(size=(8, 29)), jnp.bfloat16)

    def loss(x):
        for _ in range(6):
            x = x + jnp.sin(x) * jnp.bfloat16(0.3)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    report = cg.check_grads(loss, (x,), raise_on_failure=False)
    assert "primal" not in {failure.check for failure in report.failures}
    assert compiled["jit(cos)"] == 0


def scanned(scale):
    return lambda x: lax.scan(lambda h, _: (h * scale(), None), x, length=2)[0]


CHANGED = {
    "a number": lambda k: float(k),
    "an array": lambda k: np.full(3, float(k), np.float32),
}


@pytest.mark.parametrize("kind", some_of(CHANGED, ["a number"]))
def test_a_loop_that_changes_with_each_call_is_not_deterministic(kind):
    calls = []
    changing = scanned(lambda: calls.append(1) or CHANGED[kind](len(calls)))
    report = cg.check_grads(changing, (array(np.ones(3)),), raise_on_failure=False)
    assert "determinism" in {failure.check for failure in report.failures}


@pytest.mark.slow
def test_a_loop_beside_a_counter_that_it_counts_up_is_not_deterministic():
    count = jax.new_ref(jnp.zeros(()))

    def counting(x):
        count[...] += 1
        return scanned(lambda: x)(x) + count[...]

    report = cg.check_grads(counting, (jnp.ones(3),), raise_on_failure=False)
    assert "determinism" in {failure.check for failure in report.failures}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", range(2, 6))
def test_a_loop_whose_derivative_is_another_at_any_one_call_fails(wrong):
    calls = []

    def changing(x):
        calls.append(1)
        stop = lax.stop_gradient if len(calls) == wrong else lambda x: x
        return lax.scan(lambda h, _: (h * stop(x), None), x, length=2)[0]

    assert not cg.check_grads(changing, (jnp.ones(3) * 1.5,), raise_on_failure=False).ok
    assert len(calls) >= wrong


def test_programs_are_the_same_if_texts_and_all_constants_are():
    def program(a, b):
        inner = jax.jit(lambda x: x * a)
        return jax.make_jaxpr(lambda x: inner(x) + b)(array(np.ones(2)))

    one, two = np.ones(2, np.float32), np.full(2, 2.0, np.float32)
    assert is_same_program(program(one, one), program(one.copy(), one.copy()))
    assert not is_same_program(program(one, one), program(two, one))
    assert not is_same_program(program(one, one), program(one, two))
    assert not is_same_program(program(one, 1.0), program(one, 2.0))
    assert not is_same_program(program(one, one), None)
