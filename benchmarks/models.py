"""Models as functions ``loss(params, data, clip)``, where ``clip`` is put on values within."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from benchmarks import trees
from benchmarks.rows import Scale

Clip = Callable[[jax.Array], jax.Array]


def identity(x: jax.Array) -> jax.Array:
    """No clip."""
    return x


def normal(seed: int, *shape: int) -> jax.Array:
    """Float32 data."""
    return trees.normal(shape, seed=seed)


def in_bfloat16(fun: Callable) -> Callable:
    """The function computed in bfloat16: of its arguments in that type, its results in float32."""

    def cast(tree: Any, dtype: Any) -> Any:
        is_float = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)

    def call(*args: Any, **options: Any) -> Any:
        return cast(fun(*cast(args, jnp.bfloat16), **options), jnp.float32)

    return call


def mlp_params(widths: list[int]) -> list[jax.Array]:
    """The weights of a network without biases."""
    shapes = list(zip(widths[:-1], widths[1:], strict=True))
    return [trees.normal(shape, shape[0] ** -0.5, i) for i, shape in enumerate(shapes)]


def mlp(params: list[jax.Array], x: jax.Array, clip: Clip = identity) -> jax.Array:
    """Tanh layers and a linear one; the clip is on each layer's result."""
    for weight in params[:-1]:
        x = clip(jnp.tanh(x @ weight))
    return x @ params[-1]


def mlp_loss(params: list[jax.Array], x: jax.Array, clip: Clip = identity) -> jax.Array:
    """The mean square of the result."""
    return jnp.mean(mlp(params, x, clip) ** 2)


def mlp_args(scale: Scale) -> Callable[[], tuple]:
    """Eight layers of width 512, and 128 examples."""
    width = scale(512, 8)
    return lambda: (mlp_params([width] * 9), normal(9, scale(128, 2), width))


def lstm(params: dict[str, jax.Array], xs: jax.Array, clip: Clip = identity) -> jax.Array:
    """An LSTM; the clip is on its output at each step, which the next step uses."""

    def step(carry: tuple, x: jax.Array) -> tuple[tuple, None]:
        h, c = carry
        gates = jnp.split(x @ params["in"] + h @ params["rec"] + params["bias"], 4, axis=-1)
        i, f, o = (jax.nn.sigmoid(gate) for gate in gates[:3])
        c = f * c + i * jnp.tanh(gates[3])
        return (clip(o * jnp.tanh(c)), c), None

    zeros = jnp.zeros((xs.shape[1], params["rec"].shape[0]), jnp.float32)
    (h, _), _ = jax.lax.scan(step, (zeros, zeros), xs)
    return jnp.mean(h**2)


def lstm_args(scale: Scale) -> Callable[[], tuple]:
    """Width 128, batch 16, 256 steps."""
    width, steps = scale(128, 8), scale(256, 4)
    shapes = {"in": (width, 4 * width), "rec": (width, 4 * width), "bias": (4 * width,)}
    return lambda: (trees.normal(shapes, width**-0.5), normal(1, steps, scale(16, 2), width))


def layer_norm(x: jax.Array, scale: Any, bias: Any) -> jax.Array:
    """The layer's normalisation."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-6) * (1 + scale) + bias


def layer(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Attention of one head and an MLP, each behind a norm."""
    y = layer_norm(x, params["norm1/scale"], params["norm1/bias"])
    query, key, value = (y @ params[name] for name in ("query", "key", "value"))
    scores = jax.nn.softmax(query @ jnp.swapaxes(key, -1, -2) * query.shape[-1] ** -0.5)
    x = x + scores @ value @ params["out"]
    y = layer_norm(x, params["norm2/scale"], params["norm2/bias"])
    return x + jax.nn.gelu(y @ params["up"]) @ params["down"]


def unrolled_transformer(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The layers of ``trees.transformer`` one after the other."""
    layers: dict[str, dict[str, jax.Array]] = {}
    for path, leaf in params.items():
        name, _, rest = path.partition("/")
        layers.setdefault(name, {})[rest] = leaf
    for weights in layers.values():
        x = layer(weights, x)
    return jnp.mean(x**2)


def scanned_transformer(params: Any, x: jax.Array, clip: Clip = identity) -> jax.Array:
    """Layers of equal shape in a scan, each recomputed in the backward pass and clipped."""

    @jax.checkpoint
    def step(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return clip(layer(weights, x)), None

    return jnp.mean(jax.lax.scan(step, x, params)[0] ** 2)


def scanned_args(scale: Scale) -> Callable[[], tuple]:
    """Twelve layers of width 256, batch 4 x 128."""
    width = scale(256, 8)
    shapes = {
        name.partition("/")[2]: (12, *shape) for name, shape in trees.transformer(width, 1).items()
    }
    return lambda: (trees.normal(shapes, width**-0.5), normal(1, 4, scale(128, 4), width))


def rms_norm(x: jax.Array) -> jax.Array:
    """The decoder's normalisation."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def decoder(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """Layers of attention and MLP with four tags each."""
    for i, layer in enumerate(params):
        x = checkpoint_name(x, f"input{i}")
        y = rms_norm(x)
        query, key, value = (jnp.tanh(y @ layer[name]) for name in ("query", "key", "value"))
        scores = jax.nn.softmax(checkpoint_name(query, f"query{i}") @ key.T / 8.0)
        x = x + checkpoint_name(scores @ value, f"out{i}")
        x = x + checkpoint_name(jax.nn.gelu(rms_norm(x) @ layer["up"]) @ layer["down"], f"mlp{i}")
    # Of all elements the mean square would be 1, with a gradient of rounding errors.
    return jnp.mean(rms_norm(x)[:, :8] ** 2)


def tagged_decoder(scale: Scale) -> tuple[Callable, Any, Any, list[str]]:
    """As many tags as MaxText has: 22 layers with four each."""
    layers = scale(22)
    params = [
        {n: normal(i, 64, 64) / 8 for n in ("query", "key", "value", "up", "down")}
        for i in range(layers)
    ]
    tags = [f"{kind}{i}" for i in range(layers) for kind in ("input", "query", "out", "mlp")]
    return decoder, params, normal(99, 256, 64), tags


def tagged_rnn(scale: Scale) -> tuple[Callable, Any, Any, list[str]]:
    """A tanh RNN with a tagged state."""

    def rnn(params: jax.Array, xs: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = checkpoint_name(jnp.tanh(h @ params + x), "h")
            return h, h

        return jnp.mean(jax.lax.scan(cell, jnp.zeros_like(xs[0]), xs)[1] ** 2)

    return rnn, normal(0, 128, 128) / 11, normal(1, scale(200), 16, 128), ["h"]


def flax_apply(scale: Scale, scanned: bool) -> Callable:
    """The flax transformer as a function of its parameters and data."""
    from benchmarks.flax_models import Transformer

    return Transformer(scanned, scale(12)).apply


def flax_transformer(scale: Scale, scanned: bool) -> tuple[Callable, Any, Any, list[str]]:
    """The loss of a flax transformer without tags, its parameters and data; all modules."""
    from benchmarks.flax_models import Transformer

    model = Transformer(scanned, scale(12))
    data = normal(1, 4, scale(128, 4), scale(256, 16))
    params = model.init(jax.random.key(0), data)
    return lambda params, x: jnp.mean(model.apply(params, x) ** 2), params, data, ["**"]
