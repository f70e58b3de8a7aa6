"""The models of `torch_runs` in JAX, with the bugs that ports have, chosen by numbers.

Each loss takes ``which``, the number of its bug in `BUGS`, or -1 for none: so one compiled program
serves all bugs of a model.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipgrad._compare.comparison_result import result
from clipgrad._compare.file import load_record
from clipgrad._compare.findings import by_rounding
from clipgrad._compare.loss_recording import recorded_loss
from clipgrad._compare.match_by_number import match_by_number
from clipgrad._compare.record import TORCH, Numbers, Record, Row
from clipgrad._compare.sides import Sides
from clipgrad._compare.sketches import turned_sketches

FOLDER = pathlib.Path(__file__).parent / "torch_runs"
named = jax.named_scope
# The bugs of each model: the module in which compare finds each.
BUGS = {
    "gru": {
        "gates swapped": "cell", "reset after": "cell", "tanh of the gate": "cell",
        "state not zero": "cell", "last but one": "",
    },
    "layers": {"epsilon": "norm", "relu": "layers", "no residual": "layers"},
    "decoder": {
        "rope interleaved": "attn", "rope from 1": "attn", "rope base": "attn",
        "mask off by one": "attn", "no mask": "attn", "tiled groups": "attn",
        "scale of the model": "attn", "no scale": "attn", "gelu": "mlp", "gate and up": "mlp",
        "norm epsilon": "norm", "mean in the norm": "norm", "no final norm": "norm",
        "norm after": "layer", "no residual": "layer", "embedding scaled": "",
        "tied output": "output",
    },
    "tagger": {
        "positions shifted": "embeddings", "epsilon": "ln_1", "gate reversed": "encoder",
        "over examples": "encoder", "sum for mean": "", "kernel of another layout": "fc",
    },
}  # fmt: skip


def numbers(name):
    """The parameters and arguments of a run, by their names in torch."""
    with np.load(FOLDER / f"{name}_numbers.npz") as stored:
        return {key: stored[key] for key in stored.files}


def kernel(stored, name):
    """A linear layer's kernel, (in, out)."""
    return jnp.asarray(stored[f"{name}.weight"].T)


def picker(model, which):
    """A function of a bug's name, and of what is right and wrong there."""
    order = list(BUGS[model])
    return lambda bug, right, wrong: jnp.where(which == order.index(bug), wrong, right)


def dense(p, x):
    return x @ p["kernel"] + p.get("bias", 0)


# ---- a GRU ----


def gru_args(stored):
    gates = ("r", "z", "n")
    parts = [
        np.split(stored[f"gru.{kind}_l0"], 3) for kind in ("weight_ih", "weight_hh", "bias_ih")
    ]
    params = {"cell": {
        f"{kind}{gate}": part.T
        for kind, parts_of_kind in zip(("i", "h", "b"), parts, strict=True)
        for gate, part in zip(gates, parts_of_kind, strict=True)
    }}  # fmt: skip
    params["cell"]["hn"] = dict(
        zip(
            ("w", "b"),
            (params["cell"].pop("hn"), np.split(stored["gru.bias_hh_l0"], 3)[2]),
            strict=True,
        )
    )
    br, bz, _ = np.split(stored["gru.bias_hh_l0"], 3)
    params["cell"]["br"], params["cell"]["bz"] = (
        params["cell"]["br"] + br,
        params["cell"]["bz"] + bz,
    )
    params["head"] = {"kernel": stored["head.weight"].T, "bias": stored["head.bias"]}
    return jax.tree.map(jnp.asarray, params), stored["args.0"], stored["args.1"]


def gru(params, x, y, which):
    pick, p = picker("gru", which), params["cell"]

    def step(h, x):
        with named("cell"):
            r = jax.nn.sigmoid(x @ p["ir"] + h @ p["hr"] + p["br"])
            z = jax.nn.sigmoid(x @ p["iz"] + h @ p["hz"] + p["bz"])
            r, z = pick("gates swapped", r, z), pick("gates swapped", z, r)
            inner = r * (h @ p["hn"]["w"] + p["hn"]["b"])
            inner = pick("reset after", inner, (r * h) @ p["hn"]["w"] + p["hn"]["b"])
            n = jnp.tanh(x @ p["in"] + inner + p["bn"])
            n = pick("tanh of the gate", n, jax.nn.sigmoid(x @ p["in"] + inner + p["bn"]))
            h = (1 - z) * n + z * h
        return h, h

    start = pick("state not zero", jnp.zeros((3, 8)), 0.1)
    last, every = lax.scan(step, start, jnp.swapaxes(x, 0, 1))
    last = pick("last but one", last, every[-2])
    with named("head"):
        out = dense(params["head"], last)
    return jnp.mean((out - y) ** 2)


