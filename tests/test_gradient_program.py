"""The program of a gradient, and what each of its equations is derived from."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from clipgrad._jaxpr import equations
from clipgrad._program import GradientProgram, active_variables, dependence

pytestmark = pytest.mark.usefixtures("users_promotion")
X = jnp.array([0.5, 1.5, 2.5, 3.5])


@jax.custom_vjp
def rule(x):
    return jnp.sin(x)


rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def plainly(x):
    y = jnp.sqrt(x)
    return jnp.sum(y * jnp.log(x))


def compiled(x):
    return jax.jit(plainly)(2 * x) + jax.jit(plainly)(3 * x)


def scanned(x):
    def step(c, x):
        c = jnp.tanh(c * x)
        return c, jnp.sqrt(x)

    c, ys = jax.lax.scan(step, 1.0, x)
    return c + ys.sum()


def rematerialized(x):
    return jax.checkpoint(scanned)(x) + jax.checkpoint(plainly)(jnp.exp(x))


def remat_in_a_scan(x):
    def step(c, x):
        c = jnp.tanh(c * x)
        return c, jnp.sqrt(x)

    c, ys = jax.lax.scan(jax.checkpoint(step), 1.0, x)
    return c + ys.sum()


def branching(x):
    return jax.lax.cond(x[0] > 0, plainly, lambda x: jnp.sum(jnp.cos(x)), x)


def with_rules(x):
    y = rule(x)
    return jnp.sum(jax.nn.relu(y) * jax.nn.softmax(x))


def with_a_reference(x):
    total = jax.new_ref(jnp.zeros(()))

    def step(i, _):
        total[...] += jnp.sqrt(x[i])

    jax.lax.fori_loop(0, 4, step, None)
    return total[...]


def on_devices(x):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    specs = {"in_specs": PartitionSpec("d"), "out_specs": PartitionSpec()}

    def shard(x):
        y = jnp.sqrt(x)
        return jax.lax.psum(jnp.sum(y), "d")

    return jax.shard_map(shard, mesh=mesh, **specs)(x)


LOSSES = [plainly, compiled, scanned, rematerialized, remat_in_a_scan, branching, with_rules]
LOSSES += [with_a_reference, on_devices]


def gradient_of(loss):
    return GradientProgram.of(jax.make_jaxpr(loss)(X), [X], [0])


@pytest.mark.parametrize("loss", LOSSES)
def test_it_computes_the_results_and_their_vjp(loss):
    program = gradient_of(loss).program
    run = jax.jit(jax.extend.core.jaxpr_as_fun(program))
    value, grad = run(X, jnp.float32(3.0))
    wanted, wanted_grad = jax.jit(jax.value_and_grad(loss))(X)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(grad, 3 * wanted_grad, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_each_equation_knows_what_it_is_derived_from(loss):
    gradient = gradient_of(loss)
    found = list(gradient.operations())
    forward = {id(equation) for equation in equations(gradient.forward)}
    assert all(o.of and {id(e) for e in o.of.chain} <= forward for o in found)
    # JAX computes the derivative of a root by a division and a product.
    roots = [o.of.location.line for o in found if o.of.operation == "sqrt"]
    text = inspect.getsource(inspect.getmodule(gradient_of)).splitlines()
    assert all("sqrt" in text[line - 1] for line in roots)
    back = {o.of.operation for o in found if o.is_backward}
    assert loss is with_rules or "sqrt" in back
    assert loss is not with_rules or {"rule", "relu"} <= back


def test_what_the_forward_pass_computes_for_the_backward_pass_is_not_backward():
    found = list(gradient_of(lambda x: jnp.sum(jnp.sqrt(x))).operations())
    made = [(o.place.operation, o.is_backward) for o in found if o.of.operation == "sqrt"]
    assert made == [("sqrt", False), ("div", False), ("mul", True)]


def test_a_program_that_is_called_twice_is_told_apart_by_its_calls():
    found = list(gradient_of(compiled).operations())
    calls = {o.of.chain[1] for o in found if o.is_backward and o.of.operation == "sqrt"}
    assert len(calls) == 2


def test_steps_and_scopes_are_those_of_the_function():
    def loss(x):
        with jax.named_scope("outer"):
            return jax.jit(jax.named_scope("inner")(lambda x: scanned(x)))(x)

    found = [o for o in gradient_of(loss).operations() if o.of.operation == "sqrt"]
    assert {(o.of.module, o.of.nest, o.place.nest) for o in found} == {("outer/inner", (4,), (4,))}
    assert {o.is_backward for o in found} == {True, False}


def test_marks_are_no_scopes():
    program = gradient_of(lambda x: jax.named_scope("a")(plainly)(x))
    assert {o.place.module for o in program.operations()} == {"a"}


def test_each_argument_that_an_operand_depends_on_is_known():
    def loss(w, data, unused):
        def step(c, x):
            return c * w + x, None

        return jax.lax.scan(step, 0.0, jnp.log(data))[0]

    args = (jnp.float32(2.0), X, X)
    gradient = GradientProgram.of(jax.make_jaxpr(loss)(*args), list(args), [0])
    known, behind = dependence(gradient.program), {}
    for operation in gradient.operations():
        sources = known[operation.place.key]
        behind.setdefault(operation.of.operation, []).append(frozenset().union(*sources))
    assert behind["log"] == [{1}]
    assert behind["mul"][0] == {0, 1} and any(3 in sources for sources in behind["mul"])


def test_what_cannot_be_differentiated_is_not_active():
    @jax.custom_vjp
    def straight(x):
        return jax.lax.stop_gradient(jnp.round(x))

    straight.defvjp(lambda x: (straight(x), None), lambda _, g: (g,))

    def loss(w, data):
        def step(c, x):
            return c * w + x, jnp.floor(x).astype(int)

        c, _ = jax.lax.scan(step, 0.0, data)
        return c + jax.lax.stop_gradient(3 * w) + jnp.sum(data) + straight(w)

    program = jax.make_jaxpr(loss)(2.0, X)
    active = active_variables(program, [0])
    found = [e for e in equations(program) if any(v in active for v in e.outvars)]
    names = {e.primitive.name for e in found}
    assert {"scan", "mul", "custom_vjp_call"} <= names
    assert names.isdisjoint({"stop_gradient", "floor", "reduce_sum", "round"})
    assert active_variables(program, [1]) & set(program.jaxpr.outvars)
