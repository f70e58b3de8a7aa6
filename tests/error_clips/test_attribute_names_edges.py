"""Attribute paths where classes, calls and transformations of a model are unusual."""

import abc
import functools
import threading
from typing import ClassVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend import source_info_util

import clipgrad as cg
from tests.helpers import array, key_of

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.slow]
X = array(np.linspace(-1.0, 1.0, 6))
KEY = key_of(0)


def linear():
    return eqx.nn.Linear(6, 6, key=KEY)


def names(fun, *args):
    return [name.name for name in cg.list_names(fun, args) if "eqx.nn" not in name.name]


def loss(model, x):
    return jnp.sum(model(x) ** 2)


# ---- classes ------------------------------------------------------------------------------------


class Base(eqx.Module):
    """An abstract module with a method of its own."""

    size: eqx.AbstractVar[int]

    @abc.abstractmethod
    def __call__(self, x):
        """To be written below."""

    def twice(self, x):
        return 2 * x


@final
class Layer(Base, strict=True):
    """A module with all that Python has."""

    linear: eqx.nn.Linear
    size: int = eqx.field(static=True, converter=int)
    function: object
    kind: ClassVar[str] = "layer"

    def __init__(self):
        self.linear, self.size, self.function = linear(), 6, jnp.tanh

    def __call__(self, x):
        assert type(self).__name__ == type(self).__qualname__ == "Layer"
        assert isinstance(self, Layer) and type(self).__doc__ == Layer.__doc__
        assert hash(jax.tree.structure(self)) is not None
        again = type(self)()
        assert isinstance(again, Layer) and again.size == self.number == 6
        return self.twice(self.function(self.missing(x)))

    @property
    def number(self):
        return self.size

    @staticmethod
    def plain(x):
        return 3 * x

    def __getattr__(self, name):
        if name == "missing":
            return self.linear
        raise AttributeError(name)


class Child(eqx.Module):
    inner: Layer

    def __call__(self, x):
        with pytest.raises(AttributeError, match="FrozenInstance|cannot assign"):
            self.inner = None
        return self.inner.plain(self.inner(x))


class Grandchild(Child):
    """A module that calls the method of its parent class."""

    def __call__(self, x):
        return super().__call__(x) + 1


class Holder(eqx.Module):
    child: eqx.Module

    def __call__(self, x):
        return self.child(x)


def test_classes_with_all_that_python_has_keep_what_they_do():
    model = Holder(Grandchild(Layer()))
    assert names(loss, model, X) == ["child/inner/linear", "child/inner", "child"]
    value, grads, stats = cg.value_and_grad_with_stats(loss)(model, X)
    assert eqx.tree_equal((value, grads), eqx.filter_value_and_grad(loss)(model, X))
    assert type(grads.child.inner) is Layer
    assert float(stats["child"].norm) == pytest.approx(float(2 * jnp.linalg.norm(model(X))))


class NNXLayer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Opaque(nnx.Module, pytree=False):
    """One that is not a pytree."""

    __init__, __call__ = NNXLayer.__init__, NNXLayer.__call__


class NNXHolder(nnx.Module):
    """A model of two modules, one of which is also in a dictionary."""

    def __init__(self, rngs):
        self.layers = nnx.List([NNXLayer(rngs), Opaque(rngs)])
        self.table = nnx.Dict(first=self.layers[0])

    def __call__(self, x):
        assert type(self.layers[0]).__name__ == "NNXLayer"
        return self.table["first"](x) + self.layers[1](x)


def test_nnx_modules_that_are_shared_keep_the_first_path():
    model = NNXHolder(nnx.Rngs(0))
    expected = ["layers/0/linear", "layers/0", "layers/1/linear", "layers/1", "layers"]
    assert names(loss, model, X) == expected
    assert [type(layer) for layer in model.layers] == [NNXLayer, Opaque]


REGISTRY = []


class Registered(eqx.Module):
    """A class that is told of its subclasses, which must say something."""

    linear: eqx.nn.Linear

    def __init_subclass__(cls, *, needed):
        REGISTRY.append(cls)

    def __call__(self, x):
        return self.linear(x)


