"""Prints the answers of the library's calls on a loss with tags, scopes, remat and custom rules.

`test_primitives.py` runs it with and without JAX's upgrade flags: the answers are the same.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg

KEY = jax.random.key(0)
PARAMS = {"w": jax.random.normal(KEY, (4, 4)), "b": jnp.zeros(4)}
X = jax.random.normal(KEY, (8, 4))
CLIP = cg.ErrorClipByValue(max=0.01)


@jax.custom_vjp
def ruled(x):
    return jnp.sin(x)


ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def loss(params, x):
    def layer(h, _):
        with jax.named_scope("cell"):
            h = ruled(jax.nn.silu(h @ params["w"] + params["b"]))
        return checkpoint_name(h, "h"), None

    h, _ = jax.lax.scan(jax.checkpoint(layer), x, None, length=3)
    with jax.named_scope("head"):
        h = jax.nn.relu(h) + jax.lax.custom_root(lambda y: y - h, h, lambda f, y: h, _divide)
    return jnp.mean(h**2)


def _divide(tangent, y):
    return y / tangent(jnp.ones_like(y))


def bad(params, x):
    with jax.named_scope("inner"):
        h = jax.checkpoint(lambda h: jnp.sqrt(jnp.abs(h @ params["w"]) * 0))(x)
    return jnp.mean(h)


def step():
    optimizer = optax.chain(cg.clip_by_global_norm(1.0, stats=True), optax.adam(1e-3))
    trained = cg.train_step(loss, optimizer)
    return trained(trained.init(PARAMS), X)[1]


def rows(comparison):
    return [[f.kind, f.message] for f in comparison.findings], comparison.ok


def other(params, x):
    return 1.01 * loss(params, x)


CALLS = {
    "clip_grads": lambda: cg.clip_grads(jax.grad(loss)(PARAMS, X), cg.ClipByGlobalNorm(1.0)),
    "train_step": step,
    "error clip": lambda: jax.jit(
        jax.grad(lambda p: loss({**p, "w": cg.clip_cotangent(p["w"], CLIP)}, X))
    )(PARAMS),
    "error clip in vmap": lambda: jax.vmap(
        jax.grad(lambda v: jnp.sum(cg.clip_cotangent(v, cg.ClipByNorm(1.0)) ** 2))
    )(X),
    "by scope": lambda: jax.grad(cg.error_clip_by_name(loss, {"cell": CLIP}))(PARAMS, X),
    "by tag": lambda: jax.grad(cg.error_clip_by_name(loss, {"h": CLIP}))(PARAMS, X),
    "everywhere": lambda: jax.grad(cg.error_clip_everywhere(loss, CLIP))(PARAMS, X),
    "list_names": lambda: str(cg.list_names(loss, (PARAMS, X))),
    "list_names, lines": lambda: str(cg.list_names(loss, (PARAMS, X), lines=True)),
    "cotangents": lambda: cg.value_and_grad_with_stats(loss)(PARAMS, X),
    "values": lambda: cg.with_value_stats(loss, watch=["cell", "h", "head"])(PARAMS, X),
    "per example": lambda: cg.per_example_norms(lambda p, x: loss(p, x[None]))(PARAMS, X),
    "diagnose": lambda: [str(f.message) for f in cg.diagnose(bad, (PARAMS, X)).findings],
    "check_grads": lambda: cg.check_grads(loss, (PARAMS, X)).ok,
    "numerical_grad": lambda: cg.numerical_grad(loss, (PARAMS, X)),
    "compare": lambda: rows(cg.compare(loss, other, (PARAMS, X))),
    "compare with float64": lambda: rows(cg.compare(loss, "float64", (PARAMS, X))),
}


def plain(tree):
    """The leaves of an answer as texts and lists of numbers of four digits."""
    leaves = jax.tree.leaves(tree)
    return [
        leaf
        if isinstance(leaf, str | bool)
        else [float(f"{x:.4g}") for x in np.ravel(np.asarray(leaf, np.float64))]
        for leaf in leaves
    ]


def main():
    print(json.dumps({name: plain(call()) for name, call in CALLS.items()}))


if __name__ == "__main__":
    main()
