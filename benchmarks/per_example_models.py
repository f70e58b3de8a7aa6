"""Models with a loss of one example, and how their weights lie in PyTorch's modules."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import models, trees
from benchmarks.rows import Scale

Leaves = list[np.ndarray]
TOKENS = 32_768
STAGES = (1, 1, 2, 2, 4, 4, 8, 8)


class Model(NamedTuple):
    """A loss of one example, with what its twin in PyTorch needs to be the same."""

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Callable[[int], Any]
    twin: str  # the class in `per_example_torch`
    sizes: dict[str, Any]  # its arguments
    to_torch: Callable[[Any], Leaves]  # gradients or weights, in the order of its parameters
    limit: float  # which clips a part of the examples


def outputs_first(kernel: Any) -> np.ndarray:
    """A dense kernel, or one of a convolution over images, as PyTorch stores it."""
    axes = {2: (1, 0), 4: (3, 2, 0, 1)}.get(np.ndim(kernel), range(np.ndim(kernel)))
    return np.array(np.transpose(np.asarray(kernel), tuple(axes)), order="C")


def in_order(params: Any, names: Sequence[Any]) -> Leaves:
    """The leaves of these names, since JAX sorts the keys of what it returns."""
    return [outputs_first(params[name]) for name in names]


def spread(seed: int, size: int, *shape: int) -> jax.Array:
    """Examples of different sizes, so that a limit clips a part of them."""
    factors = np.geomspace(0.3, 3.0, size, dtype=np.float32).reshape(-1, *[1] * len(shape))
    return trees.normal((size, *shape), seed=seed) * factors


def labels(size: int, *shape: int, classes: int = 10) -> jax.Array:
    """Classes at random."""
    found = np.random.default_rng(size).integers(0, classes, (size, *shape), np.int32)
    return jnp.asarray(found)


def cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    """The mean over all axes but that of the classes."""
    chosen = jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def mlp(scale: Scale) -> Model:
    """Two hidden layers of 512 on 784 inputs: 0.67M weights."""
    widths = [scale(784, 8), scale(512, 8), scale(512, 8), 10]

    def loss(params: Any, example: Any) -> jax.Array:
        x, y = example
        return jnp.mean((models.mlp(params, x[None]) - y) ** 2)

    def batch(size: int) -> Any:
        return 10 * models.normal(1, size, widths[0]), 10 * models.normal(2, size, widths[-1])

    params = models.mlp_params(widths)
    to_torch = functools.partial(in_order, names=range(3))
    return Model(loss, params, batch, "MLP", {"widths": widths}, to_torch, 1.0)


def convolution(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution of one image, padded alike on all sides."""
    pad = (kernel.shape[0] // 2, kernel.shape[0] // 2)
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x[None], kernel, (stride, stride), (pad, pad), dimension_numbers=numbers
    )[0]


def cnn(scale: Scale) -> Model:
    """Three convolutions on images of 28 x 28, the mean over the image, and a dense layer."""
    widths, side = [1, scale(32, 4), scale(64, 4), scale(64, 4)], scale(28, 8)
    params = {}
    for i, (inputs, outputs) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
        deviation = (9 * inputs / 2) ** -0.5
        params[f"{i}/kernel"] = trees.normal((3, 3, inputs, outputs), deviation, i)
        params[f"{i}/bias"] = jnp.zeros(outputs)
    params["head"] = trees.normal((widths[-1], 10), widths[-1] ** -0.5, 9)

    def loss(params: Any, example: Any) -> jax.Array:
        x, label = example
        for i in range(3):
            x = convolution(x, params[f"{i}/kernel"], stride=1 + (i > 0))
            x = jax.nn.relu(x + params[f"{i}/bias"])
        return cross_entropy(jnp.mean(x, axis=(0, 1)) @ params["head"], label)

    def batch(size: int) -> Any:
        return spread(1, size, side, side, 1), labels(size)

    to_torch = functools.partial(in_order, names=list(params))
    return Model(loss, params, batch, "CNN", {"widths": widths}, to_torch, 1.0)


def group_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, groups: int = 4) -> jax.Array:
    """The norm of a model that clips per example, since batch statistics mix the examples."""
    grouped = x.reshape(*x.shape[:2], groups, -1)
    centred = grouped - jnp.mean(grouped, axis=(0, 1, 3), keepdims=True)
    variance = jnp.mean(centred**2, axis=(0, 1, 3), keepdims=True)
    return (centred * lax.rsqrt(variance + 1e-5)).reshape(x.shape) * scale + bias


def resnet_params(width: int) -> dict[str, jax.Array]:
    """The 62 leaves of ResNet-18's form: a stem, eight blocks of two, a dense layer."""
    params: dict[str, jax.Array] = {}

    def add(name: str, *shape: int) -> None:
        fan_in = int(np.prod(shape[:-1]))
        params[name] = trees.normal(shape, (2 / fan_in) ** 0.5, len(params))
        params[f"{name}/scale"] = jnp.ones(shape[-1])
        params[f"{name}/bias"] = jnp.zeros(shape[-1])

    add("stem", 3, 3, 3, width)
    inputs = width
    for i, factor in enumerate(STAGES):
        outputs = width * factor
        add(f"{i}/first", 3, 3, inputs, outputs)
        add(f"{i}/second", 3, 3, outputs, outputs)
        if inputs != outputs:
            add(f"{i}/project", 1, 1, inputs, outputs)
        inputs = outputs
    params["head"] = trees.normal((inputs, 10), inputs**-0.5, 99)
    return params


