"""An MLP-Mixer as in timm, beside plain JAX with named scopes that cuts patches by a reshape."""

import jax
import jax.numpy as jnp

from benchmarks.ports import twins
from benchmarks.ports.twins import Bug, Twin

WIDTH, SIDE, PATCH, CLASSES, DEPTH, BATCH = 24, 12, 3, 5, 2, 4
TOKENS = (SIDE // PATCH) ** 2
IMAGES, LABELS = twins.normal(11, BATCH, 3, SIDE, SIDE), twins.integers(12, CLASSES, BATCH)


def torch_side():
    import torch
    from torch import nn

    class Mlp(nn.Module):
        def __init__(self, features, hidden):
            super().__init__()
            self.fc1 = nn.Linear(features, hidden)
            self.act = nn.GELU()
            self.fc2 = nn.Linear(hidden, features)

        def forward(self, x):
            return self.fc2(self.act(self.fc1(x)))

    class MixerBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
            self.mlp_tokens = Mlp(TOKENS, 12)
            self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)
            self.mlp_channels = Mlp(WIDTH, 40)

        def forward(self, x):
            x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
            return x + self.mlp_channels(self.norm2(x))

    class PatchEmbed(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Conv2d(3, WIDTH, PATCH, PATCH)

        def forward(self, x):
            return self.proj(x).flatten(2).transpose(1, 2)

    class MlpMixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = PatchEmbed()
            self.blocks = nn.Sequential(*(MixerBlock() for _ in range(DEPTH)))
            self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            return self.head(self.norm(self.blocks(self.stem(x))).mean(1))

    torch.manual_seed(3)
    args = torch.from_numpy(IMAGES), torch.from_numpy(LABELS)
    return twins.stirred(MlpMixer()), lambda m, x, y: twins.torch_cross_entropy(m(x), y), args


def carry(state, bug="", grads=False):
    def block(i):
        old = f"blocks.{i}."
        first, second = ("norm2", "norm1") if bug == "norms_swapped" and i else ("norm1", "norm2")
        out = {"norm_t": twins.norm(state, old + first), "norm_c": twins.norm(state, old + second)}
        for new, name in (("tokens", "mlp_tokens"), ("channels", "mlp_channels")):
            out[new] = {part: twins.dense(state, f"{old}{name}.{part}") for part in ("fc1", "fc2")}
        return out

    kernel = state["stem.proj.weight"].transpose(2, 3, 1, 0).reshape(-1, WIDTH)
    if bug == "kernel_reshaped":
        kernel = state["stem.proj.weight"].reshape(WIDTH, -1).T
    return {
        "stem": {"kernel": kernel, "bias": state["stem.proj.bias"]},
        "blocks": [block(i) for i in range(DEPTH)],
        "norm": twins.norm(state, "norm"),
        "head": twins.dense(state, "head"),
    }


def batch(arrays, state, bug):
    images, labels = arrays
    return images.transpose(0, 2, 3, 1), labels


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


@jax.named_scope("norm")
def layer_norm(p, x, axis=-1):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean, var = wide.mean(axis, keepdims=True), wide.var(axis, keepdims=True)
    wide = (wide - mean) * jax.lax.rsqrt(var + 1e-6)
    return (wide * p["scale"] + p["bias"]).astype(x.dtype)


def mlp(p, x, late=False):
    with jax.named_scope("fc1"):
        x = dense(p["fc1"], x)
        x = x if late else jax.nn.gelu(x, approximate=False)
    with jax.named_scope("fc2"):
        x = dense(p["fc2"], x)
        return jax.nn.gelu(x, approximate=False) if late else x


def loss(bug=""):
    def stem(p, x):
        side = SIDE // PATCH
        x = x.reshape(len(x), side, PATCH, side, PATCH, 3)
        x = x.transpose(0, 1, 3, *((5, 2, 4) if bug == "patch_channels" else (2, 4, 5)))
        return dense(p, x.reshape(len(x), TOKENS, -1))

    def block(p, x):
        with jax.named_scope("norm_t"):
            h = layer_norm(p["norm_t"], x, 1 if bug == "norm_over_tokens" else -1)
        y = h.swapaxes(1, 2)
        with jax.named_scope("tokens"):
            y = mlp(p["tokens"], y, bug == "activation_late")
        y = y.reshape(x.shape) if bug == "reshaped_back" else y.swapaxes(1, 2)
        x = (h if bug == "residual_of_norm" else x) + y
        with jax.named_scope("norm_c"):
            h = layer_norm(p["norm_c"], x)
        with jax.named_scope("channels"):
            return x + mlp(p["channels"], h, bug == "activation_late")

    def loss(params, images, labels):
        with jax.named_scope("stem"):
            x = stem(params["stem"], images)
        for i, p in enumerate(params["blocks"]):
            with jax.named_scope(f"block{i}"):
                x = block(p, x)
        if bug == "mean_before_norm":
            x = layer_norm(params["norm"], x.mean(1))
        else:
            x = layer_norm(params["norm"], x).mean(1)
        with jax.named_scope("head"):
            logits = dense(params["head"], x)
        if bug == "softmax_over_examples":
            logp = jax.nn.log_softmax(logits, axis=0)
            return -jnp.mean(jnp.take_along_axis(logp, labels[:, None], -1))
        return twins.cross_entropy(logits, labels)

    return loss


BUGS = {
    "patch_channels": Bug(("stem",), "patches cut as (c, p, p), the kernel is of (p, p, c)"),
    "reshaped_back": Bug(("block0", "block0/tokens"), "tokens reshaped back, not transposed"),
    "residual_of_norm": Bug(("block0",), "the residual sum takes the normed value"),
    "norms_swapped": Bug(
        ("block1", "block1/norm_t", "block1/norm_t/norm"),
        "the two norms of block 1 have each other's weights",
        ("blocks/1/norm_t/*", "blocks/1/norm_c/*", "blocks/[1/norm_*", "blocks[1]/norm_*"),
    ),
    "mean_before_norm": Bug(("", "norm"), "the mean of tokens before the norm"),
    "activation_late": Bug(
        tuple("block0/tokens" + end for end in ("", "/fc1", "/fc2")), "GELU after the second layer"
    ),
    "norm_over_tokens": Bug(("block0/norm_t", "block0/norm_t/norm"), "the norm over the tokens"),
    "kernel_reshaped": Bug(("stem",), "the kernel flattened as torch stores it", ("stem/kernel",)),
    "softmax_over_examples": Bug(("",), "the softmax of the loss over the examples"),
}
TWIN = Twin("mixer", torch_side, loss, carry, batch, BUGS)
