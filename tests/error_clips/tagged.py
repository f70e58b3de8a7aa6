"""Small programs with tagged variables at every kind of place.

Each takes an array of shape (4, 3) and ``tag(value, name)``, which is `checkpoint_name` in the
program that is transformed, and `clip_cotangent` where the same is written by hand.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

import clipgrad as cg
from tests.helpers import array

X = array(np.linspace(-1.0, 2.0, 12).reshape(4, 3))
W = array(np.linspace(-1.0, 1.0, 9).reshape(3, 3))
POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "only h": jax.checkpoint_policies.save_only_these_names("h"),
}


def step(x, tag):
    return jnp.sin(3 * tag(jnp.tanh(x @ W), "h"))


def scanned(x, tag, wrap=lambda f: f, **options):
    def body(h, row):
        h = tag(jnp.tanh(h @ W + row), "h")
        return h, 2 * tag(jnp.sin(h), "out")

    last, outs = lax.scan(wrap(body), jnp.ones(3), x, **options)
    return outs + last[None]


def layers_of_steps(x, tag):
    def layer(rows, scale):
        return scanned(rows * scale, tag), None

    return lax.scan(layer, x, jnp.array([0.5, 1.5]))[0]


def branches(x, tag):
    on = lax.cond(x[0, 0] < 0, lambda x: tag(jnp.sin(x), "h"), jnp.cos, x)
    return lax.switch(jnp.asarray(2), [jnp.cos, jnp.exp, lambda x: 2 * tag(x, "out")], on)


def sharded(x, tag):
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,))
    rows = PartitionSpec("d")
    return jax.shard_map(lambda x: step(x, tag), mesh=mesh, in_specs=rows, out_specs=rows)(x)


def solved(x, tag):
    matrix = jnp.eye(3) * 4 + tag(jnp.sin(x[:3]), "h")
    return lax.custom_linear_solve(
        lambda v: tag(jnp.cos(matrix), "out") @ v,
        x[3],
        lambda _, b: jnp.linalg.solve(jnp.cos(matrix), b),
        lambda _, b: jnp.linalg.solve(jnp.cos(matrix).T, b),
    )


def on_this_platform(x, tag):
    return lax.platform_dependent(x, cpu=lambda x: step(x, tag), default=lambda x: step(x, tag))


def beside_custom_rules(x, tag):
    @jax.custom_vjp
    def rule(x):
        return jnp.sin(x)

    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))
    return jax.nn.relu(rule(tag(jax.nn.silu(x), "h")))


def after_a_loop(x, tag):
    times = lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0)
    return lax.fori_loop(0, 3, lambda i, x: tag(jnp.sin(x) * 1.5, "h"), x) * times


def used_thrice(x, tag):
    h = tag(jnp.sin(x), "h")
    return 3 * h - 5 * jnp.cos(h) + 10 * h**2


def decorated(x, tag):
    inner = cg.error_clip(cg.ErrorClipByValue(0.2), outputs=cg.ClipByNorm(2.0))(step)
    return inner(x, tag)


MODELS = {
    "plain": step,
    "three uses": used_thrice,
    "jit of jit": lambda x, tag: jax.jit(jax.jit(lambda x: step(x, tag)))(x) * 2,
    "scan": scanned,
    "reversed scan": functools.partial(scanned, reverse=True),
    "unrolled scan": functools.partial(scanned, unroll=2),
    "scan of remat": functools.partial(scanned, wrap=jax.checkpoint),
    "scan of jit": functools.partial(scanned, wrap=jax.jit),
    "scan of scan": layers_of_steps,
    "cond and switch": branches,
    "shard_map": sharded,
    "linear solve": solved,
    "platform": on_this_platform,
    "custom rules": beside_custom_rules,
    "loops": after_a_loop,
    "decorated": decorated,
    **{
        f"remat, {name}": lambda x, tag, policy=policy: jax.checkpoint(
            lambda x: step(step(x, tag), tag), policy=policy
        )(x)
        for name, policy in POLICIES.items()
    },
}


def loss_of(model, tag=checkpoint_name):
    """The scalar loss of a model; its gradient is not constant anywhere."""
    return lambda x: jnp.sum(jnp.cos(model(x, tag)) * 3)


def by_hand(rules):
    """A tag that clips where it stands."""
    return lambda x, name: cg.clip_cotangent(checkpoint_name(x, name), rules.get(name))
