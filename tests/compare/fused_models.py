"""Losses that hold their weights apart, beside losses that hold them fused, stacked or elsewhere.

`PAIRS` has for each a function that makes both: two losses of equal numbers, and the parameters of
each. ``scale`` makes the second version another one; ``dtype`` is that of the parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

named = jax.named_scope
WIDTH, HEADS = 8, 2


class Numbers:
    """Arrays of a random generator, rounded to a type; those of zeros are zeros, if they may be."""

    def __init__(self, dtype, seed=0, has_zeros=True):
        self.rng, self.dtype, self.has_zeros = np.random.default_rng(seed), dtype, has_zeros

    def __call__(self, *shape):
        return (self.rng.normal(size=shape) / 2).astype(jnp.dtype(self.dtype))

    def zeros(self, *shape):
        return 0 * self(*shape) if self.has_zeros else self(*shape)


def attention(q, k, v, heads=HEADS):
    """Of (tokens, heads, size); of fewer keys than queries, each serves a group."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5)
    return jnp.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def by_heads(x, size=WIDTH // HEADS):
    return x.reshape(len(x), -1, size)


def mean_square(x):
    with named("head"):
        return jnp.mean(jnp.square(x.astype(jnp.float32)))


def of_projections(project, scale=1.0):
    """A loss of attention whose projections to q, k and v are a function of parameters."""

    def loss(params, x):
        x = x.astype(jax.tree.leaves(params)[0].dtype)
        with named("attn"):
            h = attention(*map(by_heads, project(params, x)))
        with named("out"):
            return mean_square(scale * jnp.tanh(h @ params["out"]))

    return loss


def apart(params, x):
    return [x @ params[f"w{n}"] + params.get(f"b{n}", 0) for n in "qkv"]


@jax.custom_vjp
def too_large(w):
    return w


too_large.defvjp(lambda w: (w, None), lambda _, g: (1.5 * g,))


def together(sizes, order="qkv", bias=False, wrong=None):
    """The projections by one weight, whose columns are in an order of parts of some sizes.

    The gradient of one of the parts may be wrong.
    """

    def project(params, x):
        ends = np.cumsum([sizes[n] for n in order])[:-1]
        weights = jnp.split(params["wqkv"], ends, -1)
        weights = [too_large(w) if n == wrong else w for n, w in zip(order, weights, strict=True)]
        y = x @ (params["wqkv"] if wrong is None else jnp.concatenate(weights, -1)) + (
            params["bqkv"] if bias else 0
        )
        parts = dict(zip(order, jnp.split(y, ends, -1), strict=True))
        return [parts[n] for n in "qkv"]

    return project


def fused(new, scale, order="qkv", bias=None, sizes=(8, 8, 8), wrong=None):
    sizes = dict(zip("qkv", sizes, strict=True))
    params = {f"w{n}": new(WIDTH, sizes[n]) for n in "qkv"} | {"out": new(WIDTH, WIDTH)}
    weight = np.concatenate([params[f"w{n}"] for n in order], 1)
    others = {"wqkv": weight, "out": params["out"]}
    if bias is not None:
        params |= {f"b{n}": getattr(new, bias)(sizes[n]) for n in "qkv"}
        others |= {"bqkv": np.concatenate([params[f"b{n}"] for n in order])}
    project = together(sizes, order, bias is not None, wrong)
    return of_projections(apart), params, of_projections(project, scale), others


def grouped(new, scale):
    return fused(new, scale, sizes=(8, 4, 4))


def interleaved(new, scale, flat=False):
    """The columns of a head are q, k and v."""
    params = {f"w{n}": new(WIDTH, WIDTH) for n in "qkv"} | {"out": new(WIDTH, WIDTH)}
    parts = [params[f"w{n}"].reshape(WIDTH, HEADS, -1) for n in "qkv"]
    weight = np.stack(parts, 2)

    def project(params, x):
        weight = params["wqkv"].reshape(WIDTH, HEADS, 3, -1)
        y = jnp.einsum("td,dhcs->ctsh", x, weight)
        return [z.swapaxes(1, 2).reshape(len(x), -1) for z in y]

    others = {"wqkv": weight.reshape(WIDTH, -1) if flat else weight, "out": params["out"]}
    return of_projections(apart), params, of_projections(project, scale), others


def dead(new, scale):
    """Some columns of the weights are zeros."""
    one, params, other, others = fused(new, scale)
    for name, columns in (("wq", [0]), ("wk", [2, 3, 7]), ("wv", [0, 6])):
        params[name][:, columns] = new.zeros(WIDTH, len(columns))
    weight = np.concatenate([params[f"w{n}"] for n in "qkv"], 1)
    return one, params, other, others | {"wqkv": weight}


def transposed(new, scale):
    """One array of three weights, each (out, in)."""
    params = {f"w{n}": new(WIDTH, WIDTH) for n in "qkv"} | {"out": new(WIDTH, WIDTH)}
    others = {"in_proj": np.concatenate([params[f"w{n}"].T for n in "qkv"]), "out": params["out"]}

    def project(params, x):
        return jnp.split(x @ params["in_proj"].T, 3, -1)

    return of_projections(apart), params, of_projections(project, scale), others


def keys_and_values(new, scale):
    """A fused kv beside wk and wv, whose biases are zeros."""
    params = {f"w{n}": new(WIDTH, WIDTH) for n in "qkv"} | {"out": new(WIDTH, WIDTH)}
    params |= {f"b{n}": new.zeros(WIDTH) for n in "qkv"}
    keep = {name: params[name] for name in ("wq", "bq", "out")}
    kv = {name: np.concatenate([params[f"{name}{n}"] for n in "kv"], -1) for name in "wb"}

    def project(params, x):
        q = x @ params["wq"] + params["bq"]
        return q, *jnp.split(x @ params["kv"]["w"] + params["kv"]["b"], 2, -1)

    return of_projections(apart), params, of_projections(project, scale), keep | {"kv": kv}


def gate_and_up(new, scale):
    """An MLP, whose fused weight has the name of one that is apart in the first version."""
    params = {"gate": new(WIDTH, 12), "up": new(WIDTH, 12), "down": new(12, WIDTH)}
    up = np.concatenate([params["up"], params["gate"]], 1)
    others = {"up": up, "down": params["down"]}

    def of(project, scale=1.0):
        def loss(params, x):
            x = x.astype(params["down"].dtype)
            with named("mlp"):
                gate, up = project(params, x)
                x = (jax.nn.silu(gate) * up * scale) @ params["down"]
            return mean_square(x)

        return loss

    def split(params, x):
        return jnp.split(x @ params["up"], 2, -1)[::-1]

    one = of(lambda params, x: (x @ params["gate"], x @ params["up"]))
    return one, params, of(split, scale), others


def lstm(new, scale):
    """Four gates with weights of their own beside one weight of input and state."""
    gates = "ifgo"
    params = {n: {"w": new(WIDTH, 4), "u": new(4, 4), "b": new.zeros(4)} for n in gates}
    params["head"] = new(4, 4)
    weight = np.concatenate([np.concatenate([params[n][k] for n in gates], 1) for k in "wu"])
    bias = np.concatenate([params[n]["b"] for n in gates])
    others = {"cell": {"weight": weight, "bias": bias}, "head": params["head"]}

    def of(gates_of, scale=1.0):
        def step(params, state, x):
            with named("cell"):
                h, c = state
                i, f, g, o = gates_of(params, x, h)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = scale * jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), None

        def loss(params, x):
            x = x.astype(params["head"].dtype)
            start = jnp.zeros(4, x.dtype)
            (h, _), _ = lax.scan(lambda s, x: step(params, s, x), (start, start), x)
            with named("head"):
                return mean_square(h @ params["head"])

        return loss

    def one_by_one(params, x, h):
        return [x @ params[n]["w"] + h @ params[n]["u"] + params[n]["b"] for n in gates]

    def at_once(params, x, h):
        cell = params["cell"]
        return jnp.split(jnp.concatenate([x, h]) @ cell["weight"] + cell["bias"], 4)

    return of(one_by_one), params, of(at_once, scale), others


