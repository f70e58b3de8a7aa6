"""A small ResNet with BatchNorm, NCHW in torch beside NHWC in flax Linen; it trains or not."""

import functools

import flax.linen as nn
import jax.numpy as jnp

from benchmarks.ports import twins
from benchmarks.ports.twins import Bug, Twin

CHANNELS, SIDE, CLASSES, BATCH = 16, 12, 5, 6
IMAGES, LABELS = twins.normal(1, BATCH, 3, SIDE, SIDE), twins.integers(2, CLASSES, BATCH)


def torch_side(train):
    import torch
    from torch import nn

    class BasicBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(CHANNELS)
            self.relu = nn.ReLU(inplace=True)
            self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
            self.bn2 = nn.BatchNorm2d(CHANNELS)

        def forward(self, x):
            y = self.relu(self.bn1(self.conv1(x)))
            return self.relu(self.bn2(self.conv2(y)) + x)

    class ResNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(CHANNELS)
            self.relu = nn.ReLU(inplace=True)
            self.layer1 = nn.Sequential(BasicBlock(), BasicBlock())
            self.pool = nn.AvgPool2d(3, stride=2, padding=1)
            self.fc = nn.Linear(CHANNELS * 9, CLASSES)

        def forward(self, x):
            x = self.relu(self.bn1(self.conv1(x)))
            return self.fc(self.pool(self.layer1(x)).flatten(1))

    torch.manual_seed(0)
    module = twins.stirred(ResNet()).train(train)
    args = torch.from_numpy(IMAGES), torch.from_numpy(LABELS)
    return module, lambda module, x, y: twins.torch_cross_entropy(module(x), y), args


class Block(nn.Module):
    """Two convolutions and a way around them."""

    train: bool
    bug: str = ""

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, CHANNELS, (3, 3), padding=1, use_bias=False)
        norm = functools.partial(nn.BatchNorm, not self.train, momentum=0.9)
        first, second = norm(name="norm_a"), conv(name="conv_a")
        if self.bug != "norm_before_conv":
            first, second = second, first
        y = nn.relu(second(first(x)))
        far = 2 if self.bug == "dilation" and self.name == "block_1" else 1
        y = norm(name="norm_b")(conv(name="conv_b", kernel_dilation=far, padding=far)(y))
        return nn.relu(y) + x if self.bug == "relu_before_sum" else nn.relu(y + x)


class ResNet(nn.Module):
    """A stem, two blocks, a pool and a head."""

    train: bool
    bug: str = ""

    @nn.compact
    def __call__(self, x):
        pad = "SAME" if self.bug == "padding_same" else 1
        x = nn.Conv(CHANNELS, (3, 3), 2, padding=pad, use_bias=False, name="stem_conv")(x)
        eps = 1e-3 if self.bug == "norm_eps" else 1e-5
        average = not self.train or self.bug == "norm_in_evaluation"
        x = nn.BatchNorm(average, momentum=0.9, epsilon=eps, name="stem_norm")(x)
        x = nn.relu(x)
        for i in range(2):
            x = Block(self.train, self.bug, name=f"block_{i}")(x)
        counted = self.bug != "pool_without_padding"
        if self.bug == "max_pool":
            x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        else:
            x = nn.avg_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)), count_include_pad=counted)
        return nn.Dense(CLASSES, name="head")(x.reshape(len(x), -1))


def carry(state, bug="", grads=False):
    def kernel(name):
        axes = (3, 2, 1, 0) if bug == "kernel_axes" and name == "layer1.0.conv2" else (2, 3, 1, 0)
        return {"kernel": state[name + ".weight"].transpose(axes)}

    def block(i):
        old = f"layer1.{i}."
        return {
            "conv_a": kernel(old + "conv1"),
            "norm_a": twins.norm(state, old + "bn1"),
            "conv_b": kernel(old + "conv2"),
            "norm_b": twins.norm(state, old + "bn2"),
        }

    head = twins.dense(state, "fc")
    if bug != "flatten_order":
        w = head["kernel"].reshape(CHANNELS, 3, 3, CLASSES)
        head["kernel"] = w.transpose(1, 2, 0, 3).reshape(-1, CLASSES)
    return {
        "stem_conv": kernel("conv1"),
        "stem_norm": twins.norm(state, "bn1"),
        "block_0": block(0),
        "block_1": block(1),
        "head": head,
    }


def batch(arrays, state, bug):
    """The running averages, the images with the channels last, and the labels."""

    def stats(name):
        return {"mean": state[name + ".running_mean"], "var": state[name + ".running_var"]}

    averages = {"stem_norm": stats("bn1")}
    for i in range(2):
        old = f"layer1.{i}."
        averages[f"block_{i}"] = {"norm_a": stats(old + "bn1"), "norm_b": stats(old + "bn2")}
    if bug == "averages_not_carried":
        averages["block_0"]["norm_a"] = {"mean": jnp.zeros(CHANNELS), "var": jnp.ones(CHANNELS)}
    if bug == "variance_as_deviation":
        averages["block_1"]["norm_b"]["var"] = averages["block_1"]["norm_b"]["var"] ** 0.5
    images, labels = arrays
    if bug == "images_reshaped":
        return averages, images.reshape(BATCH, SIDE, SIDE, 3), labels
    return averages, images.transpose(0, 2, 3, 1), labels


def loss(train, bug=""):
    model = ResNet(train, bug)

    def loss(params, averages, images, labels):
        variables = {"params": params, "batch_stats": averages}
        logits, _ = model.apply(variables, images, mutable=["batch_stats"])
        return twins.cross_entropy(logits, labels)

    return loss


TRAINING = {
    "padding_same": Bug(("stem_conv",), "SAME at stride 2 beside one of padding on each side"),
    "norm_eps": Bug(("stem_norm",), "BatchNorm with 1e-3 beside torch's 1e-5"),
    "norm_in_evaluation": Bug(("stem_norm",), "BatchNorm with its averages while torch trains"),
    "flatten_order": Bug(("head",), "the head's kernel expects channels first", ("head/kernel",)),
    "kernel_axes": Bug(
        ("block_0/conv_b",), "height and width of a kernel exchanged", ("block_0/conv_b/kernel",)
    ),
    "images_reshaped": Bug(("", "stem_conv"), "the images reshaped, not transposed"),
    "dilation": Bug(("block_1/conv_b", "block_1"), "a dilation of 2"),
}
EVALUATION = {
    "relu_before_sum": Bug(("block_0",), "ReLU before the residual sum"),
    "averages_not_carried": Bug(
        ("block_0/norm_a",), "running averages left at 0 and 1", ("block_0/norm_a/*",)
    ),
    "pool_without_padding": Bug(("",), "the mean of a window counts no padding, torch's does"),
    "variance_as_deviation": Bug(
        ("block_1/norm_b",),
        "the root of the running variance, taken for it",
        ("block_1/norm_b/var",),
    ),
    "norm_before_conv": Bug(
        ("block_0", "block_0/norm_a", "block_0/conv_a"), "the norm before the convolution"
    ),
    "max_pool": Bug(("", "head"), "the maximum of a window, not its mean"),
}

TWINS = [
    Twin(
        name,
        functools.partial(torch_side, train),
        functools.partial(loss, train),
        carry,
        batch,
        bugs,
    )
    for name, train, bugs in (("conv", True, TRAINING), ("conv_eval", False, EVALUATION))
]
