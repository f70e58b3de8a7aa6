"""A decoder as Gemma 2 and 3: norms of 1 + w, soft caps, a sliding window; beside flax Linen."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.ports import twins
from benchmarks.ports.twins import Bug, Twin

WORDS, WIDTH, HEADS, GROUPS, SIZE, INNER, STEPS, BATCH = 40, 32, 4, 2, 10, 44, 9, 2
WINDOW, CAP, LAST_CAP = (3, None), 1.5, 4.0
THETA = (1e4, 1e6)
TOKENS = twins.integers(21, WORDS, BATCH, STEPS + 1)


def torch_side():
    import torch
    from torch import nn
    from torch.nn import functional as F

    class GemmaRMSNorm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(width))

        def forward(self, x):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return (wide * (1.0 + self.weight)).to(x.dtype)

    class RotaryEmbedding(nn.Module):
        def __init__(self, theta):
            super().__init__()
            frequencies = theta ** (-torch.arange(0, SIZE, 2).float() / SIZE)
            self.register_buffer("frequencies", frequencies, persistent=False)

        def forward(self, x):
            places = torch.arange(x.shape[1]).float()
            angles = torch.outer(places, self.frequencies.float())
            angles = torch.cat((angles, angles), -1)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def rotate_half(x):
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    class GemmaAttention(nn.Module):
        def __init__(self, window):
            super().__init__()
            self.window = window
            self.q_proj = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
            self.k_proj = nn.Linear(WIDTH, GROUPS * SIZE, bias=False)
            self.v_proj = nn.Linear(WIDTH, GROUPS * SIZE, bias=False)
            self.o_proj = nn.Linear(HEADS * SIZE, WIDTH, bias=False)
            self.q_norm, self.k_norm = GemmaRMSNorm(SIZE), GemmaRMSNorm(SIZE)

        def forward(self, x, cos, sin):
            b, t, _ = x.shape
            q = self.q_norm(self.q_proj(x).view(b, t, -1, SIZE)).transpose(1, 2)
            k = self.k_norm(self.k_proj(x).view(b, t, -1, SIZE)).transpose(1, 2)
            v = self.v_proj(x).view(b, t, -1, SIZE).transpose(1, 2)
            q, k = (a * cos + rotate_half(a) * sin for a in (q, k))
            k, v = (a.repeat_interleave(HEADS // GROUPS, 1) for a in (k, v))
            scores = CAP * torch.tanh(q @ k.transpose(2, 3) * SIZE**-0.5 / CAP)
            mask = torch.ones(t, t, dtype=torch.bool).tril()
            if self.window:
                mask = mask & torch.ones(t, t, dtype=torch.bool).triu(1 - self.window)
            scores = scores.masked_fill(~mask, torch.finfo(x.dtype).min)
            weights = scores.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
            return self.o_proj((weights.to(x.dtype) @ v).transpose(1, 2).reshape(b, t, -1))

    class GemmaMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
            self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
            self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

        def forward(self, x):
            gate = F.gelu(self.gate_proj(x), approximate="tanh")
            return self.down_proj(gate * self.up_proj(x))

    class GemmaDecoderLayer(nn.Module):
        def __init__(self, window):
            super().__init__()
            self.self_attn, self.mlp = GemmaAttention(window), GemmaMLP()
            self.input_layernorm = GemmaRMSNorm(WIDTH)
            self.post_attention_layernorm = GemmaRMSNorm(WIDTH)
            self.pre_feedforward_layernorm = GemmaRMSNorm(WIDTH)
            self.post_feedforward_layernorm = GemmaRMSNorm(WIDTH)

        def forward(self, x, cos, sin):
            h = self.self_attn(self.input_layernorm(x), cos, sin)
            x = x + self.post_attention_layernorm(h)
            h = self.mlp(self.pre_feedforward_layernorm(x))
            return x + self.post_feedforward_layernorm(h)

    class Gemma(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(WORDS, WIDTH)
            self.layers = nn.ModuleList(GemmaDecoderLayer(window) for window in WINDOW)
            self.rotary = nn.ModuleList(RotaryEmbedding(theta) for theta in THETA)
            self.norm = GemmaRMSNorm(WIDTH)

        def forward(self, tokens):
            x = self.embed_tokens(tokens) * math.sqrt(WIDTH)
            for layer, rotary in zip(self.layers, self.rotary, strict=True):
                x = layer(x, *rotary(x))
            logits = F.linear(self.norm(x), self.embed_tokens.weight)
            return LAST_CAP * torch.tanh(logits / LAST_CAP)

    torch.manual_seed(7)
    module = twins.stirred(Gemma())
    with torch.no_grad():
        module.embed_tokens.weight.mul_(0.2)
    args = torch.from_numpy(TOKENS[:, :-1].copy()), torch.from_numpy(TOKENS[:, 1:].copy())
    return module, lambda m, x, y: twins.torch_cross_entropy(m(x), y), args


class RMSNorm(nn.Module):
    """A norm whose scale is kept as its distance from 1."""

    bug: str

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.zeros, (x.shape[-1],))
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
        return (wide * (scale if self.bug == "norm_without_one" else 1 + scale)).astype(x.dtype)


class Attention(nn.Module):
    """Grouped heads, with a window or without."""

    window: int | None
    theta: float
    bug: str

    @nn.compact
    def __call__(self, x):
        t = x.shape[1]
        dense = functools.partial(nn.DenseGeneral, use_bias=False)
        q = RMSNorm(self.bug, name="q_norm")(dense((HEADS, SIZE), name="q")(x))
        k = RMSNorm(self.bug, name="k_norm")(dense((GROUPS, SIZE), name="k")(x))
        v = dense((GROUPS, SIZE), name="v")(x)
        q, k = (self.rotated(a) for a in (q, k))
        q = q.reshape(len(x), t, GROUPS, HEADS // GROUPS, SIZE) * SIZE**-0.5
        scores = jnp.einsum("btgrd,bsgd->bgrts", q, k)
        if self.bug != "cap_missing":
            scores = CAP * jnp.tanh(scores / CAP)
        back = jnp.arange(t)[:, None] - jnp.arange(t)
        mask = back >= 0
        if self.window:
            mask &= back <= self.window if self.bug == "window_off_by_one" else back < self.window
        scores = jnp.where(mask, scores, jnp.finfo(x.dtype).min)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        weights = jax.nn.softmax(scores.astype(wide)).astype(x.dtype)
        y = jnp.einsum("bgrts,bsgd->btgrd", weights, v).reshape(len(x), t, HEADS, SIZE)
        return dense(WIDTH, axis=(-2, -1), name="o")(y)

    def rotated(self, x):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        theta = THETA[0] if self.bug == "one_theta" else self.theta
        angles = jnp.arange(x.shape[1], dtype=wide)[:, None, None]
        angles = angles * theta ** (-jnp.arange(0, SIZE, 2, dtype=wide) / SIZE)
        cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


class FeedForward(nn.Module):
    """A gated layer."""

    @nn.compact
    def __call__(self, x):
        gate, up = (nn.Dense(INNER, use_bias=False, name=name)(x) for name in ("gate", "up"))
        return nn.Dense(WIDTH, use_bias=False, name="down")(nn.gelu(gate) * up)


class Decoder(nn.Module):
    """The whole model."""

    bug: str = ""

    @nn.compact
    def __call__(self, tokens):
        norm = functools.partial(RMSNorm, self.bug)
        embed = nn.Embed(WORDS, WIDTH, name="embed")
        x = embed(tokens)
        if self.bug != "embedding_not_scaled":
            x = x * math.sqrt(WIDTH)
        for i, (window, theta) in enumerate(zip(WINDOW, THETA, strict=True)):
            h = norm(name=f"pre_attn_{i}")(x)
            h = Attention(window, theta, self.bug, name=f"attn_{i}")(h)
            x = x + norm(name=f"post_attn_{i}")(h)
            h = FeedForward(name=f"mlp_{i}")(norm(name=f"pre_mlp_{i}")(x))
            x = x + norm(name=f"post_mlp_{i}")(h)
        logits = embed.attend(norm(name="norm")(x))
        return LAST_CAP * jnp.tanh(logits / LAST_CAP)


def carry(state, bug="", grads=False):
    names = {"pre_attn": "input", "post_attn": "post_attention"}
    names |= {"pre_mlp": "pre_feedforward", "post_mlp": "post_feedforward"}
    params = {"embed": {"embedding": state["embed_tokens.weight"]}}
    params["norm"] = {"scale": state["norm.weight"]}
    for i in range(len(WINDOW)):
        old = f"layers.{i}."
        for new, name in names.items():
            params[f"{new}_{i}"] = {"scale": state[f"{old}{name}_layernorm.weight"]}
        attn = {f"{x}_norm": {"scale": state[f"{old}self_attn.{x}_norm.weight"]} for x in "qk"}
        for x in "qkv":
            w = state[f"{old}self_attn.{x}_proj.weight"].T
            attn[x] = {"kernel": w.reshape(WIDTH, -1, SIZE)}
        w = state[old + "self_attn.o_proj.weight"].T
        params[f"attn_{i}"] = attn | {"o": {"kernel": w.reshape(HEADS, SIZE, WIDTH)}}
        mlp = {x: twins.dense(state, f"{old}mlp.{x}_proj") for x in ("gate", "up", "down")}
        params[f"mlp_{i}"] = mlp
    return params


def loss(bug=""):
    model = Decoder(bug)

    def loss(params, tokens, labels):
        return twins.cross_entropy(model.apply({"params": params}, tokens), labels)

    return loss


BUGS = {
    "norm_without_one": Bug(("pre_attn_0",), "norms with w, not with 1 + w"),
    "embedding_not_scaled": Bug(("", "embed"), "the embedding without the root of the width"),
    "cap_missing": Bug(("attn_0",), "scores without their soft cap"),
    "window_off_by_one": Bug(("attn_0",), "the window is one step longer"),
    "one_theta": Bug(("attn_1",), "the layer without a window has theta of the others"),
}
TWIN = Twin("gemma", torch_side, loss, carry, lambda arrays, state, bug: arrays, BUGS)
