"""A rule of a user's own may hold anything: it is applied as it is at each call."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import array, assert_close
from tests.rows import each_value

X = array(np.arange(1.0, 7.0).reshape(2, 3))


class OfARule(cg.ClipByValue):
    def __init__(self, c):
        super().__init__(1e9)
        object.__setattr__(self, "c", c)

    def __call__(self, grads, params=None):
        return jax.tree.map(lambda leaf: self.c * leaf, grads)


@dataclasses.dataclass
class Equal:
    """Equal to all of its kind, whatever they hold."""

    c: object

    def __call__(self, grads):
        return jax.tree.map(lambda leaf: self.c * leaf, grads)

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 0


def closure(c):
    def rule(g):
        return rule.c * g

    rule.c = c
    return rule


def body(x):
    return 3 * checkpoint_name(x, "h")


def scan_of_jit(x):
    return lax.scan(lambda c, row: (c, jax.jit(body)(row)), 0, x)[1]


PLACES = {
    "by name": lambda f, rule: jax.grad(cg.error_clip_by_name(f, {"h": rule})),
    "everywhere": lambda f, rule: jax.grad(cg.error_clip_everywhere(f, rule)),
    "with stats": lambda f, rule: (
        lambda x: cg.value_and_grad_with_stats(f, error_clip={"h": rule})(x)[1]
    ),
    "error_clip of inputs": lambda f, rule: jax.grad(cg.error_clip(rule)(f)),
}
INSIDE = {
    "jit": jax.jit(body),
    "scan of jit": scan_of_jit,
    "remat": jax.checkpoint(body),
    "cond": lambda x: lax.cond(x[0, 0] > 0, body, jnp.sin, x),
}


@pytest.mark.slow
def test_two_patterns_may_have_equal_rules():
    """Rules are values: of a class, with equal thresholds and all else that a subclass keeps."""
    limit = jnp.full(3, 0.1)
    equal = [
        [cg.ClipByValue(0.1), cg.ErrorClipByValue(max=0.1)],
        [cg.ClipByValue(limit), cg.ClipByValue(jnp.copy(limit))],
        [OfARule(0.1), OfARule(0.1)],
        [passes, passes],
        [None, None],
    ]
    for first, second in equal:
        gradient = jax.grad(cg.error_clip_by_name(body_sum, {"h*": first, "*": second}))(X)
        right = jax.grad(cg.error_clip_by_name(body_sum, {"h": first}))(X)
        np.testing.assert_array_equal(gradient, right)
    others = [
        [cg.ClipByValue(0.1), cg.ClipByValue(0.2)],
        [cg.ClipByValue(limit), cg.ClipByValue(2 * limit)],
        [OfARule(0.1), OfARule(0.2)],
        [passes, closure(1.0)],
        [cg.ClipByValue(0.1), None],
    ]
    for first, second in others:
        with pytest.raises(ValueError, match="h.* and .* with a rule each, which both match 'h'"):
            cg.error_clip_by_name(body_sum, {"h*": first, "*": second})(X)


def body_sum(x):
    return jnp.sum(body(x) ** 2)


def passes(g):
    return g


every_rule = pytest.mark.parametrize("make", [OfARule, Equal, closure], ids=lambda r: r.__name__)
every_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


@each_value
@every_rule
@every_place
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_a_rule_that_changes_between_calls_is_applied_as_it_is(make, place, inside):
    rule = make(1.0)
    gradient = place(lambda x: jnp.sum(inside(x)), rule)
    for c in (1.0, 2.0, jnp.array(5.0)):
        object.__setattr__(rule, "c", c)
        np.testing.assert_array_equal(gradient(X), np.full(X.shape, 3 * c))


@each_value
@every_rule
@every_place
def test_every_kind_of_rule_may_hold_what_is_traced(make, place):
    def gradient(c):
        return place(lambda x: jnp.sum(scan_of_jit(x)), make(c))(X)

    factors = array([2.0, 5.0])
    expected = np.multiply.outer(3 * np.asarray(factors), np.ones(X.shape))
    for run in (lambda cs: lax.map(gradient, cs), jax.vmap(gradient)):
        assert_close(jax.jit(run)(factors), expected, rtol=1e-6)
