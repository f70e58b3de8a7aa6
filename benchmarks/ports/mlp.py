"""An MLP of residual blocks with LayerNorm, beside plain JAX with named scopes."""

import jax
import jax.numpy as jnp

from benchmarks.ports import twins
from benchmarks.ports.twins import Bug, Twin

WIDTH, FEATURES, CLASSES, DEPTH = 32, 12, 5, 3


def torch_side():
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.fc1 = nn.Linear(WIDTH, WIDTH)
            self.act = nn.GELU()
            self.fc2 = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x + self.fc2(self.act(self.fc1(self.norm(x))))

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(FEATURES, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    args = torch.from_numpy(twins.normal(1, 24, FEATURES)), torch.from_numpy(LABELS)
    return twins.stirred(MLP()), lambda module, x, y: twins.torch_cross_entropy(module(x), y), args


LABELS = twins.integers(2, CLASSES, 24)


def carry(state, bug="", grads=False):
    def block(i):
        old = f"blocks.{0 if bug == 'layer_twice' and i == 1 else i}."
        return {
            "ln": twins.norm(state, old + "norm"),
            "up": twins.dense(state, old + "fc1"),
            "down": twins.dense(state, old + "fc2"),
        }

    params = {f"block_{i}": block(i) for i in range(DEPTH)}
    params["stem"] = twins.dense(state, "stem")
    params["ln"] = twins.norm(state, "norm")
    params["out"] = twins.dense(state, "head")
    if bug == "kernel_not_transposed":
        params["block_1"]["up"]["kernel"] = state["blocks.1.fc1.weight"]
    if bug == "up_and_down":
        parts = params["block_2"]
        parts["up"], parts["down"] = parts["down"], parts["up"]
    if bug == "bias_missing":
        del params["block_0"]["down"]["bias"]
    return params


def loss(bug=""):
    def dense(p, x):
        return x @ p["kernel"] + p.get("bias", 0)

    def layer_norm(p, x, eps=1e-6 if bug == "norm_eps" else 1e-5):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = wide.mean(-1, keepdims=True)
        var = jnp.square(wide - mean).mean(-1, keepdims=True)
        return ((wide - mean) * jax.lax.rsqrt(var + eps)).astype(x.dtype) * p["scale"] + p["bias"]

    def block(p, x, i):
        h = x
        if bug != "post_norm":
            with jax.named_scope("ln"):
                h = layer_norm(p["ln"], h)
        with jax.named_scope("up"):
            h = dense(p["up"], h)
        h = jax.nn.gelu(h, approximate=bug == "gelu_tanh")
        with jax.named_scope("down"):
            h = dense(p["down"], h)
        x = h if bug == "residual_missing" and i == 1 else x + h
        if bug == "post_norm":
            with jax.named_scope("ln"):
                x = layer_norm(p["ln"], x)
        return x

    def loss(params, x, y):
        if bug == "input_standardized":
            x = (x - x.mean(0)) / x.std(0)
        with jax.named_scope("stem"):
            x = dense(params["stem"], x)
            x = jax.nn.relu(x) if bug == "stem_activation" else x
        for i in range(DEPTH)[:: -1 if bug == "blocks_reversed" else 1]:
            with jax.named_scope(f"block_{i}"):
                x = block(params[f"block_{i}"], x, i)
        with jax.named_scope("ln"):
            x = layer_norm(params["ln"], x)
        with jax.named_scope("out"):
            logits = dense(params["out"], x)
        return twins.cross_entropy(logits, y)

    return loss


BUGS = {
    "gelu_tanh": Bug(("block_0",), "gelu by tanh beside torch's erf"),
    "norm_eps": Bug(("block_0/ln",), "LayerNorm with 1e-6 beside torch's 1e-5"),
    "kernel_not_transposed": Bug(
        ("block_1/up",), "a square kernel as torch stores it", ("block_1/up/kernel",)
    ),
    "bias_missing": Bug(("block_0/down",), "a layer without its bias", ("block_0/down/bias",)),
    "post_norm": Bug(("block_0", "block_0/up", "block_0/ln"), "norm after the residual sum"),
    "layer_twice": Bug(
        ("block_1", "block_1/ln"), "block 1 has the weights of block 0", ("block_1/*",)
    ),
    "stem_activation": Bug(("stem",), "ReLU after the stem"),
    "up_and_down": Bug(
        ("block_2/up", "block_2/down"),
        "the two layers of block 2 have each other's weights",
        ("block_2/up/*", "block_2/down/*"),
    ),
    "blocks_reversed": Bug(("", "block_0", "block_2"), "the last block runs first"),
    "residual_missing": Bug(("block_1",), "no residual sum in block 1"),
    "input_standardized": Bug(("", "stem"), "the features are standardized over the examples"),
}

TWINS = [Twin("mlp", torch_side, loss, carry, lambda arrays, state, bug: arrays, BUGS)]
