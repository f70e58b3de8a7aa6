"""The programs that a diagnosis and a comparison compile: small, few, none a second time."""

import collections
import gc
import weakref

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


def spread(x):
    """An array, one row in eight on each device."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))


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


@pytest.mark.kinds()
@pytest.mark.parametrize("is_sharded", [False, True])
def test_what_is_not_finite_is_counted_in_one_more_program(programs, is_sharded):
    loss, (params, x, mask) = layers(3, bad=5)
    x = spread(x) if is_sharded else x
    result = cg.diagnose(loss, (params, x, mask))
    (finding,) = result.findings
    assert (finding.kind, finding.operation) == ("vjp", "sqrt")
    healthy, counting = programs[:2]
    assert not {"cond", "while", "scan"} & {*operations(healthy), *operations(counting)}
    # Of all cotangents of one shape together, and in JAX 0.10 of all gradients.
    assert operations(counting)["is_finite"] in (1, 2) and not operations(healthy)["is_finite"]
    counts = [float(row.nonfinite) for row in result.rows]
    # Of 5 columns where the root is, of all elements that a product has reached, of none behind.
    assert {*counts} == {0, 5 * WIDTH, WIDTH**2} and counts[-1] == 0


def scanned(w, x):
    step = lambda h, _: (jnp.tanh(h @ w), None)  # noqa: E731
    return jnp.sum(jnp.sqrt(jax.lax.scan(step, x, length=3)[0] ** 2))


def halved(w, x):
    return jnp.sum((x.astype(jnp.float16) @ w.astype(jnp.float16)) * jnp.float16(1e-7)).astype(
        jnp.float32
    )


def rounded(w, x):
    step = lambda h, _: (jax.lax.cond(h[0, 0] > 9, jnp.sin, jax.jit(jnp.round), h @ w), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(step, x, length=2)[0])


@jax.custom_vjp
def ruled(x):
    return jnp.sin(x)


ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))

SMALL = X[:4, :4]
ASKED = {
    "healthy": lambda: cg.diagnose(lambda w, x: jnp.sum(ruled(x @ w)), (SMALL, SMALL)),
    "large, on devices": lambda: cg.diagnose(layers(1)[0], ([X], spread(X), X[0] * 0 + 1)),
    "a VJP": lambda: cg.diagnose(*layers(2, bad=1)),
    "in a scan": lambda: cg.diagnose(scanned, (SMALL, 0 * SMALL)),
    "underflow": lambda: cg.diagnose(halved, (SMALL, SMALL)),
    "a zero": lambda: cg.diagnose(rounded, (SMALL, SMALL)),
    "examples": lambda: cg.diagnose(lambda w, x: jnp.sum(x @ w), (SMALL, SMALL), examples=1),
    "versions": lambda: cg.compare(
        scanned, lambda w, x: scanned(w, x * np.float32(1.1)), (SMALL, SMALL)
    ),
    "precision": lambda: cg.compare(halved, "float32", (SMALL, SMALL)),
    "steps": lambda: cg.compare(
        lambda w, x: w - x, lambda w, x: w - x * 2, (SMALL, SMALL), argnums=None
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_the_same_question_compiles_nothing_a_second_time(name, compiled):
    first = ASKED[name]()
    assert compiled["compiled"] > 0
    compiled.clear()
    assert str(ASKED[name]()) == str(first) and compiled["compiled"] == 0


def test_what_a_loss_closes_over_is_read_anew():
    """Also where it is a number in a kept program, a constant beside it, or a function."""
    own = {"number": 1.0, "array": np.ones(4, np.float32), "function": jnp.sin}

    def loss(w):
        return jnp.sum(own["function"](w * own["array"] * jnp.float32(own["number"])) ** 2)

    def found():
        result = cg.diagnose(loss, (SMALL[0],))
        kept = cg.compare(loss, lambda w: jnp.sum(jnp.sin(w) ** 2), (SMALL[0],))
        return [f.operation for f in result.findings], kept.ok

    assert found() == ([], True)
    own["array"] = np.float32([1, np.inf, 1, 1])
    assert found() == (["sin"], False)
    own["array"] = np.float32([1, 2, 1, 1])
    assert found() == ([], False)
    own |= {"array": np.ones(4, np.float32), "number": float("nan")}
    assert found() == (["mul"], False)
    own |= {"number": 1.0, "function": jnp.sqrt}
    assert found()[0] == ["sqrt"]
    own["function"] = jnp.sin
    assert found() == ([], True)


class Held:
    """What a callback closes over."""


def holding(size):
    """A loss with a callback and an array, and weak references to what it closes over."""
    held, array = Held(), np.full(size, 2.0, np.float32)

    def loss(w):
        told = jax.pure_callback(lambda x: (held, x)[1], jax.typeof(w), jax.lax.stop_gradient(w))
        return jnp.sum(w * told) + jnp.sum(w[0] * array)

    return loss, [weakref.ref(held), weakref.ref(array)]


@pytest.mark.parametrize("ask", [cg.diagnose, lambda loss, args: cg.compare(loss, loss, args)])
@pytest.mark.parametrize("size", [8, 2**15])
def test_nothing_of_a_users_is_kept_alive(ask, size):
    loss, held = holding(size)
    assert ask(loss, (SMALL[0] + 2,)).ok
    del loss
    gc.collect()
    assert [ref() for ref in held] == [None, None]
