"""Trees of gradients: their shapes, and arrays of these shapes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Shape = tuple[int, ...]


def leaves(count: int, shape: Shape) -> list[Shape]:
    """As many leaves of one shape."""
    return [shape] * count


def resnet(width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3)) -> dict[str, Shape]:
    """By default the 161 leaves of ResNet-50: kernels with outputs last, scales and biases."""
    found: dict[str, Shape] = {}

    def convolution(name: str, *shape: int) -> None:
        found[name] = shape
        found[f"{name}/scale"] = found[f"{name}/bias"] = shape[-1:]

    convolution("stem", 7, 7, 3, width)
    size = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        for block in range(count):
            name = f"stage{stage}/block{block}"
            convolution(f"{name}/reduce", 1, 1, size, inner)
            convolution(f"{name}/middle", 3, 3, inner, inner)
            convolution(f"{name}/expand", 1, 1, inner, 4 * inner)
            if block == 0:
                convolution(f"{name}/project", 1, 1, size, 4 * inner)
            size = 4 * inner
    return found | {"head": (size, 1000), "head/bias": (1000,)}


def transformer(width: int, layers: int = 12) -> dict[str, Shape]:
    """Ten leaves for each layer: attention, MLP and two norms."""
    layer = {name: (width, width) for name in ("query", "key", "value", "out")}
    layer |= {"up": (width, 4 * width), "down": (4 * width, width)}
    layer |= {f"norm{i}/{name}": (width,) for i in (1, 2) for name in ("scale", "bias")}
    return {f"layer{i}/{name}": shape for i in range(layers) for name, shape in layer.items()}


def normal(shapes: Any, deviation: float = 1.0, seed: int = 0, dtype: Any = jnp.float32) -> Any:
    """Arrays of these shapes."""
    rng = np.random.default_rng(seed)

    def array(shape: Shape) -> jax.Array:
        return jnp.asarray(deviation * rng.standard_normal(shape, np.float32), dtype)

    return jax.tree.map(array, shapes, is_leaf=lambda shape: isinstance(shape, tuple))


def size_of(shapes: Any) -> int:
    """Bytes of all leaves in float32."""
    found = jax.tree.leaves(shapes, is_leaf=lambda shape: isinstance(shape, tuple))
    return 4 * sum(int(np.prod(shape)) for shape in found)
