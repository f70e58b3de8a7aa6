"""The image side of CLIP and its contrastive loss, as in transformers, beside flax NNX."""

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.ports import twins
from benchmarks.ports.twins import Bug, Twin
from benchmarks.ports.vit import called

WIDTH, HEADS, INNER, DEPTH, SIDE, PATCH, SHARED, BATCH = 24, 3, 44, 2, 12, 4, 10, 5
SIZE, PATCHES = WIDTH // HEADS, (SIDE // PATCH) ** 2
IMAGES, TEXTS = twins.normal(24, BATCH, 3, SIDE, SIDE), twins.normal(25, BATCH, SHARED)


def torch_side():
    import torch
    from torch import nn
    from torch.nn import functional as F

    class CLIPVisionEmbeddings(nn.Module):
        def __init__(self):
            super().__init__()
            self.class_embedding = nn.Parameter(torch.randn(WIDTH))
            self.patch_embedding = nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)
            self.position_embedding = nn.Embedding(PATCHES + 1, WIDTH)

        def forward(self, x):
            x = self.patch_embedding(x).flatten(2).transpose(1, 2)
            x = torch.cat((self.class_embedding.expand(len(x), 1, -1), x), 1)
            return x + self.position_embedding(torch.arange(PATCHES + 1)[None])

    class CLIPAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.k_proj = nn.Linear(WIDTH, WIDTH)
            self.v_proj = nn.Linear(WIDTH, WIDTH)
            self.q_proj = nn.Linear(WIDTH, WIDTH)
            self.out_proj = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            layers = self.q_proj, self.k_proj, self.v_proj
            q, k, v = (f(x).view(len(x), -1, HEADS, SIZE).transpose(1, 2) for f in layers)
            y = F.scaled_dot_product_attention(q, k, v)
            return self.out_proj(y.transpose(1, 2).reshape(x.shape))

    class QuickGELU(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(1.702 * x)

    class CLIPMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.activation_fn = QuickGELU()
            self.fc1 = nn.Linear(WIDTH, INNER)
            self.fc2 = nn.Linear(INNER, WIDTH)

        def forward(self, x):
            return self.fc2(self.activation_fn(self.fc1(x)))

    class CLIPEncoderLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn, self.mlp = CLIPAttention(), CLIPMLP()
            self.layer_norm1, self.layer_norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x):
            x = x + self.self_attn(self.layer_norm1(x))
            return x + self.mlp(self.layer_norm2(x))

    class CLIP(nn.Module):
        def __init__(self):
            super().__init__()
            self.embeddings = CLIPVisionEmbeddings()
            self.pre_layrnorm = nn.LayerNorm(WIDTH)
            self.layers = nn.ModuleList(CLIPEncoderLayer() for _ in range(DEPTH))
            self.post_layernorm = nn.LayerNorm(WIDTH)
            self.visual_projection = nn.Linear(WIDTH, SHARED, bias=False)
            self.logit_scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, images, texts):
            x = self.pre_layrnorm(self.embeddings(images))
            for layer in self.layers:
                x = layer(x)
            x = self.visual_projection(self.post_layernorm(x[:, 0]))
            x = x / x.norm(dim=-1, keepdim=True)
            texts = texts / texts.norm(dim=-1, keepdim=True)
            return self.logit_scale.exp() * x @ texts.t()

    def loss(module, images, texts):
        logits, labels = module(images, texts), torch.arange(len(images))
        one, other = (twins.torch_cross_entropy(x, labels) for x in (logits, logits.t()))
        return (one + other) / 2

    torch.manual_seed(10)
    return twins.stirred(CLIP()), loss, (torch.from_numpy(IMAGES), torch.from_numpy(TEXTS))


class Attention(nnx.Module):
    """Queries, keys and values with a layer of each."""

    def __init__(self, rngs, bug):
        self.query, self.key, self.value, self.out = (
            nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)
        )
        self.bug = bug

    def __call__(self, x):
        layers = {"query": self.query, "key": self.key, "value": self.value}
        parts = [called(*layer, x) for layer in layers.items()]
        if self.bug == "heads_last":
            q, k, v = (a.reshape(len(x), -1, SIZE, HEADS).swapaxes(2, 3) for a in parts)
            y = jax.nn.dot_product_attention(q, k, v).swapaxes(2, 3)
        else:
            y = jax.nn.dot_product_attention(*(a.reshape(len(x), -1, HEADS, SIZE) for a in parts))
        return called("out", self.out, y.reshape(x.shape))


