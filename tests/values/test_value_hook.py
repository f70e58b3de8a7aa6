"""Seeing values with names in any program, where they are, and what goes on in their place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import clipgrad._programs as _programs
from clipgrad._values import ValueHook, named_values, value_hook
from tests.error_clips.tagged import X, step
from tests.helpers import array, assert_close, assert_same
from tests.rows import first_row
from tests.values.value_programs import PROGRAMS


@value_hook()
class Sums(ValueHook):
    """Notes the sum of each value, and how many were noted."""

    def note_of(self, seen, x):
        return jnp.sum(x), jnp.ones(())

    def joined(self, first, second):
        return jax.tree.map(jnp.add, first, second)

    def over_devices(self, equation, key, note):
        return jax.tree.map(lambda x: x.sum(0), note)


@jax.custom_vjp
def tapped(x, tap):
    return x


tapped.defvjp(lambda x, tap: (x, None), lambda _, g: (g, jnp.sum(g)))


@value_hook(data=["factor"], choices=["only"])
class Taps(Sums):
    """Multiplies values by a factor, and lets the sums of their cotangents out."""

    factor: jax.Array = dataclasses.field(default_factory=lambda: array(np.ones(())))
    only: str | None = None

    def wants(self, name, kind, used):
        return self.only in (None, name)

    def replaced(self, seen, x, tap):
        x = x * self.factor.astype(x.dtype)
        return x if tap is None else tapped(x, tap)


def tagged(x, name):
    with jax.named_scope(f"net/{name}"):
        return checkpoint_name(x * 1.0, name)


every_program = pytest.mark.parametrize("model", PROGRAMS.values(), ids=PROGRAMS)


def traced(model, tag=tagged):
    return _programs.trace(lambda x: model(x, tag), (X,), {})


@first_row
@every_program
def test_every_value_that_is_listed_is_noted_and_the_result_stays(model):
    program = traced(model)
    hook = Sums()
    result = jax.jit(lambda x: (program.evaluate((x,), {}, hook), hook.noted()))
    out, notes = result(X)
    assert_close(out, jax.jit(lambda x: model(x, tagged))(X), rtol=1e-6, atol=1e-6)
    alone = jax.jit(lambda x: program.evaluate((x,), {}, Sums()))(X)
    assert_same(alone, jax.jit(lambda x: model(x, tagged))(X))
    values = list(named_values(program.program))
    assert sorted(notes) == sorted(value.position for value in values)
    for value in values:
        shape = value.place.nest
        assert notes[value.position][0].shape == shape, value.name
    assert len(notes) == len(values)


@first_row
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "while"])
def test_taps_bring_the_cotangents_out_and_what_is_replaced_goes_on(name):
    model = PROGRAMS[name]
    program = traced(model)
    values = {v.position: v for v in named_values(program.program)}

    def loss(x, taps, factor):
        hook = Taps(taps=taps, factor=factor)
        return jnp.sum(jnp.cos(program.evaluate((x,), {}, hook)))

    # The one program with a `shard_map` is on four devices.
    devices = (4,) if name == "shard_map" else ()
    taps = {p: array(np.zeros((*devices, *v.place.nest))) for p, v in values.items()}
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    grad, sums, by_factor = gradients(X, taps, array(np.ones(())))
    plain = jax.jit(jax.grad(lambda x: jnp.sum(jnp.cos(model(x, tagged)))))(X)
    np.testing.assert_allclose(grad, plain, rtol=1e-6, atol=1e-6)
    assert {p: s.shape for p, s in sums.items()} == {p: t.shape for p, t in taps.items()}
    assert float(by_factor) != 0


def test_a_hook_that_wants_one_name_leaves_all_else_as_it_is():
    program, hook = traced(step), Taps(only="out")
    jaxpr = jax.make_jaxpr(lambda x: program.evaluate((x,), {}, hook))(X)
    assert str(jaxpr) == str(jax.make_jaxpr(lambda x: step(x, tagged))(X))


def test_the_options_of_a_jit_inside_stay():
    @jax.jit
    def plain(x):
        return tagged(x, "h") * 2

    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,))
    spread = jax.NamedSharding(mesh, P("d"))
    inner = jax.jit(plain, out_shardings=spread, donate_argnums=0)
    program, hook = _programs.trace(lambda x: inner(x), (X,), {}), Sums()
    jaxpr = jax.make_jaxpr(lambda x: (program.evaluate((x,), {}, hook), hook.noted()))(X).jaxpr
    (equation,) = (e for e in jaxpr.eqns if e.primitive.name == "jit")
    assert equation.params["donated_invars"] == (True,)
    assert equation.params["out_shardings"][0] == spread
    assert len(equation.outvars) > 1
