"""What a function changes in flax NNX models and in references comes out as without the wrapper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import array, assert_close, assert_same
from tests.rows import each_value, in_turn

pytestmark = pytest.mark.slow

X = array(np.linspace(-1.0, 1.0, 12).reshape(4, 3))
RULES = {"h": cg.ErrorClipByValue(1e9)}
TRANSFORMED = {
    "by name": functools.partial(cg.error_clip_by_name, rules=RULES),
    "everywhere": functools.partial(cg.error_clip_everywhere, rule=RULES["h"]),
}
every_transformed = pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)


@pytest.fixture(autouse=True)
def lenient_promotion():
    """The libraries promote ranks and dtypes as NumPy does."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


class Counter(nnx.Variable):
    """A variable of a user's own."""


class Model(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed, noise=7)
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, 4, rngs=rngs)
        self.shared, self.again = rngs, rngs
        self.count = Counter(jnp.array(0))
        self.calls = 0

    def __call__(self, x):
        self.count[...] = self.count[...] + 1
        self.calls += 1
        h = checkpoint_name(self.first(x), "h")
        h = h + jax.random.normal(self.shared.noise()) * jax.random.normal(self.again.noise())
        return self.last(jnp.tanh(self.dropout(self.norm(h))))


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def state_of(model):
    graph, state = nnx.split(model)
    return numbers(state), graph, model.calls