class Layer(nnx.Module):
    """Attention, then an MLP."""

    def __init__(self, rngs, bug):
        self.ln_1 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.attention = Attention(rngs, bug)
        self.ln_2 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(WIDTH, INNER, rngs=rngs)
        self.down = nnx.Linear(INNER, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + called("attention", self.attention, called("ln_1", self.ln_1, x))
        h = called("up", self.up, called("ln_2", self.ln_2, x))
        return x + called("down", self.down, h * jax.nn.sigmoid(1.702 * h))


class Clip(nnx.Module):
    """The whole model."""

    def __init__(self, bug=""):
        rngs = nnx.Rngs(0)
        self.patches = nnx.Conv(
            3, WIDTH, (PATCH, PATCH), (PATCH, PATCH), padding="VALID", use_bias=False, rngs=rngs
        )
        self.token = nnx.Param(jnp.zeros(WIDTH))
        self.position = nnx.Param(jnp.zeros((PATCHES + 1, WIDTH)))
        self.ln_pre = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.layers = nnx.List([Layer(rngs, bug) for _ in range(DEPTH)])
        self.ln_post = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.project = nnx.Linear(WIDTH, SHARED, use_bias=False, rngs=rngs)
        self.temperature = nnx.Param(jnp.zeros(()))
        self.bug = bug

    def embedded(self, x):
        x = called("patches", self.patches, x).reshape(len(x), PATCHES, WIDTH)
        x = jnp.concatenate((jnp.broadcast_to(self.token[...], (len(x), 1, WIDTH)), x), 1)
        return x if self.bug == "position_after_norm" else x + self.position[...]

    def __call__(self, images, texts):
        x = called("embeddings", self.embedded, images)
        if self.bug != "first_norm_missing":
            x = called("ln_pre", self.ln_pre, x)
        if self.bug == "position_after_norm":
            x = x + self.position[...]
        for i, layer in enumerate(self.layers):
            before, x = x, called(f"layers/{i}", layer, x)
        x = before if self.bug == "last_layer_left_out" else x
        x = called("project", self.project, called("ln_post", self.ln_post, x[:, 0]))
        x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        texts = texts / jnp.linalg.norm(texts, axis=-1, keepdims=True)
        scale = self.temperature[...]
        scale = scale if self.bug == "temperature_not_exponential" else jnp.exp(scale)
        return scale * x @ texts.T


def carry(state, bug="", grads=False):
    def layer(i):
        old = f"layers.{i}."
        names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
        return {
            "ln_1": twins.norm(state, old + "layer_norm1"),
            "ln_2": twins.norm(state, old + "layer_norm2"),
            "attention": {
                new: twins.dense(state, f"{old}self_attn.{name}") for new, name in names.items()
            },
            "up": twins.dense(state, old + "mlp.fc1"),
            "down": twins.dense(state, old + "mlp.fc2"),
        }

    kernel = state["embeddings.patch_embedding.weight"].transpose(2, 3, 1, 0)
    tree = {
        "patches": {"kernel": kernel},
        "token": state["embeddings.class_embedding"],
        "position": state["embeddings.position_embedding.weight"],
        "ln_pre": twins.norm(state, "pre_layrnorm"),
        "layers": {i: layer(i) for i in range(DEPTH)},
        "ln_post": twins.norm(state, "post_layernorm"),
        "project": twins.dense(state, "visual_projection"),
        "temperature": state["logit_scale"],
    }
    params = nnx.state(Clip(), nnx.Param)
    nnx.replace_by_pure_dict(params, jax.tree.map(jnp.asarray, tree))
    return params


def batch(arrays, state, bug):
    images, texts = arrays
    return images.transpose(0, 2, 3, 1), texts


def loss(bug=""):
    graph, _, rest = nnx.split(Clip(bug), nnx.Param, ...)

    def loss(params, images, texts):
        logits = nnx.merge(graph, params, rest, copy=True)(images, texts)
        labels = jnp.arange(len(logits))
        one, other = (twins.cross_entropy(x, labels) for x in (logits, logits.T))
        return (one + other) / 2

    return loss


BUGS = {
    "heads_last": Bug(("layers/0/attention",), "heads split as (size, heads)"),
    "first_norm_missing": Bug(
        ("", "ln_pre", "embeddings"), "the norm before the layers is left out", ("ln_pre/*",)
    ),
    "position_after_norm": Bug(("", "embeddings", "ln_pre"), "positions added behind the norm"),
    "last_layer_left_out": Bug(
        ("", "ln_post", "layers/1"), "the class token of the last layer but one"
    ),
    "temperature_not_exponential": Bug(("",), "the scale of logits is not its exponential"),
}
TWIN = Twin("clip", torch_side, loss, carry, batch, BUGS)
