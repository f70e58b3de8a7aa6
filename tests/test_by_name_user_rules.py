"""A rule of a user's own may hold anything: it is applied as it is at each call."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

import clipgrad as cg
from tests.helpers import assert_close

X = jnp.arange(1.0, 7.0).reshape(2, 3)


def scale(g, c):
    return jax.tree.map(lambda leaf: c * leaf, g)


class OfTheProtocol(cg.ClipRule):
    def __init__(self, c):
        self.c = c

    def __call__(self, grads, params=None):
        return scale(grads, self.c)


class OfARule(cg.ClipByValue):
    def __init__(self, c):
        super().__init__(1e9)
        object.__setattr__(self, "c", c)

    def __call__(self, grads, params=None):
        return scale(grads, self.c)


@dataclasses.dataclass
class NotHashable:
    c: object

    def __call__(self, g):
        return scale(g, self.c)


class Equal(NotHashable):
    """Equal to all of its kind, whatever they hold."""

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 0


@functools.partial(jax.tree_util.register_dataclass, data_fields=["c"], meta_fields=[])
@dataclasses.dataclass
class OfAPytree(NotHashable):
    """A pytree that checks its leaves whenever it is made."""

    c: object

    def __post_init__(self):
        assert jnp.shape(self.c) == ()


def closure(c):
    def rule(g):
        return scale(g, rule.c)

    rule.c = c
    return rule


def body(x):
    return 3 * checkpoint_name(x, "h")


RULES = [OfTheProtocol, OfARule, NotHashable, Equal, OfAPytree, closure]
PLACES = {
    "by name": lambda f, rule: jax.grad(cg.error_clip_by_name(f, {"h": rule})),
    "everywhere": lambda f, rule: jax.grad(cg.error_clip_everywhere(f, rule)),
    "with stats": lambda f, rule: (
        lambda x: cg.value_and_grad_with_stats(f, rules={"h": rule})(x)[1]
    ),
}
INSIDE = {
    "nothing": body,
    "jit": jax.jit(body),
    "scan of jit": lambda x: lax.scan(lambda c, row: (c, INSIDE["jit"](row)), 0, x)[1],
    "vmap": jax.vmap(body),
    "remat": jax.checkpoint(body),
    "cond": lambda x: lax.cond(x[0, 0] > 0, body, jnp.sin, x),
    "shard_map": lambda x: jax.shard_map(
        body,
        mesh=jax.make_mesh((2,), ("d",), (AxisType.Auto,)),
        in_specs=PartitionSpec("d"),
        out_specs=PartitionSpec("d"),
    )(x),
}
every_rule = pytest.mark.parametrize("make", RULES, ids=lambda r: r.__name__)
every_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
every_inside = pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)


@pytest.mark.kinds("place")
@pytest.mark.ci("make place", "inside place")
@every_rule
@every_place
@every_inside
def test_a_rule_that_changes_between_calls_is_applied_as_it_is(make, place, inside):
    rule = make(1.0)
    gradient = place(lambda x: jnp.sum(inside(x)), rule)
    for c in (1.0, 2.0, jnp.array(5.0)):
        object.__setattr__(rule, "c", c)
        np.testing.assert_array_equal(gradient(X), np.full(X.shape, 3 * c))


@pytest.mark.kinds("place")
@every_rule
@every_place
def test_every_kind_of_rule_may_hold_what_is_traced(make, place):
    def gradient(c):
        return place(lambda x: jnp.sum(INSIDE["scan of jit"](x)), make(c))(X)

    factors = jnp.array([2.0, 5.0])
    expected = 3 * jnp.broadcast_to(factors[:, None, None], (2, *X.shape))
    assert_close(lax.map(gradient, factors), expected, rtol=1e-6)
    assert_close(jax.vmap(gradient)(factors), expected, rtol=1e-6)


def with_stats(rule, grads):
    tx = cg.gradient_clip(rule, stats="per_leaf")
    return tx.update(grads, tx.init(grads))[0]


def watched(rule, grads):
    def loss(x, probe):
        return jnp.sum(cg.clip_cotangent(x, rule, probe=probe) * grads)

    return jax.grad(loss, argnums=(0, 1))(grads, cg.types.ClipStats.zero())[0]


# What a rule makes of the gradient, or cotangent, x.
OWN_PLACES = {
    "clip_cotangent with a probe": watched,
    "error_clip of inputs": lambda rule, x: jax.vjp(cg.error_clip(rule)(lambda y: y), x)[1](x)[0],
    "gradient_clip with statistics": with_stats,
    "clip_grads": lambda rule, x: cg.clip_grads(x, rule)[0],
    "clip_per_example": lambda rule, x: cg.clip_per_example(
        lambda w, example: jnp.sum(w * example), rule, reduce="sum"
    )(jnp.zeros(x.shape), x[None])[1],
}


@pytest.mark.kinds("make", "place")
@pytest.mark.ci("make", "place")
@every_rule
@pytest.mark.parametrize("place", OWN_PLACES.values(), ids=OWN_PLACES)
def test_a_rule_that_changes_is_applied_as_it_is_outside_of_programs_too(make, place):
    rule, x = make(1.0), jnp.arange(1.0, 9.0).reshape(8, 1)
    for c in (1.0, 2.0, jnp.array(5.0), np.float32(7.0)):
        object.__setattr__(rule, "c", c)
        np.testing.assert_array_equal(place(rule, x), c * x)
