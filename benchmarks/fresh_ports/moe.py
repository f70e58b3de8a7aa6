"""A decoder with a mixture of experts, beside flax Linen with stacked layers and experts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ports import twins
from benchmarks.ports.twins import Bug, Twin

WORDS, WIDTH, HEADS, INNER, EXPERTS, CHOSEN, DEPTH, STEPS, BATCH = 25, 24, 3, 28, 4, 2, 2, 6, 2
AUX = 0.1
TOKENS = twins.integers(22, WORDS, BATCH, STEPS + 1)


def torch_side():
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1 = nn.Linear(WIDTH, INNER, bias=False)
            self.w2 = nn.Linear(INNER, WIDTH, bias=False)
            self.w3 = nn.Linear(WIDTH, INNER, bias=False)

        def forward(self, x):
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    class SparseMoeBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
            self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

        def forward(self, x):
            shape, x = x.shape, x.reshape(-1, WIDTH)
            logits = self.gate(x)
            probs = logits.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
            weights, chosen = probs.topk(CHOSEN, -1)
            weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                rows, places = torch.where(chosen == i)
                y = expert(x[rows]) * weights[rows, places, None]
                out = out.index_add(0, rows, y)
            share = F.one_hot(chosen, EXPERTS).sum(1).to(probs.dtype).mean(0)
            return out.reshape(shape), EXPERTS * (share * probs.mean(0)).sum()

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1 = nn.LayerNorm(WIDTH)
            self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.norm2 = nn.LayerNorm(WIDTH)
            self.moe = SparseMoeBlock()

        def forward(self, x):
            h = self.norm1(x)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
            y, aux = self.moe(self.norm2(x))
            return x + y, aux

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(WORDS, WIDTH)
            self.wpe = nn.Embedding(STEPS, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, tokens):
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
            total = 0
            for layer in self.layers:
                x, aux = layer(x)
                total = total + aux
            return self.head(self.norm(x)), total

    def loss(module, tokens, labels):
        logits, aux = module(tokens)
        return twins.torch_cross_entropy(logits, labels) + AUX * aux

    torch.manual_seed(8)
    module = twins.stirred(Decoder())
    with torch.no_grad():
        for layer in module.layers:
            layer.moe.gate.weight.mul_(3)
    args = torch.from_numpy(TOKENS[:, :-1].copy()), torch.from_numpy(TOKENS[:, 1:].copy())
    return module, loss, args


class Experts(nn.Module):
    """Each token is computed by each expert, and those that were chosen are summed."""

    bug: str

    @nn.compact
    def __call__(self, x, routed):
        init = nn.initializers.lecun_normal()
        w1, w3 = (self.param(name, init, (EXPERTS, WIDTH, INNER)) for name in ("w1", "w3"))
        w2 = self.param("w2", init, (EXPERTS, INNER, WIDTH))
        logits = nn.Dense(EXPERTS, use_bias=False, name="router")(routed)
        probs = jax.nn.softmax(logits.astype(jnp.promote_types(x.dtype, jnp.float32)))
        weights, chosen = jax.lax.top_k(probs, CHOSEN)
        if self.bug != "not_renormalized":
            weights = weights / weights.sum(-1, keepdims=True)
        hot = jax.nn.one_hot(chosen, EXPERTS, dtype=probs.dtype)
        share = hot.sum(-2).mean((0, 1))
        if self.bug == "capacity":
            order = jnp.cumsum(hot.sum(-2).reshape(-1, EXPERTS), 0).reshape(*probs.shape)
            hot = hot * (order <= STEPS * BATCH * CHOSEN // EXPERTS)[:, :, None]
        weights = jnp.einsum("btk,btke->bte", weights, hot).astype(x.dtype)
        h = jax.nn.silu(jnp.einsum("btd,edi->btei", x, w1)) * jnp.einsum("btd,edi->btei", x, w3)
        y = jnp.einsum("btei,eid,bte->btd", h, w2, weights)
        return y, EXPERTS * (share * probs.mean((0, 1))).sum()


class Layer(nn.Module):
    """One layer, in the form that ``nn.scan`` takes."""

    bug: str

    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm(epsilon=1e-5, name="ln_1")(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="attention")(h, mask=mask)
        h = nn.LayerNorm(epsilon=1e-5, name="ln_2")(x)
        routed = x if self.bug == "router_before_norm" else h
        y, aux = Experts(self.bug, name="experts")(h, routed)
        return x + y, aux


class Decoder(nn.Module):
    """The whole model."""

    bug: str = ""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(WORDS, WIDTH, name="token")(tokens)
        x = x + nn.Embed(STEPS, WIDTH, name="position")(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        mask = 1 - mask if self.bug == "mask_inverted" else mask
        scan = nn.scan(
            Layer, {"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=DEPTH
        )
        x, aux = scan(self.bug, name="layers")(x, mask)
        x = nn.LayerNorm(epsilon=1e-5, name="ln")(x)
        return nn.Dense(WORDS, name="head")(x), aux.sum()


def carry(state, bug="", grads=False):
    def layer(i):
        old = f"layers.{i}."
        w = state[old + "attn.in_proj_weight"].reshape(3, HEADS, -1, WIDTH)
        b = state[old + "attn.in_proj_bias"].reshape(3, HEADS, -1)
        attention = {
            name: {"kernel": w[j].transpose(2, 0, 1), "bias": b[j]}
            for j, name in enumerate(("query", "key", "value"))
        }
        attention["out"] = twins.dense(state, old + "attn.out_proj")
        attention["out"]["kernel"] = attention["out"]["kernel"].reshape(HEADS, -1, WIDTH)
        experts = {"router": twins.dense(state, old + "moe.gate")}
        for name in ("w1", "w2", "w3"):
            kernels = [state[f"{old}moe.experts.{e}.{name}.weight"].T for e in range(EXPERTS)]
            experts[name] = np.stack(kernels)
        return {
            "ln_1": twins.norm(state, old + "norm1"),
            "attention": attention,
            "ln_2": twins.norm(state, old + "norm2"),
            "experts": experts,
        }

    return {
        "token": {"embedding": state["wte.weight"]},
        "position": {"embedding": state["wpe.weight"]},
        "layers": jax.tree.map(lambda *parts: np.stack(parts), *map(layer, range(DEPTH))),
        "ln": twins.norm(state, "norm"),
        "head": twins.dense(state, "head"),
    }


def loss(bug=""):
    model = Decoder(bug)

    def loss(params, tokens, labels):
        logits, aux = model.apply({"params": params}, tokens)
        value = twins.cross_entropy(logits, labels)
        return value if bug == "aux_missing" else value + AUX * aux

    return loss


EXPERT = "layers/experts"
BUGS = {
    "mask_inverted": Bug(("layers/attention", "", "layers"), "a mask of what is hidden"),
    "router_before_norm": Bug(
        ("layers", EXPERT, EXPERT + "/router"), "the router sees what the norm has not seen"
    ),
    "not_renormalized": Bug((EXPERT,), "the weights of the chosen experts do not sum to 1"),
    "capacity": Bug((EXPERT,), "tokens above an expert's capacity are dropped"),
    "aux_missing": Bug(("",), "the loss without that of balance"),
}
TWIN = Twin("moe", torch_side, loss, carry, lambda arrays, state, bug: arrays, BUGS)
