"""Eighty small programs that score clipgrad. Expectations were written before any of them was run with it.

Each program returns (passed, what was said). `expect` is "right" (must pass in silence and equal a reference in
NumPy or plain JAX), "finds" (a planted fault that must be found) or "sentence" (bad input, or a call that must warn,
that must end in a clear sentence). References come before the calls of clipgrad, so that they do not depend on it.
"""

import functools
import pathlib
import tempfile
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg

f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
PROGRAMS = {}


def program(name, group, expect):
    def add(function):
        assert name not in PROGRAMS
        PROGRAMS[name] = {
            "name": name,
            "group": group,
            "expect": expect,
            "run": function,
            "doc": function.__doc__,
        }
        return function

    return add


def rnd(seed, *shape, scale=1.0):
    return scale * jax.random.normal(jax.random.key(seed), shape)


def line_of(tag):
    lines = pathlib.Path(__file__).read_text().splitlines()
    (found,) = [i for i, line in enumerate(lines, 1) if line.rstrip().endswith("# @" + tag)]
    return found


def at(found, tag, kinds=("value", "vjp")):
    """Whether the first finding is in this file at the tagged line."""
    first = found.findings[0] if found.findings else None
    return (
        first is not None
        and first.kind in kinds
        and first.line == line_of(tag)
        and pathlib.Path(__file__).name in str(first.file)
    )


def has(text, *words):
    """Whether text has one of the alternatives (a|b) of each word."""
    return all(any(part.lower() in str(text).lower() for part in word.split("|")) for word in words)


def sentence(call, *words):
    """Passes if call raises a TypeError or ValueError of clipgrad itself, whose message has the words."""
    try:
        call()
    except (TypeError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error}"
        ours = "/clipgrad/" in last.filename and "raise" in (last.line or "")
        if type(error) not in (TypeError, ValueError) or not ours:
            return False, f"RAW error from {last.filename}:{last.lineno}: {said}"
        return (True, said) if has(error, *words) else (False, "NOT A SENTENCE about it: " + said)
    return False, "SILENT: no error"


def warned(call, *words):
    """Passes if call warns in such words (and may then go on)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    said = " | ".join(str(w.message) for w in caught if "donated" not in str(w.message))
    return (any(has(w.message, *words) for w in caught)), said or "SILENT: no warning"


def apart(a, b):
    """The largest relative difference of two trees, leaf by leaf, in float64."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
    return max(float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)) for x, y in pairs)


def near(a, b, tolerance, said=""):
    distance = apart(a, b)
    return bool(
        distance <= tolerance
    ), f"apart from the reference by {distance:.2e} (allowed {tolerance}) {said}"


def clipped_sum(grads_of_examples, limit):
    """NumPy reference: the sum of the clipped gradients of examples, and their norms."""
    leaves, tree = jax.tree.flatten(
        jax.tree.map(lambda g: np.asarray(g, np.float64), grads_of_examples)
    )
    norms = np.sqrt(sum((leaf.reshape(len(leaf), -1) ** 2).sum(1) for leaf in leaves))
    scale = np.minimum(1.0, limit / np.maximum(norms, 1e-300))
    return jax.tree.unflatten(tree, [np.tensordot(scale, leaf, 1) for leaf in leaves]), norms


def check(fun, args, **keywords):
    return cg.check_grads(fun, args, raise_on_failure=False, **keywords)


def mesh(axis="data"):
    return jax.make_mesh((8,), (axis,), axis_types=(AxisType.Auto,))


# ---------------------------------------------------------------- mixed precision


def smooth(labels, classes, share):
    return (1 - share) * jax.nn.one_hot(labels, classes) + share / classes


def cross_entropy_head(share_in_backward):
    def logits_of(h, w):
        return jnp.dot(h.astype(bf16), w.astype(bf16), preferred_element_type=f32)

    @jax.custom_vjp
    def head(h, w, labels):
        return -jnp.mean(
            jnp.sum(smooth(labels, w.shape[1], 0.1) * jax.nn.log_softmax(logits_of(h, w)), -1)
        )

    def backward(saved, g):
        h, w, labels = saved
        d = (
            g
            / len(labels)
            * (jax.nn.softmax(logits_of(h, w)) - smooth(labels, w.shape[1], share_in_backward))
        )
        d = d.astype(bf16)
        dh = jnp.dot(d, w.astype(bf16).T, preferred_element_type=f32)
        dw = jnp.dot(h.astype(bf16).T, d, preferred_element_type=f32)
        return dh.astype(h.dtype), dw.astype(w.dtype), None

    head.defvjp(lambda *args: (head(*args), args), backward)
    return head


HEAD_ARGS = lambda: (rnd(1, 6, 8), rnd(2, 8, 5, scale=0.5), jnp.array([0, 3, 1, 4, 2, 2]))


@program("m_ce_head_right", "mixed", "right")
def _():
    """check_grads: fused cross entropy with label smoothing, bfloat16 operands, float32 logits and weights; right rule"""
    report = check(cross_entropy_head(0.1), HEAD_ARGS())
    return report.ok, str(report)


@program("m_ce_head_no_smoothing", "mixed", "finds")
def _():
    """check_grads: its backward forgets the label smoothing"""
    report = check(cross_entropy_head(0.0), HEAD_ARGS())
    return not report.ok and has(report, "args[0]|args[1]"), str(report)


@program("m_cotangent_norm_right", "mixed", "right")
def _():
    """value_and_grad_with_stats: the norm of float16 cotangents is above 65504 and must not be inf"""

    def loss(w, x, weights):
        with jax.named_scope("act"):
            h = x.astype(f16) * w.astype(f16)
        return jnp.sum(h.astype(f32) * weights)

    weights = 300 * jnp.sign(rnd(3, 500, 200)) + rnd(4, 500, 200)
    args = jnp.linspace(0.5, 1.5, 200), rnd(5, 500, 200, scale=0.1), weights
    expected = np.linalg.norm(np.asarray(weights.astype(f16), np.float64))
    plain = jax.jit(jax.value_and_grad(loss))(*args)
    assert expected > 65504 and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(plain))
    value, grads, stats = jax.jit(cg.value_and_grad_with_stats(loss))(*args)
    at_act = stats["act"]
    return near(
        (at_act.norm, at_act.clipped_norm, value, grads), (expected, expected, *plain), 5e-3
    )


@program("m_norm_rule_in_vmap", "mixed", "sentence")
def _():
    """error_clip_by_name: a norm rule at a bfloat16 value inside of a vmap measures all examples together: a warning"""

    def loss(w, xs):
        def one(x):
            with jax.named_scope("hidden"):
                h = jnp.tanh(x.astype(bf16) @ w.astype(bf16))
            return jnp.sum(h.astype(f32) ** 2)

        return jnp.mean(jax.vmap(one)(xs))

    args = rnd(6, 4, 3), rnd(7, 8, 4)
    assert np.isfinite(jax.grad(loss)(*args)).all()
    clipped = cg.error_clip_by_name(loss, {"hidden": cg.ClipByNorm(0.1)})
    return warned(lambda: jax.grad(clipped)(*args), "hidden|vmap", "example|batch|together")


