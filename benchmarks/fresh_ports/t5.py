"""An encoder and decoder as T5: relative positions, no scale of scores; beside flax Linen."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ports import twins
from benchmarks.ports.twins import Bug, Twin

WORDS, WIDTH, HEADS, INNER, DEPTH, BUCKETS, FAR, BATCH = 30, 24, 3, 40, 1, 8, 20, 3
SIZE = WIDTH // HEADS
SOURCE = twins.integers(19, WORDS - 1, BATCH, 9) + 1
SOURCE[1:, 6:], SOURCE[2, 4:] = 0, 0
LABELS = twins.integers(20, WORDS - 1, BATCH, 6) + 1
LABELS[0, 4:], LABELS[2, 3:] = -100, -100


def torch_side():
    import torch
    from torch import nn

    class T5LayerNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * wide.to(x.dtype)

    class T5Attention(nn.Module):
        def __init__(self, relative, decoder):
            super().__init__()
            self.relative, self.decoder = relative, decoder
            self.q = nn.Linear(WIDTH, WIDTH, bias=False)
            self.k = nn.Linear(WIDTH, WIDTH, bias=False)
            self.v = nn.Linear(WIDTH, WIDTH, bias=False)
            self.o = nn.Linear(WIDTH, WIDTH, bias=False)
            if relative:
                self.relative_attention_bias = nn.Embedding(BUCKETS, HEADS)

        def bias(self, rows, columns):
            places = torch.arange(columns)[None] - torch.arange(rows)[:, None]
            buckets, out = BUCKETS, torch.zeros_like(places)
            if self.decoder:
                places = -torch.min(places, torch.zeros_like(places))
            else:
                buckets //= 2
                out, places = (places > 0).long() * buckets, places.abs()
            exact = buckets // 2
            far = torch.log(places.float().clamp(min=1) / exact) / math.log(FAR / exact)
            far = (exact + (far * (buckets - exact)).long()).clamp(max=buckets - 1)
            out = out + torch.where(places < exact, places, far)
            return self.relative_attention_bias(out).permute(2, 0, 1)[None]

        def forward(self, x, mask, context=None, bias=None):
            context = x if context is None else context
            q = self.q(x).view(len(x), -1, HEADS, SIZE).transpose(1, 2)
            k = self.k(context).view(len(x), -1, HEADS, SIZE).transpose(1, 2)
            v = self.v(context).view(len(x), -1, HEADS, SIZE).transpose(1, 2)
            scores = q @ k.transpose(2, 3)
            if self.relative:
                bias = self.bias(x.shape[1], context.shape[1])
            if bias is not None:
                scores = scores + bias
            scores = scores + (~mask).to(x.dtype) * torch.finfo(x.dtype).min
            wide = torch.promote_types(x.dtype, torch.float32)
            y = scores.to(wide).softmax(-1).to(x.dtype) @ v
            return self.o(y.transpose(1, 2).reshape(x.shape)), bias

    class DenseReluDense(nn.Module):
        def __init__(self):
            super().__init__()
            self.wi = nn.Linear(WIDTH, INNER, bias=False)
            self.wo = nn.Linear(INNER, WIDTH, bias=False)
            self.act = nn.ReLU()

        def forward(self, x):
            return self.wo(self.act(self.wi(x)))

    class T5Block(nn.Module):
        def __init__(self, decoder, first):
            super().__init__()
            self.norm1, self.self_attn = T5LayerNorm(), T5Attention(first, decoder)
            if decoder:
                self.norm2, self.cross_attn = T5LayerNorm(), T5Attention(False, decoder)
            self.norm3, self.ff = T5LayerNorm(), DenseReluDense()
            self.decoder = decoder

        def forward(self, x, mask, bias, context=None, context_mask=None):
            y, bias = self.self_attn(self.norm1(x), mask, bias=bias)
            x = x + y
            if self.decoder:
                x = x + self.cross_attn(self.norm2(x), context_mask, context)[0]
            return x + self.ff(self.norm3(x)), bias

    class T5Stack(nn.Module):
        def __init__(self, decoder):
            super().__init__()
            self.block = nn.ModuleList(T5Block(decoder, not i) for i in range(DEPTH))
            self.final_layer_norm = T5LayerNorm()

        def forward(self, x, mask, context=None, context_mask=None):
            bias = None
            for block in self.block:
                x, bias = block(x, mask, bias, context, context_mask)
            return self.final_layer_norm(x)

    class T5(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Embedding(WORDS, WIDTH)
            self.encoder, self.decoder = T5Stack(False), T5Stack(True)
            self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
            self.lm_head.weight = self.shared.weight

        def forward(self, source, labels):
            mask = (source != 0)[:, None, None]
            context = self.encoder(self.shared(source), mask)
            start = torch.zeros_like(labels[:, :1])
            target = torch.cat((start, labels[:, :-1]), 1).clamp(min=0)
            causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
            x = self.decoder(self.shared(target), causal, context, mask)
            return self.lm_head(x * WIDTH**-0.5)

    def loss(module, source, labels):
        return twins.torch_cross_entropy(module(source, labels), labels)

    torch.manual_seed(6)
    return twins.stirred(T5()), loss, (torch.from_numpy(SOURCE), torch.from_numpy(LABELS))


class RMSNorm(nn.Module):
    """A norm by the root mean square."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
        return scale * wide.astype(x.dtype)