# ---- a decoder ----

LINEAR = {
    "attn": {"q": "attention.wq", "k": "attention.wk", "v": "attention.wv", "o": "attention.wo"},
    "mlp": {"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"},
}
NORMS = {"norm_1": "attention_norm", "norm_2": "ffn_norm"}


def decoder_args(stored, stacked=False, dtype="float32"):
    layers = []
    for i in range(2):
        at = f"layers.{i}."
        layer = {
            m: {n: {"kernel": kernel(stored, at + module_name)} for n, module_name in names.items()}
            for m, names in LINEAR.items()
        }
        layers.append(
            layer
            | {
                n: {"scale": stored[f"{at}{module_name}.weight"]}
                for n, module_name in NORMS.items()
            }
        )
    params = {
        "embed": stored["tok_embeddings.weight"],
        "norm": {"scale": stored["norm.weight"]},
        "output": {"kernel": kernel(stored, "output")},
        "layers": jax.tree.map(lambda *x: jnp.stack(x), *layers) if stacked else layers,
    }
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    return params, stored["args.0"], stored["args.1"]


def rms(pick, p, x):
    wide = x.astype("float32")
    wide = pick("mean in the norm", wide, wide - wide.mean(-1, keepdims=True))
    size = jnp.mean(wide**2, -1, keepdims=True) + pick("norm epsilon", 1e-5, 1e-3)
    return (wide * lax.rsqrt(size)).astype(x.dtype) * p["scale"]


def rope(pick, x):
    """Rotary position embedding of (B, T, H, D)."""
    half = x.shape[-1] // 2
    base = pick("rope base", 100.0, 10.0)
    positions = jnp.arange(x.shape[1]) + pick("rope from 1", 0, 1) * jnp.arange(x.shape[1])
    angles = positions[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    halves, pairs = (x[..., :half], x[..., half:]), (x[..., ::2], x[..., 1::2])
    turn = lambda a, b: (a * cos - b * sin, b * cos + a * sin)  # noqa: E731
    right = jnp.concatenate(turn(*halves), -1)
    return pick("rope interleaved", right, jnp.stack(turn(*pairs), -1).reshape(x.shape))


def attention(pick, p, x):
    B, T, D = x.shape
    with named("q"):
        q = dense(p["q"], x).reshape(B, T, 4, -1)
    with named("k"):
        k = dense(p["k"], x).reshape(B, T, 2, -1)
    with named("v"):
        v = dense(p["v"], x).reshape(B, T, 2, -1)
    q, k = rope(pick, q), rope(pick, k)
    k, v = (pick("tiled groups", jnp.repeat(t, 2, 2), jnp.tile(t, (1, 1, 2, 1))) for t in (k, v))
    size = pick("no scale", pick("scale of the model", q.shape[-1] ** 0.5, D**0.5), 1.0)
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / size.astype(x.dtype)
    ahead = jnp.arange(T)[None] - jnp.arange(T)[:, None]
    seen = ahead <= pick("no mask", pick("mask off by one", 0, 1), T)
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))
    with named("o"):
        return dense(p["o"], jnp.einsum("bhts,bshd->bthd", weights, v).reshape(B, T, D))


def mlp_of(pick, p, x):
    with named("gate"):
        gate = dense(p["gate"], x)
    with named("up"):
        up = dense(p["up"], x)
    first, second = pick("gate and up", gate, up), pick("gate and up", up, gate)
    h = pick("gelu", jax.nn.silu(first), jax.nn.gelu(first)) * second
    with named("down"):
        return dense(p["down"], h)


