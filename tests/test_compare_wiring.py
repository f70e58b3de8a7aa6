"""The modules that two programs share: the same operations of the same operands."""

import jax
import jax.numpy as jnp
import pytest

from clipgrad._compare.program_record import program_record
from clipgrad._compare.slices import shared_modules
from clipgrad._jaxpr import trace
from tests.compare_models import with_vjp

A, B = jnp.arange(4.0), jnp.ones(4)


def program(inside, extra=False):
    def run(a, b):
        with jax.named_scope("before"):
            x = jnp.sin(a)
        with jax.named_scope("inside"):
            y = inside(x, b)
        with jax.named_scope("after"):
            return jnp.sum(y * x) + (jnp.sum(x) if extra else 0)

    return program_record(trace(run, (A, B), {}).program)


def shared(other, extra=False):
    return shared_modules(program(jnp.subtract), program(other, extra))


def looped(x, b, by=1.0):
    return jax.lax.scan(lambda h, y: (h, y * by), x[0], b)[1]


CHANGED = {
    "operands exchanged": lambda x, b: b - x,
    "another operand": lambda x, b: x - x,
    "another number": lambda x, b: x - b * 2,
    "a stop": lambda x, b: jax.lax.stop_gradient(x) - b,
    "a rule of its own": with_vjp(jnp.subtract, lambda grads: grads),
}


def test_equal_programs_share_all_modules():
    assert shared(jnp.subtract) == {("before",), ("inside",), ("after",)}
    assert shared_modules(program(looped), program(looped)) >= {("inside",), ("after",)}


@pytest.mark.parametrize("name", CHANGED)
def test_what_differs_is_in_the_changed_module_alone(name):
    assert shared(CHANGED[name]) == {("before",), ("after",)}


def test_a_change_inside_of_a_loop_is_one_of_the_loop():
    found = shared_modules(program(looped), program(lambda x, b: looped(x, b, by=2.0)))
    assert found == {("before",), ("after",)}


def test_a_module_with_another_operation_is_not_shared():
    assert shared(jnp.subtract, extra=True) == {("before",), ("inside",)}