def bucket(places, bidirectional):
    """The bucket of each relative position."""
    buckets, out = BUCKETS, 0
    if bidirectional:
        buckets //= 2
        out, places = (places > 0) * buckets, abs(places)
    else:
        places = -np.minimum(places, 0)
    exact = buckets // 2
    far = np.log(np.maximum(places, 1) / exact) / math.log(FAR / exact)
    far = np.minimum(exact + (far * (buckets - exact)).astype(int), buckets - 1)
    return out + np.where(places < exact, places, far)


class Attention(nn.Module):
    """Heads whose scores are not scaled."""

    relative: bool
    bidirectional: bool
    bug: str = ""

    @nn.compact
    def __call__(self, x, context, mask, bias=None):
        dense = functools.partial(nn.DenseGeneral, use_bias=False)
        q = dense((HEADS, SIZE), name="query")(x)
        k = dense((HEADS, SIZE), name="key")(context)
        v = dense((HEADS, SIZE), name="value")(context)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        if self.relative:
            places = np.arange(context.shape[1])[None] - np.arange(x.shape[1])[:, None]
            places = -places if self.bug == "places_reversed" else places
            table = nn.Embed(BUCKETS, HEADS, name="relative")
            bias = table(bucket(places, self.bidirectional)).transpose(2, 0, 1)[None]
        scores = scores if bias is None else scores + bias
        if mask is not None:
            scores = jnp.where(mask, scores, jnp.finfo(x.dtype).min)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        weights = jax.nn.softmax(scores.astype(wide)).astype(x.dtype)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return dense(WIDTH, axis=(-2, -1), name="out")(y), bias


class Layer(nn.Module):
    """Attention, in the decoder attention to the encoder, and two dense layers."""

    decoder: bool
    first: bool
    bug: str

    @nn.compact
    def __call__(self, x, mask, bias, context, context_mask):
        both = not self.decoder or self.bug == "buckets_of_encoder"
        h = RMSNorm(name="ln_self")(x)
        y, bias = Attention(self.first, both, self.bug, name="self")(h, h, mask, bias)
        x = x + y
        if self.decoder:
            seen = None if self.bug == "cross_without_mask" else context_mask
            h = RMSNorm(name="ln_cross")(x)
            h = x if self.bug == "cross_before_norm" else h
            x = x + Attention(False, False, name="cross")(h, context, seen)[0]
        h = nn.Dense(INNER, use_bias=False, name="wi")(RMSNorm(name="ln_mlp")(x))
        return x + nn.Dense(WIDTH, use_bias=False, name="wo")(nn.relu(h)), bias


class Stack(nn.Module):
    """The encoder or the decoder."""

    decoder: bool
    bug: str

    @nn.compact
    def __call__(self, x, mask, context=None, context_mask=None):
        bias = None
        for i in range(DEPTH):
            layer = Layer(self.decoder, not i, self.bug, name=f"layer_{i}")
            x, bias = layer(x, mask, bias, context, context_mask)
        normed = RMSNorm(name="ln")(x)
        return x if self.bug == "encoder_norm_missing" and not self.decoder else normed