class NNXRegistered(nnx.Module):
    """The same for NNX."""

    __init__, __call__ = NNXLayer.__init__, NNXLayer.__call__

    def __init_subclass__(cls, *, needed):
        REGISTRY.append(cls)


class NNXOne(nnx.Module):
    def __init__(self, rngs):
        self.child = NNXRegistered(rngs)

    def __call__(self, x):
        return self.child(x)


@pytest.mark.parametrize(
    "make", [lambda: Holder(Registered(linear())), lambda: NNXOne(nnx.Rngs(0))]
)
def test_a_class_that_is_told_of_its_subclasses_stays_as_it_is(make):
    """Only its parts have names, which begin with its own."""
    model = make()
    seen = []
    call = lambda model, x: (seen.append(type(model.child)), loss(model, x))[1]  # noqa: E731
    assert names(call, model, X) == ["child/linear", "child"]
    assert seen == [type(model.child)] and REGISTRY == []


# ---- calls --------------------------------------------------------------------------------------


class Codec(eqx.Module):
    """Called by its own methods; some are compiled or decorated."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def encode(self, x):
        return self.helper(self.up(x))

    @eqx.filter_jit
    def decode(self, x):
        return jnp.sin(self.down(x))

    def helper(self, x):
        assert "//" not in f"{source_info_util.current_name_stack()}/"
        return jnp.tanh(x)


class Auto(eqx.Module):
    """Reaches into its parts."""

    codec: Codec

    def __call__(self, x):
        y = self.codec.decode(self.codec.encode(x)) + self.codec.up(x)
        return eqx.filter_vmap(self.codec.encode)(y[None])[0]


def autoencoder():
    return Auto(Codec(linear(), linear()))


def test_methods_have_names_once_and_a_part_that_is_called_from_outside_its_whole_path():
    model = autoencoder()
    assert set(names(loss, model, X)) == {"codec", "codec/up", "codec/down"}
    reached = lambda model, x: jnp.sum(model.codec.up(x))  # noqa: E731
    assert set(names(reached, model, X)) == {"codec", "codec/up"}
    value, grads, stats = cg.value_and_grad_with_stats(loss)(model, X)
    assert eqx.tree_equal((value, grads), eqx.filter_value_and_grad(loss)(model, X))
    assert all(float(names_there.norm) > 0 for names_there in stats.values())


# ---- transformations of NNX ---------------------------------------------------------------------


class Scanned(nnx.Module):
    """Layers that are stacked, and scanned with remat; one that is compiled, mapped and merged."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return NNXHolder(rngs)

        self.layers = make(rngs)
        self.last = NNXHolder(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def forward(layer, x):
            return layer(x)

        x = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(self.last, forward(self.layers, x)[None])
        merged = nnx.merge(*nnx.split(self.last))
        return nnx.jit(lambda m, x: m(x))(merged, x[0])


def test_nnx_transformations_keep_the_names_and_the_classes():
    model, twin = Scanned(nnx.Rngs(0)), Scanned(nnx.Rngs(0))
    listed = {name.name: name for name in cg.list_names(loss, (model, X))}
    assert {"layers/layers/0/linear", "last/layers/0/linear", "layers", "last"} <= set(listed)
    assert listed["layers/layers/1"].scans == (3,)
    value, grads, _ = cg.value_and_grad_with_stats(loss, watch=["last"])(model, X)
    expected = nnx.value_and_grad(loss)(twin, X)
    jax.tree.map(np.testing.assert_array_equal, (value, grads), expected)
    assert nnx.graphdef(model) == nnx.graphdef(twin)


def test_models_that_the_function_returns_have_the_classes_of_the_user():
    model = NNXHolder(nnx.Rngs(0))
    again = lambda model, x: (jnp.sum(model(x)), nnx.merge(*nnx.split(model)))  # noqa: E731
    made = cg.error_clip_by_name(again, {"layers/*": None})(model, X)[1]
    kinds = [{type(part) for _, part in nnx.iter_modules(each)} for each in (made, model)]
    assert kinds[0] == kinds[1]


# ---- errors, caches, threads --------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: NNXHolder(nnx.Rngs(0)), autoencoder])
def test_an_error_of_the_function_is_raised_and_classes_are_as_before(make):
    def failing(model, x):
        model(x)
        raise KeyError("of the user's")

    model = make()
    before = jax.tree.structure(model)
    with pytest.raises(KeyError, match="of the user's"):
        cg.list_names(failing, (model, X))
    assert jax.tree.structure(model) == before


def test_a_model_that_is_joined_with_a_part_from_outside_has_no_names_and_runs():
    arrays, rest = eqx.partition(autoencoder(), eqx.is_array)
    joined = lambda arrays, x: loss(eqx.combine(arrays, rest), x)  # noqa: E731
    assert cg.error_clip_by_name(joined, {"**": None})(arrays, X) == joined(arrays, X)


@pytest.mark.parametrize("make", [lambda: NNXHolder(nnx.Rngs(0)), autoencoder])
def test_a_model_in_a_closure_has_no_names_and_the_error_says_where_it_has(make):
    model = make()
    closed = lambda x: loss(model, x)  # noqa: E731
    with pytest.raises(ValueError, match="NNX and Equinox: in a model among its arguments"):
        cg.error_clip_by_name(closed, {"codec": None})(X)
    if isinstance(model, nnx.Module):  # layers of Equinox have scopes of their own
        with pytest.raises(ValueError, match=r"names if it is an argument: fun\(model, ...\)"):
            cg.value_and_grad_with_stats(closed)(X)


def test_a_compiled_step_is_traced_once_and_classes_are_made_once():
    model = autoencoder()
    seen, traces = [], []

    def noting(model, x):
        traces.append(None)
        seen.append(type(model.codec))
        return loss(model, x)

    step = eqx.filter_jit(cg.value_and_grad_with_stats(noting, watch=["codec"]))
    for _ in range(3):
        grads = step(model, X)[1]
        model = eqx.apply_updates(model, grads)
    assert len(traces) == 1
    cg.list_names(noting, (model, X))
    assert len(set(seen)) == 1 and seen[0] is not Codec


def test_threads_have_the_same_classes_and_the_same_names():
    class Fresh(Holder):
        """A class that nobody has seen."""

    model, classes, seen = Holder(Fresh(linear())), [], set()
    start = threading.Barrier(4)

    def run():
        start.wait()
        note = lambda model, x: (seen.add(type(model.child)), loss(model, x))[1]  # noqa: E731
        classes.append(names(note, model, X))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert classes == [["child/child", "child"]] * 4
    assert len(seen) == 1


# ---- all the places where names are taken -------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_step_takes_a_whole_equinox_model(accumulate):
    """That of filter_grad, at several steps and with all kinds of leaves: test_parameters.py."""

    def training_loss(model, batch):
        return jnp.mean(jax.vmap(model)(batch) ** 2)

    model, batch = autoencoder(), jnp.stack([X, 2 * X])
    rules = {"codec/up": None}
    step = cg.train_step(training_loss, optax.sgd(0.1), error_clip=rules, accumulate=accumulate)
    state, metrics = step(step.init(model), batch)
    grads = eqx.filter_grad(training_loss)(model, batch)
    expected = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
    assert jax.tree.structure(state.params) == jax.tree.structure(expected)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, state.params, expected)
    assert metrics["error_clip"]["codec/up"].norm > 0


def test_gradients_of_several_arguments_are_those_of_equinox_for_each():
    def both(first, second, x):
        return jnp.sum(first(x) * second.up(x)) * 2.0

    first, second = eqx.nn.MLP(6, 6, 4, 1, key=KEY), Codec(linear(), linear())
    grads = cg.value_and_grad_with_stats(both, (0, 1), watch=["up"])(first, second, X)[1]
    expected = eqx.filter_grad(lambda both_, x: both(*both_, x))((first, second), X)
    assert eqx.tree_equal(grads, expected)