def block(pick, p, x):
    def within(name, f, *args):
        with named(name):
            return f(pick, *args)

    a = within("attn", attention, p["attn"], within("norm_1", rms, p["norm_1"], x))
    h = pick("no residual", x + a, a)
    m = within(
        "mlp", mlp_of, p["mlp"], within("norm_2", rms, p["norm_2"], pick("norm after", h, x))
    )
    return h + m


def decoder(params, tokens, targets, which, scanned=False):
    pick = picker("decoder", which)
    with named("embed"):
        h = params["embed"][tokens]
    h = pick("embedding scaled", h, h * 4.0)
    if scanned:
        with named("layers"):
            h, _ = lax.scan(lambda h, p: (block(pick, p, h), None), h, params["layers"])
    else:
        for i, p in enumerate(params["layers"]):
            with named(f"layer_{i}"):
                h = block(pick, p, h)
    with named("norm"):
        h = pick("no final norm", rms(pick, params["norm"], h), h)
    with named("output"):
        tied = params["embed"].T
        logits = h @ pick("tied output", params["output"]["kernel"], tied)
    logits = jax.nn.log_softmax(logits.astype("float32"))
    return -jnp.mean(jnp.take_along_axis(logits, targets[..., None], -1))


# ---- layers of Flax Linen under `nn.scan`, beside a list of modules ----


def layers_args(stored):
    kernels = {
        "norm": {"scale": "norm.weight", "bias": "norm.bias"},
        "fc": {"kernel": "fc.weight", "bias": "fc.bias"},
    }
    stacked = {
        name: {
            leaf: jnp.stack([stored[f"layers.{i}.{other}"].T for i in range(3)])
            for leaf, other in leaves.items()
        }
        for name, leaves in kernels.items()
    }
    params = {
        name: {"kernel": kernel(stored, name), "bias": jnp.asarray(stored[f"{name}.bias"])}
        for name in ("stem", "head")
    }
    return params | {"layers": stacked}, stored["args.0"], stored["args.1"]


def layers(params, x, y, which):
    import flax.linen as nn

    pick = picker("layers", which)
    epsilon = pick("epsilon", 1e-5, 1e-3)  # outside, so that the choice is of no module

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            n = nn.LayerNorm(epsilon=epsilon, name="norm")(x)
            h = nn.Dense(6, name="fc")(n)
            h = pick("relu", jnp.tanh(h), jax.nn.relu(h))
            return pick("no residual", x + h, h), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(6, name="stem")(x)
            scan = nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=3)
            x, _ = scan(name="layers")(x)
            return nn.Dense(3, name="head")(x)

    return jnp.mean((Net().apply({"params": params}, x) - y) ** 2)


# ---- a tagger, whose run is of no framework: `other_tagger` says what modules would see ----

EXAMPLES = STEPS = 3  # as many, so that axes can be confused
WIDTH = 8


