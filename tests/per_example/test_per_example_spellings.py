"""One weight that a loss spells twice: each two of many ways, against `vmap(grad)` in float64.

Each pair of ways has a weight of its own, so that one program has many pairs. The losses are linear
in their weights, whose gradients are then sums of products of the data: exact in bfloat16 too.

Then weights that are unpacked, and losses with operations that have no result.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipgrad as cg
from tests.helpers import array
from tests.rows import crossed, first_rows, this_turn

SIDE, SIZE, STEPS, ROWS, EXAMPLES = 12, 144, 2, 2, 3


def weigh(y, c):
    """The sum of y times the numbers of c, which are its cotangent."""
    return jnp.sum(y * jnp.resize(c, y.shape))


def kernel(x, w, padding="VALID"):
    """A convolution of x, (positions, inputs), with w, (taps, inputs, outputs)."""
    return lax.conv_general_dilated(
        x[None], w, (1,), padding, dimension_numbers=("NWC", "WIO", "NWC")
    )


# A way is a function of the weight, of data h with rows of the vector's length, and of ids.
VECTOR = {
    "matvec": lambda v, h, ids: h @ v,
    "vecmat": lambda v, h, ids: v @ h.T,
    "column": lambda v, h, ids: h @ v[:, None],
    "row": lambda v, h, ids: v[None] @ h.T,
    "transposed row": lambda v, h, ids: h @ v[None].T,
    "outer": lambda v, h, ids: h[:, :1] @ v[None],
    "outer of a column": lambda v, h, ids: v[:, None] @ h[:1, :3],
    "lookup": lambda v, h, ids: v[ids],
    "lookup in a column": lambda v, h, ids: v[:, None][ids],
    "lookup in a row": lambda v, h, ids: v[None][ids % 1],
    "slice": lambda v, h, ids: h[:, 5:] @ v[5:],
    "halves": lambda v, h, ids: jnp.stack(
        [x @ w for x, w in zip(jnp.split(h, 2, axis=1), jnp.split(v, 2), strict=True)]
    ),
    "reshape": lambda v, h, ids: h[:, :SIDE] @ v.reshape(SIDE, SIDE),
    "reshape of a column": lambda v, h, ids: h[:, :SIDE] @ v[:, None].reshape(SIDE, SIDE),
    "rows of a reshape": lambda v, h, ids: sum(h[:, :72] @ w for w in v.reshape(2, 72)),
    "batched": lambda v, h, ids: jnp.einsum("i,ti->ti", v, h),
    "einsum": lambda v, h, ids: jnp.einsum("abi,ti->tba", v[None, None], h),
    "conv": lambda v, h, ids: kernel(h, v[None, :, None]),
    "elementwise": lambda v, h, ids: h * v[None],
    "strided": lambda v, h, ids: h[:, ::2] @ v[::2],
}  # fmt: skip

MATRIX = {
    "matmul": lambda w, h, ids: h[:, :SIDE] @ w,
    "from the left": lambda w, h, ids: w @ h[:, :SIDE].T,
    "transpose": lambda w, h, ids: h[:, :SIDE] @ w.T,
    "column": lambda w, h, ids: jnp.einsum("ti,ijk->tjk", h[:, :SIDE], w[:, :, None]),
    "row": lambda w, h, ids: jnp.einsum("ti,kij->tkj", h[:, :SIDE], w[None]),
    "vector": lambda w, h, ids: h @ w.reshape(-1),
    "vector in a column": lambda w, h, ids: h @ w.reshape(-1, 1),
    "heads": lambda w, h, ids: jnp.einsum("ti,iab->tab", h[:, :SIDE], w.reshape(SIDE, 3, 4)),
    "lookup": lambda w, h, ids: w[ids % SIDE],
    "lookup in the transpose": lambda w, h, ids: w.T[ids % SIDE],
    "lookup along the second axis": lambda w, h, ids: jnp.take(w, ids % SIDE, axis=1),
    "slice": lambda w, h, ids: h[:, :9] @ w[3:],
    "first row": lambda w, h, ids: h[:, :SIDE] @ w[0],
    "unpacked": lambda w, h, ids: sum(h[:, :SIDE] @ row for row in w[:3]),
    "unstack": lambda w, h, ids: sum(h[:, :SIDE] @ row for row in jnp.unstack(w[:, :3], axis=1)),
    "split": lambda w, h, ids: sum(h[:, :SIDE] @ x for x in jnp.split(w, 2, axis=1)),
    "batched": lambda w, h, ids: jnp.einsum("ti,ij->tij", h[:, :SIDE], w),
    "conv": lambda w, h, ids: kernel(h[:, :SIDE], w[None]),
    "conv of taps": lambda w, h, ids: kernel(h[:1].T, w[:, None, :]),
    "elementwise": lambda w, h, ids: h[:, :SIDE, None] * w[None],
}  # fmt: skip


def once(way, weight, example):
    """At one place of the program."""
    h, c, ids = example
    return weigh(way(weight, h[0], ids[0]), c[0])


def in_a_scan(way, weight, example):
    """In all steps of a scan."""
    step = lambda s, x: (s + weigh(way(weight, x[0], x[2]), x[1]), None)  # noqa: E731
    return lax.scan(step, jnp.zeros((), example[0].dtype), example)[0]


def along_a_scan(way, weight, example):
    """In a scan along the weight's first axis."""
    step = lambda s, x: (s + weigh(way(x[0], x[1][0], x[1][2]), x[1][1]), None)  # noqa: E731
    return lax.scan(step, jnp.zeros((), example[0].dtype), (weight, example))[0]


