"""The programs that a diagnosis compiles: small and few."""

import collections
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import clipgrad as cg
from clipgrad import _jaxpr
from clipgrad._diagnose import measure as measuring

WIDTH = 96  # so that each cotangent, of 9,216 numbers, is summed up in the program
X = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32)


def layers(count, bad=0):
    """A loss of some layers, and its arguments; NaN in the gradient of the first two, if bad."""
    params = [X / WIDTH**0.5] * count

    def loss(params, x, mask):
        for i, w in enumerate(params):
            x = x + jax.nn.gelu(x @ w)
            x = x * jnp.sqrt(x * 0 + mask[None]) if i == 1 else x
        return jnp.mean(x**2)

    return loss, (params, X, np.where(np.arange(WIDTH) < bad, 0, 1).astype(np.float32))


@pytest.fixture
def programs(monkeypatch):
    """The programs that are run, in order."""
    found, usual = [], _jaxpr.jit_by_size

    def noting(program):
        def decorate(fun):
            def call(*args):
                found.append(jax.make_jaxpr(fun)(*args))
                return usual(program)(fun)(*args)

            return call

        return decorate

    monkeypatch.setattr(measuring, "jit_by_size", noting)
    return found


def operations(program):
    """How many there are of each operation; of programs inside, those of equal ones once."""
    left, seen, counts = [program.jaxpr], set(), collections.Counter()
    while left:
        jaxpr = left.pop()
        if id(jaxpr) not in seen:
            seen.add(id(jaxpr))
            counts.update(equation.primitive.name for equation in jaxpr.eqns)
            left += [x for e in jaxpr.eqns for x in jaxprs_in_params(e.params)]
    return counts


def test_a_healthy_gradient_is_measured_by_one_program_without_branches_and_loops(programs):
    found = {}
    for count in (2, 4):
        loss, args = layers(count)
        assert cg.diagnose(loss, args).ok
        plain = operations(jax.make_jaxpr(jax.value_and_grad(loss))(*args))
        (program,) = programs
        found[count] = operations(program), plain
        programs.clear()
    assert not {"cond", "while", "scan"} & {*found[4][0]}
    more, plain = ((found[4][i] - found[2][i]).total() for i in (0, 1))
    assert plain < more < 2 * plain  # in each further layer


def test_what_is_not_finite_is_told_by_the_same_program(programs):
    loss, (params, x, mask) = layers(3, bad=5)
    result = cg.diagnose(loss, (params, x, mask))
    (finding,) = result.findings
    assert (finding.kind, finding.operation) == ("vjp", "sqrt") and len(programs) == 1
    assert [float(row.nonfinite) for row in result.rows][-1] == 0
    assert any(row.nonfinite and np.isnan(row.norm) for row in result.rows)


def test_equal_layers_are_compiled_once_in_a_diagnosis(compiled):
    def compilations(count):
        def loss(weights, x):
            for i, w in enumerate(weights):
                with jax.named_scope(f"layer_{i}"):
                    for _ in range(4):
                        x = jnp.tanh(x @ w) + 0.1 * jnp.cos(x)
            return jnp.sum(jnp.sqrt(x * 0))

        compiled.clear()
        assert not cg.diagnose(loss, ([SMALL] * count, SMALL)).ok
        return compiled["compiled"]

    compilations(3)  # and single operations
    assert compilations(12) < compilations(4) + 8


SMALL = X[:4, :4]


def test_what_a_loss_closes_over_is_read_anew():
    own = {"number": 1.0, "array": np.ones(4, np.float32), "function": jnp.sin}

    def loss(w):
        return jnp.sum(own["function"](w * own["array"] * jnp.float32(own["number"])) ** 2)

    def found():
        return [f.operation for f in cg.diagnose(loss, (SMALL[0],)).findings]

    assert found() == []
    own["array"] = np.float32([1, np.inf, 1, 1])
    assert found() == ["sin"]
    own |= {"array": np.ones(4, np.float32), "number": float("nan")}
    assert found() == ["mul"]
    own |= {"number": 1.0, "function": jnp.sqrt}
    assert found() == ["sqrt"]
    own["function"] = jnp.sin
    assert found() == []


class Held:
    """What a callback closes over."""


def holding(size):
    """A loss with a callback and an array, and weak references to what it closes over."""
    held, array = Held(), np.full(size, 2.0, np.float32)

    def loss(w):
        told = jax.pure_callback(lambda x: (held, x)[1], jax.typeof(w), jax.lax.stop_gradient(w))
        return jnp.sum(w * told) + jnp.sum(w[0] * array)

    return loss, [weakref.ref(held), weakref.ref(array)]


@pytest.mark.parametrize("size", [8, 2**15])
def test_nothing_of_a_users_is_kept_alive(size):
    loss, held = holding(size)
    assert cg.diagnose(loss, (SMALL[0] + 2,)).ok
    del loss
    gc.collect()
    assert [ref() for ref in held] == [None, None]
