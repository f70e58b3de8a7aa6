"""The order of several clips of one value: the docstrings say it, for each form."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.rows import each_value

# The cotangent 1 becomes 11 by `outer` and then `inner`, and 20 by `inner` and then `outer`.
inner, outer = (lambda g: g + 1.0), (lambda g: 10.0 * g)
OUTER_FIRST, INNER_FIRST = 11, 20


def value(x):
    return cg.clip_cotangent(cg.clip_cotangent(x, inner), outer)


@cg.error_clip(outputs=outer)
@cg.error_clip(outputs=inner)
def outputs(x):
    return x


@cg.error_clip(outer)
@cg.error_clip(inner)
def inputs(x):
    return x


@cg.error_clip({"x": outer})
@cg.error_clip({"x": inner})
def named_inputs(x):
    return x


def tagged(x):
    return checkpoint_name(1.0 * x, "h") * 1.0


def clip_inside(x):
    """A clip of a tagged value, before the tag or behind it."""
    return cg.clip_cotangent(checkpoint_name(cg.clip_cotangent(1.0 * x, inner), "h"), outer) * 1.0


def twice(transform, fun):
    return transform(transform(fun, inner), outer)


def by_name(fun, rule):
    return cg.error_clip_by_name(fun, {"h": rule})


def decorated(fun, rule):
    return cg.error_clip(rule)(fun)


def returned(fun, rule):
    return cg.error_clip(outputs=rule)(fun)


def module(x):
    return jax.named_scope("h")(jnp.sin)(x) * 1.0


FORMS = {
    "clip_cotangent": (value, OUTER_FIRST),
    "outputs": (outputs, OUTER_FIRST),
    "outputs, one call after the other": (twice(returned, lambda x: x), OUTER_FIRST),
    "outputs around a value": (
        cg.error_clip(outputs=outer)(lambda x: cg.clip_cotangent(x, inner)), OUTER_FIRST
    ),
    "inputs": (inputs, INNER_FIRST),
    "inputs by name": (named_inputs, INNER_FIRST),
    "inputs, one call after the other": (twice(decorated, lambda x: x), INNER_FIRST),
    "inputs around a value": (
        cg.error_clip(outer)(lambda x: cg.clip_cotangent(x, inner)), INNER_FIRST
    ),
    "by name": (twice(by_name, tagged), INNER_FIRST),
    "module by name": (lambda x: twice(by_name, module)(x) / jnp.cos(x), INNER_FIRST),
    "inputs inside of outputs": (
        cg.error_clip(outer, outputs=inner)(lambda x: x), INNER_FIRST
    ),
    "by name around an output": (
        by_name(lambda x: checkpoint_name(returned(lambda x: 1.0 * x, outer)(x), "h"), inner),
        INNER_FIRST,
    ),
}  # fmt: skip


@each_value
@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"]
)
@pytest.mark.parametrize("form", FORMS)
def test_of_two_clips_of_a_value_one_gets_the_cotangent_first(form, transform):
    clipped, expected = FORMS[form]
    assert round(float(jax.grad(transform(clipped))(0.0)), 4) == expected


def test_everywhere_a_clip_inside_is_an_operation_like_others():
    """Its result has the rule, then comes the clip, then the rule of what it clips."""
    everywhere = cg.error_clip_everywhere(lambda x: 1.0 * cg.clip_cotangent(1.0 * x, inner), outer)
    assert jax.grad(everywhere)(0.0) == (1 * 10 + 1) * 10


@pytest.mark.parametrize("name", ["clip_cotangent", "error_clip", "error_clip_by_name",
                                  "error_clip_everywhere"])  # fmt: skip
def test_the_docstring_says_the_order(name):
    assert (
        "cotangent first" in getattr(cg, name).__doc__
        or "the rule again" in getattr(cg, name).__doc__
        or "clips the cotangent of a result first" in getattr(cg, name).__doc__
    )
