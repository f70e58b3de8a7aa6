"""QK-clip against its formula in NumPy, and on attention as it is in frameworks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import assert_same

RNG = np.random.default_rng(0)
LIMIT = 2.0


def normal(*shape):
    return np.asarray(RNG.normal(size=shape), np.float32)


# For each: shape and axis of queries, of keys, heads of queries and of keys, size of a head along
# the axis, layers.
LAYOUTS = {
    "heads apart": ((5, 4, 3), (5, 4, 3), 1, 4, 4, 1, ()),
    "from the end": ((5, 4, 3), (5, 4, 3), -2, 4, 4, 1, ()),
    "heads first": ((4, 5, 3), (4, 5, 3), 0, 4, 4, 1, ()),
    "one after the other": ((5, 12), (5, 12), 1, 4, 4, 3, ()),
    "PyTorch's": ((12, 5), (12, 5), 0, 4, 4, 3, ()),
    "grouped": ((5, 4, 3), (5, 2, 3), 1, 4, 2, 1, ()),
    "grouped, one after the other": ((5, 12), (5, 6), 1, 4, 2, 3, ()),
    "one key": ((5, 4, 3), (5, 1, 3), 1, 4, 1, 1, ()),
    "layers": ((2, 5, 4, 3), (2, 5, 2, 3), -2, 4, 2, 1, (2,)),
}


def reference(p, u, gamma, axis, power, heads, size):
    """The update of one kernel, head by head, in float64."""
    p, u = np.asarray(p, np.float64), np.asarray(u, np.float64)
    out = u.copy()
    layers = gamma.shape[:-1]
    for layer in np.ndindex(*layers):
        of_layer = np.moveaxis(out[layer], axis - len(layers) if axis >= 0 else axis, 0)
        weights = np.moveaxis(p[layer], axis - len(layers) if axis >= 0 else axis, 0)
        share = gamma.shape[-1] // heads
        for head in range(heads):
            factor = gamma[layer][head * share : (head + 1) * share].min()
            rows = slice(head * size, (head + 1) * size)
            if factor < 1:
                new = factor**power * (weights[rows] + of_layer[rows]) - weights[rows]
                of_layer[rows] = new
    return out


@pytest.mark.kinds("name", "balance")
@pytest.mark.ci("name", "balance")
@pytest.mark.parametrize("balance", [0.5, 0.2, 1.0])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_update_is_that_of_the_formula(name, balance):
    query, key, axis, heads, key_heads, size, layers = LAYOUTS[name]
    params = {"q": {"kernel": normal(*query)}, "k": {"kernel": normal(*key)}, "v": normal(3)}
    updates = jax.tree.map(lambda p: 0.1 * normal(*p.shape), params)
    largest = np.abs(normal(*layers, heads)) * 3
    largest[..., 0] = LIMIT / 2
    tx = cg.qk_clip([("logits", "q/kernel", "k/kernel", axis)], LIMIT, balance)
    found, state = jax.jit(tx.update)(
        updates, tx.init(params), params, max_logits={"logits": largest}
    )
    assert state == optax.EmptyState()
    gamma = np.minimum(1, LIMIT / largest.astype(np.float64))
    for part, count, power in (("q", heads, balance), ("k", key_heads, 1 - balance)):
        p, u = params[part]["kernel"], updates[part]["kernel"]
        expected = reference(p, u, gamma, axis, power, count, size)
        np.testing.assert_allclose(found[part]["kernel"], expected, rtol=1e-6, atol=1e-6)
    assert_same(found["v"], jnp.asarray(updates["v"]))


PARTS = [("qkv", np.s_[:, 0]), ("qkv", np.s_[:, 1]), ("qkv", np.s_[:, 0:2]), "q", "k"]


@pytest.mark.kinds()
@pytest.mark.parametrize("seed", range(6))
def test_a_kernel_in_several_pairs_is_scaled_once_by_the_smallest_factor(seed):
    """Random pairs: kernels that are shared, for queries and keys alike, and parts that overlap."""
    rng = np.random.default_rng(seed)
    params = {"qkv": normal(5, 2, 4, 3), "q": normal(5, 4, 3), "k": normal(5, 4, 3)}
    updates = jax.tree.map(lambda p: 0.1 * normal(*p.shape), params)
    factors = {name: np.ones(p.shape) for name, p in params.items()}
    pairs, largest = [], {}
    for i in range(5):
        several, names = rng.integers(2), [PARTS[j] for j in rng.choice([0, 1, 3, 4], 2)]
        parts = [PARTS[2]] * 2 if several else names
        pairs.append((f"layer {i}", *parts, 2 if several else 1))
        largest[f"layer {i}"] = np.abs(rng.normal(size=4)) * 3
        gamma = np.minimum(1, LIMIT / largest[f"layer {i}"])
        for part, power in zip(parts, (0.3, 0.7), strict=True):
            name, index = part if isinstance(part, tuple) else (part, ...)
            own = gamma[:, None] ** power  # heads and what is behind them
            factors[name][index] = np.minimum(factors[name][index], own)
    tx = cg.qk_clip(pairs, LIMIT, balance=0.3)
    found, _ = jax.jit(tx.update)(updates, tx.init(params), params, max_logits=largest)
    for name, factor in factors.items():
        p, u = np.float64(params[name]), np.float64(updates[name])
        np.testing.assert_allclose(found[name], factor * (p + u) - p, rtol=1e-5, atol=1e-6)
        assert_same(found[name][factor == 1], jnp.asarray(updates[name][factor == 1]))


@pytest.mark.parametrize(
    "largest", [[0.0, 0.5, LIMIT], [np.nan, np.inf, 0.0]], ids=["below or at", "not finite"]
)
def test_heads_without_a_clip_keep_their_bits(largest):
    params = {"q": normal(5, 3, 2), "k": normal(5, 3, 2)}
    updates = jax.tree.map(lambda p: normal(*p.shape), params)
    tx = cg.qk_clip([("logits", "q", "k", 1)], LIMIT)
    found, _ = tx.update(
        updates, tx.init(params), params, max_logits={"logits": jnp.array(largest)}
    )
    assert_same(found, jax.tree.map(jnp.asarray, updates))


@pytest.mark.kinds()
@pytest.mark.parametrize(
    ("shape", "bias", "parts", "axis", "heads"),
    [
        ((5, 3, 4, 2), (3, 4, 2), [np.s_[:, 0], np.s_[:, 1]], 1, lambda a, i: a[..., i, :, :]),
        ((5, 24), (24,), [np.s_[:, :8], np.s_[:, 8:16]], -1, None),
        ((24, 5), (24,), [np.s_[:8], np.s_[8:16]], 0, None),
    ],
    ids=["apart", "along an axis", "PyTorch's"],
)
def test_parts_of_a_fused_kernel_and_its_bias_are_scaled_alike(shape, bias, parts, axis, heads):
    params = {"qkv": {"kernel": normal(*shape), "bias": normal(*bias)}}
    pairs = [("logits", ("qkv/kernel", parts[0]), ("qkv/kernel", parts[1]), axis)]
    tx = cg.qk_clip(pairs, LIMIT)
    zeros = jax.tree.map(np.zeros_like, params)
    largest = {"logits": jnp.array([4 * LIMIT, 1.0, 1.0, 16 * LIMIT])}
    updates, _ = tx.update(zeros, tx.init(params), params, max_logits=largest)
    after = jax.tree.map(np.asarray, optax.apply_updates(params, updates))
    scale = np.array([0.5, 1, 1, 0.25])
    of_kernel, of_bias = np.ones(shape), np.ones(bias)
    if heads:
        of_kernel[:, :2] = scale[None, None, :, None]
        of_bias[:2] = scale[None, :, None]
    else:
        line = np.repeat(scale, 2)
        of_bias[:16] = np.tile(line, 2)
        of_kernel *= of_bias if axis == -1 else of_bias[:, None]
    np.testing.assert_allclose(after["qkv"]["kernel"], params["qkv"]["kernel"] * of_kernel, 1e-6)
    np.testing.assert_allclose(after["qkv"]["bias"], params["qkv"]["bias"] * of_bias, 1e-6)


# ---- attention as it is -------------------------------------------------------------------------

X = jax.random.normal(jax.random.key(1), (3, 5, 8))


def grouped():
    params = {"q": normal(8, 4, 3), "k": normal(8, 2, 3)}

    def loss(p, x):
        q, k = jnp.einsum("btd,dhf->bthf", x, p["q"]), jnp.einsum("btd,dhf->bthf", x, p["k"])
        with jax.named_scope("logits"):
            logits = jnp.einsum("bqhf,bkhf->bhqk", q, jnp.repeat(k, 2, 2))
        return jnp.mean(jax.nn.softmax(logits) ** 2)

    return loss, params, "logits", 1, ("q", "k", 1)


def heads_axis(loss, params, pattern):
    """The name of the logits, and the axis of length 2 in those of Equinox, which maps heads."""
    found = [n for n in cg.list_names(loss, (params, X)) if cg._trees.matches(pattern, n.name)]
    return found[0]


def assert_at_the_limit_after_a_step(loss, params, pattern, axis, kernels):
    """Returns the largest logits before and after, and the limit."""
    query, key, heads = kernels
    name = heads_axis(loss, params, pattern)
    axis = 1 if axis is None else axis
    measure = cg.with_value_stats(loss, watch={pattern: axis})
    before = measure(params, X)[1][name.name].highest
    limit = (
        float(jnp.sort(before)[-2]) * 0.9
        if len(before) > 2
        else float(before.min() + before.max()) / 2
    )
    tx = optax.chain(optax.sgd(0.0), cg.qk_clip([(name.name, query, key, heads)], limit))
    step = cg.train_step(loss, tx, watch_values={pattern: axis})
    state, metrics = step(step.init(params), X)
    np.testing.assert_allclose(metrics["values"][name.name].highest, before, rtol=1e-6)
    after = measure(state.params, X)[1][name.name].highest
    assert (np.asarray(after) <= limit * (1 + 1e-5)).all() and (np.asarray(before) > limit).any()
    return before, after, limit


@pytest.mark.usefixtures("users_promotion")
def test_the_largest_logits_of_grouped_queries_are_at_the_limit_after_the_step():
    assert_at_the_limit_after_a_step(*grouped())


@pytest.mark.usefixtures("users_promotion")
def test_logits_that_grow_stay_at_the_limit():
    params = {"q": normal(8, 8), "k": normal(8, 8)}

    def loss(p, x):
        q, k = ((x @ p[n]).reshape(3, 5, 2, 4) for n in "qk")
        with jax.named_scope("logits"):
            logits = jnp.einsum("bqhf,bkhf->bhqk", q, k)
        return -jnp.mean(logits[:, :, :, 0])

    grown, kept = [], []
    clip = cg.qk_clip([("logits", "q", "k", 1)], 20.0)
    for seen, tail in ((grown, optax.identity()), (kept, clip)):
        step = cg.train_step(loss, optax.chain(optax.adamw(0.02), tail), watch_values={"logits": 1})
        state = step.init(params)
        for _ in range(60):
            state, metrics = step(state, X)
            seen.append(float(metrics["values"]["logits"].highest.max()))
    assert grown[-1] > 40
    # Each update is added to weights that fit the limit: the logits are over it by one update.
    assert 20 < max(kept[5:]) <= 20 * 1.15


# ---- the largest logit, not the largest magnitude -----------------------------------------------

FAR_BELOW = {"shifted": -400.0, "masked": -1e9, "masked by -inf": -np.inf}


@pytest.mark.kinds()
@pytest.mark.parametrize("name", FAR_BELOW)
def test_logits_far_below_zero_are_no_reason_to_scale(name):
    """Softmax ignores shifts; and of what a mask adds nothing comes from the kernels."""
    params = {"q": normal(8, 4, 3), "k": normal(8, 4, 3)}
    params["q"][:, 1] *= 30
    mask = np.tri(5, dtype=bool)

    def logits_of(p):
        logits = jnp.einsum("btd,dhf,bsd,dhf->bhts", X, p["q"], X, p["k"])
        below = FAR_BELOW[name]
        return jnp.where(mask, logits, below) if "mask" in name else logits.at[:, 2].add(below)

    def loss(p, x):
        with jax.named_scope("logits"):
            logits = logits_of(p)
        return jnp.mean(jax.nn.softmax(logits) ** 2)

    before = np.asarray(logits_of(params).max((0, 2, 3)))
    limit = float(np.sort(before)[-2]) * 1.1
    tx = optax.chain(optax.sgd(0.0), cg.qk_clip([PAIR], limit))
    for accumulate in (1, 3) if name == "masked" else (1,):
        step = cg.train_step(loss, tx, watch_values={"logits": 1}, accumulate=accumulate)
        state, metrics = step(step.init(params), X)
        found = metrics["values"]["logits"].highest
        np.testing.assert_allclose(found, np.maximum(before, 0), rtol=1e-5)
        factor = np.ones(4)
        factor[1] = (limit / before[1]) ** 0.5
        for kernel in "qk":
            wanted = params[kernel] * factor[:, None]
            np.testing.assert_allclose(state.params[kernel], wanted, rtol=1e-5)


# ---- multi-head latent attention: logits that are a sum -----------------------------------------


def latent(kernel_of_queries):
    """The logits of a part for each head, and of a rotary part whose key all heads share."""

    def parts(p):
        q = p["q"] if kernel_of_queries == "fused" else jnp.concatenate([p["q"], p["q_rope"]], -1)
        queries = jnp.einsum("btd,dhf->bthf", X, q)
        own = jnp.einsum("bthf,bsd,dhf->bhts", queries[..., :3], X, p["k"])
        return own + jnp.einsum("bthf,bsd,df->bhts", queries[..., 3:], X, p["k_rope"])

    params = {"q": normal(8, 4, 3), "k": normal(8, 4, 3), "k_rope": normal(8, 2)}
    rope = normal(8, 4, 2)
    if kernel_of_queries == "fused":
        params["q"] = np.concatenate([params["q"], rope], -1)
        at = [("q", np.s_[:, :, :3]), ("q", np.s_[:, :, 3:])]
    else:
        params["q_rope"] = rope
        at = ["q", "q_rope"]
    return parts, params, at


@pytest.mark.kinds("balance", "kernels")
@pytest.mark.parametrize("balance", [0.5, 0.2])
@pytest.mark.parametrize("kernels", ["fused", "apart"])
def test_a_key_that_heads_share_stays_and_quiet_heads_keep_their_logits(kernels, balance):
    logits_of, params, (own, rope) = latent(kernels)
    before = np.asarray(logits_of(params))
    largest = before.max((0, 2, 3))
    limit = float(np.mean(np.sort(largest)[1:3]))  # two heads are above
    pairs = [("logits", own, "k", 1), ("logits", rope, None, 1)]
    tx = cg.qk_clip(pairs, limit, balance)
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params, max_logits={"logits": largest})
    after = optax.apply_updates(params, updates)
    factor = np.minimum(1, limit / largest)[:, None, None]
    assert (factor < 1).sum() == 2
    np.testing.assert_allclose(logits_of(after), before * factor, rtol=1e-4, atol=1e-4)
    assert_same(after["k_rope"], jnp.asarray(params["k_rope"]))


def test_a_shared_key_beside_one_for_each_head_is_refused():
    kernels = {
        "q": (5, 4, 3),
        "k": (5, 4, 3),
        "rope": (5, 4, 2),
        "one": (5, 1, 2),
        "two": (5, 2, 3),
        "twice as many": (5, 8, 2),
    }
    params = {name: normal(*shape) for name, shape in kernels.items()} | {"flat": normal(5, 4)}
    largest = {"logits": jnp.full(4, 2 * LIMIT), "other": jnp.ones(4)}
    refused = [
        ([("q", "k"), ("rope", "one")], r"of 4 and 1 heads .*the key 'one'.*'rope', None, 1\)"),
        ([("rope", "one"), ("q", "k")], r"of 1 and 4 heads .*the key 'one'.*'rope', None, 1\)"),
        ([("q", "two"), ("rope", "one")], r"of 2 and 1 heads .*the key 'one'"),
        ([("q", "two"), ("rope", None)], r"of 2 and 4 heads .*the key 'two'"),
        ([("rope", "flat")], r"'flat' of shape \(5, 4\), .*write None for a key without an axis"),
    ]
    for kernels, match in refused:
        tx = cg.qk_clip([("logits", *both, 1) for both in kernels], LIMIT)
        with pytest.raises(ValueError, match=match):
            tx.update(params, tx.init(params), params, max_logits=largest)
    wide = [("q", "k"), ("twice as many", "twice as many")]
    for kernels in ([("q", "two")], [("rope", "one")], [("rope", None)], [("q", "k")] * 2, wide):
        tx = cg.qk_clip([("logits", *both, 1) for both in kernels], LIMIT)
        tx.update(params, tx.init(params), params, max_logits=largest)
    apart = cg.qk_clip([("logits", "q", "k", 1), ("other", "rope", "one", 1)], LIMIT)
    apart.update(params, apart.init(params), params, max_logits=largest)


# ---- errors -------------------------------------------------------------------------------------

PAIR = ("logits", "q", "k", 1)
PARAMS = {"q": jnp.ones((5, 4, 2)), "k": jnp.ones((5, 4, 2))}


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        (("logits",), TypeError, "pairs: got 'logits', expected a list of such as"),
        (([("logits", "q", "k")],), TypeError, r"pairs: got \('logits', 'q', 'k'\), expected such"),
        (([("logits", "q", "k", "h")],), TypeError, "expected such as"),
        (([("logits", ("q", "h"), "k", 1)],), TypeError, "and an index of slices and integers"),
        (([PAIR], -1.0), ValueError, "max_logit: got -1.0, expected a positive number"),
        (([PAIR], "a"), TypeError, "max_logit: got 'a', expected a positive number"),
        (([PAIR], None), TypeError, "max_logit: got None, expected a positive number"),
        (([PAIR], 1.0, "a"), TypeError, "balance: got 'a', expected a number from 0 to 1"),
        (([PAIR], 1.0, 2.0), ValueError, "balance: got 2.0, expected a number from 0 to 1"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(args, error, match):
    with pytest.raises(error, match=match):
        cg.qk_clip(*args)


@pytest.mark.parametrize(
    ("pair", "max_logits", "match"),
    [
        (PAIR, None, r"max_logits: got None, .*train_step\(..., watch_values={'logits': axis}\)"),
        (PAIR, {"other": jnp.ones(4)}, "max_logits: got no 'logits', .*there are"),
        (PAIR, {"logits": jnp.ones(())}, "max_logits: got one number for 'logits', expected one"),
        (PAIR, {"logits": jnp.ones(3)}, "of length 4, expected a multiple of the 3 heads"),
        (("logits", "q", "k", 3), {"logits": jnp.ones(4)}, "with the axis 3, expected an axis of"),
        (PAIR, {"logits": jnp.ones((2, 4))}, r"behind the axes \(2,\) of stacked layers"),
    ],
    ids=str,
)
def test_logits_and_kernels_that_do_not_fit_are_refused(pair, max_logits, match):
    tx = cg.qk_clip([pair])
    with pytest.raises(ValueError, match=match):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, max_logits=max_logits)


def test_logits_that_are_no_numbers_are_refused():
    tx, stats = cg.qk_clip([PAIR]), cg.types.ValueStats.of(jnp.ones((4, 3)), axis=0)
    for given in (stats, {"a": 1}):
        with pytest.raises(TypeError, match=r"for 'logits', .* such as stats\[name\].highest"):
            tx.update(PARAMS, tx.init(PARAMS), PARAMS, max_logits={"logits": given})


def test_a_path_that_is_not_there_is_refused_at_once():
    with pytest.raises(
        ValueError, match="pairs: got the path 'w', expected that of a kernel; ther"
    ):
        cg.qk_clip([("logits", "w", "k", 1)]).init(PARAMS)
    with pytest.raises(ValueError, match="params: got None, expected the parameters"):
        cg.qk_clip([PAIR]).update(PARAMS, optax.EmptyState(), max_logits={})


@pytest.mark.kinds()
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype):
    params = {"q": jnp.asarray(normal(5, 2, 2), dtype), "k": jnp.asarray(normal(5, 2, 2), dtype)}
    tx = cg.qk_clip([("logits", "q", "k", 1)], LIMIT)
    zeros = jax.tree.map(jnp.zeros_like, params)
    largest = {"logits": jnp.array([4 * LIMIT, 1.0])}
    updates, _ = tx.update(zeros, tx.init(params), params, max_logits=largest)
    assert updates["q"].dtype == dtype
    assert_same(optax.apply_updates(params, updates)["q"][:, 0], params["q"][:, 0] / 2)
