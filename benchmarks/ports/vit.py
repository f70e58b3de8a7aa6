"""A vision transformer with a class token and fused queries, keys and values, beside flax NNX."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.ports import twins
from benchmarks.ports.twins import Bug, Twin

WIDTH, HEADS, INNER, DEPTH, SIDE, PATCH, CLASSES, BATCH = 32, 4, 64, 2, 16, 4, 5, 4
SIZE, PATCHES = WIDTH // HEADS, (SIDE // PATCH) ** 2
IMAGES, LABELS = twins.normal(1, BATCH, 3, SIDE, SIDE), twins.integers(2, CLASSES, BATCH)


def torch_side():
    import torch
    from torch import nn
    from torch.nn import functional as F

    class PatchEmbed(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Conv2d(3, WIDTH, PATCH, PATCH)

        def forward(self, x):
            return self.proj(x).flatten(2).transpose(1, 2)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
            self.proj = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            b, t, _ = x.shape
            qkv = self.qkv(x).reshape(b, t, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(*qkv.unbind(0))
            return self.proj(y.transpose(1, 2).reshape(b, t, WIDTH))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(WIDTH, INNER)
            self.act = nn.GELU()
            self.drop = nn.Dropout(0.1)
            self.fc2 = nn.Linear(INNER, WIDTH)

        def forward(self, x):
            return self.fc2(self.drop(self.act(self.fc1(x))))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
            self.attn = Attention()
            self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)
            self.mlp = Mlp()

        def forward(self, x):
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class VisionTransformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch_embed = PatchEmbed()
            self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH) / 3)
            self.pos_embed = nn.Parameter(torch.randn(1, PATCHES + 1, WIDTH) / 3)
            self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
            self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            x = self.patch_embed(x)
            x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embed
            return self.head(self.norm(self.blocks(x))[:, 0])

    torch.manual_seed(0)
    args = torch.from_numpy(IMAGES), torch.from_numpy(LABELS)
    module = twins.stirred(VisionTransformer()).eval()
    return module, lambda module, x, y: twins.torch_cross_entropy(module(x), y), args


def called(name, layer, x):
    """A layer within a scope: NNX gives none of its own."""
    with jax.named_scope(name):
        return layer(x)


class Attention(nnx.Module):
    """Queries, keys and values with a layer of each."""

    def __init__(self, rngs, bug):
        self.query = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.key = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.value = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.bug = bug

    def __call__(self, x):
        b, t, _ = x.shape
        layers = {"query": self.query, "key": self.key, "value": self.value}
        q, k, v = (called(*layer, x).reshape(b, t, HEADS, SIZE) for layer in layers.items())
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(SIZE)
        weights = jax.nn.softmax(scores, axis=2 if self.bug == "softmax_axis" else 3)
        order = "bhqd" if self.bug == "heads_not_moved_back" else "bqhd"
        y = jnp.einsum("bhqk,bkhd->" + order, weights, v)
        return called("out", self.out, y.reshape(b, t, WIDTH))


class Mlp(nnx.Module):
    """Two layers and dropout."""

    def __init__(self, rngs, bug):
        self.up = nnx.Linear(WIDTH, INNER, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, deterministic=bug != "dropout_on", rngs=rngs)
        self.down = nnx.Linear(INNER, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.gelu(called("up", self.up, x), approximate=False)
        return called("down", self.down, called("dropout", self.dropout, x))


class Block(nnx.Module):
    """Attention, then the MLP."""

    def __init__(self, rngs, bug):
        self.ln_1 = nnx.LayerNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.attention = Attention(rngs, bug)
        self.ln_2 = nnx.LayerNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.mlp = Mlp(rngs, bug)

    def __call__(self, x):
        x = x + called("attention", self.attention, called("ln_1", self.ln_1, x))
        return x + called("mlp", self.mlp, called("ln_2", self.ln_2, x))


class ViT(nnx.Module):
    """The whole model."""

    def __init__(self, bug=""):
        rngs = nnx.Rngs(0)
        self.patches = nnx.Conv(
            3, WIDTH, (PATCH, PATCH), (PATCH, PATCH), padding="VALID", rngs=rngs
        )
        self.token = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.position = nnx.Param(jnp.zeros((1, PATCHES + 1, WIDTH)))
        self.layers = nnx.List([Block(rngs, bug) for _ in range(DEPTH)])
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.classes = nnx.Linear(WIDTH, CLASSES, rngs=rngs)
        self.bug = bug

    def embedded(self, x):
        x = called("patches", self.patches, x)
        if self.bug == "patch_order":
            x = x.swapaxes(1, 2)
        x = x.reshape(len(x), PATCHES, WIDTH)
        token = jnp.broadcast_to(self.token[...], (len(x), 1, WIDTH))
        x = jnp.concatenate((x, token) if self.bug == "class_token_last" else (token, x), 1)
        position = self.position[...]
        return x + (jnp.roll(position, 1, 1) if self.bug == "position_shifted" else position)

    def __call__(self, x):
        x = called("embeddings", self.embedded, x)
        for i, layer in enumerate(self.layers):
            x = called(f"layers/{i}", layer, x)
        x = called("norm", self.norm, x)
        place = -1 if self.bug == "class_token_last" else 0
        x = x.mean(1) if self.bug == "mean_of_tokens" else x[:, place]
        return called("classes", self.classes, x)


def carry(state, bug="", grads=False):
    def block(i):
        old = f"blocks.{i}."
        w, b = state[old + "attn.qkv.weight"], state[old + "attn.qkv.bias"]
        if bug == "qkv_by_heads":
            w = w.reshape(HEADS, 3, SIZE, WIDTH).swapaxes(0, 1).reshape(3 * WIDTH, WIDTH)
            b = b.reshape(HEADS, 3, SIZE).swapaxes(0, 1).reshape(3 * WIDTH)
        parts = [slice(j * WIDTH, (j + 1) * WIDTH) for j in range(3)]
        q, k, v = ({"kernel": w[part].T, "bias": b[part]} for part in parts)
        q, k = (k, q) if bug == "keys_first" else (q, k)
        out = twins.dense(state, old + "attn.proj")
        return {
            "ln_1": twins.norm(state, old + "norm1"),
            "attention": {"query": q, "key": k, "value": v, "out": out},
            "ln_2": twins.norm(state, old + "norm2"),
            "mlp": {
                "up": twins.dense(state, old + "mlp.fc1"),
                "down": twins.dense(state, old + "mlp.fc2"),
            },
        }

    tree = {
        "patches": {
            "kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
            "bias": state["patch_embed.proj.bias"],
        },
        "token": state["cls_token"],
        "position": state["pos_embed"],
        "layers": {i: block(i) for i in range(DEPTH)},
        "norm": twins.norm(state, "norm"),
        "classes": twins.dense(state, "head"),
    }
    params = nnx.state(ViT(), nnx.Param)
    nnx.replace_by_pure_dict(params, jax.tree.map(jnp.asarray, tree))
    return params


def loss(bug=""):
    graph, _, rest = nnx.split(ViT(bug), nnx.Param, ...)

    def loss(params, images, labels):
        model = nnx.merge(graph, params, rest, copy=True)
        logits = model(images)
        return twins.cross_entropy(
            jax.nn.softmax(logits) if bug == "softmax_twice" else logits, labels
        )

    return loss


def batch(arrays, state, bug):
    images, labels = arrays
    axes = (0, 3, 2, 1) if bug == "image_axes" else (0, 2, 3, 1)
    return images.transpose(axes), labels


FIRST = "layers/0/"
BUGS = {
    "class_token_last": Bug(("embeddings",), "the class token after the patches, and read there"),
    "position_shifted": Bug(("embeddings",), "the position of a token is that of its neighbour"),
    "patch_order": Bug(("embeddings",), "patches by columns, not by rows"),
    "qkv_by_heads": Bug(
        tuple(FIRST + "attention" + end for end in ("", "/query", "/key", "/value")),
        "the fused kernel read as heads of q, k, v, not as q, k, v of heads",
        tuple(f"layers/*/attention/{part}/*" for part in ("query", "key", "value")),
    ),
    "softmax_axis": Bug((FIRST + "attention",), "softmax over the queries"),
    "dropout_on": Bug((FIRST + "mlp", FIRST + "mlp/dropout"), "dropout while torch evaluates"),
    "mean_of_tokens": Bug(("", "classes"), "the head reads the mean, not the class token"),
    "image_axes": Bug(
        ("", "embeddings", "embeddings/patches"), "height and width of the images exchanged"
    ),
    "heads_not_moved_back": Bug(
        (FIRST + "attention", FIRST + "attention/out"), "heads before steps when they are merged"
    ),
    "keys_first": Bug(
        tuple(FIRST + "attention" + end for end in ("", "/query", "/key")),
        "the fused kernel read as keys, queries, values",
        tuple(f"layers/*/attention/{part}/*" for part in ("query", "key")),
    ),
    "softmax_twice": Bug(("",), "the loss of probabilities, taken for logits"),
}

TWINS = [Twin("vit", torch_side, loss, carry, batch, BUGS)]
