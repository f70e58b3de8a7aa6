"""A decoder that reads token by token with a cache of keys and values, beside Equinox.

The cache grows in torch; in JAX it has its final size, and ``jax.lax.scan`` goes over the tokens.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.ports import twins
from benchmarks.ports.twins import Bug, Twin

WORDS, WIDTH, HEADS, INNER, DEPTH, STEPS, ROOM, BATCH = 30, 24, 3, 40, 2, 6, 8, 4
SIZE = WIDTH // HEADS
TOKENS = twins.integers(1, WORDS, BATCH, STEPS + 1)


def torch_side():
    import torch
    from torch import nn

    class CachedAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(WIDTH, WIDTH)
            self.k = nn.Linear(WIDTH, WIDTH)
            self.v = nn.Linear(WIDTH, WIDTH)
            self.o = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, cache):
            q, k, v = (f(x).view(len(x), 1, HEADS, SIZE) for f in (self.q, self.k, self.v))
            if cache is not None:
                k, v = torch.cat((cache[0], k), 1), torch.cat((cache[1], v), 1)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(SIZE)
            y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
            return self.o(y.reshape(len(x), WIDTH)), (k, v)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1 = nn.LayerNorm(WIDTH)
            self.attn = CachedAttention()
            self.norm2 = nn.LayerNorm(WIDTH)
            self.fc1 = nn.Linear(WIDTH, INNER)
            self.fc2 = nn.Linear(INNER, WIDTH)

        def forward(self, x, cache):
            y, cache = self.attn(self.norm1(x), cache)
            x = x + y
            return x + self.fc2(torch.relu(self.fc1(self.norm2(x)))), cache

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok = nn.Embedding(WORDS, WIDTH)
            self.pos = nn.Embedding(ROOM, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, WORDS, bias=False)

        def forward(self, tokens):
            caches, logits = [None] * DEPTH, []
            for t in range(tokens.shape[1]):
                x = self.tok(tokens[:, t]) + self.pos(torch.tensor(t))
                for i, block in enumerate(self.blocks):
                    x, caches[i] = block(x, caches[i])
                logits.append(self.head(self.norm(x)))
            return torch.stack(logits, 1)

    torch.manual_seed(0)
    module = twins.stirred(Decoder())
    args = (torch.from_numpy(TOKENS[:, :-1].copy()), torch.from_numpy(TOKENS[:, 1:].copy()))
    return module, lambda module, x, y: twins.torch_cross_entropy(module(x), y), args


class Attention(eqx.Module):
    """One query beside the keys and values of the cache."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    bug: str = eqx.field(static=True)

    def __init__(self, bug):
        key = jax.random.key(0)
        self.query, self.key, self.value, self.output = (
            eqx.nn.Linear(WIDTH, WIDTH, key=key) for _ in range(4)
        )
        self.bug = bug

    def __call__(self, x, cache, t):
        heads = HEADS, SIZE
        with jax.named_scope("query"):
            q = self.query(x).reshape(heads)
        with jax.named_scope("key"):
            k = self.key(x).reshape(heads)
        with jax.named_scope("value"):
            v = (self.key if self.bug == "key_as_value" else self.value)(x).reshape(heads)
        # The last slot is taken twice, and the first stays empty.
        slot = jnp.minimum(t + 1, STEPS - 1) if self.bug == "slot_off_by_one" else t
        keys, values = (
            jax.lax.dynamic_update_index_in_dim(old, new, slot, 0)
            for old, new in zip(cache, (k, v), strict=True)
        )
        scores = jnp.einsum("hd,khd->hk", q, keys) / math.sqrt(SIZE)
        if self.bug != "empty_slots_seen":
            scores = jnp.where(jnp.arange(ROOM) <= t, scores, -jnp.inf)
        y = jnp.einsum("hk,khd->hd", jax.nn.softmax(scores), values)
        with jax.named_scope("output"):
            return self.output(y.reshape(WIDTH)), (keys, values)


