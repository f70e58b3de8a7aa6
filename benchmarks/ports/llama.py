"""A decoder as Llama: RMSNorm, rotated positions, grouped heads, SwiGLU and tied embeddings.

The torch side is beside two twins in flax Linen: one with layers of their own, one with layers that
are stacked by ``nn.scan``.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.ports import twins
from benchmarks.ports.twins import Bug, Twin

WORDS, WIDTH, HEADS, GROUPS, INNER, DEPTH, STEPS, BATCH = 40, 32, 4, 2, 48, 3, 9, 3
SIZE, THETA, EPS = WIDTH // HEADS, 10000.0, 1e-5
TOKENS = twins.integers(1, WORDS, BATCH, STEPS + 1)


def torch_side():
    import torch
    from torch import nn
    from torch.nn import functional as F

    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
            return self.weight * wide.to(x.dtype)

    def rotated(x):
        frequencies = THETA ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
        angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), frequencies)
        angles = torch.cat((angles, angles), -1)
        first, second = x.chunk(2, -1)
        return x * angles.cos().to(x.dtype) + torch.cat((-second, first), -1) * angles.sin().to(
            x.dtype
        )

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
            self.k_proj = nn.Linear(WIDTH, GROUPS * SIZE, bias=False)
            self.v_proj = nn.Linear(WIDTH, GROUPS * SIZE, bias=False)
            self.o_proj = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

        def forward(self, x):
            b, t, _ = x.shape
            q = rotated(self.q_proj(x).view(b, t, HEADS, SIZE).transpose(1, 2))
            k = rotated(self.k_proj(x).view(b, t, GROUPS, SIZE).transpose(1, 2))
            v = self.v_proj(x).view(b, t, GROUPS, SIZE).transpose(1, 2)
            k, v = (a.repeat_interleave(HEADS // GROUPS, 1) for a in (k, v))
            scores = q @ k.transpose(2, 3) / math.sqrt(SIZE)
            mask = torch.ones(t, t, dtype=torch.bool).tril()
            scores = scores.masked_fill(~mask, torch.finfo(x.dtype).min)
            weights = scores.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
            y = weights.to(x.dtype) @ v
            return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
            self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
            self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_layernorm = RMSNorm()
            self.self_attn = Attention()
            self.post_attention_layernorm = RMSNorm()
            self.mlp = MLP()

        def forward(self, x):
            x = x + self.self_attn(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(WORDS, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
            self.norm = RMSNorm()
            self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
            self.lm_head.weight = self.embed_tokens.weight

        def forward(self, tokens):
            x = self.embed_tokens(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.lm_head(self.norm(x))

    torch.manual_seed(0)
    module = twins.stirred(Llama())
    with torch.no_grad():
        module.embed_tokens.weight.mul_(0.1)
    args = (torch.from_numpy(TOKENS[:, :-1].copy()), torch.from_numpy(TOKENS[:, 1:].copy()))
    return module, lambda module, x, y: twins.torch_cross_entropy(module(x), y), args


class RMSNorm(nn.Module):
    """A norm by the root mean square."""

    bug: str = ""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        eps = 1e-6 if self.bug == "norm_eps" else EPS
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
        return scale * wide.astype(x.dtype)


def rotated(x, interleaved=False):
    """The rotation of positions; x is (batch, steps, heads, size)."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = THETA ** (-jnp.arange(0, SIZE, 2, dtype=wide) / SIZE)
    angles = jnp.arange(x.shape[1], dtype=wide)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return jnp.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    """Grouped heads that see what came before."""

    bug: str = ""

    @nn.compact
    def __call__(self, x):
        b, t, _ = x.shape
        dense = functools.partial(nn.DenseGeneral, use_bias=False)
        q = dense((HEADS, SIZE), name="query")(x)
        k = dense((GROUPS, SIZE), name="key")(x)
        v = dense((GROUPS, SIZE), name="value")(x)
        unturned = k
        q, k = (rotated(a, self.bug == "rope_interleaved") for a in (q, k))
        k = unturned if self.bug == "keys_not_rotated" else k
        if self.bug == "groups_tiled":
            k, v = (jnp.tile(a, (1, 1, HEADS // GROUPS, 1)) for a in (k, v))
        else:
            k, v = (jnp.repeat(a, HEADS // GROUPS, axis=2) for a in (k, v))
        scale = 1 / math.sqrt(WIDTH if self.bug == "scale" else SIZE)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
        mask = jnp.tril(jnp.ones((t, t), bool), 1 if self.bug == "mask_off_by_one" else 0)
        scores = jnp.where(mask, scores, jnp.finfo(x.dtype).min)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        weights = jax.nn.softmax(scores.astype(wide)).astype(x.dtype)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return dense(WIDTH, axis=(-2, -1), name="out")(y)


class FeedForward(nn.Module):
    """SwiGLU."""

    bug: str = ""

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False)
        gate, up = dense(INNER, name="gate")(x), dense(INNER, name="up")(x)
        h = gate * nn.silu(up) if self.bug == "gate_and_up" else nn.silu(gate) * up
        return dense(WIDTH, name="down")(h)


class Layer(nn.Module):
    """One layer, in the form that ``nn.scan`` takes."""

    bug: str = ""

    @nn.compact
    def __call__(self, x, _=None):
        before = x
        x = x + Attention(self.bug, name="attn")(RMSNorm(self.bug, name="norm_1")(x))
        h = before if self.bug == "parallel" else x
        x = x + FeedForward(self.bug, name="ffn")(RMSNorm(self.bug, name="norm_2")(h))
        return x, None


class Decoder(nn.Module):
    """The whole model."""

    stacked: bool
    bug: str = ""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(WORDS, WIDTH, name="embed")
        x = embed(tokens)
        if self.stacked:
            scan = nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=DEPTH)
            x, _ = scan(self.bug, name="layers")(x, None)
        else:
            for i in range(DEPTH):
                x, _ = Layer(self.bug, name=f"layers_{i}")(x)
        x = RMSNorm(self.bug, name="norm")(x)
        if self.bug == "not_tied":
            return nn.Dense(WORDS, use_bias=False, name="lm_head")(x)
        return embed.attend(x)


def carry(stacked, state, bug="", grads=False):
    def layer(i):
        old = f"layers.{1 if bug == 'layer_twice' and i == 2 else i}."

        def kernel(name, *shape):
            w = state[f"{old}{name}_proj.weight"]
            if bug == "permuted_for_pairs" and name in ("self_attn.q", "self_attn.k"):
                w = w.reshape(-1, 2, SIZE // 2, WIDTH).swapaxes(1, 2).reshape(-1, WIDTH)
            return {"kernel": w.T.reshape(*shape)}

        return {
            "norm_1": {"scale": state[old + "input_layernorm.weight"]},
            "attn": {
                "query": kernel("self_attn.q", WIDTH, HEADS, SIZE),
                "key": kernel("self_attn.k", WIDTH, GROUPS, SIZE),
                "value": kernel("self_attn.v", WIDTH, GROUPS, SIZE),
                "out": kernel("self_attn.o", HEADS, SIZE, WIDTH),
            },
            "norm_2": {"scale": state[old + "post_attention_layernorm.weight"]},
            "ffn": {
                "gate": kernel("mlp.gate", WIDTH, INNER),
                "up": kernel("mlp.up", WIDTH, INNER),
                "down": kernel("mlp.down", INNER, WIDTH),
            },
        }

    layers = [layer(i) for i in ((0, 2, 1) if bug == "layers_order" else range(DEPTH))]
    if stacked:
        params = {"layers": jax.tree.map(lambda *parts: jnp.stack(parts), *layers)}
    else:
        params = {f"layers_{i}": part for i, part in enumerate(layers)}
    params["embed"] = {"embedding": state["embed_tokens.weight"]}
    params["norm"] = {"scale": state["norm.weight"]}
    if bug == "not_tied":
        params["lm_head"] = {"kernel": state["embed_tokens.weight"].T}
    return params


def loss(stacked, bug=""):
    model = Decoder(stacked, bug)

    def loss(params, tokens, labels):
        logits = model.apply({"params": params}, tokens)
        if bug == "shifted_twice":
            logits, labels = logits[:, :-1], labels[:, 1:]
        return twins.cross_entropy(logits, labels)

    return loss


LISTED = {
    "rope_interleaved": Bug(("layers_0/attn",), "pairs of neighbours are rotated, not halves"),
    "mask_off_by_one": Bug(("layers_0/attn",), "the mask shows the next token"),
    "groups_tiled": Bug(("layers_0/attn",), "keys and values tiled, not repeated"),
    "norm_eps": Bug(("layers_0/norm_1",), "RMSNorm with 1e-6 beside 1e-5"),
    "not_tied": Bug(
        ("embed", "embed.attend", "lm_head"),
        "the head has a copy of the embedding",
        ("embed/embedding", "lm_head/kernel"),
    ),
    "permuted_for_pairs": Bug(
        ("layers_0/attn", "layers_0/attn/query", "layers_0/attn/key"),
        "kernels permuted as for pairs of neighbours, and halves are rotated",
        ("layers_*/attn/query/kernel", "layers_*/attn/key/kernel"),
    ),
    "parallel": Bug(
        ("layers_0", "layers_0/norm_2"), "the second part reads what the first part reads"
    ),
    "shifted_twice": Bug(("",), "labels that are shifted already are shifted again"),
}
STACKED = {
    "scale": Bug(("layers/attn",), "scores divided by the root of the width, not of the head"),
    "gate_and_up": Bug(("layers/ffn",), "SiLU of up, not of gate"),
    "layer_twice": Bug(
        ("layers", "layers/norm_1"), "layer 2 has the weights of layer 1", ("layers/*",)
    ),
    "keys_not_rotated": Bug(("layers/attn",), "only the queries are rotated"),
    "layers_order": Bug(
        ("layers", "layers/norm_1"), "layers 1 and 2 stacked the other way", ("layers/*",)
    ),
}

TWINS = [
    Twin(
        name,
        torch_side,
        functools.partial(loss, stacked),
        functools.partial(carry, stacked),
        lambda arrays, state, bug: arrays,
        bugs,
    )
    for name, stacked, bugs in (("llama", False, LISTED), ("llama_scan", True, STACKED))
]