def half_regression(params, batch, scale):
    x, y = batch
    h = jnp.tanh(x.astype(f16) @ params["w1"].astype(f16))
    out = (h @ params["w2"].astype(f16)).astype(f32)  # @half
    return scale * jnp.mean((out[:, 0] - y) ** 2)


HALF = lambda: (
    {"w1": rnd(5, 6, 16, scale=0.4), "w2": rnd(6, 16, 1, scale=0.3)},
    (rnd(7, 32, 6), 50 + rnd(8, 32)),
)


@program("m_loss_scale_overflows", "mixed", "finds")
def _():
    """diagnose: a loss scale of 2**16 makes cotangents above 65504 at the cast to float16"""
    found = cg.diagnose(functools.partial(half_regression, scale=2.0**16), HALF())
    return not found.ok and at(found, "half") and has(found, "float16|65504"), str(found)


@program("m_loss_scale_right", "mixed", "right")
def _():
    """diagnose: the same with a scale of 256"""
    found = cg.diagnose(functools.partial(half_regression, scale=256.0), HALF())
    return found.ok, str(found)


def cosine_attention(dtype, params, x):
    q, k = 40 * (x @ params["q"]).astype(dtype), 40 * (x @ params["k"]).astype(dtype)
    dots = q @ k.T  # @dots
    sizes = jnp.linalg.norm(q.astype(f32), axis=-1)[:, None] * jnp.linalg.norm(
        k.astype(f32), axis=-1
    )
    return jnp.mean((jax.nn.softmax(4 * dots.astype(f32) / sizes) @ x) ** 2)


COSINE = lambda: ({"q": rnd(9, 6, 64), "k": rnd(9, 6, 64)}, rnd(10, 5, 6))


@program("m_float16_dots_overflow", "mixed", "finds")
def _():
    """diagnose: products of queries and keys overflow float16 before they are divided by their norms"""
    found = cg.diagnose(functools.partial(cosine_attention, f16), COSINE())
    return not found.ok and at(found, "dots", ("value",)), str(found)


@program("m_bfloat16_dots_right", "mixed", "right")
def _():
    """diagnose: the same products in bfloat16"""
    found = cg.diagnose(functools.partial(cosine_attention, bf16), COSINE())
    return found.ok, str(found)


def nearly_fitted(params, x, scale):
    h = jnp.tanh(x.astype(f16) @ params["w1"].astype(f16))
    out = (h @ params["w2"].astype(f16)).astype(f32)
    return scale * jnp.mean((out - (jax.lax.stop_gradient(out) + 1e-5)) ** 2)


FITTED = lambda: (
    {"w1": rnd(11, 8, 16, scale=0.3), "w2": rnd(12, 16, 64, scale=0.3)},
    rnd(13, 128, 8),
)


@program("m_float16_underflow", "mixed", "finds")
def _():
    """diagnose: small residuals of a mean over 8192 outputs underflow to 0 in float16; names it, suggests loss scaling"""
    found = cg.diagnose(functools.partial(nearly_fitted, scale=1.0), FITTED())
    return not found.ok and has(found, "underflow", "scal", "w1|w2"), str(found)


@program("m_float16_scaled_right", "mixed", "right")
def _():
    """diagnose: the same with a loss scale of 2**16"""
    found = cg.diagnose(functools.partial(nearly_fitted, scale=2.0**16), FITTED())
    return found.ok, str(found)


def moving_average(careful, params, x):
    with jax.named_scope("hidden"):
        h = jax.nn.sigmoid(x.astype(bf16) @ params["w"].astype(bf16))
    with jax.named_scope("window"):
        if careful:
            m = sum(h[i : len(h) - 4 + i] for i in range(4)) / 4
        else:
            c = jnp.cumsum(h, 0)
            m = (c[4:] - c[:-4]) / 4
    with jax.named_scope("head"):
        return jnp.mean((m.astype(f32) * params["gain"]) ** 2)


AVERAGE = lambda: ({"w": rnd(14, 6, 4), "gain": 1 + rnd(15, 508, 4, scale=0.1)}, rnd(16, 512, 6))


@program("m_cumsum_loses", "mixed", "finds")
def _():
    """Compare with "float32": a moving average as a difference of bfloat16 cumulative sums"""
    found = cg.compare(functools.partial(moving_average, False), "float32", AVERAGE())
    return not found.ok and any(f.module == "window" for f in found.findings), str(found)


@program("m_shifted_sum_right", "mixed", "right")
def _():
    """Compare with "float32": the same average as a sum of four shifted arrays"""
    found = cg.compare(functools.partial(moving_average, True), "float32", AVERAGE())
    return found.ok, str(found)


def attention_loss(params, x, factor=8**-0.5, early=False):
    half = jax.tree.map(lambda w: w.astype(bf16), params)
    h = x.astype(bf16)
    with jax.named_scope("attention"):
        q, k, v = (h @ half[name] for name in "qkv")
        if early:
            scores = ((q * factor) @ k.T).astype(f32)
        else:
            scores = (q @ k.T).astype(f32) * factor
        h = h + jax.nn.softmax(scores).astype(bf16) @ v
    with jax.named_scope("mlp"):
        h = h + jnp.tanh(h @ half["up"])
    return jnp.mean(h.astype(f32) ** 2)


ATTENTION = lambda: (
    {n: rnd(20 + i, 8, 8, scale=0.6) for i, n in enumerate(("q", "k", "v", "up"))},
    rnd(25, 12, 8),
)


@program("m_port_divides_by_d", "mixed", "finds")
def _():
    """compare: a bfloat16 port divides the scores by d and not by its root"""
    found = cg.compare(attention_loss, functools.partial(attention_loss, factor=1 / 8), ATTENTION())
    first = found.findings[0] if found.findings else None
    return not found.ok and first.kind == "value" and first.module == "attention", str(found)


@program("m_port_scales_early_right", "mixed", "right")
def _():
    """compare: a bfloat16 port scales the queries before the product, which only rounds differently"""
    found = cg.compare(attention_loss, functools.partial(attention_loss, early=True), ATTENTION())
    return found.ok, str(found)


@program("m_forward_forgets_bias", "mixed", "finds")
def _():
    """check_grads: the forward rule of a bfloat16 dense layer leaves out the bias that the function adds"""

    def product(x, w):
        return jnp.dot(x.astype(bf16), w.astype(bf16), preferred_element_type=f32)

    dense = jax.custom_vjp(lambda x, w, b: product(x, w) + b)
    dense.defvjp(
        lambda x, w, b: (product(x, w), (x, w)),
        lambda saved, g: (
            product(g, saved[1].T).astype(g.dtype),
            product(saved[0].T, g).astype(g.dtype),
            g.sum(0),
        ),
    )
    report = check(dense, (rnd(26, 5, 4), rnd(27, 4, 3), 1 + rnd(28, 3, scale=0.1)))
    return not report.ok and any(f.check == "primal" for f in report.failures), str(report)


