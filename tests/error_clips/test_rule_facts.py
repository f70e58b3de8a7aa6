"""A function as a rule may ask for the name of a value and the operation that made it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import array

X = array(np.linspace(0.1, 1.0, 4).reshape(2, 2))


class Facts:
    """A rule that keeps what it was told, in any form of a function."""

    def __init__(self):
        self.seen = []

    def both(self, cotangent, *, name, operation):
        self.seen.append((name, operation))
        return cotangent

    def names(self, cotangent, *, name):
        self.seen.append(name)
        return cotangent

    def operations(self, cotangent, *, operation="?"):
        self.seen.append(operation)
        return cotangent


def relu(x):
    return jnp.maximum(x, 0)


# A value with a name, and what made it.
VALUES = {
    "dot_general": lambda x: x @ x,
    "exp": jnp.exp,
    "sin": lambda x: jax.jit(jnp.sin)(x),
    "tanh": jax.checkpoint(jnp.tanh),
    "max": jax.jit(lambda x: jax.jit(relu)(x)),
    "scan": lambda x: jax.lax.scan(lambda c, _: (c * x, None), x, None, length=2)[0],
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "custom_jvp_call": jax.nn.relu,
    "mul": lambda x: checkpoint_name(x * x, "inner"),
}
# Ways to name it.
TAGGED = {
    "tag": lambda f, x: checkpoint_name(f(x), "h"),
    "module": lambda f, x: jax.named_scope("h")(f)(x),
    "tag in jit": lambda f, x: jax.jit(lambda x: checkpoint_name(f(x), "h"))(x),
    "module in scan": lambda f, x: jax.lax.scan(
        lambda c, _: (jax.named_scope("h")(f)(c), None), x, None, length=2
    )[0],
}


def by_name(rule, loss):
    return jax.grad(cg.error_clip_by_name(loss, {"h": rule}))


def with_stats(rule, loss):
    """The names that are clipped are watched too."""
    return cg.value_and_grad_with_stats(cg.error_clip_by_name(loss, {"h": rule}), watch=["h"])


@pytest.mark.parametrize("place", [by_name, with_stats])
@pytest.mark.parametrize("tagged", TAGGED)
@pytest.mark.parametrize("operation", VALUES)
def test_by_name_a_rule_gets_the_name_and_the_primitive_that_made_the_value(
    operation, tagged, place
):
    loss = lambda x: jnp.sum(TAGGED[tagged](VALUES[operation], x) ** 2)  # noqa: E731
    facts = Facts()
    jax.eval_shape(place(facts.both, loss), X)
    assert set(facts.seen) == {("h", operation)}


def test_by_name_an_argument_has_no_operation_and_each_matched_name_is_told():
    facts = Facts()

    def loss(x):
        x = checkpoint_name(x, "x")
        for i in range(2):
            with jax.named_scope(f"block_{i}"):
                x = jnp.sin(x)
        return jnp.sum(x)

    jax.eval_shape(jax.grad(cg.error_clip_by_name(loss, {"**": facts.both})), X)
    assert facts.seen == [("x", ""), ("block_0", "sin"), ("block_1", "sin")]


def test_everywhere_a_rule_clips_what_one_operation_made():
    loss = lambda x: jnp.sum(7 * jnp.exp(jnp.sin(2 * x)))  # noqa: E731
    rule = lambda g, *, operation: jnp.clip(g, -1, 1) if operation == "exp" else g  # noqa: E731
    clipped = jax.grad(cg.error_clip_everywhere(loss, rule))(X)
    np.testing.assert_allclose(clipped, 2 * jnp.cos(2 * X) * jnp.exp(jnp.sin(2 * X)), rtol=1e-6)
    values = lambda g, *, name: 0 * g if name == "a/b" else g  # noqa: E731

    def named(x):
        with jax.named_scope("a"):
            with jax.named_scope("b"):
                h = jnp.sin(x)
            return jnp.sum(h * h) + jnp.sum(checkpoint_name(x * x, "square"))

    np.testing.assert_allclose(jax.grad(cg.error_clip_everywhere(named, values))(X), 2 * X)


def test_everywhere_each_operation_at_any_depth_is_told_with_the_name_of_its_value():
    def loss(x):
        h = checkpoint_name(jax.checkpoint(jnp.exp)(x), "tag of a call")
        with jax.named_scope("outer"):
            h = jax.jit(jax.named_scope("inner")(lambda h: jnp.sin(h)))(h)

        def body(c, _):
            with jax.named_scope("cell"):
                return jnp.tanh(c), None

        return jnp.sum(jax.lax.scan(body, h, None, length=2)[0] @ x)

    facts = Facts()
    jax.eval_shape(jax.grad(cg.error_clip_everywhere(loss, facts.both)), X)
    assert facts.seen == [
        ("tag of a call", "exp"), ("outer/inner", "sin"), ("cell", "tanh"), ("", "dot_general"),
    ]  # fmt: skip


@pytest.mark.parametrize("keyword", ["where", "operation", "names"])
def test_a_selection_in_place_of_a_rule_that_asks_says_what_to_write(keyword):
    with pytest.raises(TypeError, match=rf"got {keyword}='exp'; .*\*, name, operation"):
        cg.error_clip_everywhere(jnp.exp, Facts().both, **{keyword: "exp"})


def of_arguments(rule):
    @cg.error_clip(rule)
    def f(x, *args, **kwargs):
        return jnp.sum(x * args[0] * args[1] * kwargs["z"])

    return lambda x: f(x, x, 2 * x, z=x)


def of_parts(rule):
    f = cg.error_clip({"p": {"w": rule, "b": None}}, outputs={"y": rule, "z": None})(
        lambda p: {"y": p["w"] + p["b"], "z": p["w"]}
    )
    return lambda x: jnp.sum(f({"w": x, "b": x})["y"])


DIRECT = {
    "a value": (lambda rule: lambda x: jnp.sum(cg.clip_cotangent(x, rule)), [""]),
    "a tree": (
        lambda rule: lambda x: jnp.sum(cg.clip_cotangent({"a": [x, x]}, {"a": rule})["a"][1]),
        ["a"],
    ),
    "arguments": (of_arguments, ["x", "args/0", "args/1", "z"]),
    "parts": (of_parts, ["p/w", "y"]),
}


@pytest.mark.parametrize("place", DIRECT)
def test_directly_a_rule_gets_the_path_and_no_operation(place):
    make, names = DIRECT[place]
    facts = Facts()
    jax.eval_shape(jax.grad(make(facts.both)), X)
    assert sorted(facts.seen) == sorted((name, "") for name in names)


def test_error_clip_tells_a_rule_the_place_among_args_also_behind_self():
    places = []

    def rule(grads, *, name):
        places.append(name)
        return grads

    class Model:
        @cg.error_clip(rule)
        def product(*args):
            return args[1] * args[2]

    jax.grad(lambda x: Model().product(x, 2 * x))(1.0)
    assert {*places} == {"args/1", "args/2"}


def test_a_rule_may_ask_for_one_fact_or_set_it_itself():
    facts = Facts()
    for rule in (facts.names, facts.operations, functools.partial(facts.both, name="mine")):
        jax.eval_shape(by_name(rule, lambda x: jnp.sum(checkpoint_name(jnp.sin(x), "h"))), X)
    assert facts.seen == ["h", "sin", ("mine", "sin")]


class OfTheUser(cg.ClipRule):
    def __call__(self, grads, params=None, *, name):
        return jax.tree.map(lambda g: 0 * g if name == "h" else g, grads)


@pytest.mark.parametrize("times", [1, 2])
def test_a_class_may_ask_and_gradient_clips_know_no_names(times):
    loss = lambda x: jnp.sum(checkpoint_name(3 * x, "h"))  # noqa: E731
    for _ in range(times):
        assert not jax.grad(cg.error_clip_by_name(loss, {"h": OfTheUser()}))(X).any()
        np.testing.assert_array_equal(cg.clip_grads(X, OfTheUser())[0], X)