def layers(new, scale, first=True, fuse=True):
    """Layers one by one, whose gate and up are apart, beside a scan of fused ones.

    The axis of layers may be another than the first.
    """
    single = [{n: new(WIDTH, WIDTH) for n in ("gate", "up")} | {"bias": new.zeros(WIDTH)}
              for _ in range(3)]  # fmt: skip
    params = {f"layer_{i}": layer for i, layer in enumerate(single)} | {"head": new(WIDTH, 2)}
    axis = 0 if first else 1

    def stack(f):
        return np.stack([f(layer) for layer in single], axis)

    weights = {"gate": stack(lambda p: p["gate"]), "up": stack(lambda p: p["up"])}
    if fuse:
        weights = {"gate_up": stack(lambda p: np.concatenate([p["gate"], p["up"]], 1))}
    others = {"layers": weights | {"bias": stack(lambda p: p["bias"])}, "head": params["head"]}

    def block(x, gate, up, bias):
        return x + jnp.tanh(gate) * up + bias

    def one_by_one(params, x):
        x = x.astype(params["head"].dtype)
        for i in range(3):
            p = params[f"layer_{i}"]
            with named(f"layer_{i}"):
                x = block(x, x @ p["gate"], x @ p["up"], p["bias"])
        with named("head"):
            return mean_square(x @ params["head"])

    def scanned(params, x):
        x = x.astype(params["head"].dtype)

        def step(x, p):
            with named("layers"):
                parts = (x @ p["gate"], x @ p["up"]) if not fuse else None
                gate, up = parts or jnp.split(x @ p["gate_up"], 2, -1)
                return block(x, gate, up * scale, p["bias"]), None

        stacked = jax.tree.map(lambda w: jnp.moveaxis(w, axis, 0), params["layers"])
        x, _ = lax.scan(step, x, stacked)
        with named("head"):
            return mean_square(x @ params["head"])

    return one_by_one, params, scanned, others