@program("m_per_example_right", "mixed", "right")
def _():
    """clip_per_example: bfloat16 compute, float32 weights; sum and norms are those of vmap(grad) and NumPy"""

    def loss(params, example):
        x, y = example
        h = jnp.tanh(x.astype(bf16) @ params["a"].astype(bf16))
        return jnp.mean(((h @ params["b"].astype(bf16)).astype(f32) - y) ** 2)

    params = {"a": rnd(30, 6, 16, scale=0.5), "b": rnd(31, 16, 3, scale=0.5)}
    batch = rnd(32, 10, 7, 6), 3 * rnd(33, 10, 7, 3)
    expected, norms = clipped_sum(jax.vmap(jax.grad(loss), (None, 0))(params, batch), 6.0)
    _, grads, stats = jax.jit(cg.clip_per_example(loss, cg.ClipByGlobalNorm(6.0), reduce="sum"))(
        params, batch
    )
    passed, said = near((grads, stats.norm), (expected, norms), 0.02)
    return passed and all(g.dtype == f32 for g in jax.tree.leaves(grads)), said


@program("m_value_stats_float16", "mixed", "right")
def _():
    """with_value_stats: the norm of float16 values is above 65504 and must not be inf"""

    def loss(w, x):
        with jax.named_scope("act"):
            h = x.astype(f16) * w.astype(f16)
        return jnp.mean(h.astype(f32))

    w, x = jnp.linspace(100, 400, 200), 1 + jnp.abs(rnd(34, 500, 200, scale=0.1))
    h = np.asarray(x.astype(f16) * w.astype(f16), np.float64)
    expected = np.linalg.norm(h), np.sqrt((h**2).mean()), np.abs(h).max()
    assert 65504 < expected[0]
    _, stats = jax.jit(cg.with_value_stats(loss))(w, x)
    return near((stats["act"].norm, stats["act"].rms, stats["act"].max), expected, 1e-3)


def half_loss(params, batch):
    x, y = batch
    h = jnp.tanh(x.astype(bf16) @ params["a"].astype(bf16))
    return jnp.mean(((h @ params["b"].astype(bf16))[:, 0].astype(f32) - y) ** 2)


ACCUMULATED = lambda: (
    {"a": rnd(35, 6, 16, scale=0.5), "b": rnd(36, 16, 1)},
    (rnd(37, 32, 6), 2 + rnd(38, 32)),
)


@program("m_accumulated_sum", "mixed", "finds")
def _():
    """Compare of steps: gradients of four bfloat16 microbatches are added up and not averaged; factor 1/4 named"""

    def whole(params, batch):
        value, grads = jax.value_and_grad(half_loss)(params, batch)
        return {"loss": value, "grads": grads}

    def parts(params, batch):
        def add(total, part):
            value, grads = jax.value_and_grad(half_loss)(params, part)
            return jax.tree.map(jnp.add, total, (value / 4, grads)), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        split = jax.tree.map(lambda a: a.reshape(4, 8, *a.shape[1:]), batch)
        value, grads = jax.lax.scan(add, zero, split)[0]
        return {"loss": value, "grads": grads}

    found = cg.compare(whole, parts, ACCUMULATED(), argnums=None)
    first = found.findings[0] if found.findings else None
    ok = (
        not found.ok
        and "grads" in str(first.path)
        and (abs((first.ratio or 0) - 0.25) < 0.01 or has(first.message, "1/4|0.25"))
    )
    return ok, str(found)


@program("m_accumulate_right", "mixed", "right")
def _():
    """train_step(accumulate=4): bfloat16 compute, the step is the float32 mean of the microbatches"""
    params, batch = ACCUMULATED()
    parts = [jax.grad(half_loss)(params, jax.tree.map(lambda a: a[i::4], batch)) for i in range(4)]
    mean = jax.tree.map(lambda *g: np.mean([np.asarray(x, np.float64) for x in g], 0), *parts)
    expected = jax.tree.map(lambda p, g: np.asarray(p, np.float64) - g, params, mean)
    step = cg.train_step(half_loss, optax.sgd(1.0), accumulate=4)
    state, metrics = step(step.init(params), batch)
    passed, said = near(state.params, expected, 5e-3)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(mean)))
    return passed and abs(metrics["grad_norm"] / norm - 1) < 0.01, said


@program("m_qk_clip_unwatched", "mixed", "sentence")
def _():
    """qk_clip in a bfloat16 training step that does not watch the logits"""

    def loss(params, x):
        q, k = (x.astype(bf16) @ params[n].astype(bf16).reshape(6, -1) for n in "qk")
        with jax.named_scope("scores"):
            scores = (q @ k.T).astype(f32)
        return jnp.mean(jax.nn.softmax(scores) ** 2)

    params = {"q": rnd(39, 6, 1, 4), "k": rnd(40, 6, 1, 4)}
    assert np.isfinite(loss(params, rnd(41, 5, 6)))
    optimizer = optax.chain(optax.sgd(0.1), cg.qk_clip([("scores", "q", "k", 1)], max_logit=10.0))

    def call():
        step = cg.train_step(loss, optimizer)
        step(step.init(params), rnd(41, 5, 6))

    return sentence(call, "max_logits|watch_values|logits")


# ---------------------------------------------------------------- sharded


def batch_norm(mean, var, params, x):
    return (x - mean) / jnp.sqrt(var + 1e-5) * params["gain"]


def bn_whole(params, x):
    def loss(params):
        h = x @ params["w"]
        mean, var = h.mean(0), (h**2).mean(0) - h.mean(0) ** 2
        return jnp.mean(jnp.tanh(batch_norm(mean, var, params, h)) ** 3), {"mean": mean, "var": var}

    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return {"stats": stats, "loss": value, "grads": grads}


def bn_sharded(sync):
    def device(params, x):
        def loss(params):
            h = x @ params["w"]
            mean, square = h.mean(0), (h**2).mean(0)
            if sync:
                mean, square = jax.lax.pmean((mean, square), "data")
            var = square - mean**2
            return jnp.mean(jnp.tanh(batch_norm(mean, var, params, h)) ** 3), {
                "mean": mean,
                "var": var,
            }

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.lax.pmean({"stats": stats, "loss": value, "grads": grads}, "data")

    return jax.jit(
        jax.shard_map(
            device, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )
    )


BN = lambda: (
    {"w": rnd(50, 5, 6), "gain": 1 + rnd(51, 6, scale=0.2)},
    rnd(52, 32, 5) + jnp.linspace(0, 2, 32)[:, None],
)


@program("s_batch_norm_local", "sharded", "finds")
def _():
    """Compare of steps: statistics of a batch norm of each device's rows alone"""
    found = cg.compare(bn_whole, bn_sharded(False), BN(), argnums=None)
    return not found.ok and found.findings[0].path in ("stats/var", "loss"), str(found)


@program("s_batch_norm_synced_right", "sharded", "right")
def _():
    """Compare of steps: the same with synchronized statistics"""
    found = cg.compare(bn_whole, bn_sharded(True), BN(), argnums=None)
    return found.ok, str(found)


def clip_in_parts(rule_of):
    grads = {"w": rnd(53, 16, 4), "b": rnd(54, 8)}
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in grads.values()))
    expected = jax.tree.map(lambda g: np.asarray(g, np.float64) / norm, grads)

    def call():
        device = lambda g: cg.clip_grads(g, rule_of())[0]
        return jax.jit(jax.shard_map(device, mesh=mesh(), in_specs=P("data"), out_specs=P("data")))(
            grads
        )

    return call, expected


@program("s_clip_of_a_part", "sharded", "sentence")
def _():
    """clip_grads in shard_map of gradients in parts, without axis_name: a warning"""
    call, _ = clip_in_parts(lambda: cg.ClipByGlobalNorm(1.0))
    return warned(call, "axis_name", "data")