PLACES = {"once": once, "in a scan": in_a_scan, "along a scan": along_a_scan}
SHAPES = {"vector": (VECTOR, (SIZE,)), "matrix": (MATRIX, (SIDE, SIDE))}


def across(ways):
    """Each way with the one across, so that all are spelled twice."""
    names, half = list(ways), len(ways) // 2
    return [(a, names[(i + half) % len(names)]) for i, a in enumerate(names)]


def every_pair(ways):
    """A sixth of all pairs: all take 90 s to compile."""
    return this_turn(itertools.combinations_with_replacement(ways, 2), 6)


def spelled(ways, pairs, place, is_tied):
    """A loss of a weight for each pair of ways, as it is or as two cuts of one that is longer."""

    def loss(params, example):
        total = jnp.zeros((), example[0].dtype)
        for first, second in pairs:
            weight = params[f"{first} + {second}"].astype(example[0].dtype)
            views = [cut(weight), cut(weight)] if is_tied else [weight, weight]
            h, c, ids = example
            total += PLACES[place](ways[first], views[0], (h, c, ids))
            total += PLACES[place](ways[second], views[1], (h[..., ::-1], 2 * c, ids[..., ::-1]))
        return total

    return loss


def cut(weight):
    """The weight inside of one that has two more indices of its last axis."""
    return weight[..., 1:-1]


def arguments(shape, pairs, place, is_tied, dtype):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    whole = (*([STEPS] if place == "along a scan" else []), *SHAPES[shape][1])
    whole = (*whole[:-1], whole[-1] + 2) if is_tied else whole
    params = {f"{a} + {b}": make(*whole).astype("float32") for a, b in pairs}
    h, c = make(EXAMPLES, STEPS, ROWS, SIZE), make(EXAMPLES, STEPS, 5)
    ids = jnp.asarray(rng.integers(0, SIZE, (EXAMPLES, STEPS, ROWS)))
    return params, (h, c, ids)


def right_gradients(loss, params, batch):
    """The gradients of `vmap(grad)` in float64."""
    with jax.enable_x64(True):
        params, (h, c, ids) = jax.tree.map(np.asarray, (params, batch))
        batch = h.astype("float64"), c.astype("float64"), ids
        params = {k: v.astype("float64") for k, v in params.items()}
        each = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch)
        return {k: np.asarray(g).reshape(EXAMPLES, -1) for k, g in each.items()}


