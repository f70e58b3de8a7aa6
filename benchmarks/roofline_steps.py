"""Whole steps with statistics on an H200, estimated for a transformer in bfloat16 and in float32.

    JAX_PLATFORMS=cpu python -m benchmarks.roofline_steps [--layers 8]

The model is that of `benchmarks.roofline_examples` with 16 sequences of 512 tokens, all of whose
modules are watched, and adamw. benchmarks/RESULTS.md has times of such steps from an H200.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import clipgrad as cg
from benchmarks import roofline_examples as model

TOKENS = 512


def gradients(loss):
    """What returns a value and its gradients, and statistics beside them."""
    measured = jax.value_and_grad(cg.with_value_stats(loss), has_aux=True)
    stats = {"statistics of gradients": cg.value_and_grad_with_stats(loss)}
    return {"no statistics": jax.value_and_grad(loss)} | stats | {"statistics of values": measured}


def step_of(value_and_grad, tx):
    def step(params, state, batch):
        value, grads, *stats = value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, stats)

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=model.LAYERS)
    model.LAYERS = parser.parse_args().layers
    params, tx = model.parameters(), optax.adamw(1e-4)
    tokens = jax.ShapeDtypeStruct((model.EXAMPLES, TOKENS), jnp.int32)

    def programs(one):
        loss = lambda p, batch: jnp.mean(jax.vmap(one, (None, 0))(p, batch))  # noqa: E731
        return {name: step_of(fun, tx) for name, fun in gradients(loss).items()}

    model.table(programs, (params, jax.eval_shape(tx.init, params), tokens), digits=3)


if __name__ == "__main__":
    main()