def renamed(new, scale):
    """Two leaves of one size that have other names, one of them transposed."""
    params = {"embed": new(WIDTH, WIDTH), "proj": new(WIDTH, WIDTH), "bias": new.zeros(WIDTH)}
    params["head"] = new(WIDTH, 2)
    others = {"wte": params["embed"], "w": params["proj"].T, "b": params["bias"]}
    others["head"] = params["head"]

    def of(names, turn, scale=1.0):
        def loss(params, x):
            embed, proj, bias = (params[name] for name in names)
            proj = proj.T if turn else proj
            with named("body"):
                x = jnp.tanh(x.astype(embed.dtype) @ embed) @ proj * scale + bias
            with named("head"):
                return mean_square(x @ params["head"])

        return loss

    return (of(("embed", "proj", "bias"), False), params, of(("wte", "w", "b"), True, scale),
            others)  # fmt: skip


def of_other_names(one, params, other, others):
    """The pair with other names of all leaves in the second version, as in another framework."""

    def with_keys(tree, key):
        is_leaf = not isinstance(tree, dict)
        return tree if is_leaf else {key(k): with_keys(x, key) for k, x in tree.items()}

    def loss(params, x):
        return other(with_keys(params, lambda k: k.removeprefix("of_")), x)

    return one, params, loss, with_keys(others, "of_{}".format)


PAIRS = {
    "fused": fused,
    "another order": lambda new, scale: fused(new, scale, order="vqk"),
    "biases": lambda new, scale: fused(new, scale, bias="__call__"),
    "biases of zeros": lambda new, scale: fused(new, scale, bias="zeros"),
    "grouped": grouped,
    "interleaved": interleaved,
    "interleaved and flat": lambda new, scale: interleaved(new, scale, flat=True),
    "transposed": transposed,
    "dead columns": dead,
    "keys and values": keys_and_values,
    "gate and up": gate_and_up,
    "lstm": lstm,
    "scanned": layers,
    "scanned, apart": lambda new, scale: layers(new, scale, fuse=False),
    "scanned, layers second": lambda new, scale: layers(new, scale, first=False),
    "renamed": renamed,
}


def pair_of(name, scale=1.0, dtype="float32"):
    return PAIRS[name](Numbers(dtype), scale)


X = np.random.default_rng(1).normal(size=(6, WIDTH)).astype(np.float32)
