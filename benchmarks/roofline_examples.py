"""Each example's gradient on an H200, estimated for a transformer in bfloat16 and in float32.

Eight layers of width 768, a vocabulary of 8,192, 16 examples of 256 tokens: the model of which
benchmarks/RESULTS.md has times from an H200.
"""

import jax
import jax.numpy as jnp
import optax

import clipgrad as cg
from benchmarks.accelerators import placed
from benchmarks.roofline import Estimate

LAYERS, WIDTH, HEADS, TOKENS, EXAMPLES, WORDS = 8, 768, 12, 256, 16, 8192


def parameters():
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "g1": (WIDTH,), "g2": (WIDTH,)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    layers = {k: jax.ShapeDtypeStruct((LAYERS, *s), jnp.float32) for k, s in shapes.items()}
    return {"embed": jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32), "layers": layers}


def normalized(x, scale):
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * root * scale).astype(x.dtype)


def layer(x, w):
    w = {k: v.astype(x.dtype) for k, v in w.items()}
    with jax.named_scope("attention"):
        heads = jnp.split(normalized(x, w["g1"]) @ w["qkv"], 3, -1)
        heads = [h.reshape(*h.shape[:-1], HEADS, WIDTH // HEADS) for h in heads]
        attended = jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
        x = x + attended @ w["out"]
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(normalized(x, w["g2"]) @ w["up"]) @ w["down"]


def loss_of(dtype, scanned):
    """The loss of one example in a model that computes in a dtype."""

    def loss(params, tokens):
        embed = params["embed"].astype(dtype)
        x = embed[tokens[None]]
        if scanned:
            x = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])[0]
        else:
            for i in range(LAYERS):
                x = layer(x, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
        logits = (x @ embed.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[None, 1:]
        ).mean()

    return loss


def programs(loss):
    rule = cg.ClipByGlobalNorm(1.0)

    def mean(params, batch):
        return jnp.mean(jax.vmap(loss, (None, 0))(params, batch))

    def each(params, batch):
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        return jax.tree.map(lambda g: g.mean(0), jax.vmap(lambda g: rule(g))(grads))

    clips = {m: cg.clip_per_example(loss, rule, method=m) for m in ("one pass", "two passes")}
    return {
        "plain gradient": jax.value_and_grad(mean),
        "vmap(grad)": each,
        "norms": cg.per_example_norms(loss),
    } | clips


def table(programs_of, args, digits):
    """Prints what programs of each dtype and form take; the first of them is the plain one."""
    args = placed(args, "H200")
    print("| computes in | layers | program | ms | ratio | temporaries, MB |")
    print("|---|---|---|---|---|---|")
    for dtype in (jnp.bfloat16, jnp.float32):
        for scanned in (True, False):
            plain = None
            for name, fun in programs_of(loss_of(dtype, scanned)).items():
                compiled = jax.jit(fun).lower(*args).compile()
                seconds = Estimate(compiled.as_text()).seconds
                plain = plain or seconds
                size = compiled.memory_analysis().temp_size_in_bytes / 2**20
                row = dtype.__name__, "scanned" if scanned else "unrolled", name
                numbers = f"{seconds * 1e3:.1f} | {seconds / plain:.{digits}f} | {size:,.0f}"
                print(f"| {' | '.join(row)} | {numbers} |", flush=True)


def main():
    tokens = jax.ShapeDtypeStruct((EXAMPLES, TOKENS), jnp.int32)
    table(programs, (parameters(), tokens), digits=2)
