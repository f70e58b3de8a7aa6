"""Any chain of operations, each example's gradient: against one after the other in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import clipgrad as cg
from tests.per_example.per_example_references import (
    assert_clipped,
    every_way,
    norms_of,
    one_by_one,
    wide,
)

WIDTH, POSITIONS = 12, 3


def square(*more):
    return (*more, WIDTH, WIDTH)


def dense(w, x):
    return x @ w


def transposed(w, x):
    return x @ w.T


def cut(w, x):
    return x @ w[:, 3 : 3 + WIDTH]


def gates(w, x):
    return jnp.multiply(*(x @ gate for gate in jnp.split(w, 2, axis=1)))


def heads(w, x):
    return jnp.einsum("td,dhk->thk", x, w.reshape(WIDTH, 3, 4)).reshape(-1, WIDTH)


def layers(w, x):
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0]


def recurrence(w, x):
    step = lambda h, x: (jnp.tanh(h @ w + x),) * 2  # noqa: E731
    return jax.lax.scan(step, jnp.zeros(WIDTH, x.dtype), x)[1]


def convolution(w, x):
    return jax.lax.conv_general_dilated(
        x[None], w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[0]


def tied(w, x):
    ids = jnp.argmax(x, axis=1)
    return (x + w[ids]) @ w.T @ w / 20


def bias(w, x):
    return x + w[None]


def masked(w, x):
    return x @ jnp.tril(w)


OPERATIONS = {
    dense: square(), transposed: square(), cut: (WIDTH, WIDTH + 6), gates: (WIDTH, 2 * WIDTH),
    heads: square(), layers: square(4), recurrence: square(), convolution: square(3),
    tied: (20, WIDTH), bias: (WIDTH,), masked: square(),
}  # fmt: skip
PLACES = {
    "as it is": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "twice": lambda f: lambda w, x: f(w, jnp.sin(f(w, x))),
    "in a scan": lambda f: lambda w, x: jax.lax.scan(lambda x, _: (f(w, x), None), x, None, 2)[0],
}
links = st.tuples(st.sampled_from(list(OPERATIONS)), st.sampled_from(sorted(PLACES)))


def check(chain):
    """Both methods and the norms of each leaf, where the median of the norms is the limit."""

    def loss(params, x):
        for i, (operation, place) in enumerate(chain):
            x = jnp.sin(PLACES[place](operation)(params[f"w{i}"], x))
        return jnp.sum(x * jnp.cos(x))

    rng = np.random.default_rng(len(chain))
    shapes = {f"w{i}": OPERATIONS[operation] for i, (operation, _) in enumerate(chain)}
    params = {k: jnp.asarray(rng.normal(size=s) / 3, jnp.float32) for k, s in shapes.items()}
    batch = jnp.asarray(rng.normal(size=(3, POSITIONS, WIDTH)), jnp.float32)
    each = one_by_one(loss, params, batch)
    norms = norms_of(each)
    limit = float(np.median(np.sqrt(sum(n**2 for n in norms.values()))))
    with jax.enable_x64(True):
        ways, by_leaf = every_way(loss, cg.ClipByGlobalNorm(limit), *wide((params, batch)))
        for result in ways.values():
            assert_clipped(result, each, limit, 1e-9)
    for path, norm in norms.items():
        np.testing.assert_allclose(by_leaf[path], norm, rtol=1e-9, atol=1e-30, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_chain_is_clipped_and_measured_as_one_example_after_the_other(place):
    check([(operation, place) for operation in OPERATIONS])


@pytest.mark.slow
@settings(max_examples=5, phases=[Phase.generate], deadline=None)
@given(st.lists(links, min_size=3, max_size=5))
def test_any_chain_is_clipped_and_measured_as_one_example_after_the_other(chain):
    """In float64, since the gradient of a deep chain has few digits in float32."""
    check(chain)
