"""What programs take on one H200, estimated or measured: the one table of this kind in RESULTS.md.

    JAX_PLATFORMS=cpu python -m benchmarks.estimates [--layers 8]    # estimated, without a GPU
    python -m benchmarks.estimates --run                             # measured, on a GPU

Estimates read programs compiled for an H200 (extra ``accelerators``); `benchmarks.roofline`
says how good they are. Each block has a plain program, and what others take in multiples of it. The
model of each example and of the steps is a transformer of width 768 with a vocabulary of 8,192.
"""

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import clipgrad as cg
from benchmarks.compiled import host_transfers
from benchmarks.peers import by_leaf
from benchmarks.roofline import Estimate

H200 = pathlib.Path(__file__).parents[1] / "tests" / "clips" / "h200.txtpb"
WIDTH, HEADS, WORDS = 768, 12, 8192
CLIPS = {
    "global norm": (optax.clip_by_global_norm, cg.clip_by_global_norm, 1.0),
    "norm of each leaf": (by_leaf, cg.clip_by_norm, 1.0),
    "block RMS": (optax.clip_by_block_rms, cg.clip_by_block_rms, 1.0),
    "adaptive": (optax.adaptive_grad_clip, cg.adaptive_grad_clip, 0.01),
    "value": (optax.clip, cg.clip_by_value, 1.0),
}
Programs = dict[str, Callable]


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The type of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def parameters(layers: int) -> dict[str, Any]:
    """Stacked weights in float32."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "g1": (WIDTH,), "g2": (WIDTH,)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return {
        "embed": array(WORDS, WIDTH),
        "layers": {k: array(layers, *s) for k, s in shapes.items()},
    }


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    """By the root mean square, in float32."""
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * root * scale).astype(x.dtype)


def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Attention and an MLP, whose modules have names."""
    w = {k: v.astype(x.dtype) for k, v in w.items()}
    with jax.named_scope("attention"):
        heads = jnp.split(normalized(x, w["g1"]) @ w["qkv"], 3, -1)
        heads = [h.reshape(*h.shape[:-1], HEADS, WIDTH // HEADS) for h in heads]
        attended = jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
        x = x + attended @ w["out"]
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(normalized(x, w["g2"]) @ w["up"]) @ w["down"]


def loss_of(dtype: Any, layers: int, scanned: bool) -> Callable:
    """The loss of one example, computed in a dtype."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        embed = params["embed"].astype(dtype)
        x = embed[tokens[None]]
        if scanned:
            x = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])[0]
        else:
            for i in range(layers):
                x = layer(x, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
        logits = (x @ embed.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[None, 1:]
        ).mean()

    return loss


def mean_of(loss: Callable) -> Callable:
    """The mean over the examples."""
    return lambda params, batch: jnp.mean(jax.vmap(loss, (None, 0))(params, batch))


def update_of(tx: optax.GradientTransformation) -> Callable:
    """An update with its state, which may hold statistics."""
    return lambda grads, params=None: tx.update(grads, tx.init(grads), params)


def clips(dtype: Any) -> Any:
    """One update of 20 leaves, beside optax's clip of the same kind."""
    grads = [array(1600, 1000, dtype=dtype) for _ in range(20)]
    for name, (theirs, ours, limit) in CLIPS.items():
        found = {
            f"optax, {name}": update_of(theirs(limit)),
            "clipgrad": update_of(ours(limit)),
            "with statistics": update_of(ours(limit, stats=True)),
        }
        yield found, (grads, grads) if name == "adaptive" else (grads,)


def each_example(dtype: Any, layers: int) -> Any:
    """16 examples of 256 tokens, beside the plain gradient."""
    args = parameters(layers), array(16, 256, dtype=jnp.int32)
    rule = cg.ClipByGlobalNorm(1.0)
    for scanned in (True, False):
        loss = loss_of(dtype, layers, scanned)

        def each(params: Any, batch: Any, loss: Callable = loss) -> Any:
            grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
            return jax.tree.map(lambda g: g.mean(0), jax.vmap(lambda g: rule(g))(grads))

        yield (
            {
                f"gradient, {'scanned' if scanned else 'unrolled'} layers": jax.value_and_grad(
                    mean_of(loss)
                ),
                "vmap(grad) and a clip": each,
                "per_example_norms": cg.per_example_norms(loss),
                "clip_per_example": cg.clip_per_example(loss, rule),
            },
            args,
        )


def steps(dtype: Any, layers: int) -> Any:
    """Steps of adamw on 16 sequences of 512 tokens, all modules watched."""
    adamw, tokens = optax.adamw(1e-4), array(16, 512, dtype=jnp.int32)
    params = parameters(layers)
    args = params, jax.eval_shape(adamw.init, params), tokens
    watched = cg.watch_updates(adamw, stacked="layers")
    norms = jax.eval_shape(watched.init, params).norms

    def step_of(gradient: Callable) -> Callable:
        def step(params: Any, state: Any, batch: Any) -> Any:
            value, grads, *stats = gradient(params, batch)
            updates, state = adamw.update(grads, state, params)
            return optax.apply_updates(params, updates), state, (value, stats)

        return step

    def watched_step(gradient: Callable) -> Callable:
        def step(params: Any, state: Any, batch: Any) -> Any:
            value, grads = gradient(params, batch)
            updates, state = watched.update(grads, cg.types.WatchUpdatesState(state, norms), params)
            new = optax.apply_updates(params, updates)
            return new, state.inner_state, (value, state.norms)

        return step

    for scanned in (True, False):
        loss = mean_of(loss_of(dtype, layers, scanned))
        yield (
            {
                f"step, {'scanned' if scanned else 'unrolled'} layers": step_of(
                    jax.value_and_grad(loss)
                ),
                "watch_updates": watched_step(jax.value_and_grad(loss)),
                "statistics of cotangents": step_of(cg.value_and_grad_with_stats(loss)),
                "statistics of values": step_of(
                    jax.value_and_grad(cg.with_value_stats(loss), has_aux=True)
                ),
            },
            args,
        )


def estimated(fun: Callable, args: Any) -> tuple[float, int]:
    """Seconds by estimate, and bytes of temporaries."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=H200.read_text(), topology="1x1x1"
    )
    one = SingleDeviceSharding(topology.devices[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), args)
    compiled = jax.jit(fun).lower(*placed).compile()
    text = compiled.as_text()
    assert not host_transfers(text), host_transfers(text)[:3]
    return Estimate(text).seconds, compiled.memory_analysis().temp_size_in_bytes


def measured(fun: Callable, args: Any, rounds: int = 20) -> tuple[float, int]:
    """Median seconds of a run, and bytes of temporaries."""
    given = jax.tree.map(
        lambda x: jnp.ones(x.shape, x.dtype) * (0.01 if x.dtype != jnp.int32 else 1), args
    )
    compiled = jax.jit(fun).lower(*given).compile()
    jax.block_until_ready(compiled(*given))
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken), compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--run", action="store_true", help="measure on the device that is there")
    options = parser.parse_args()
    seconds_of = measured if options.run else estimated
    print("| in | program | ms | beside the plain one | temporaries, MB |")
    print("|---|---|---:|---:|---:|")
    for dtype in (jnp.bfloat16, jnp.float32):
        blocks = *clips(dtype), *each_example(dtype, options.layers), *steps(dtype, options.layers)
        for programs, args in blocks:
            plain = None
            for name, fun in programs.items():
                seconds, size = seconds_of(fun, args)
                plain = plain or seconds
                numbers = f"{seconds * 1e3:.3f} | {seconds / plain:.2f} | {size / 2**20:,.0f}"
                print(f"| {dtype.__name__} | {name} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
