"""Torch models, of which `make.py` writes runs; the same in JAX are in `port_models.py`."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    """Two layers around a residual, with a norm."""

    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, 4)

    def forward(self, x):
        h = F.gelu(self.norm(self.fc1(x)))
        h = h + self.fc2(h)
        return self.fc3(torch.tanh(h))


class Recurrent(nn.Module):
    """A GRU and a linear layer on its last state."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.gru(x)[0][:, -1])


class Convolutions(nn.Module):
    """Two convolutions with BatchNorm and in-place ReLU, NCHW."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6)
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(6, 5)

    def forward(self, x):
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.relu(self.bn2(self.conv2(h)))
        return self.fc(h.mean(dim=(2, 3)))


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotated(x):
    """Rotary position embedding, half by half, of (B, H, T, D)."""
    length, half = x.shape[2], x.shape[3] // 2
    angles = torch.arange(length)[:, None] * 100.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self, dim, heads, groups):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, groups * self.size, bias=False)
        self.wv = nn.Linear(dim, groups * self.size, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q = rotated(self.wq(x).view(B, T, self.heads, self.size).transpose(1, 2))
        k = rotated(self.wk(x).view(B, T, self.groups, self.size).transpose(1, 2))
        v = self.wv(x).view(B, T, self.groups, self.size).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        logits = q @ k.transpose(2, 3) / math.sqrt(self.size)
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        weights = logits.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.wo((weights @ v).transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim, heads, groups, hidden):
        super().__init__()
        self.attention, self.feed_forward = Attention(dim, heads, groups), FeedForward(dim, hidden)
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x):
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Decoder(nn.Module):
    """A small Llama: RMSNorm, rotary embedding, grouped queries, SwiGLU."""

    def __init__(self, layers=2, dim=16, heads=4, groups=2, hidden=10, words=7):
        super().__init__()
        self.tok_embeddings = nn.Embedding(words, dim)
        self.layers = nn.ModuleList(Block(dim, heads, groups, hidden) for _ in range(layers))
        self.norm, self.output = RMSNorm(dim), nn.Linear(dim, words, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


class ResidualLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class Layers(nn.Module):
    """A list of layers, for a scan over stacked ones."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(ResidualLayer() for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def squared(model, x, y):
    """The mean squared error."""
    return F.mse_loss(model(x), y)


def entropy(model, tokens, targets):
    """The cross entropy."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def drawn(model):
    """A model with parameters, also of norms and biases, that are nowhere 0 or 1."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            if not x.is_floating_point():
                continue
            if x.ndim > 1:
                noise = torch.randn(x.shape, generator=generator) / math.sqrt(x[0].numel())
            else:
                noise = 0.1 * torch.randn(x.shape, generator=generator)
            is_one = x.ndim == 1 and "bias" not in name and "mean" not in name
            x.copy_(noise.abs() + 0.8 if is_one else noise)
    return model


def table():
    """Each model with its loss and arguments."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 7, (1, 5))
    image = torch.randn(2, 3, 4, 4), torch.randn(2, 5)
    decoder = drawn(Decoder())
    return {
        "mlp": (drawn(MLP()), squared, (torch.randn(6, 12), torch.randn(6, 4))),
        "gru": (drawn(Recurrent()), squared, (torch.randn(3, 5, 6), torch.randn(3, 3))),
        "conv_eval": (drawn(Convolutions()).eval(), squared, image),
        "conv_train": (drawn(Convolutions()).train(), squared, image),
        "layers": (drawn(Layers()), squared, (torch.randn(4, 5), torch.randn(4, 3))),
        "decoder": (decoder, entropy, (tokens, tokens.roll(-1, 1))),
        "decoder_bfloat16": (
            drawn(Decoder()).bfloat16(), entropy, (tokens, tokens.roll(-1, 1)),
        ),
    }  # fmt: skip
