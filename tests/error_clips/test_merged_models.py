"""A loss that merges an NNX model inside has no names; what the message says to write has them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.helpers import array

nnx = pytest.importorskip("flax.nnx")

X = array(np.linspace(-1.0, 1.0, 6).reshape(2, 3))
RULES = {"first": cg.ErrorClipByValue(1e-3)}


@functools.cache
def parts():
    """The graph and the parameters of a model, and a loss that merges them."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(3, 3, rngs=rngs)
            self.last = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            return self.last(jnp.tanh(self.first(x)))

    return nnx.split(Model(nnx.Rngs(0)))


def merging(params, x):
    return jnp.mean(nnx.merge(parts()[0], params)(x) ** 2)


def of_model(model, x):
    return jnp.mean(model(x) ** 2)


SAYS = r"write a function of the model.*nnx.merge\(graphdef, params, copy=True\)"
CALLS = {
    "list_names": lambda p: str(cg.list_names(merging, (p, X))),
    "error_clip_by_name": lambda p: cg.error_clip_by_name(merging, RULES)(p, X),
    "watch": lambda p: cg.value_and_grad_with_stats(merging, watch=["first"])(p, X),
    "watch all": lambda p: cg.value_and_grad_with_stats(merging)(p, X),
    "values": lambda p: cg.with_value_stats(merging, watch=["first"])(p, X),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_said_what_to_write(name):
    call = functools.partial(CALLS[name], parts()[1])
    if name == "list_names":
        assert re.search(SAYS, call())
        return
    with pytest.raises(ValueError, match=SAYS):
        call()


def one_by_one(loss, params, xs):
    return sum(loss(params, x) for x in xs)


def in_a_scan(loss, params, xs):
    return jax.lax.scan(lambda c, x: (c + loss(params, x), None), 0.0, xs)[0]


@pytest.mark.parametrize("over", [one_by_one, in_a_scan])
def test_what_it_says_clips_in_a_gradient_and_in_a_scan(over):
    clipped = cg.error_clip_by_name(of_model, RULES)
    loss = lambda p, x: clipped(nnx.merge(parts()[0], p, copy=True), x)  # noqa: E731
    got, plain = (
        jax.jit(jax.grad(functools.partial(over, fun)))(parts()[1], jnp.stack([X, 2 * X]))
        for fun in (loss, merging)
    )
    # The bias of the first layer gets the sum of what is clipped: two rows at two steps.
    bias = np.asarray(got["first"]["bias"][...])
    assert np.max(np.abs(bias)) <= 4.001e-3 < np.max(np.abs(plain["first"]["bias"][...]))
    np.testing.assert_allclose(got["last"]["bias"][...], plain["last"]["bias"][...], rtol=1e-5)