class T5(nn.Module):
    """The whole model."""

    bug: str = ""

    @nn.compact
    def __call__(self, source, labels):
        embed = nn.Embed(WORDS, WIDTH, name="embed")
        mask = (source != 0)[:, None, None]
        context = Stack(False, self.bug, name="encoder")(embed(source), mask)
        target = jnp.pad(jnp.maximum(labels, 0)[:, :-1], ((0, 0), (1, 0)))
        if self.bug == "target_not_shifted":
            target = jnp.maximum(labels, 0)
        steps = target.shape[1]
        causal = jnp.tril(jnp.ones((steps, steps), bool))
        x = Stack(True, self.bug, name="decoder")(embed(target), causal, context, mask)
        return embed.attend(x if self.bug == "head_not_scaled" else x * WIDTH**-0.5)


def carry(state, bug="", grads=False):
    def attention(old):
        out = {}
        for new, name in (("query", "q"), ("key", "k"), ("value", "v")):
            out[new] = {"kernel": state[f"{old}.{name}.weight"].T.reshape(WIDTH, HEADS, SIZE)}
        out["out"] = {"kernel": state[old + ".o.weight"].T.reshape(HEADS, SIZE, WIDTH)}
        if old + ".relative_attention_bias.weight" in state:
            out["relative"] = {"embedding": state[old + ".relative_attention_bias.weight"]}
        return out

    def stack(name):
        out = {"ln": {"scale": state[name + ".final_layer_norm.weight"]}}
        for i in range(DEPTH):
            old = f"{name}.block.{i}."
            layer = {"ln_self": {"scale": state[old + "norm1.weight"]}}
            layer["self"] = attention(old + "self_attn")
            if name == "decoder":
                layer["ln_cross"] = {"scale": state[old + "norm2.weight"]}
                layer["cross"] = attention(old + "cross_attn")
                if bug == "cross_of_self":
                    layer["cross"] = attention(old + "self_attn")
                    del layer["cross"]["relative"]
            layer["ln_mlp"] = {"scale": state[old + "norm3.weight"]}
            layer |= {part: twins.dense(state, f"{old}ff.{part}") for part in ("wi", "wo")}
            out[f"layer_{i}"] = layer
        return out

    embed = {"embedding": state["shared.weight"]}
    return {"embed": embed, "encoder": stack("encoder"), "decoder": stack("decoder")}


def loss(bug=""):
    model = T5(bug)

    def loss(params, source, labels):
        logits = model.apply({"params": params}, source, labels)
        logp = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        kept = labels >= 0
        logp = jnp.take_along_axis(logp, jnp.maximum(labels, 0)[..., None], -1)[..., 0] * kept
        return -logp.sum() / (labels.size if bug == "mean_over_ignored" else kept.sum())

    return loss


FIRST = "decoder/layer_0/"
BUGS = {
    "buckets_of_encoder": Bug(
        (FIRST + "self", FIRST + "self/relative"), "the decoder's buckets go both ways"
    ),
    "cross_without_mask": Bug((FIRST + "cross",), "the decoder sees the padding of the source"),
    "encoder_norm_missing": Bug(
        ("encoder", "encoder/ln"), "the encoder's last norm is not used", ("encoder/ln/scale",)
    ),
    "head_not_scaled": Bug(
        ("", "embed", "embed.attend"), "the tied head without the root of the width"
    ),
    "mean_over_ignored": Bug(("",), "the mean of the loss over what is ignored, too"),
    "places_reversed": Bug(
        ("encoder/layer_0/self", "encoder/layer_0/self/relative"),
        "relative positions with the other sign",
    ),
    "target_not_shifted": Bug(
        ("", "embed", "decoder"), "the decoder reads the labels, not the words before them"
    ),
    "cross_before_norm": Bug(
        ("decoder/layer_0", FIRST + "cross", FIRST + "cross/query", FIRST + "ln_cross"),
        "queries of the encoder's states from before the norm",
        (FIRST + "ln_cross/scale",),
    ),
    "cross_of_self": Bug(
        tuple(FIRST + "cross" + end for end in ("", "/query", "/key", "/value", "/out")),
        "attention to the encoder with the weights of attention to itself",
        (FIRST + "cross/*",),
    ),
}
TWIN = Twin("t5", torch_side, loss, carry, lambda arrays, state, bug: arrays, BUGS)
