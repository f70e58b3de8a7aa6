"""Programs with named values, wherever a program may have them."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.error_clips.tagged import MODELS


def in_a_while(x, tag):
    def body(state):
        i, x = state
        return i + 1, tag(jnp.sin(x) * 1.5, "h")

    return lax.while_loop(lambda s: s[0] < x.shape[1], body, (jnp.int32(0), x))[1]


def same_branches(x, tag):
    def branch(x):
        return tag(jnp.sin(x), "h")

    return lax.cond(x[0, 0] > 5, branch, branch, x)


def unused(x, tag):
    with jax.named_scope("idle"):
        jnp.cos(x)
    return tag(x, "h")


PROGRAMS = MODELS | {"while": in_a_while, "equal branches": same_branches, "unused": unused}
# Recomputation and several devices call back more often; a linear solve is left whole.
COUNTED = [n for n in PROGRAMS if "remat" not in n and n not in ("linear solve", "shard_map")]