@program("s_clip_with_axis_right", "sharded", "right")
def _():
    """clip_grads in shard_map with axis_name: the clip of the whole gradient"""
    call, expected = clip_in_parts(lambda: cg.ClipByGlobalNorm(1.0, axis_name="data"))
    return near(call(), expected, 1e-6)


def sharded_norms(safe):
    def device(w, x):
        h = x @ w
        if safe:
            squares = jnp.sum(h * h, -1)
            zero = squares == 0
            sizes = jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, squares)))
        else:
            sizes = jnp.sqrt(jnp.sum(h * h, -1))  # @shardsqrt
        return jax.lax.pmean(jnp.mean(sizes), "data")

    return jax.jit(jax.shard_map(device, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P()))


@program("s_nan_on_one_device", "sharded", "finds")
def _():
    """diagnose: a row of zeros on device 5 of a shard_map; names the line and the device"""
    found = cg.diagnose(sharded_norms(False), (rnd(55, 4, 3), rnd(56, 16, 4).at[11].set(0.0)))
    return not found.ok and at(found, "shardsqrt", ("vjp",)) and has(found, "data=5"), str(found)


@program("s_safe_norm_right", "sharded", "right")
def _():
    """diagnose: the same with a safe norm"""
    found = cg.diagnose(sharded_norms(True), (rnd(55, 4, 3), rnd(56, 16, 4).at[11].set(0.0)))
    return found.ok, str(found)


def column_parallel(twice):
    @jax.custom_vjp
    def enter(x):
        return x

    enter.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.psum(g, "data"),))
    device = lambda x, w: jnp.tanh((enter(x) if twice else x) @ w)
    specs = {"in_specs": (P(), P(None, "data")), "out_specs": P(None, "data")}
    return jax.jit(jax.shard_map(device, mesh=mesh(), check_vma=False, **specs))


@program("s_psum_twice", "sharded", "finds")
def _():
    """check_grads: a column-parallel layer whose backward adds the devices up a second time"""
    report = check(column_parallel(True), (rnd(57, 4, 3), rnd(58, 3, 16)))
    return not report.ok and has(report, "args[0]") and not any(
        "args[1]" in f.where for f in report.failures
    ), str(report)


@program("s_psum_once_right", "sharded", "right")
def _():
    """check_grads: the same layer without the second psum"""
    report = check(column_parallel(False), (rnd(57, 4, 3), rnd(58, 3, 16)))
    return report.ok, str(report)


def private(rule_of):
    def loss(params, example):
        x, y = example
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)

    params = {"a": rnd(60, 4, 8), "b": rnd(61, 8, 2)}
    batch = rnd(62, 16, 3, 4), 3 * rnd(63, 16, 3, 2)
    expected = clipped_sum(jax.vmap(jax.grad(loss), (None, 0))(params, batch), 12.0)

    def call():
        def device(params, batch):
            _, grads, stats = cg.clip_per_example(loss, rule_of(), reduce="sum")(params, batch)
            return jax.lax.psum(grads, "data"), stats.norm

        specs = {"in_specs": (P(), P("data")), "out_specs": (P(), P("data"))}
        return jax.jit(jax.shard_map(device, mesh=mesh(), **specs))(params, batch)

    return call, expected


@program("s_axis_of_the_examples", "sharded", "sentence")
def _():
    """clip_per_example in shard_map with an axis_name that the examples are spread over"""
    call, _ = private(lambda: cg.ClipByGlobalNorm(12.0, axis_name="data"))
    return sentence(call, "axis_name", "data|example")


@program("s_private_sum_right", "sharded", "right")
def _():
    """clip_per_example in shard_map, then psum: the sum and the norms of NumPy"""
    call, expected = private(lambda: cg.ClipByGlobalNorm(12.0))
    return near(call(), expected, 2e-5)


def token_loss(params, batch):
    x, y, mask = batch
    return mask * jnp.sum((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2, -1), mask


def masked_mean(params, batch):
    losses, mask = token_loss(params, batch)
    return jnp.sum(losses) / jnp.sum(mask)


def TOKENS():
    mask = (jnp.arange(12) < 1 + (jnp.arange(16) * 5 % 12)[:, None]).astype(f32)
    return {"a": rnd(64, 4, 8), "b": rnd(65, 8, 2)}, (rnd(66, 16, 12, 4), rnd(67, 16, 12, 2), mask)


def clipped_in_parts(axis_name):
    w, x = rnd(68, 4, 3), rnd(69, 16, 4)
    h = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    norm = np.linalg.norm(3 * h**2)
    expected = norm, 2.0, np.asarray(x, np.float64).T @ (3 * h**2) * 2 / norm

    def device(w, x):
        with jax.named_scope("hidden"):
            h = x @ w
        return jax.lax.psum(jnp.sum(h**3), "data")

    def call():
        fun = jax.shard_map(device, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
        rules = {"hidden": cg.ClipByNorm(2.0, **({"axis_name": axis_name} if axis_name else {}))}
        _, grads, stats = jax.jit(cg.value_and_grad_with_stats(fun, rules=rules))(w, x)
        return stats["hidden"].norm, stats["hidden"].clipped_norm, grads

    assert norm > 2 and np.allclose(
        jax.grad(lambda w: jnp.sum((x @ w) ** 3))(w) * 2 / norm, expected[2], rtol=1e-4
    )
    return call, expected


@program("s_error_clip_of_a_part", "sharded", "sentence")
def _():
    """value_and_grad_with_stats: a norm rule inside of shard_map at rows in parts, without axis_name: a warning"""
    call, _ = clipped_in_parts(None)
    return warned(call, "axis_name", "data")


@program("s_error_clip_with_axis_right", "sharded", "right")
def _():
    """value_and_grad_with_stats: the same with axis_name: norms of all devices together, and NumPy's gradient"""
    call, expected = clipped_in_parts("data")
    return near(call(), expected, 1e-5)


def heads_in_parts(watch):
    q, k = rnd(68, 16, 5, 4), rnd(69, 16, 5, 4)
    expected = np.abs(np.einsum("htd,hsd->hts", np.asarray(q), np.asarray(k))).max((1, 2))

    def device(q, k):
        with jax.named_scope("scores"):
            scores = jnp.einsum("htd,hsd->hts", q, k)
        return jax.lax.psum(jnp.sum(jax.nn.softmax(scores) ** 2), "m")

    def call():
        fun = jax.shard_map(device, mesh=mesh("m"), in_specs=(P("m"), P("m")), out_specs=P())
        return jax.jit(cg.with_value_stats(fun, watch=watch))(q, k)[1]["scores"].max

    return call, expected


@program("s_heads_are_cut", "sharded", "sentence")
def _():
    """with_value_stats: each head of scores whose heads are cut by the mesh: a warning says what to write"""
    call, _ = heads_in_parts({"scores": 0})
    return warned(call, "scores", "'m'|\"m\"")


@program("s_heads_are_named_right", "sharded", "right")
def _():
    """with_value_stats: the same with (axis, mesh axis): the largest scores of all sixteen heads in order"""
    call, expected = heads_in_parts({"scores": (0, "m")})
    return near(call(), expected, 1e-5)


@program("s_rows_repeat", "sharded", "finds")
def _():
    """Compare of steps: a missing pmean, hidden by the same rows on each device; a note must say so"""
    loss = lambda w, x: jnp.mean((x @ w - 1.0) ** 2)
    whole = lambda w, x: {"grads": jax.grad(loss)(w, x)}
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    device = jax.jit(jax.shard_map(whole, mesh=mesh(), **specs))
    found = cg.compare(whole, device, (rnd(70, 4), jnp.tile(rnd(71, 2, 4), (8, 1))), argnums=None)
    return has(" ".join(map(str, found.notes)), "row|repeat|same on"), str(found) + str(found.notes)


@program("s_train_step_right", "sharded", "right")
def _():
    """train_step with parameters and batch in parts: three steps are those of optax on one device"""

    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch[0] @ params["a"]) @ params["b"] - batch[1]) ** 2)

    params = {"a": rnd(72, 8, 16), "b": rnd(73, 16, 8)}
    batch = rnd(74, 32, 8), rnd(75, 32, 8)
    reference, optimizer = (
        params,
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.3, momentum=0.9)),
    )
    state = optimizer.init(reference)
    for _ in range(3):
        updates, state = optimizer.update(jax.grad(loss)(reference, batch), state, reference)
        reference = optax.apply_updates(reference, updates)
    place = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh(), spec))
    step = cg.train_step(
        loss, optax.chain(cg.clip_by_global_norm(0.5), optax.sgd(0.3, momentum=0.9))
    )
    state = step.init(place(params, P("data", None)))
    for _ in range(3):
        state, metrics = step(state, place(batch, P("data")))
    passed, said = near(state.params, reference, 1e-5)
    return passed and abs(metrics["clipped_norm"] - 0.5) < 1e-5, said


