"""Small programs of all kinds, drawn at random, for tests of what `clip_per_example` stores."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad as cg
from benchmarks import per_example_models
from benchmarks.rows import Scale

EXAMPLES = 16
PROGRAMS: dict[str, Callable[[np.random.Generator], "Program"]] = {}
# Shapes of parameters, and of what an example has, with its dtype.
Shapes = dict[str, tuple[int, ...]]


class Program(NamedTuple):
    """A loss of parameters and an example, and their shapes; integers are ids below 7."""

    loss: Callable[..., jax.Array]
    shapes: Shapes
    example: Sequence[tuple[tuple[int, ...], str]]

    def arguments(self) -> tuple[Any, Any]:
        """Parameters and a batch."""
        rng = np.random.default_rng(0)
        params = {
            name: jnp.asarray(rng.normal(size=shape) / math.sqrt(shape[0]), jnp.float32)
            for name, shape in self.shapes.items()
        }
        batch = [
            jnp.asarray(rng.integers(0, 7, (EXAMPLES, *shape)), jnp.int32)
            if kind == "int32"
            else jnp.asarray(rng.normal(size=(EXAMPLES, *shape)), jnp.float32)
            for shape, kind in self.example
        ]
        return params, batch

    def clip(self, method: str) -> Any:
        """Each example's clip by a method."""
        return cg.clip_per_example(self.loss, cg.ClipByGlobalNorm(1.0), method=method)

    def compiled(self, method: str, options: Any = None) -> Any:
        """The clip compiled for these shapes."""
        return jax.jit(self.clip(method)).lower(*self.arguments()).compile(options)


def program(
    make: Callable[[np.random.Generator], Program],
) -> Callable[[np.random.Generator], Program]:
    """Registers what draws a program."""
    PROGRAMS[make.__name__.replace("_", " ")] = make
    return make


@program
def dense(rng: np.random.Generator) -> Program:
    """Layers on rows of several numbers."""
    rows, *sizes = (int(n) for n in rng.choice([1, 4, 16, 64], 4))
    shapes: Shapes = {
        f"w{i}": pair for i, pair in enumerate(zip(sizes[:-1], sizes[1:], strict=True))
    }
    shapes["b"] = (sizes[-1],)

    def loss(p: Any, example: Any) -> jax.Array:
        (x,) = example
        for i in range(len(sizes) - 1):
            x = jnp.tanh(x @ p[f"w{i}"])
        return jnp.sum((x + p["b"][None]) ** 2)

    return Program(loss, shapes, [((rows, sizes[0]), "float32")])


@program
def convolutions(rng: np.random.Generator) -> Program:
    """Kernels of 3 x 3."""
    pixels, *sizes = (int(n) for n in rng.choice([4, 8, 16], 4))
    pairs = zip([3, *sizes[:-1]], sizes, strict=True)
    shapes = {f"k{i}": (3, 3, *pair) for i, pair in enumerate(pairs)}

    def loss(p: Any, example: Any) -> jax.Array:
        (x,) = example
        for i in range(len(sizes)):
            dims = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(
                x[None], p[f"k{i}"], (1, 1), "SAME", dimension_numbers=dims
            )[0]
            x = jnp.tanh(x)
        return jnp.sum(x**2)

    return Program(loss, shapes, [((pixels, pixels, 3), "float32")])


@program
def convolutional_network(rng: np.random.Generator) -> Program:
    """The CNN of the benchmarks; nothing is drawn."""
    model = per_example_models.cnn(Scale(1))
    shapes = {name: leaf.shape for name, leaf in model.params.items()}
    example = [(leaf.shape[1:], leaf.dtype.name) for leaf in model.batch(1)]
    return Program(model.loss, shapes, example)


@program
def recurrence(rng: np.random.Generator) -> Program:
    """Two kernels in a scan."""
    length, size = int(rng.choice([2, 16, 64, 128])), int(rng.choice([8, 32]))
    shapes = {"w": (size, size), "r": (size, size), "b": (size,)}

    def loss(p: Any, example: Any) -> jax.Array:
        step = lambda h, x: (jnp.tanh(x @ p["w"] + h @ p["r"] + p["b"]), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, jnp.zeros(size), example[0])[0] ** 2)

    return Program(loss, shapes, [((length, size), "float32")])


@program
def lstm(rng: np.random.Generator) -> Program:
    """Kernels of gates in a scan, and a layer behind it."""
    length, size = int(rng.choice([2, 16, 64, 128])), int(rng.choice([8, 16]))
    shapes = {"w": (size, 4 * size), "r": (size, 4 * size), "out": (size, 3)}

    def loss(p: Any, example: Any) -> jax.Array:
        def step(state: Any, x: jax.Array) -> Any:
            i, f, g, o = jnp.split(x @ p["w"] + state[0] @ p["r"], 4)
            c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros(size), jnp.zeros(size)
        found = jax.lax.scan(step, start, example[0])[1]
        return jnp.sum((found @ p["out"]) ** 2)

    return Program(loss, shapes, [((length, size), "float32")])


@program
def embedding(rng: np.random.Generator) -> Program:
    """A table that is used twice, a layer and a scale."""
    length, size, count = (int(rng.choice(n)) for n in ([4, 32], [8, 32], [7, 100]))
    shapes = {"e": (count, size), "w": (size, size), "s": (size,)}

    def loss(p: Any, example: Any) -> jax.Array:
        x = jnp.tanh(p["e"][example[0]] @ p["w"]) * p["s"][None]
        return jnp.mean((x @ p["e"].T) ** 2)

    return Program(loss, shapes, [((length,), "int32")])


@program
def scanned_layers(rng: np.random.Generator) -> Program:
    """Stacked kernels and scales."""
    rows, size, layers = (int(rng.choice(n)) for n in ([1, 16, 64], [8, 32], [2, 4]))
    shapes = {"w": (layers, size, size), "s": (layers, size)}

    def loss(p: Any, example: Any) -> jax.Array:
        step = lambda x, own: (jnp.tanh(x @ own["w"]) * own["s"][None], None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, example[0], p)[0] ** 2)

    return Program(loss, shapes, [((rows, size), "float32")])


@program
def small_leaves(rng: np.random.Generator) -> Program:
    """Biases and scales."""
    rows, size, layers = (int(rng.choice(n)) for n in ([1, 16], [8, 32], [2, 8]))
    shapes = {f"{name}{i}": (size,) for i in range(layers) for name in "sb"}

    def loss(p: Any, example: Any) -> jax.Array:
        x = example[0]
        for i in range(layers):
            x = jnp.tanh(x * p[f"s{i}"][None] + p[f"b{i}"][None])
        return jnp.sum(x**2)

    return Program(loss, shapes, [((rows, size), "float32")])
