"""A U-Net of a diffusion model, as in diffusers, beside flax NNX with the channels last."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.ports import twins
from benchmarks.ports.twins import Bug, Twin
from benchmarks.ports.vit import called

NARROW, WIDE, TIME, SIDE, BATCH = 16, 32, 20, 8, 4
IMAGES, NOISE = twins.normal(16, BATCH, 3, SIDE, SIDE), twins.normal(17, BATCH, 3, SIDE, SIDE)
STEPS = twins.integers(18, 1000, BATCH)


def torch_side():
    import torch
    from torch import nn
    from torch.nn import functional as F

    class TimestepEmbedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear_1 = nn.Linear(NARROW, TIME)
            self.act = nn.SiLU()
            self.linear_2 = nn.Linear(TIME, TIME)

        def forward(self, t):
            half = NARROW // 2
            frequencies = torch.exp(-math.log(10000) * torch.arange(half) / half)
            angles = t[:, None] * frequencies
            x = torch.cat((angles.cos(), angles.sin()), -1).to(self.linear_1.weight.dtype)
            return self.linear_2(self.act(self.linear_1(x)))

    class ResnetBlock2D(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.norm1 = nn.GroupNorm(4, inputs)
            self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
            self.time_emb_proj = nn.Linear(TIME, outputs)
            self.norm2 = nn.GroupNorm(4, outputs)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
            self.nonlinearity = nn.SiLU()
            self.conv_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

        def forward(self, x, t):
            h = self.conv1(self.nonlinearity(self.norm1(x)))
            h = h + self.time_emb_proj(self.nonlinearity(t))[:, :, None, None]
            h = self.conv2(self.nonlinearity(self.norm2(h)))
            return h + (x if self.conv_shortcut is None else self.conv_shortcut(x))

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.time_embedding = TimestepEmbedding()
            self.conv_in = nn.Conv2d(3, NARROW, 3, padding=1)
            self.down = ResnetBlock2D(NARROW, WIDE)
            self.downsample = nn.Conv2d(WIDE, WIDE, 3, stride=2)
            self.mid = ResnetBlock2D(WIDE, WIDE)
            self.upsample = nn.ConvTranspose2d(WIDE, NARROW, 4, 2, 1)
            self.up = ResnetBlock2D(NARROW + WIDE, NARROW)
            self.conv_norm_out = nn.GroupNorm(4, NARROW)
            self.conv_out = nn.Conv2d(NARROW, 3, 3, padding=1)

        def forward(self, x, t):
            t = self.time_embedding(t)
            skip = self.down(self.conv_in(x), t)
            x = self.mid(self.downsample(F.pad(skip, (0, 1, 0, 1))), t)
            x = self.up(torch.cat((self.upsample(x), skip), 1), t)
            return self.conv_out(F.silu(self.conv_norm_out(x)))

    torch.manual_seed(5)
    args = tuple(torch.from_numpy(x) for x in (IMAGES, STEPS, NOISE))
    return twins.stirred(UNet()), lambda m, x, t, y: (m(x, t) - y).float().pow(2).mean(), args


class Block(nnx.Module):
    """Two convolutions, moved by the time, and a way around them."""

    def __init__(self, inputs, outputs, rngs, bug):
        groups = {"num_groups": None, "group_size": 4} if bug == "group_size" else {"num_groups": 4}
        norm = functools.partial(nnx.GroupNorm, epsilon=1e-5, rngs=rngs, **groups)
        conv = functools.partial(nnx.Conv, rngs=rngs)
        self.norm1, self.norm2 = norm(inputs), norm(outputs)
        self.conv1 = conv(inputs, outputs, (3, 3), padding=1)
        self.conv2 = conv(outputs, outputs, (3, 3), padding=1)
        self.time = nnx.Linear(TIME, outputs, rngs=rngs)
        self.shortcut = conv(inputs, outputs, (1, 1)) if inputs != outputs else None
        self.bug = bug

    def __call__(self, x, t):
        normed = nnx.silu(called("norm1", self.norm1, x))
        h = called("conv1", self.conv1, normed)
        t = t if self.bug == "time_without_silu" else nnx.silu(t)
        h = h + called("time", self.time, t)[:, None, None]
        h = called("conv2", self.conv2, nnx.silu(called("norm2", self.norm2, h)))
        if self.bug == "shortcut_of_normed" and self.shortcut is not None:
            x = normed
        return h + (x if self.shortcut is None else called("shortcut", self.shortcut, x))


class Time(nnx.Module):
    """Waves of the time, and two layers."""

    def __init__(self, rngs, bug):
        self.first = nnx.Linear(NARROW, TIME, rngs=rngs)
        self.second = nnx.Linear(TIME, TIME, rngs=rngs)
        self.bug = bug

    def __call__(self, t):
        half = NARROW // 2
        steps = half - 1 if self.bug == "frequency_shift" else half
        angles = t[:, None] * jnp.exp(-math.log(10000) * jnp.arange(half) / steps)
        waves = [jnp.cos(angles), jnp.sin(angles)]
        waves = waves[::-1] if self.bug == "sin_first" else waves
        x = jnp.concatenate(waves, -1).astype(self.first.kernel[...].dtype)
        return called("second", self.second, nnx.silu(called("first", self.first, x)))


class UNet(nnx.Module):
    """The whole model."""

    def __init__(self, bug=""):
        rngs = nnx.Rngs(0)
        self.time = Time(rngs, bug)
        self.first = nnx.Conv(3, NARROW, (3, 3), padding=1, rngs=rngs)
        self.down = Block(NARROW, WIDE, rngs, bug)
        pad = ((0, 1), (0, 1))
        self.downsample = nnx.Conv(WIDE, WIDE, (3, 3), 2, padding=pad, rngs=rngs)
        self.mid = Block(WIDE, WIDE, rngs, bug)
        flipped = bug != "kernel_not_flipped"
        channels = (WIDE, NARROW)
        self.upsample = nnx.ConvTranspose(
            *channels, (4, 4), 2, padding="SAME", transpose_kernel=flipped, rngs=rngs
        )
        self.up = Block(NARROW + WIDE, NARROW, rngs, bug)
        self.norm = nnx.GroupNorm(NARROW, num_groups=4, epsilon=1e-5, rngs=rngs)
        self.last = nnx.Conv(NARROW, 3, (3, 3), padding=1, rngs=rngs)
        self.bug = bug

    def __call__(self, x, t):
        t = called("time", self.time, t)
        skip = called("down", lambda x: self.down(x, t), called("first", self.first, x))
        x = called("downsample", self.downsample, skip)
        x = called("upsample", self.upsample, called("mid", lambda x: self.mid(x, t), x))
        x = jnp.concatenate((skip, x) if self.bug == "skip_first" else (x, skip), -1)
        x = called("up", lambda x: self.up(x, t), x)
        return called("last", self.last, nnx.silu(called("norm", self.norm, x)))


def carry(state, bug="", grads=False):
    def conv(name):
        return {
            "kernel": state[name + ".weight"].transpose(2, 3, 1, 0),
            "bias": state[name + ".bias"],
        }

    def block(name):
        out = {part: conv(f"{name}.{part}") for part in ("conv1", "conv2")}
        out |= {part: twins.norm(state, f"{name}.{part}") for part in ("norm1", "norm2")}
        of = "mid" if bug == "time_of_mid" and name == "down" else name
        out["time"] = twins.dense(state, of + ".time_emb_proj")
        if name + ".conv_shortcut.weight" in state:
            out["shortcut"] = conv(name + ".conv_shortcut")
        return out

    tree = {"first": conv("conv_in"), "downsample": conv("downsample"), "last": conv("conv_out")}
    tree |= {name: block(name) for name in ("down", "mid", "up")}
    tree["norm"] = twins.norm(state, "conv_norm_out")
    tree["upsample"] = conv("upsample")
    if bug == "kernel_not_flipped":
        tree["upsample"]["kernel"] = state["upsample.weight"].transpose(2, 3, 0, 1)
    names = {"first": "time_embedding.linear_1", "second": "time_embedding.linear_2"}
    tree["time"] = {new: twins.dense(state, old) for new, old in names.items()}
    params = nnx.state(UNet(bug), nnx.Param)
    nnx.replace_by_pure_dict(params, jax.tree.map(jnp.asarray, tree))
    return params


def batch(arrays, state, bug):
    images, steps, noise = arrays
    if bug == "noise_reshaped":
        return images.transpose(0, 2, 3, 1), steps, noise.reshape(BATCH, SIDE, SIDE, 3)
    return images.transpose(0, 2, 3, 1), steps, noise.transpose(0, 2, 3, 1)


def loss(bug=""):
    graph, _, rest = nnx.split(UNet(bug), nnx.Param, ...)

    def loss(params, images, steps, noise):
        out = nnx.merge(graph, params, rest, copy=True)(images, steps) - noise
        return jnp.square(out.astype(jnp.promote_types(out.dtype, jnp.float32))).mean()

    return loss


BUGS = {
    "sin_first": Bug(("time", "time/first"), "sines before cosines"),
    "group_size": Bug(("down/norm2", "down"), "groups of four channels, not four groups"),
    "time_without_silu": Bug(("down", "down/time"), "the time projected without SiLU"),
    "kernel_not_flipped": Bug(
        ("upsample",), "a transposed convolution whose kernel is not flipped", ("upsample/kernel",)
    ),
    "skip_first": Bug(("", "up", "up/norm1"), "the skip before what was sampled up"),
    "shortcut_of_normed": Bug(("down", "down/shortcut"), "the shortcut reads the normed value"),
    "frequency_shift": Bug(("time", "time/first"), "waves whose last one has 1/10000"),
    "time_of_mid": Bug(
        ("down/time",), "the first block has the time projection of the middle", ("down/time/*",)
    ),
    "noise_reshaped": Bug(("",), "the noise of the loss reshaped, not transposed"),
}
TWIN = Twin("unet", torch_side, loss, carry, batch, BUGS)