def recorded(bad):
    def loss(w, x):
        sizes = jnp.sum((x * w) ** 2, -1)
        return jnp.mean(jnp.log(sizes))

    whole, parts = NamedSharding(mesh(), P()), NamedSharding(mesh(), P("data"))
    batches = [np.array(1 + rnd(80 + i, 16, 4)) for i in range(6)]
    if bad:
        batches[3][9] = 0.0
    values = [float(loss(jnp.ones(4), x)) for x in batches]
    assert [np.isfinite(v) for v in values] == [not (bad and i == 3) for i in range(6)]
    step = cg.train_step(loss, cg.skip_spikes(optax.sgd(0.01), halt=True))
    state = step.init(jax.device_put(jnp.ones(4), whole))
    with cg.FlightRecorder(tempfile.mkdtemp(), raise_on_halt=True) as recorder:
        for i, x in enumerate(batches):
            state, metrics = step(state, jax.device_put(x, parts))
            jax.block_until_ready(metrics)
            recorder.record(state, jax.device_put(x, parts), step=i)
    return loss, batches, recorder


@program("s_recorder_halts", "sharded", "finds")
def _():
    """recorder: a zero row of step 3 on device 4 of 8; the capture has step and batch, diagnose line and example"""
    try:
        recorded(True)
    except cg.HaltedError as error:
        capture = cg.load_capture(error.path)
        bad = np.array(1 + rnd(83, 16, 4))
        bad[9] = 0.0
        found = cg.diagnose(
            lambda w, x: jnp.mean(jnp.log(jnp.sum((x * w) ** 2, -1))), capture.args, examples=1
        )
        same = capture.step == 3 and np.array_equal(np.asarray(capture.batch), bad)
        return same and not found.ok and has(
            " ".join(map(str, found.examples)), "example 9"
        ), f"{capture.step} {found}"
    return False, "SILENT: no halt"


@program("s_recorder_clean_right", "sharded", "right")
def _():
    """recorder: the same run without the zero row neither halts nor writes"""
    _, _, recorder = recorded(False)
    return len(recorder.captures) == 0, f"captures {recorder.captures}"


@program("s_norms_are_added", "sharded", "finds")
def _():
    """Compare of steps: the norms of eight parts of the gradient are added, not their squares"""
    loss = lambda params, x: jnp.mean((jnp.tanh(x @ params["a"].T) @ params["b"] - 1.0) ** 2)

    def step(norm):
        def run(params, x):
            grads = jax.grad(loss)(params, x)
            return {
                "norm": norm(grads),
                "params": jax.tree.map(lambda p, g: p - 0.1 * g, params, grads),
            }

        return jax.jit(run)

    size = lambda grads: jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    parts = jax.shard_map(
        lambda g: jax.lax.psum(size(g), "data"), mesh=mesh(), in_specs=P("data"), out_specs=P()
    )
    args = {"a": rnd(86, 16, 4), "b": rnd(87, 16, 3)}, rnd(88, 10, 4)
    found = cg.compare(step(size), step(parts), args, argnums=None)
    return not found.ok and found.findings[0].path == "norm" and len(found.findings) == 1, str(
        found
    )


