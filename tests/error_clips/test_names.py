"""What `list_names` says; what the names are is in test_modules.py."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import array

X = array(np.ones((2, 3)))


def model(x, scale=1.0):
    def layer(h, _):
        with jax.named_scope("layer"):
            h = jnp.tanh(checkpoint_name(h, "inside"))
        return h, None

    with jax.named_scope("encoder"):
        h = lax.scan(layer, x, None, length=4)[0]
        wide = jnp.concatenate([h, h]).astype(jnp.bfloat16)
    with jax.named_scope("index"):
        index = jnp.argmax(h)
    return (wide * scale).sum() + h.ravel()[index].astype(jnp.bfloat16)


TABLE = """\
name           kind    shape  dtype     scans  sites  cotangent
inside         tag     2 x 3  float32   4      1      yes
encoder/layer  module  2 x 3  float32   4      1      yes
encoder        module  4 x 3  bfloat16         2      yes"""


def test_the_table_has_the_largest_of_the_variables_of_a_name():
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)  # which is enough: nothing is run
    assert str(cg.list_names(model, (shape,))) == TABLE


@jax.custom_vjp
def ruled(x):
    return checkpoint_name(jnp.sin(x), "inside") * 2


ruled.defvjp(lambda x: (ruled(x), None), lambda _, g: (g,))


def counted(x):
    with jax.named_scope("index"):
        index = jnp.argmax(x)
    return index * 2


@pytest.mark.parametrize(
    ("fun", "reason"),
    [
        (jnp.sin, "no names: there are no tags or modules, expected .*named_scope.*fun\\(model"),
        (ruled, "no names: the values of 'inside' are inside of custom_vjp_call, from where"),
        (counted, "no names: the values of 'index' are int32, expected floating or complex"),
    ],
)
def test_with_no_row_the_table_says_why(fun, reason):
    names = cg.list_names(fun, (X,))
    assert names == () and re.match(reason, str(names)), str(names)


def test_names_cost_little_more_than_tracing():
    """Of rules within loops, whose derivatives are not traced to list names."""

    traced = []

    def nested(depth, x):
        @jax.custom_jvp
        def rule(x):
            traced.append(depth)
            return nested(depth - 1, x) if depth else jnp.sin(x)

        rule.defjvp(lambda p, t: (rule(*p), t[0]))
        return lax.while_loop(
            lambda x: x.sum() < 0,
            rule,
            lax.scan(lambda x, _: (rule(x), None), x, None, length=3)[0],
        )

    jax.make_jaxpr(lambda x: nested(3, x))(X)
    plain = len(traced)
    cg.list_names(lambda x: nested(3, x), (X,))
    assert len(traced) <= 2 * plain + plain


def test_what_nothing_uses_does_not_count_beside_values_of_its_name_that_something_uses():
    def module(x):
        with jax.named_scope("net"):
            return jnp.sin(x)

    def scanned(x):
        module(jnp.concatenate([x, x]))
        return lax.scan(lambda h, _: (module(h), None), x, None, length=3)[0]

    def looped(x):
        module(jnp.concatenate([x, x]))
        return lax.while_loop(lambda h: h[0, 0] > 0.5, module, x)

    (name,) = cg.list_names(looped, (X,))
    assert (name.shape, name.sites, name.cotangent) == (X.shape, 1, False)
    stats = cg.with_value_stats(scanned, watch=["net"])(X)[1]["net"]
    np.testing.assert_array_equal(stats.size, [X.size] * 3)