# In a scan each pair of ways, in turn; elsewhere each way with another one.
SPELLED = [
    (every_pair, "vector", "in a scan", False, "float32"),
    (every_pair, "matrix", "in a scan", True, "bfloat16"),
    (across, "vector", "once", True, "bfloat16"),
    (across, "matrix", "once", False, "float32"),
    (across, "vector", "along a scan", False, "bfloat16"),
    (across, "matrix", "along a scan", True, "float32"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("pairs", "shape", "place", "is_tied", "dtype"), SPELLED)
def test_a_weight_that_is_spelled_twice_adds_what_one_example_may(
    pairs, shape, place, is_tied, dtype
):
    ways = SHAPES[shape][0]
    chosen = pairs(ways)
    loss = spelled(ways, chosen, place, is_tied)
    params, batch = arguments(shape, chosen, place, is_tied, dtype)
    right = right_gradients(loss, params, batch)
    clip = cg.clip_per_example(loss, cg.ClipByNorm(1.0), reduce="sum")
    alone = jax.tree.map(lambda x: x[:, None], batch)
    added = jax.jit(lambda params, batch: jax.lax.map(lambda x: clip(params, x)[1], batch))
    direct = {leaf.path for leaf in clip.plan(params, batch).leaves if leaf.norm == "direct"}
    for pair, gradients in added(params, alone).items():
        gradients = np.float64(gradients).reshape(EXAMPLES, -1)
        norms = np.linalg.norm(right[pair], axis=1)
        assert (np.linalg.norm(gradients, axis=1) <= 1 + 4e-7).all(), pair
        # Of what is direct JAX adds the cotangents, in bfloat16.
        off = 2e-2 if pair in direct and dtype == "bfloat16" else 2e-5
        limited = right[pair] / np.maximum(norms, 1)[:, None]
        np.testing.assert_allclose(gradients, limited, atol=off, err_msg=pair)


# weights that are unpacked


def layers(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def two_names(w, x):
    first, second = w
    return layers((first, second), x)


UNPACKED = {
    "for": layers,
    "two names": two_names,
    "index": lambda w, x: layers([w[0], w[-1]], x),
    "list": lambda w, x: layers(list(w), x),
    "star": lambda w, x: layers([w[0], *w[1:]], x),
    "unstack": lambda w, x: layers(jnp.unstack(w), x),
    "unstack of another axis": lambda w, x: layers(jnp.unstack(jnp.moveaxis(w, 0, 2), axis=2), x),
    "split": lambda w, x: layers([half[0] for half in jnp.split(w, 2)], x),
    "of a reshape": lambda w, x: layers(w.reshape(-1).reshape(2, 16, 16), x),
    "index of a transpose": lambda w, x: layers([w.T[:, :, 0].T, w.T[..., 1].T], x),
}

AROUND = {
    "plain": lambda way, w, x: way(w, x),
    "jit": jax.jit(lambda way, w, x: way(w, x), static_argnums=0),
    "remat": lambda way, w, x: jax.checkpoint(lambda w, x: way(w, x))(w, x),
    "vmap": lambda way, w, x: jax.vmap(lambda x: way(w, x[None]))(x),
    "scan": lambda way, w, x: lax.scan(lambda c, x: (c, way(w, x[None])), None, x)[1],
    "cond": lambda way, w, x: lax.cond(x[0, 0] > 0, way, lambda w, x: 2 * way(w, x), w, x),
}

OPTIONS = {
    "none": {},
    "where": {"where": lambda params: {"w": True, "b": False}},
    "microbatch": {"microbatch": 1},
    "direct": {"method": "direct"},
}


@crossed(1)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("way", UNPACKED)
def test_a_weight_that_is_unpacked_is_followed(way, around, options):
    def loss(params, x):
        y = AROUND[around](UNPACKED[way], params["w"], x)
        return jnp.sum(y * jnp.cos(params["b"]))

    rng = np.random.default_rng(1)
    params = {"w": array(rng.normal(size=(2, 16, 16)) / 4), "b": jnp.float32(2.0)}
    x, options = array(rng.normal(size=(3, 2, 16))), OPTIONS[options]
    clip = cg.clip_per_example(loss, cg.ClipByGlobalNorm(0.5), reduce="sum", **options)
    norms = cg.per_example_norms(loss, per_leaf=True, **options)

    @jax.jit
    def run(params, x):
        return jax.vmap(jax.grad(loss), (None, 0))(params, x), norms(params, x), clip(params, x)

    each, measured, (_, grads, stats) = jax.device_get(run(params, x))
    sizes = np.linalg.norm(each["w"].reshape(3, -1), axis=1)
    chosen = sizes if "where" in options else np.hypot(sizes, each["b"])
    np.testing.assert_allclose(measured["w"], sizes, rtol=1e-5)
    np.testing.assert_allclose(stats.norm, chosen, rtol=1e-5)
    sums = np.tensordot(np.minimum(1, 0.5 / chosen), each["w"], 1)
    np.testing.assert_allclose(grads["w"], sums, atol=1e-5)
    (plan,) = [leaf for leaf in norms.plan(params, x).leaves if leaf.path == "w"]
    is_followed = around != "cond" and options != OPTIONS["direct"]
    assert plan.norm == ("Gram" if is_followed else "direct"), plan


# operations without results


def say(x):
    jax.debug.print("says {}", x)


SAYINGS = {
    "data": lambda w, x: say(x[0, 0]),
    "the weight": lambda w, x: say(w),
    "a row of it": lambda w, x: say(w[0]),
    "a product": lambda w, x: say((x @ w)[0, 0]),
    "a callback": lambda w, x: jax.debug.callback(lambda x: print("says"), x @ w),
    "in a jit": lambda w, x: jax.jit(lambda w, x: say((x @ w)[0, 0]))(w, x),
    "in a scan": lambda w, x: lax.scan(lambda c, x: (say(x @ w), None)[1:] * 2, None, x),
    "in a cond": lambda w, x: lax.cond(x[0, 0] == x[0, 0], lambda w: say(w), lambda w: None, w),
    "in remat": lambda w, x: jax.checkpoint(lambda w, x: (say(w), jnp.sum(x @ w))[1])(w, x),
    "in a loop": lambda w, x: lax.fori_loop(0, 2, lambda i, c: say(i), None),
}

RULE = cg.ClipByGlobalNorm(1.0)


def clipped(loss, rule=RULE, **options):
    clip = cg.clip_per_example(loss, rule, reduce="sum", **options)
    return lambda w, x: clip(w, x)[2].norm


CALLS = {
    "norms": cg.per_example_norms,
    "norms, direct": lambda loss: cg.per_example_norms(loss, method="direct"),
    "norms, where": lambda loss: cg.per_example_norms(loss, where=lambda w: True),
    "clip": clipped,
    "clip, direct": lambda loss: clipped(loss, method="direct"),
    "clip, microbatch": lambda loss: clipped(loss, microbatch=1),
    "clip by value": lambda loss: clipped(loss, cg.ClipByValue(1e9)),
    "clip, error": lambda loss: clipped(loss, nonfinite="zero"),
}


@first_rows(2)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("saying", SAYINGS)
def test_an_operation_without_results_changes_nothing(saying, call, capfd):
    def loss(w, x):
        SAYINGS[saying](w, x)
        return jnp.sum(jnp.tanh(x @ w))

    rng = np.random.default_rng(2)
    w, x = array(rng.normal(size=(12, 12)) / 4), array(rng.normal(size=(3, 2, 12)))
    each = jax.jit(jax.vmap(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), (None, 0)))(w, x)
    norms = jax.jit(CALLS[call](loss))(w, x)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("says") >= 1
    np.testing.assert_allclose(norms, np.linalg.norm(np.reshape(each, (3, -1)), axis=1), rtol=1e-5)
    plan = cg.per_example_norms(loss).plan(w, x)
    assert plan.leaves[0].norm == "Gram", plan


@pytest.mark.slow
def test_a_gradient_that_leaves_by_a_reference_is_not_lost():
    """A scan that adds to a reference has no result either."""

    def loss(w, x):
        total = jax.new_ref(jnp.zeros(()))

        def step(carry, h):
            total[...] += jnp.sum(h @ w)
            jax.ref.addupdate(total, (), jnp.sum(jnp.sin(h @ w)))
            return carry, None

        lax.scan(step, None, x)
        return total[...]

    rng = np.random.default_rng(3)
    w, x = array(rng.normal(size=(12, 12)) / 4), array(rng.normal(size=(3, 2, 12)))
    each = jax.vmap(jax.grad(loss), (None, 0))(w, x)
    norms = cg.per_example_norms(loss)(w, x)
    np.testing.assert_allclose(norms, np.linalg.norm(np.reshape(each, (3, -1)), axis=1), rtol=1e-5)