class Block(eqx.Module):
    """Attention, then an MLP."""

    norm1: eqx.nn.LayerNorm
    attention: Attention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, bug):
        key = jax.random.key(0)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = Attention(bug)
        self.up = eqx.nn.Linear(WIDTH, INNER, key=key)
        self.down = eqx.nn.Linear(INNER, WIDTH, key=key)

    def __call__(self, x, cache, t):
        with jax.named_scope("norm1"):
            h = self.norm1(x)
        with jax.named_scope("attention"):
            y, cache = self.attention(h, cache, t)
        x = x + y
        with jax.named_scope("norm2"):
            h = self.norm2(x)
        with jax.named_scope("up"):
            h = jax.nn.relu(self.up(h))
        with jax.named_scope("down"):
            return x + self.down(h), cache


class Decoder(eqx.Module):
    """The whole model, for one sequence."""

    token: eqx.nn.Embedding
    position: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    bug: str = eqx.field(static=True)

    def __init__(self, bug=""):
        key = jax.random.key(0)
        self.token = eqx.nn.Embedding(WORDS, WIDTH, key=key)
        self.position = eqx.nn.Embedding(ROOM, WIDTH, key=key)
        self.blocks = [Block(bug) for _ in range(DEPTH)]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, WORDS, use_bias=False, key=key)
        self.bug = bug

    def __call__(self, tokens):
        def step(caches, now):
            t, token = now
            with jax.named_scope("embed"):
                place = jnp.zeros_like(t) if self.bug == "position_stuck" else t
                x = self.token(token) + self.position(place)
            new = []
            for i, (block, cache) in enumerate(zip(self.blocks, caches, strict=True)):
                with jax.named_scope(f"block{i}"):
                    x, cache = block(x, cache, t)
                if self.bug == "cache_shared" and i == 1:
                    cache = new[0]
                new.append(cache)
            with jax.named_scope("norm"):
                x = self.norm(x)
            with jax.named_scope("head"):
                return new, self.head(x)

        empty = jnp.zeros((ROOM, HEADS, SIZE), self.token.weight.dtype)
        caches = [(empty, empty) for _ in range(DEPTH)]
        return jax.lax.scan(step, caches, (jnp.arange(len(tokens)), tokens))[1]


def carry(state, bug="", grads=False):
    def pair(name):
        return [jnp.asarray(state[f"{name}.{part}"]) for part in ("weight", "bias")]

    def leaves(model):
        out = [model.token.weight, model.position.weight]
        for block in model.blocks:
            a = block.attention
            layers = (block.norm1, a.query, a.key, a.value, a.output)
            for layer in (*layers, block.norm2, block.up, block.down):
                out += [layer.weight, layer.bias]
        return [*out, model.norm.weight, model.norm.bias, model.head.weight]

    new = [jnp.asarray(state["tok.weight"]), jnp.asarray(state["pos.weight"])]
    for i in range(DEPTH):
        for name in ("norm1", "attn.q", "attn.k", "attn.v", "attn.o", "norm2", "fc1", "fc2"):
            new += pair(f"blocks.{i}.{name}")
    new += [*pair("norm"), jnp.asarray(state["head.weight"])]
    return eqx.tree_at(leaves, Decoder(bug), new)


def loss(bug=""):
    def loss(model, tokens, labels):
        return twins.cross_entropy(jax.vmap(model)(tokens), labels)

    return loss


ATTENTION = "block0/attention"
BUGS = {
    "slot_off_by_one": Bug((ATTENTION,), "a key is written one slot too far"),
    "empty_slots_seen": Bug((ATTENTION,), "slots that are still empty take part in the softmax"),
    "position_stuck": Bug(("embed",), "every token has position 0"),
    "key_as_value": Bug((ATTENTION + "/value", ATTENTION), "values from the layer of the keys"),
    "cache_shared": Bug(
        ("block1/attention",), "the second layer reads the cache of the first from step 1 on"
    ),
}

TWINS = [Twin("cache", torch_side, loss, carry, lambda arrays, state, bug: arrays, BUGS)]