@program("s_qk_clip_right", "sharded", "right")
def _():
    """qk_clip with kernels in parts by head: heads above the limit are scaled, others keep their bits"""
    params = {"q": rnd(89, 6, 8, 4), "k": rnd(90, 6, 8, 4)}
    largest = jnp.array([5.0, 40.0, 9.9, 1000.0, 10.0, 12.0, 1.0, 20.0])
    gamma = np.minimum(1.0, 10.0 / np.asarray(largest, np.float64))[:, None] ** 0.5
    expected = jax.tree.map(lambda p: np.asarray(p, np.float64) * gamma, params)
    params = jax.device_put(params, NamedSharding(mesh("m"), P(None, "m", None)))
    tx = cg.qk_clip([("scores", "q", "k", 1)], max_logit=10.0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    update = jax.jit(
        lambda p: optax.apply_updates(
            p, tx.update(zeros, tx.init(p), p, max_logits={"scores": largest})[0]
        )
    )
    result = update(params)
    passed, said = near(result, expected, 1e-6)
    return passed and bool((result["q"][:, 0] == params["q"][:, 0]).all()), said


# ---------------------------------------------------------------- public reports


def vtrace(safe, w, batch):
    x, actions, old, advantage, valid = batch
    new = jnp.take_along_axis(jax.nn.log_softmax(x @ w), actions[:, None], 1)[:, 0]
    if safe:
        rho = jnp.exp(jnp.clip(new - old, -20.0, 20.0))
    else:
        rho = jnp.exp(new - old)  # @vtrace
    gain = jnp.minimum(rho, 1.0) * advantage
    return -jnp.sum(jnp.where(valid, gain, 0.0)) / jnp.sum(valid)


def VTRACE():
    old = jnp.full(12, -1.2).at[9:].set(-500.0)
    return rnd(100, 5, 3), (
        rnd(101, 12, 5),
        jnp.arange(12) % 3,
        old,
        rnd(102, 12),
        jnp.arange(12) < 9,
    )


@program("p_importance_ratio", "public", "finds")
def _():
    """diagnose: V-trace's min(1, exp(new - old)) overflows at padding; line of exp, and that a value is hidden there"""
    found = cg.diagnose(functools.partial(vtrace, False), VTRACE())
    return not found.ok and at(found, "vtrace") and has(
        found.findings[0].message, "where|minimum|clamp|clip|hidden"
    ), str(found)


@program("p_importance_ratio_right", "public", "right")
def _():
    """diagnose: the argument of exp is clamped"""
    found = cg.diagnose(functools.partial(vtrace, True), VTRACE())
    return found.ok, str(found)


def ranked(params, batch):
    ids, y = batch
    h = jnp.take(params["table"], ids, axis=0)  # @take
    score = jnp.tanh(h @ params["w"])
    return jnp.mean(jnp.where(ids != 12, (score - y) ** 2, 0.0))


RANKED = lambda ids: (
    {"table": rnd(103, 10, 4), "w": rnd(104, 4)},
    (jnp.array(ids), rnd(105, 2, 3)),
)


@program("p_index_beyond_table", "public", "finds")
def _():
    """diagnose: the padding id 12 is beyond a table of 10 rows, reads NaN, and is masked later"""
    found = cg.diagnose(ranked, RANKED([[1, 4, 12], [0, 9, 3]]))
    return not found.ok and at(found, "take") and has(
        found.findings[0].message, "index", "12"
    ), str(found)


@program("p_index_in_table_right", "public", "right")
def _():
    """diagnose: the same with ids within the table"""
    found = cg.diagnose(ranked, RANKED([[1, 4, 9], [0, 9, 3]]))
    return found.ok, str(found)


def windowed(mask_value, params, batch):
    x, real = batch
    with jax.named_scope("attention"):
        near_by = jnp.abs(jnp.arange(8)[:, None] - jnp.arange(8)) < 2
        scores = (x @ params["q"]) @ x.T
        scores = jnp.where(near_by & real, scores, mask_value)
        x = jax.nn.softmax(scores) @ x
    return jnp.sum(jnp.where(real[:, None], x @ params["o"], 0.0) ** 2)


WINDOWED = lambda: ({"q": rnd(106, 4, 4), "o": rnd(107, 4, 2)}, (rnd(108, 8, 4), jnp.arange(8) < 5))


@program("p_row_all_masked", "public", "finds")
def _():
    """diagnose: window and padding together mask whole rows with -inf; the loss drops those rows"""
    found = cg.diagnose(functools.partial(windowed, -jnp.inf), WINDOWED())
    first = found.findings[0] if found.findings else None
    return not found.ok and first.module == "attention" and has(first.message, "softmax|mask"), str(
        found
    )


@program("p_row_all_masked_right", "public", "right")
def _():
    """diagnose: the same with a finite mask value"""
    found = cg.diagnose(functools.partial(windowed, float(jnp.finfo(f32).min)), WINDOWED())
    return found.ok, str(found)


def routed(first_softmax, params, x):
    logits = x @ params["router"]
    if first_softmax:
        gates, chosen = jax.lax.top_k(jax.nn.softmax(logits), 1)
    else:
        best, chosen = jax.lax.top_k(logits, 1)
        gates = jax.nn.softmax(best, axis=-1)
    experts = jnp.tanh(jnp.einsum("td,edf->tef", x, params["experts"]))
    out = jnp.take_along_axis(experts, chosen[:, :, None], 1) * gates[:, :, None]
    return jnp.mean((out.sum(1) - 1.0) ** 2)


ROUTED = lambda: ({"router": rnd(109, 4, 3), "experts": rnd(110, 3, 4, 2)}, rnd(111, 9, 4))


@program("p_router_of_one", "public", "finds")
def _():
    """diagnose: softmax over the single best logit; the gradient of the router is exactly zero"""
    found = cg.diagnose(functools.partial(routed, False), ROUTED())
    said = " ".join(f.message for f in found.findings)
    return not found.ok and has(said, "router", "zero|is 0|length 1|one element"), str(found)


@program("p_router_right", "public", "right")
def _():
    """diagnose: softmax before the choice"""
    found = cg.diagnose(functools.partial(routed, True), ROUTED())
    return found.ok, str(found)


@program("p_equilibrium_detached", "public", "finds")
def _():
    """check_grads: an equilibrium whose gradient is one Newton step, in which one parameter was detached; named at the top"""

    def solve(a, b):
        z = jnp.zeros_like(b)
        for _ in range(30):
            z = jax.lax.stop_gradient(jnp.tanh(a * z + b))
        slope = jax.lax.stop_gradient(1 - a * (1 - z**2))
        return z - (z - jnp.tanh(jax.lax.stop_gradient(a) * z + b)) / slope

    report = check(solve, (jnp.array([0.1, -0.2, 0.3]), jnp.array([0.5, 0.8, -0.4])))
    top = "\n".join(str(report).splitlines()[:2])
    return not report.ok or has(top, "stop_gradient"), str(report)


@program("p_semi_gradient_right", "public", "right")
def _():
    """check_grads: the semi-gradient of temporal differences stops the target on purpose; passes (a note may say so)"""

    def loss(w, now, then, reward):
        q = lambda x: jnp.tanh(x @ w).sum(-1)
        return jnp.mean((jax.lax.stop_gradient(reward + 0.9 * q(then)) - q(now)) ** 2)

    report = check(loss, (rnd(112, 4, 3), rnd(113, 6, 4), rnd(114, 6, 4), rnd(115, 6)), wrt="w")
    return report.ok, str(report)


def swiglu(right):
    def run(kernel, count, *arrays):
        shape = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
        return pl.pallas_call(
            kernel, out_shape=(shape,) * count if count > 1 else shape, interpret=True
        )(*arrays)

    def forward(a_ref, b_ref, out_ref):
        out_ref[...] = a_ref[...] * b_ref[...] * jax.nn.sigmoid(b_ref[...])

    def backward(a_ref, b_ref, g_ref, da_ref, db_ref):
        a, b, g = a_ref[...], b_ref[...], g_ref[...]
        s = jax.nn.sigmoid(b)
        da_ref[...] = g * b * s
        db_ref[...] = g * a * s * (1 + b * (1 - s) if right else 1 + (1 - s))

    glu = jax.custom_vjp(lambda a, b: run(forward, 1, a, b))
    glu.defvjp(lambda a, b: (glu(a, b), (a, b)), lambda saved, g: run(backward, 2, *saved, g))
    return glu


@program("p_pallas_swiglu", "public", "finds")
def _():
    """check_grads: a Pallas kernel of SwiGLU whose backward kernel forgets a factor in the gate"""
    report = check(swiglu(False), (rnd(116, 3, 4), rnd(117, 3, 4)))
    return not report.ok and has(report, "args[1]") and not any(
        "args[0]" in f.where for f in report.failures
    ), str(report)


@program("p_pallas_swiglu_right", "public", "right")
def _():
    """check_grads: the right kernel"""
    report = check(swiglu(True), (rnd(116, 3, 4), rnd(117, 3, 4)))
    return report.ok, str(report)


def accumulated_tokens(of_tokens, params, batch):
    def part_loss(params, part):
        losses, mask = token_loss(params, part)
        return jnp.sum(losses) / (jnp.sum(batch[2]) if of_tokens else 4 * jnp.sum(mask))

    split = jax.tree.map(lambda a: a.reshape(4, -1, *a.shape[1:]), batch)
    values, grads = jax.lax.map(lambda part: jax.value_and_grad(part_loss)(params, part), split)
    return {"loss": values.sum(), "grads": jax.tree.map(lambda g: g.sum(0), grads)}


def whole_tokens(params, batch):
    value, grads = jax.value_and_grad(masked_mean)(params, batch)
    return {"loss": value, "grads": grads}


@program("p_accumulated_token_means", "public", "finds")
def _():
    """Compare of steps: accumulation averages the token means of microbatches of different lengths"""
    found = cg.compare(
        whole_tokens, functools.partial(accumulated_tokens, False), TOKENS(), argnums=None
    )
    return not found.ok and found.findings[0].path.split("/")[0] in ("loss", "grads"), str(found)


@program("p_accumulated_tokens_right", "public", "right")
def _():
    """Compare of steps: accumulation divides by the tokens of the whole batch"""
    found = cg.compare(
        whole_tokens, functools.partial(accumulated_tokens, True), TOKENS(), argnums=None
    )
    return found.ok, str(found)


def block(act, params, x):
    with jax.named_scope("norm"):
        h = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    with jax.named_scope("mlp"):
        h = act(h @ params["up"]) @ params["down"]
    with jax.named_scope("head"):
        return jnp.mean((x + h) @ params["head"])


BLOCK = lambda: (
    {"up": rnd(118, 6, 24), "down": rnd(119, 24, 6, scale=0.2), "head": rnd(120, 6)},
    rnd(121, 10, 6),
)


def torch_gelu(x):
    return 0.5 * x * (1 + jax.lax.erf(x / np.sqrt(2.0).astype(np.float32)))


@program("p_port_gelu", "public", "finds")
def _():
    """compare: torch's exact gelu, ported as jax.nn.gelu, which is the tanh approximation"""
    found = cg.compare(
        functools.partial(block, torch_gelu), functools.partial(block, jax.nn.gelu), BLOCK()
    )
    first = found.findings[0] if found.findings else None
    return not found.ok and first.kind == "value" and first.module == "mlp", str(found)


@program("p_port_gelu_right", "public", "right")
def _():
    """compare: the port with approximate=False"""
    exact = functools.partial(jax.nn.gelu, approximate=False)
    found = cg.compare(
        functools.partial(block, torch_gelu), functools.partial(block, exact), BLOCK()
    )
    return found.ok, str(found)


def unscaled_step(clip, divide_first, params, batch):
    grads = jax.grad(lambda p: 1024.0 * half_free_loss(p, batch))(params)
    divide = lambda tree: jax.tree.map(lambda g: g / 1024.0, tree)
    return {"updates": clip(divide(grads)) if divide_first else divide(clip(grads))}


def half_free_loss(params, batch):
    return jnp.mean((jnp.tanh(batch[0] @ params["a"]) @ params["b"] - batch[1]) ** 2)


def by_hand(grads):
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / norm), grads)