def numbers(tree):
    return [random_bits(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def random_bits(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def sow(model, x):
    model.seen = Counter((x, 2 * x))
    model.also = nnx.Linear(3, 3, rngs=model.shared)
    return loss(model, x)


def remove(model, x):
    model.seen = Counter(x)
    del model.seen, model.norm
    model.dropout.deterministic = True
    return jnp.mean(checkpoint_name(model.first(x), "h"))


def cyclic(model, x):
    model.me = model
    return loss(model.me, x)


PROGRAMS = {
    "keyword": lambda wrap, m: wrap(lambda *, p: loss(p["m"][0], p["x"]))(p={"m": [m], "x": X}),
    "nnx.value_and_grad": lambda wrap, m: nnx.value_and_grad(wrap(loss))(m, X),
    "nnx.jit outside": lambda wrap, m: nnx.jit(nnx.grad(wrap(loss)))(m, X),
    "nnx.remat inside": lambda wrap, m: nnx.grad(wrap(nnx.remat(loss)))(m, X),
    "nnx.scan inside": lambda wrap, m: wrap(
        nnx.scan(lambda m, x: (m, loss(m, x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    )(m, jnp.stack([X, 2 * X])),
    "new variables": lambda wrap, m: nnx.grad(wrap(sow))(m, X),
    "removed variables": lambda wrap, m: nnx.grad(wrap(remove))(m, X),
    "a cycle": lambda wrap, m: [nnx.grad(wrap(cyclic))(m, X) for _ in range(2)],
    "without flax's graph": lambda wrap, m: tree_mode(wrap),
}


def tree_mode(wrap):
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    with nnx.set_graph_mode(False):
        grads = nnx.grad(wrap(lambda m, x: jnp.sum(checkpoint_name(m(x), "h") ** 2)))(model, X)
    assert isinstance(grads, nnx.BatchNorm)
    return model.mean[...], model.var[...]


@in_turn
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@every_transformed
def test_a_model_is_changed_as_by_the_plain_function(program, transformed):
    plain, clipped = Model(), Model()
    results = [program(f, m) for f, m in ((lambda f: f, plain), (transformed, clipped))]
    assert_same(state_of(clipped)[0], state_of(plain)[0])
    assert state_of(clipped)[1:] == state_of(plain)[1:]
    assert vars(clipped).keys() == vars(plain).keys()
    assert_close(*map(numbers, results), rtol=1e-5, atol=1e-6)


def train(gradient, compile, steps=3):
    """All that a training ends with; the gradients are rounded, since only values have the bits."""
    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.5, momentum=0.9), wrt=nnx.Param)

    @compile
    def step(model, optimizer, x):
        optimizer.update(model, jax.tree.map(lambda g: jnp.round(g, 2), gradient(model, x)))

    for i in range(steps):
        step(model, optimizer, X + i)
    return state_of(model)[0] + numbers(nnx.state(optimizer))


GRADIENTS = {name: lambda m, x, t=t: nnx.grad(t(loss))(m, x) for name, t in TRANSFORMED.items()}
GRADIENTS["with stats"] = lambda m, x: cg.value_and_grad_with_stats(loss, error_clip=RULES)(m, x)[1]


@in_turn
@pytest.mark.parametrize("compile", [nnx.jit, lambda f: f], ids=["nnx.jit", "eager"])
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_a_training_ends_with_the_bits_of_the_plain_one(gradient, compile):
    plain, clipped = (train(g, compile) for g in (nnx.grad(loss), gradient))
    assert_same(clipped, plain)


@pytest.mark.parametrize(("argnums", "same"), [(1, 1), ((0, 1), (0, 1)), (-2, 0)], ids=str)
def test_statistics_of_a_model_come_with_what_nnx_returns(argnums, same):
    plain, clipped = Model(), Model()
    value, grads, stats = cg.value_and_grad_with_stats(loss, argnums)(clipped, X)
    expected = nnx.value_and_grad(loss, argnums=same)(plain, X)
    assert jax.tree.structure((value, grads)) == jax.tree.structure(expected)
    assert_close((value, grads), expected, rtol=1e-5, atol=1e-6)
    assert_same(state_of(clipped)[0], state_of(plain)[0])
    assert stats["h"].size == 16


@every_transformed
def test_a_model_that_is_returned_is_the_one_that_was_passed(transformed):
    model = Model()
    assert transformed(lambda m, x: (m(x), m))(model, X)[1] is model


OUTSIDERS = {
    "by name": lambda f: cg.error_clip_by_name(f, RULES),
    "everywhere": lambda f: cg.error_clip_everywhere(f, RULES["h"]),
    "with stats": cg.value_and_grad_with_stats,
}


@pytest.mark.parametrize("transformed", OUTSIDERS.values(), ids=OUTSIDERS)
def test_a_model_that_is_closed_over_and_changed_is_an_error_that_says_what_to_write(transformed):
    model = Model()
    for closed in (lambda x: loss(model, x), functools.partial(loss, model)):
        with pytest.raises(ValueError, match=r"fun: got .* NNX model .*; write fun\(model, ...\)"):
            transformed(closed)(X)
    assert model.count[...] == model.calls == 0


# references


def write(x, ref):
    h = checkpoint_name(x * 2, "h")
    ref[...] = lax.stop_gradient(ref[...] + h)
    return h / 4 + jnp.sin(ref[...])


REFERENCES = {
    "jit": jax.jit(write),
    "scan of jit": lambda x, ref: lax.scan(
        lambda c, _: (jax.jit(write)(c, ref), None), x, length=3
    )[0],
    "remat": lambda x, ref: jax.checkpoint(lambda x: write(x, ref))(x),
    "cond": lambda x, ref: lax.cond(x > 0, lambda x: write(x, ref), lambda x: x, x),
    "loop": lambda x, ref: (
        checkpoint_name(x, "h") * lax.fori_loop(0, 3, lambda i, x: write(x, ref), 1.5)
    ),
}


def as_argument(wrap, fun, x, ref):
    return wrap(fun)(x, ref)


def closed_over(wrap, fun, x, ref):
    return wrap(lambda x: fun(x, ref))(x)


WATCHED = {
    "by name": lambda f: jax.value_and_grad(cg.error_clip_by_name(f, RULES)),
    "everywhere": lambda f: jax.value_and_grad(cg.error_clip_everywhere(f, RULES["h"])),
    "with stats": lambda f: lambda *a: cg.value_and_grad_with_stats(f, error_clip=RULES)(*a)[:2],
}


@each_value
@pytest.mark.parametrize("fun", REFERENCES.values(), ids=REFERENCES)
@pytest.mark.parametrize("place", [as_argument, closed_over])
@pytest.mark.parametrize("transformed", WATCHED.values(), ids=WATCHED)
def test_references_are_written_to_as_by_the_plain_function(fun, place, transformed):
    plain, clipped = jax.new_ref(jnp.zeros(())), jax.new_ref(jnp.zeros(()))
    for _ in range(2):
        expected = place(jax.value_and_grad, fun, jnp.array(1.0), plain)
        assert_close(place(transformed, fun, jnp.array(1.0), clipped), expected, rtol=1e-6)
    assert clipped[...] == plain[...] != 0