def tagger_numbers():
    """The parameters, by their names in the other framework, and the arguments."""
    shapes = {
        "proj.weight": (WIDTH, 5), "position": (STEPS, WIDTH), "blocks.0.norm1.weight": (WIDTH,),
        "cell.weight_ih": (WIDTH, WIDTH), "cell.weight_hh": (WIDTH, WIDTH),
        "fc.weight": (4, STEPS * WIDTH), "args[0]": (EXAMPLES, STEPS, 5), "args[1]": (EXAMPLES, 4),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def layer_norm(scale, x, eps):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * scale


def other_tagger(p, names):
    """The loss, and what enters and leaves modules, whose names are added to ``names``."""
    seen = []

    def call(name, f, *xs):
        seen.extend((name, "enters", x) for x in xs)
        seen.append((name, "module", f(*xs)))
        return seen[-1][2]

    h = call("proj", lambda x: x @ p["proj.weight"].T, p["args[0]"]) + p["position"]
    norm = functools.partial(layer_norm, p["blocks.0.norm1.weight"], eps=1e-5)
    h = call("blocks.0", functools.partial(call, "blocks.0.norm1", norm), h)
    state, states = jnp.zeros((EXAMPLES, WIDTH)), []
    for t in range(STEPS):
        state = call(
            "cell",
            lambda x, s: cell(p["cell.weight_ih"].T, p["cell.weight_hh"].T, x, s)[0],
            h[:, t],
            state,
        )
        states.append(state)
    h = call("drop", jnp.array, jnp.stack(states, 1))
    out = call("fc", lambda x: x @ p["fc.weight"].T, h.reshape(EXAMPLES, -1))
    names.extend(entry[:2] for entry in seen)
    return jnp.mean((out - p["args[1]"]) ** 2), [entry[2] for entry in seen]


def cell(w, u, x, s):
    gate, new = jax.nn.sigmoid(x @ w), jnp.tanh(x @ w + s @ u)
    return (1 - gate) * new + gate * s, gate * new + (1 - gate) * s


def tagger_run():
    """The run of `other_tagger`, as if a framework had written it."""
    p, names = tagger_numbers(), []
    run = jax.value_and_grad(lambda p: other_tagger(p, names), has_aux=True)
    (loss, seen), grads = jax.jit(run)(p)
    rows = []

    def add(kind, name, x, node=None, **more):
        node = len(rows) if node is None else node
        more |= {"node": node, "position": (len(rows), 0, 0), "turned": "all"}
        more["numbers"] = Numbers(sketch=turned_sketches(np.asarray(x), "all"))
        rows.append(Row(kind, name, np.shape(x), "float32", **more))
        return node

    for (name, view), x in zip(names, seen, strict=True):
        add("value", name, x, view=view)
    for name, x in p.items():
        node = add("argument", name, x)
        if "args" not in name:
            add("gradient", name, grads[name], node)
    add("output", "the loss", loss)
    return Record(rows, framework=TORCH)


def tagger_args(p):
    """The head reads its input with the steps last, so its kernel has its rows in that order."""
    kernel = p["fc.weight"].T.reshape(STEPS, WIDTH, 4).swapaxes(0, 1).reshape(-1, 4)
    params = {
        "patches": p["proj.weight"].T, "position": p["position"],
        "ln_1": p["blocks.0.norm1.weight"], "encoder": {"w": p["cell.weight_ih"].T,
        "u": p["cell.weight_hh"].T}, "fc": {"kernel": kernel},
    }  # fmt: skip
    return jax.tree.map(jnp.asarray, params), p["args[0]"], p["args[1]"]


def tagger(params, x, y, which):
    pick = picker("tagger", which)
    with named("embeddings"):
        with named("patches"):
            h = x @ params["patches"]
        position = params["position"]
        h = h + pick("positions shifted", position, jnp.roll(position, 1, 0))
    with named("layers/0"), named("ln_1"):
        h = layer_norm(params["ln_1"], h, pick("epsilon", 1e-5, 1e-2))
    flip = functools.partial(jnp.swapaxes, axis1=0, axis2=1)

    def step(state, x):
        with named("encoder"):
            p = params["encoder"]
            state = pick("gate reversed", *cell(p["w"], p["u"], x, state))
        return state, state

    with named("encoder"):
        h = pick("over examples", flip(h), h)
    _, h = lax.scan(step, jnp.zeros((EXAMPLES, WIDTH)), h)
    with named("encoder"):
        h = pick("over examples", flip(h), h)
    h = h.swapaxes(1, 2).reshape(EXAMPLES, -1)
    with named("fc"):
        kernel = params["fc"]["kernel"]
        other = kernel.reshape(WIDTH, STEPS, 4).swapaxes(0, 1).reshape(-1, 4)
        out = h @ pick("kernel of another layout", kernel, other)
    return pick("sum for mean", jnp.mean((out - y) ** 2), jnp.sum((out - y) ** 2))


def compared(run, loss, args, bugs):
    """The comparison of each bug with a run of torch; the floor is that of the right loss."""
    port = load_record(FOLDER / f"{run}.npz") if isinstance(run, str) else run
    recording = recorded_loss(loss, (*args, jnp.int32(-1)), {}, 0, False)
    names = [row.name for row in recording.record.rows if row.kind == "argument"]
    right = recording.run(floor=True)
    for number in bugs:
        recording.leaves[names.index(f"args[{len(args)}]")] = jnp.int32(number)
        record = recording.run()
        for row, measured in zip(record.rows, right.rows, strict=True):
            row.numbers = row.numbers._replace(moved=measured.numbers.moved)
        sides = Sides(record, port, match_by_number(record, port))
        yield result(sides, by_rounding(sides))
