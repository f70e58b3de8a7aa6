"""The programs that a diagnosis compiles: small, few, and none a second time."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import clipgrad as cg
from clipgrad import _jaxpr

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
    found, usual = [], _jaxpr.jit_for_one_call

    def noting(program):
        def decorate(fun):
            def call(*args):
                found.append(jax.make_jaxpr(fun)(*args))
                return usual(program)(fun)(*args)

            return call

        return decorate

    monkeypatch.setattr(_jaxpr, "jit_for_one_call", noting)
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


@pytest.mark.parametrize("is_sharded", [False, True])
def test_what_is_not_finite_is_counted_in_one_more_program(programs, is_sharded):
    loss, (params, x, mask) = layers(3, bad=5)
    if is_sharded:
        mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
    result = cg.diagnose(loss, (params, x, mask))
    (finding,) = result.findings
    assert (finding.kind, finding.operation) == ("vjp", "sqrt")
    healthy, counting = programs[:2]
    assert not {"cond", "while", "scan"} & {*operations(healthy), *operations(counting)}
    # Of all cotangents of one shape together, and of all gradients.
    assert operations(counting)["is_finite"] == 2 and not operations(healthy)["is_finite"]
    counts = [float(row.nonfinite) for row in result.rows]
    # Of 5 columns where the root is, of all elements that a product has reached, of none behind.
    assert {*counts} == {0, 5 * WIDTH, WIDTH**2} and counts[-1] == 0