UNSCALED = lambda: (
    {"a": rnd(122, 5, 8), "b": rnd(123, 8, 2)},
    (rnd(124, 16, 5), 3 + rnd(125, 16, 2)),
)


@program("p_clip_before_unscale", "public", "finds")
def _():
    """Compare of steps: the gradient is clipped before it is divided by the loss scale; the factor is 1024"""
    right, wrong = (functools.partial(unscaled_step, by_hand, first) for first in (True, False))
    found = cg.compare(right, wrong, UNSCALED(), argnums=None)
    return not found.ok and abs((found.findings[0].ratio or 0) / 1024 - 1) < 0.01, str(found)


@program("p_clip_after_unscale_right", "public", "right")
def _():
    """Compare of steps: divided first, then clip_by_global_norm of clipgrad, beside a clip by hand"""
    clip = cg.clip_by_global_norm(0.5)
    ours = lambda grads: clip.update(grads, clip.init(grads))[0]
    right, other = (functools.partial(unscaled_step, c, True) for c in (by_hand, ours))
    found = cg.compare(right, other, UNSCALED(), argnums=None)
    return found.ok, str(found)


def masked_scores(scale_in_backward):
    @jax.custom_vjp
    def scores(q, k, mask):
        return jnp.where(mask, 0.5 * q @ k.T, jnp.finfo(q.dtype).min)

    def backward(saved, g):
        q, k, mask = saved
        g = scale_in_backward * jnp.where(mask, g, 0.0)
        return g @ k, g.T @ q, None

    scores.defvjp(lambda *args: (scores(*args), args), backward)
    return scores


SCORES = lambda: (rnd(126, 5, 4), rnd(127, 5, 4), jnp.tril(jnp.ones((5, 5), bool)))


@program("p_scores_scale", "public", "finds")
def _():
    """check_grads: a kernel of causal scores with finfo.min among its outputs; its backward forgets the scale"""
    report = check(masked_scores(1.0), SCORES())
    return not report.ok and has(report, "args[0]|args[1]"), str(report)


@program("p_scores_right", "public", "right")
def _():
    """check_grads: the right kernel, with finfo.min among its outputs"""
    report = check(masked_scores(0.5), SCORES())
    return report.ok, str(report)


# ---------------------------------------------------------------- in a hurry


@program("l_check_ones_right", "lazy", "right")
def _():
    """check_grads: a dense layer with relu at ones and zeros"""
    layer = lambda x, w, b: jax.nn.relu(x @ w + b)
    report = check(layer, (jnp.ones((4, 3)), jnp.ones((3, 2)), jnp.zeros(2)))
    return report.ok, str(report)


@program("l_check_ones_transposes", "lazy", "finds")
def _():
    """check_grads: a matrix product whose rule misses both transposes, at ones, where this does not show"""
    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1], saved[0] @ g))
    report = check(product, (jnp.ones((3, 3)), jnp.ones((3, 3))))
    return not report.ok, str(report)


@program("l_diagnose_numbers_right", "lazy", "right")
def _():
    """diagnose: Python numbers as weight and data"""
    found = cg.diagnose(lambda w, x: (w * x - 1.0) ** 2, (2.0, 3))
    return found.ok, str(found)


@program("l_forgotten_has_aux", "lazy", "sentence")
def _():
    """diagnose: a loss that returns (loss, metrics), without has_aux"""
    loss = lambda w, x: (jnp.mean((x @ w) ** 2), {"n": len(x)})
    return sentence(lambda: cg.diagnose(loss, (jnp.ones(3), jnp.ones((2, 3)))), "has_aux|scalar")


@program("l_compare_numbers_right", "lazy", "right")
def _():
    """compare: two formulas of one polynomial at a Python number"""
    found = cg.compare(lambda w: (w + 1.0) ** 2, lambda w: w * w + 2 * w + 1, (3.0,))
    return found.ok, str(found)


@program("l_args_is_an_array", "lazy", "sentence")
def _():
    """check_grads: the argument itself in place of a tuple"""
    return sentence(lambda: cg.check_grads(jnp.sin, jnp.ones(3)), "args", "tuple")


@program("l_one_example_right", "lazy", "right")
def _():
    """clip_per_example and per_example_norms: a batch of one example of ones"""
    loss = lambda w, x: jnp.sum(x @ w)
    expected = np.full((3, 2), 1 / np.sqrt(6)), np.array([np.sqrt(6)]), np.array([np.sqrt(6)])
    w, x = jnp.zeros((3, 2)), jnp.ones((1, 3))
    _, grads, stats = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0))(w, x)
    return near((grads, stats.norm, cg.per_example_norms(loss)(w, x)), expected, 1e-5)