def resnet(scale: Scale) -> Model:
    """ResNet-18 of width 16 with group norm, on images of 16 x 16: 0.7M weights."""
    width, side = scale(16, 4), scale(16, 8)

    def layer(params: Any, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
        x = convolution(x, params[name], stride)
        return group_norm(x, params[f"{name}/scale"], params[f"{name}/bias"])

    def loss(params: Any, example: Any) -> jax.Array:
        x, label = example
        x = jax.nn.relu(layer(params, "stem", x))
        for i in range(len(STAGES)):
            shrinks = f"{i}/project" in params
            y = jax.nn.relu(layer(params, f"{i}/first", x, 1 + shrinks))
            y = layer(params, f"{i}/second", y)
            x = jax.nn.relu(y + (layer(params, f"{i}/project", x, 2) if shrinks else x))
        return cross_entropy(jnp.mean(x, axis=(0, 1)) @ params["head"], label)

    def batch(size: int) -> Any:
        return spread(1, size, side, side, 3), labels(size)

    params = resnet_params(width)
    to_torch = functools.partial(in_order, names=list(params))
    sizes = {"width": width, "stages": STAGES}
    return Model(loss, params, batch, "ResNet", sizes, to_torch, 10.0)


def layer_params(width: int, layers: int) -> dict[str, jax.Array]:
    """Stacked weights of a transformer's layers; norms begin at one."""
    shapes = {
        name.partition("/")[2]: (layers, *shape)
        for name, shape in trees.transformer(width, 1).items()
    }
    params = trees.normal(shapes, width**-0.5)
    return params | {name: jnp.ones(shapes[name]) for name in shapes if name.endswith("scale")}


def scanned(params: Any, x: jax.Array, remat: bool) -> jax.Array:
    """The layers in a scan, whose norms multiply by the scale, as PyTorch's do."""

    def step(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        shifted = {name: weights[name] - 1 for name in weights if name.endswith("scale")}
        return models.layer(weights | shifted, x), None

    return lax.scan(jax.checkpoint(step) if remat else step, x, params)[0]


ORDER = (
    "norm1/scale norm1/bias query key value out norm2/scale norm2/bias up down".split()  # fmt: skip
)


def layers_in_order(params: Any) -> Leaves:
    """Layer by layer, what a scan has stacked."""
    layers = len(params["query"])
    return [outputs_first(params[name][i]) for i in range(layers) for name in ORDER]


def transformer(scale: Scale) -> Model:
    """Four layers of width 128 in a scan, each recomputed in the backward pass; 64 positions."""
    width, steps, layers = scale(128, 8), scale(64, 4), 4

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(scanned(params, x, remat=True) ** 2)

    sizes = {"width": width, "layers": layers}
    params = layer_params(width, layers)
    batch = lambda size: spread(1, size, steps, width)  # noqa: E731
    return Model(loss, params, batch, "Transformer", sizes, layers_in_order, 0.3)


def lstm(scale: Scale) -> Model:
    """An LSTM of width 128 without biases, of which PyTorch has two; 64 steps."""
    width, steps = scale(128, 8), scale(64, 4)
    shapes = {"in": (width, 4 * width), "rec": (width, 4 * width)}

    def loss(params: Any, xs: jax.Array) -> jax.Array:
        return models.lstm(params | {"bias": jnp.zeros(4 * width, jnp.float32)}, xs[:, None])

    def to_torch(params: Any) -> Leaves:
        # PyTorch's gates are input, forget, cell, output; here the cell's come last.
        blocks = [np.split(np.asarray(params[name]), 4, axis=1) for name in ("in", "rec")]
        return [outputs_first(np.concatenate([i, f, g, o], 1)) for i, f, o, g in blocks]

    params = trees.normal(shapes, width**-0.5)
    batch = lambda size: spread(1, size, steps, width)  # noqa: E731
    return Model(loss, params, batch, "LSTM", {"width": width}, to_torch, 0.05)


def language_model(scale: Scale, tied: bool) -> Model:
    """Two layers of width 64 between an embedding of 32k tokens and a head; 32 positions."""
    width, steps, tokens, layers = scale(64, 8), scale(32, 4), scale(TOKENS, 16), 2
    params = {"embedding": trees.normal((tokens, width), 1.0, 7)}
    params |= layer_params(width, layers)
    if not tied:
        params["head"] = trees.normal((width, tokens), width**-0.5, 8)

    def loss(params: Any, example: jax.Array) -> jax.Array:
        layers = {name: params[name] for name in ORDER}
        x = scanned(layers, params["embedding"][example[:-1]], remat=False)
        head = params["embedding"].T if tied else params["head"]
        return cross_entropy(x @ head, example[1:])

    def to_torch(params: Any) -> Leaves:
        ends = [] if tied else [outputs_first(params["head"])]
        return [np.array(params["embedding"]), *layers_in_order(params), *ends]

    sizes = {"tokens": tokens, "width": width, "layers": layers, "tied": tied}
    batch = lambda size: labels(size, steps + 1, classes=tokens)  # noqa: E731
    return Model(loss, params, batch, "LanguageModel", sizes, to_torch, 5.0)


def images_first(batch: Sequence[Any]) -> list[np.ndarray]:
    """A batch as PyTorch takes it, with the channels before the rows of an image."""
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(batch)]
    return [np.moveaxis(leaf, -1, 1).copy() if leaf.ndim == 4 else leaf for leaf in leaves]
