"""`error_clip`: the decorator on inputs, by name and on outputs."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg

VALUE = cg.ErrorClipByValue(max=5.0)


def multiply(x, y=3.0, *, z=1.0):
    """Multiplies."""
    return 100 * x * y * z


def test_one_rule_clips_what_is_handed_back_to_all_inputs():
    clipped = cg.error_clip(VALUE)(multiply)
    gradients = jax.grad(lambda x, y, z: clipped(x, y, z=z), argnums=(0, 1, 2))(1.0, 2.0, -3.0)
    assert gradients == (-5, -5, 5)
    assert clipped(1.0, 2.0, z=-3.0) == multiply(1.0, 2.0, z=-3.0)


def test_inputs_are_found_by_position_and_by_name():
    clipped = cg.error_clip({"y": VALUE, "x": None})(multiply)
    for call in (clipped, lambda x, y: clipped(x, y=y), lambda x, y: clipped(y=y, x=x)):
        assert jax.grad(call, argnums=(0, 1))(1.0, 2.0) == (200, 5)


def test_defaults_and_inputs_without_cotangents_are_passed_over():
    @cg.error_clip(VALUE)
    def f(x, n, name, fn, flag=True, table=None):
        assert (n, name, flag, table) == (3, "text", True, None)
        return fn(x) * n if flag and name else x

    assert jax.grad(f)(1.0, 3, "text", lambda x: 100 * x) == 5
    assert jax.jit(jax.grad(f), static_argnums=(1, 2, 3))(1.0, 3, "text", jnp.sin) > 0


def test_args_and_kwargs_are_variables_of_their_own():
    def f(*args, **kwargs):
        return 100 * sum(args) + 200 * sum(kwargs.values())

    def gradients(decorator):
        g = decorator(f)
        return jax.grad(lambda a, b, c, d: g(a, b, c=c, d=d), argnums=(0, 1, 2, 3))(
            1.0, 1.0, 1.0, 1.0
        )

    assert gradients(cg.error_clip(VALUE)) == (5, 5, 5, 5)
    assert gradients(cg.error_clip({"args": VALUE})) == (5, 5, 200, 200)
    assert gradients(cg.error_clip({"kwargs": VALUE})) == (100, 100, 5, 5)
    assert gradients(cg.error_clip({"d": VALUE})) == (100, 100, 200, 5)


def test_a_name_for_kwargs_that_a_call_lacks_is_refused():
    clipped = cg.error_clip({"d": VALUE})(lambda **kwargs: sum(kwargs.values()))
    with pytest.raises(ValueError, match=r"error_clip: got a call without \['d'\], expected an"):
        clipped(c=1.0)


def test_outputs_are_clipped_before_the_functions_own_vjp():
    @cg.error_clip(outputs=cg.ErrorClipByValue(max=0.5))
    def double(x):
        return 2 * x

    assert jax.grad(lambda x: 100 * double(x))(1.0) == 1


def test_outputs_take_a_prefix_tree_of_rules():
    @cg.error_clip(outputs={"a": cg.ClipByGlobalNorm(1.0), "b": None, "c": VALUE})
    def split(x, y):
        return {"a": (x, y), "b": x, "c": y}

    def loss(x, y):
        out = split(x, y)
        return 3 * out["a"][0] + 4 * out["a"][1] + 50 * out["b"] + 60 * out["c"]

    gradients = jax.grad(loss, argnums=(0, 1))(1.0, 1.0)
    np.testing.assert_allclose(gradients, (50.6, 5.8), rtol=1e-6)


def test_outputs_that_are_no_prefix_are_refused():
    clipped = cg.error_clip(outputs={"a": VALUE})(lambda x: (x, x))
    with pytest.raises(ValueError, match="outputs: got rules of the .* expected a prefix of"):
        clipped(1.0)


def test_methods_are_decorated_and_self_is_no_input():
    class Model:
        scale = 100.0

        @cg.error_clip(VALUE)
        def method(self, x):
            return self.scale * x

        @classmethod
        @cg.error_clip(VALUE)
        def of_class(cls, x):
            return cls.scale * x

        @staticmethod
        @cg.error_clip(VALUE)
        def static(x):
            return 100 * x

    for f in (Model().method, Model.of_class, Model.static):
        assert jax.grad(f)(1.0) == 5


# A method is what is called on an object of the class that has it, not what names its parameter so.


def product(cls, w):
    return 100 * cls * w


def of_object(this, w):
    return 100 * this.weight * w


class Layer:
    """A pytree with methods, which are decorated in each way."""

    def __init__(self, weight):
        self.weight = weight

    plain = cg.error_clip(VALUE)(of_object)
    lambda_ = cg.error_clip(VALUE)(lambda self, w: 100 * self.weight * w)
    any_arguments = cg.error_clip(VALUE)(lambda *args: 100 * args[0].weight * args[1])
    compiled = jax.jit(cg.error_clip(VALUE)(of_object))
    static = staticmethod(cg.error_clip(VALUE)(product))
    outside_of_static = cg.error_clip(VALUE)(staticmethod(product))
    static_of_object = staticmethod(cg.error_clip(VALUE)(of_object))
    function = cg.error_clip(VALUE)(product)

    @cg.error_clip(VALUE)
    def written(this, w):
        return 100 * this.weight * w

    @property
    @cg.error_clip(VALUE)
    def value(self):
        return 100 * self.weight

    @cg.error_clip(VALUE)
    @classmethod
    def outside_of_class(cls, self, w):
        return 100 * self * w

    @classmethod
    @cg.error_clip(VALUE)
    def of_class(cls, self, w):
        return 100 * self * w


jax.tree_util.register_pytree_node(
    Layer, lambda layer: ((layer.weight,), None), lambda _, children: Layer(*children)
)


class Lower(Layer):
    """A subclass, a pytree of its own."""


jax.tree_util.register_pytree_node(
    Lower, lambda layer: ((layer.weight,), None), lambda _, children: Lower(*children)
)
Layer.late = cg.error_clip(VALUE)(lambda s, w: 100 * s.weight * w)


def nested(self, w):
    @cg.error_clip(VALUE)
    def inner(self, w):
        return 100 * self * w

    return inner(self, w)


METHODS = ("plain", "lambda_", "any_arguments", "compiled", "written", "late")
FUNCTIONS = {
    "function": cg.error_clip(VALUE)(product),
    "lambda": cg.error_clip(VALUE)(lambda self, w: 100 * self * w),
    "nested": nested,
    "partial": cg.error_clip(VALUE)(functools.partial(product)),
    "partial of a clip": functools.partial(cg.error_clip(VALUE)(product)),
    "static": Layer.static,
    "static, on an object": Layer(1.0).static,
    "outside of static": Layer(1.0).outside_of_static,
    "of a class": Layer.of_class,
    "outside of a class": Layer(1.0).outside_of_class,
    "function of a class": Layer.function,
    "compiled": jax.jit(cg.error_clip(VALUE)(product)),
}


@pytest.mark.parametrize("cls", [Layer, Lower])
@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_is_called_on_is_no_input_whatever_its_name(name, cls):
    calls = [lambda layer, w: getattr(layer, name)(w), getattr(cls, name)]
    for call in calls:
        layer, w = jax.grad(call, (0, 1))(cls(2.0), 3.0)
        assert (layer.weight, w) == (300, 5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_clips_its_first_argument_whatever_its_name(name):
    assert jax.grad(FUNCTIONS[name], (0, 1))(2.0, 3.0) == (5, 5)


def test_a_method_may_be_a_property_and_a_static_one_may_take_an_object():
    assert jax.grad(lambda layer: layer.value)(Layer(2.0)).weight == 100
    layer, w = jax.grad(Layer.static_of_object, (0, 1))(Layer(2.0), 3.0)
    assert (layer.weight, w) == (5, 5)


def test_signature_name_docstring_and_the_plain_function_are_kept():
    clipped = cg.error_clip({"x": VALUE})(multiply)
    assert clipped.__wrapped__ is multiply
    assert clipped.__name__ == "multiply" and clipped.__doc__ == "Multiplies."
    assert inspect.signature(clipped) == inspect.signature(multiply)


@pytest.mark.parametrize("function", [jax.jit(jnp.sin), functools.partial(jnp.multiply, 1.0)])
def test_callables_of_any_kind_are_decorated(function):
    clipped = cg.error_clip(cg.ErrorClipByValue(max=0.01))(function)
    assert jax.grad(clipped)(0.5) == np.float32(0.01)


def test_none_turns_it_off():
    for decorator in (cg.error_clip(None), cg.error_clip({"x": None}), cg.error_clip(outputs=None)):
        assert jax.grad(decorator(multiply))(1.0) == 300


def test_a_wrong_call_is_reported_in_pythons_words():
    with pytest.raises(
        TypeError, match=r"multiply\(\) missing 1 required positional argument: 'x'"
    ):
        cg.error_clip({"x": VALUE})(multiply)()
    with pytest.raises(TypeError, match="unexpected keyword argument 'q'"):
        cg.error_clip({"x": VALUE})(multiply)(1.0, q=2)


@pytest.mark.parametrize("name", ["h", None])
def test_an_unknown_parameter_is_refused_when_decorating(name):
    match = rf"got {name!r}, expected a parameter of multiply; there are \['x', 'y', 'z'\]"
    with pytest.raises(ValueError, match=match):
        cg.error_clip({name: VALUE, "x": None})(multiply)


@pytest.mark.parametrize("bad", [0.1, {"x": 0.1}], ids=str)
def test_what_is_no_rule_is_refused_before_decorating(bad):
    with pytest.raises(TypeError, match="expected a ClipRule, a function of the cotangent or None"):
        cg.error_clip(bad)
    with pytest.raises(TypeError, match="expected a ClipRule, a function of the cotangent or None"):
        cg.error_clip(outputs={"x": 0.1})


@pytest.mark.parametrize("bad", [3, int], ids=["number", "class"])
def test_what_is_no_function_is_refused(bad):
    match = r"to decorate, expected a function .* @error_clip\(rule\), with a rule in the parenth"
    with pytest.raises(TypeError, match=match):
        cg.error_clip(VALUE)(bad)
    with pytest.raises(TypeError, match=match):
        cg.error_clip(multiply)(1.0)  # without the parentheses: caught at the call


@pytest.mark.slow
def test_each_input_is_a_variable_of_its_own():
    @cg.error_clip(cg.ClipByGlobalNorm(1.0))
    def f(a, b):
        return jnp.sum(a["u"] * 3 + a["v"] * 4) + 12 * jnp.sum(b)

    x = jnp.ones(1)
    a, b = jax.grad(f, argnums=(0, 1))({"u": x, "v": x}, x)
    np.testing.assert_allclose([a["u"][0], a["v"][0], b[0]], [0.6, 0.8, 1.0], rtol=1e-6)


def test_self_can_be_named():
    class Layer(dict):
        @cg.error_clip({"self": VALUE})
        def apply(self, x):
            return 100 * self["w"] * x

    jax.tree_util.register_pytree_node(
        Layer, lambda m: ((m["w"],), None), lambda _, leaves: Layer(w=leaves[0])
    )
    layer, gradient = jax.grad(lambda m, x: m.apply(x), argnums=(0, 1))(Layer(w=2.0), 1.0)
    assert layer["w"] == 5 and gradient == 200