@program("l_batch_of_two_lengths", "lazy", "sentence")
def _():
    """clip_per_example: four inputs and five labels"""
    loss = lambda w, e: (e["x"] @ w - e["y"]) ** 2
    call = lambda: cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0))(
        jnp.ones(3), {"x": jnp.ones((4, 3)), "y": jnp.ones(5)}
    )
    return sentence(call, "leading|length|axis|entries|examples")


@program("l_scalar_parameter_right", "lazy", "right")
def _():
    """train_step: a Python number is the parameter, another one the batch"""
    step = cg.train_step(lambda w, x: (w * x) ** 2, optax.sgd(0.1))
    state, metrics = step(step.init(1.0), 2.0)
    return near((state.params, metrics["loss"], metrics["grad_norm"]), (0.2, 4.0, 8.0), 1e-5)


@program("l_loss_of_shape_one", "lazy", "sentence")
def _():
    """train_step: a loss of shape (1,), from predictions of shape (n, 1)"""
    loss = lambda w, x: jnp.mean((x @ w) ** 2, axis=0)
    step = cg.train_step(loss, optax.sgd(0.1))
    return sentence(lambda: step(step.init(jnp.ones((3, 1))), jnp.ones((4, 3))), "scalar")


@program("l_optimizer_not_called", "lazy", "sentence")
def _():
    """train_step: optax.adam in place of optax.adam(1e-3)"""
    return sentence(
        lambda: cg.train_step(lambda w, x: jnp.sum(w * x), optax.adam),
        "optimizer",
        "adam|call|transformation",
    )


@program("l_values_of_zeros_right", "lazy", "right")
def _():
    """with_value_stats: zeros; no NaN, all elements are zero"""

    def model(w, x):
        with jax.named_scope("hidden"):
            h = jnp.tanh(x @ w)
        return h.sum()

    _, stats = cg.with_value_stats(model)(jnp.zeros((3, 2)), jnp.zeros((4, 3)))
    at_hidden = stats["hidden"]
    found = [
        float(v)
        for v in (
            at_hidden.norm,
            at_hidden.rms,
            at_hidden.max,
            at_hidden.nonfinite,
            at_hidden.zeros,
        )
    ]
    return found == [0.0, 0.0, 0.0, 0.0, 1.0], str(found)


@program("l_misspelt_module", "lazy", "sentence")
def _():
    """error_clip_by_name: "blokc_0"; the error lists the name that there is"""

    def loss(w, x):
        with jax.named_scope("block_0"):
            h = x @ w
        return jnp.sum(h**2)

    clipped = cg.error_clip_by_name(loss, {"blokc_0": cg.ErrorClipByValue(max=0.1)})
    return sentence(
        lambda: jax.grad(clipped)(jnp.ones((3, 2)), jnp.ones((4, 3))), "blokc_0", "block_0"
    )


@program("l_clips_of_zeros_right", "lazy", "right")
def _():
    """Gradient clips of a gradient of zeros at weights of zeros: zeros, no NaN"""
    zeros = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
    clips = [
        cg.clip_by_global_norm(1.0),
        cg.clip_by_norm(1.0),
        cg.clip_by_value(1.0),
        cg.clip_by_block_rms(1.0),
    ]
    clips += [
        cg.adaptive_grad_clip(0.01),
        cg.gradient_clip(cg.AutoNorm()),
        cg.clip_by_global_norm(0),
    ]
    results = [tx.update(zeros, tx.init(zeros), zeros)[0] for tx in clips]
    return all(bool((leaf == 0).all()) for leaf in jax.tree.leaves(results)), str(results[-1])


@program("l_rule_is_a_number", "lazy", "sentence")
def _():
    """train_step(error_clip={"h": 0.1}): a number in place of a rule"""

    def loss(w, x):
        return jnp.sum(checkpoint_name(x * w, "h"))

    def call():
        step = cg.train_step(loss, optax.sgd(0.1), error_clip={"h": 0.1})
        step(step.init(jnp.ones(3)), jnp.ones(3))

    return sentence(call, "0.1", "rule", "ErrorClipByValue|ClipByValue")


@program("l_numpy_arguments_right", "lazy", "right")
def _():
    """value_and_grad_with_stats: NumPy arrays of ones; value, gradient and cotangent norm by hand"""

    def loss(w, x):
        with jax.named_scope("hidden"):
            h = x @ w
        return jnp.sum(h**2)

    w, x = np.ones((3, 2), np.float32), np.ones((4, 3), np.float32)
    expected = 72.0, np.full((3, 2), 24.0), 6 * np.sqrt(8)
    value, grads, stats = cg.value_and_grad_with_stats(loss)(w, x)
    return near((value, grads, stats["hidden"].norm), expected, 1e-6)


@program("l_kernel_path_misspelt", "lazy", "sentence")
def _():
    """qk_clip: a path that is not in the parameters"""
    params = {"attn": {"query": jnp.ones((2, 1, 2)), "key": jnp.ones((2, 1, 2))}}
    return sentence(
        lambda: cg.qk_clip([("scores", "atn/query", "attn/key", 1)]).init(params),
        "atn/query",
        "attn/query",
    )


@program("l_error_clip_in_scan_right", "lazy", "right")
def _():
    """clip_cotangent and error_clip_by_name: a sum over a scan from zeros; the gradient by hand is 6"""

    def loss(by_hand, w, xs):
        def cell(h, x):
            h = checkpoint_name(h + w * x, "h")
            return (cg.clip_cotangent(h, cg.ErrorClipByValue(max=1.0)) if by_hand else h), None

        return jnp.sum(10 * jax.lax.scan(cell, jnp.zeros(2), xs)[0])

    by_name = cg.error_clip_by_name(
        functools.partial(loss, False), {"h": cg.ErrorClipByValue(max=1.0)}
    )
    grads = [jax.grad(f)(1.0, jnp.ones((3, 2))) for f in (functools.partial(loss, True), by_name)]
    return near(grads, [6.0, 6.0], 1e-6)


@program("l_recorder_number_right", "lazy", "right")
def _():
    """recorder: the number of the batch in place of the batch, Python scalars, a run that is fine"""
    step = cg.train_step(
        lambda w, x: jnp.sum((w - x) ** 2), cg.skip_spikes(optax.sgd(0.1), halt=True)
    )
    state = step.init(jnp.zeros(2))
    with cg.FlightRecorder(tempfile.mkdtemp()) as recorder:
        for i in range(4):
            state, metrics = step(state, jnp.ones(2))
            recorder.record(state, i, loss=metrics["loss"])
    passed, said = near(state.params, np.full(2, 1 - 0.8**4), 1e-5)
    return passed and len(recorder.captures) == 0, said


@program("l_recorder_without_halt", "lazy", "sentence")
def _():
    """recorder: an optimizer without skip_spikes(halt=True)"""
    step = cg.train_step(lambda w, x: jnp.sum((w - x) ** 2), optax.sgd(0.1))
    state, _ = step(step.init(jnp.zeros(2)), jnp.ones(2))
    recorder = cg.FlightRecorder(tempfile.mkdtemp())
    return sentence(lambda: recorder.record(state, jnp.ones(2)), "skip_spikes|halt")
