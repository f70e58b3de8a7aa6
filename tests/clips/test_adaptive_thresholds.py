"""Adaptive thresholds against NumPy, through the events that disable their peers, and in clips."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import array, assert_close, assert_same, generator, reductions, tree_of
from tests.rows import each_value, first_row

MOST = float(np.finfo(np.float32).max)


def made(kind, **options):
    """A threshold; the percentile of AutoClip's paper, where none is given."""
    first = {"percentile": 10} if kind is cg.PercentileThreshold else {}
    return kind(**first | options)


# The formulas, in float64 and one norm after the other. ``far`` is the factor from the median
# beyond which a norm is left out, which the papers don't do.


def says_something(norm):
    return bool(np.isfinite(norm) and norm > 0)


def near(norms, far, low=False):
    median = np.median(norms)
    return [n for n in norms if n <= far * median and (not low or n >= median / far)]


def percentile(norms, far, percentile=10.0, window=1024, feed="raw"):
    history = []
    for norm in norms:
        known = (history + [norm] * says_something(norm))[-window:]
        threshold = np.percentile(known, percentile) if known else MOST
        yield threshold
        fed = norm if feed == "raw" else min(norm, threshold)
        history = (history + [fed] * says_something(norm))[-window:]


def history(norms, far, window=128, sigma=3.0, min_history=None, feed="raw"):
    past, least = [], max(2, window // 2) if min_history is None else min_history
    for norm in norms:
        threshold = MOST
        if len(past) >= least:
            known = near(past, far)
            threshold = np.mean(known) + sigma * np.std(known)
        yield threshold
        fed = norm if feed == "raw" else min(norm, threshold)
        past = (past + [fed] * says_something(norm))[-window:]


def z_score(norms, far, z=2.5, decay=0.97, warmup=25, eps=1e-6, max_norm=None, feed="clipped"):
    first, mean, variance = [], 0.0, 0.0
    for norm in norms:
        threshold, warms_up = MOST, len(first) < warmup
        if not warms_up:
            score = (norm - mean) / (np.sqrt(variance) + eps)
            threshold = mean + z * (np.sqrt(variance) + eps)
            if score > z:
                threshold = mean + z * np.sqrt(variance) / (score / z)
        yield threshold if max_norm is None else min(threshold, max_norm)
        if not says_something(norm):
            continue
        fed = norm if feed == "raw" else min(norm, threshold)
        if warms_up:
            first.append(norm)
            mean, variance = np.mean(near(first, far)), np.var(near(first, far))
        else:
            mean = decay * mean + (1 - decay) * fed
            variance = decay * variance + (1 - decay) * (fed - mean) ** 2


def ema(norms, far, decay=0.98, relative=1.05, absolute=1.0, warmup=100, feed="clipped"):
    """Of several leaves at once: ``norms`` has the shape (steps, leaves)."""
    first, mean = [[] for _ in norms[0]], np.zeros(len(norms[0]))
    for step in norms:
        total = np.sqrt(np.sum(np.square(step[np.isfinite(step)])))
        thresholds = np.empty(len(step))
        for i, norm in enumerate(step):
            warms_up = len(first[i]) < warmup
            limit = norm * min(1, absolute / max(total, 1e-300)) if warms_up else relative * mean[i]
            thresholds[i] = limit if says_something(norm) or not warms_up else MOST
            if not says_something(norm):
                continue
            fed = norm if feed == "raw" else min(norm, limit)
            if warms_up:
                first[i].append(fed)
                mean[i] = min(near(first[i], far, low=True))
            else:
                mean[i] = decay * mean[i] + (1 - decay) * fed
        yield thresholds


def one_by_one(reference):
    """A reference for each of several leaves."""

    def run(norms, far, **options):
        columns = [list(reference(list(column), far, **options)) for column in norms.T]
        return np.stack(columns, axis=1)

    return run


REFERENCES = {
    cg.PercentileThreshold: one_by_one(percentile),
    cg.HistoryThreshold: one_by_one(history),
    cg.ZScoreThreshold: one_by_one(z_score),
    cg.EMAThreshold: lambda norms, far, **options: np.stack(list(ema(norms, far, **options))),
}
OPTIONS = [
    (cg.PercentileThreshold, {}),
    (cg.PercentileThreshold, {"percentile": 87.5, "window": 10}),
    (cg.PercentileThreshold, {"percentile": 0, "window": 1}),
    (cg.PercentileThreshold, {"percentile": 60, "window": 50, "feed": "clipped"}),
    (cg.HistoryThreshold, {}),
    (cg.HistoryThreshold, {"window": 9, "sigma": 1.0, "min_history": 1, "feed": "clipped"}),
    (cg.ZScoreThreshold, {}),
    (cg.ZScoreThreshold, {"z": 1.0, "decay": 0.9, "warmup": 3, "eps": 0.01, "max_norm": 2.0}),
    (cg.ZScoreThreshold, {"z": 2.0, "feed": "raw"}),
    (cg.EMAThreshold, {}),
    (cg.EMAThreshold, {"decay": 0.9, "relative": 1.5, "absolute": 3.0, "warmup": 7}),
    (cg.EMAThreshold, {"relative": 2.0, "absolute": 11.0, "warmup": 50, "feed": "raw"}),
]
KINDS = list(REFERENCES)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
every_option = pytest.mark.parametrize(
    "kind, options", OPTIONS, ids=lambda x: x.__name__ if isinstance(x, type) else str(x)
)


@functools.cache
def compiled(threshold):
    """Runs of norms, shape (runs, steps, leaves)."""

    def step(state, norm):
        value, new = threshold.update(state, norm)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, new)
        return new, value

    def all_steps(norms):
        return jax.lax.scan(step, threshold.init(jnp.zeros(norms.shape[1:])), norms)

    return jax.jit(jax.vmap(all_steps))


def runs(threshold, norms):
    """All thresholds and the last state of each run."""
    state, values = compiled(threshold)(array(norms))
    chex.assert_tree_all_finite((values, state))
    return np.asarray(values, np.float64), state


LONGEST, MOST_LEAVES = 600, 3


def run(threshold, norms):
    """All thresholds and the last state, of the leaves of one tree.

    Zeros are added, which say nothing, so that trees and runs of all sizes share a program.
    """
    steps, leaves = norms.shape
    padded = np.zeros((1, LONGEST, MOST_LEAVES))
    padded[0, :steps, :leaves] = norms
    values, state = runs(threshold, padded)
    state = jax.device_get(state)
    return values[0, :steps, :leaves], jax.tree.map(lambda x: x[0, ..., :leaves], state)


def run_apart(threshold, norms):
    """The same of columns that know nothing of each other."""
    values, _ = runs(threshold, norms.T[:, :, None])
    return values[:, :, 0].T


def assert_equal_up_to_rounding(actual, expected):
    """Each step may add one rounding error to an average."""
    np.testing.assert_allclose(actual, expected, rtol=len(expected) * np.finfo(np.float32).eps)


def ordinary(steps=600, leaves=2, seed=0):
    """Norms that scatter by a third around a level that drifts, each leaf at its own."""
    rng = np.random.default_rng(seed)
    drift = np.exp(np.cumsum(rng.normal(size=(steps, leaves)) * 0.003, axis=0))
    scatter = np.exp(np.clip(rng.normal(size=(steps, leaves)) * 0.3, -0.9, 0.9))
    return np.float32(drift * scatter * 10.0 ** np.arange(leaves))


def eventful(**kwargs):
    """The same with NaN, inf, zeros, and spikes of all sizes."""
    norms, rng = ordinary(seed=1, **kwargs), np.random.default_rng(2)
    for value in (np.nan, np.inf, 0.0):
        norms[rng.random(norms.shape) < 0.02] = value
    spikes = rng.random(norms.shape) < 0.03
    norms[spikes] *= np.float32(10 ** rng.uniform(0, 8, spikes.sum()))
    return norms


@pytest.mark.slow
@every_option
def test_it_is_the_published_formula_but_for_what_says_nothing_and_what_is_far(kind, options):
    steps = 1200 if kind is cg.PercentileThreshold and not options else 600
    norms = ordinary(steps), eventful(steps=steps)
    thresholds, _ = runs(made(kind, **options), np.stack(norms))
    for actual, run_of, far in zip(thresholds, norms, (np.inf, 10.0), strict=True):
        expected = REFERENCES[kind](np.float64(run_of), far, **options)
        assert_equal_up_to_rounding(actual, expected)


# Events that disable ZClip, optax-zclip, AutoClip and levanter's clip for ever or for a window.

WARM = (cg.ZScoreThreshold, cg.EMAThreshold)
USEFUL = {
    cg.PercentileThreshold: cg.PercentileThreshold(90, window=100),
    cg.HistoryThreshold: cg.HistoryThreshold(),
    cg.ZScoreThreshold: cg.ZScoreThreshold(),
    cg.EMAThreshold: cg.EMAThreshold(absolute=100.0),
}


EVENTS = [np.nan, np.inf, 0.0, 1e6, 1e30, MOST]
TIMES = [0, 1, 10, 24, 99, 200, 290]


@pytest.mark.slow
@first_row
@every_kind
def test_one_event_disables_nothing(kind):
    norms = ordinary(300, 1)
    pairs = [(when, event) for when in TIMES for event in EVENTS]
    changed = np.tile(norms, len(pairs))
    for column, (when, event) in enumerate(pairs):
        changed[when, column] = event
    every = np.concatenate([norms, changed], axis=1)
    every = np.concatenate([every, np.full((3, len(pairs) + 1), 1e6)])
    thresholds = run_apart(USEFUL[kind], every)
    ratio = thresholds[299, 1:] / thresholds[299, 0]
    assert ratio.min() > 0.5 and ratio.max() < 1.5
    assert (thresholds[300:] < 10).all(), "a spike soon after would pass"


@each_value
@every_kind
@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0], ids=str)
def test_without_a_single_norm_nothing_is_clipped(kind, bad):
    thresholds, _ = run(USEFUL[kind], np.full((130, 1), bad))
    assert (thresholds == np.float32(MOST)).all()


@every_kind
def test_thresholds_and_states_are_finite_whatever_the_norms_were(kind):
    rng = np.random.default_rng(5)
    norms = np.float32(10 ** rng.uniform(-45, np.log10(MOST), (40, 500)))
    norms[:, 250:] = np.float32(10 ** rng.uniform(-1, 0, (40, 250))) * norms[:1, 250:]
    special = np.array([np.nan, np.inf, 0.0, MOST, np.finfo(np.float32).tiny, 1e-45], np.float32)
    places = rng.random(norms.shape) < rng.random(500)
    norms[places] = rng.choice(special, places.sum())
    short = {"warmup": 5} if kind in WARM else {"window": 8}
    thresholds = run_apart(made(kind, **short), norms)
    assert (thresholds >= 0).all()


# In gradient clips

CLIPS = {
    "clip_by_value": cg.clip_by_value,
    "clip_by_norm": cg.clip_by_norm,
    "clip_by_global_norm": cg.clip_by_global_norm,
    "clip_by_block_rms": cg.clip_by_block_rms,
    "adaptive_grad_clip": cg.adaptive_grad_clip,
}
every_clip = pytest.mark.parametrize("name", CLIPS)


class Times:
    """A threshold that is a multiple of what is followed."""

    def __init__(self, factor):
        self.factor = factor

    def init(self, norms):
        return norms

    def update(self, state, norms):
        return norms * self.factor, state + norms


@functools.cache
def compiled_scan(tx):
    def run(grads, params):
        def step(state, g):
            updates, new = tx.update(g, state, params)
            chex.assert_trees_all_equal_shapes_and_dtypes(state, new)
            return new, updates

        return jax.lax.scan(step, tx.init(params), grads)

    return jax.jit(run)


def scan(tx, grads, params):
    return compiled_scan(tx)(grads, params)


@pytest.mark.slow
@every_clip
def test_what_is_followed_is_the_least_threshold_that_changes_nothing(name, key):
    grads, params = tree_of(key, scale=3.0), tree_of(jax.random.fold_in(key, 1))

    @jax.jit
    def clip(factor, grads, params):
        tx = CLIPS[name](Times(factor), stats="per_leaf")
        return tx.update(grads, tx.init(params), params)

    updates, _ = clip(jnp.float32(1.0), grads, params)
    assert_close(updates, grads)
    if name != "adaptive_grad_clip":
        assert_same(updates, grads)
    updates, state = clip(jnp.float32(0.99), grads, params)
    assert all(s.clipped for path, s in state.leaf_stats.items() if path != "empty")
    expected = () if name == "clip_by_global_norm" else (4,)
    assert state.threshold.shape == state.history.shape == expected


# Under the flags that stop at the first NaN or inf, which nothing made of finite gradients may be:
# zeros, equal norms, a warm-up, spikes, a norm far below the others.
HEALTHY = np.float32([
    *[0.0] * 3, *[1.0] * 25, *ordinary(25, 1)[:, 0], 0.0, 1e6, 1.0, 1e30, 1e-30, *[2.0] * 10,
])  # fmt: skip
PAIRS = [
    (kind, name)
    for kind in KINDS
    for name in CLIPS
    if kind is cg.ZScoreThreshold or name in ("clip_by_norm", "clip_by_global_norm")
]
FLAGGED = [(*pair, compile) for pair in PAIRS for compile in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize("kind, name, compile", FLAGGED, ids=lambda x: getattr(x, "__name__", x))
def test_no_flag_for_nan_or_inf_stops_a_loop_on_finite_gradients(kind, name, compile):
    tx = CLIPS[name](made(kind, **{"warmup" if kind in WARM else "window": 20}), stats=True)
    params = {"early": jnp.array([3.0, 4.0]), "late": jnp.array([0.3, 0.4])}
    with jax.debug_nans(True), jax.debug_infs(True):
        state, update = tx.init(params), jax.jit(tx.update) if compile else tx.update
        # Eagerly squares are taken one by one, as in optax, and that of 1e30 is inf.
        for step, norm in enumerate(HEALTHY if compile else np.minimum(HEALTHY, np.float32(1e15))):
            grads = {"early": norm * params["early"], "late": float(step > 30) * params["late"]}
            _, state = update(grads, state, params)
    assert state.count == len(HEALTHY) > 60 and (state.threshold < MOST).all()


def inputs(key):
    shapes = {"bias": (3,), "conv": (2, 3), "key": (2,)}
    rng = generator(key)
    grads = {k: array(rng.normal(size=(40, *s)), jnp.bfloat16) for k, s in shapes.items()}
    return grads, {k: array(np.ones(s)) for k, s in shapes.items()}


@each_value
@every_clip
@every_kind
def test_the_state_has_one_structure(name, kind, key):
    tx = CLIPS[name](made(kind), where=("bias", "conv"), stats="per_leaf")
    jax.eval_shape(functools.partial(scan, tx), *inputs(key))


@pytest.mark.slow
@first_row
@every_clip
def test_following_sums_nothing_twice(name):
    threshold = cg.HistoryThreshold(window=4)
    params = {"a": jnp.ones((64, 64)), "b": jnp.ones(32)}
    tx, plain = CLIPS[name](threshold), CLIPS[name](1.0)
    state = tx.init(params)
    followed = reductions(jax.jit(tx.update).lower(params, state, params).compile())
    bare = jax.jit(lambda g, p: plain.update(g, plain.init(p), p)[0]).lower(params, params)
    # A clip by value measures nothing by itself, and slices of a leaf have a largest one.
    extra = {"clip_by_value": 2, "adaptive_grad_clip": 2}.get(name, 0)
    assert (
        followed <= reductions(bare.compile()) + following(threshold, state.threshold.shape) + extra
    )


def following(threshold, shape):
    """The reductions over the history."""
    norms = jnp.ones(shape)
    return reductions(jax.jit(threshold.update).lower(threshold.init(norms), norms).compile())


# Bad input


@pytest.mark.parametrize("make, error, match", [
    (lambda: cg.PercentileThreshold(), TypeError, "missing .* 'percentile'"),
    (lambda: cg.PercentileThreshold(101), ValueError, r"percentile: got 101, .* in \[0, 100\]"),
    (lambda: cg.PercentileThreshold("10"), TypeError, "percentile: got '10' of type str"),
    (lambda: cg.PercentileThreshold(90, window=0), ValueError, "window: got 0, .* at least 1"),
    (lambda: cg.PercentileThreshold(90, window=2.5), ValueError, "window: got 2.5, .*integer"),
    (lambda: cg.PercentileThreshold(9, feed="b"), ValueError, "feed: got .b., .*raw, clipped"),
    (lambda: cg.HistoryThreshold(sigma=-1), ValueError, "sigma: got -1, expected a number >= 0"),
    (lambda: cg.HistoryThreshold(8, min_history=9), ValueError, "got 9, .* at most window, 8"),
    (lambda: cg.ZScoreThreshold(decay=1.5), ValueError, r"decay: got 1.5, .* in \[0, 1\]"),
    (lambda: cg.ZScoreThreshold(max_norm=-1), ValueError, "max_norm: got -1"),
    (lambda: cg.ZScoreThreshold(z=True), TypeError, "z: got True of type bool"),
    (lambda: cg.ZScoreThreshold(eps=np.inf), ValueError, "eps: got inf"),
    (lambda: cg.EMAThreshold(relative=0.5), ValueError, "relative: got 0.5, .* >= 1"),
    (lambda: cg.EMAThreshold(absolute=0), ValueError, "absolute: got 0"),
], ids=range(14))  # fmt: skip
def test_what_is_out_of_range_is_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize("call, match", [
    (lambda t, x: cg.clip_grads(x, cg.ClipByGlobalNorm(t)), "only a gradient clip can use"),
    (lambda t, x: cg.ClipByNorm(t)(x), "max_norm: got Percentile.* only a gradient clip can"),
    (lambda t, x: cg.error_clip(cg.ClipByBlockRMS(t))(jnp.sin), "threshold: got Percentile"),
    (lambda t, x: cg.AdaptiveClip(eps=t), "eps: got .*only the first threshold of a clip by"),
    (lambda t, x: cg.ClipByValue(1.0, t), "min: got .*only the first threshold of a clip by"),
    (lambda t, x: cg.gradient_clip(t), "rule: got PercentileThreshold.*expected a ClipRule"),
    (lambda t, x: cg.clip_by_norm(optax.sgd(1.0)), "max_norm: got Gradient.*expected a number"),
], ids=range(7))  # fmt: skip
def test_a_threshold_where_a_number_belongs_is_refused(call, match):
    with pytest.raises(TypeError, match=match):
        call(cg.PercentileThreshold(90), array(np.ones(2)))


def test_an_adaptive_bound_has_no_other_bound():
    with pytest.raises(ValueError, match="min: got -1.0 with an adaptive max, expected None"):
        cg.clip_by_value(cg.PercentileThreshold(90), -1.0)


def test_other_leaves_than_those_of_init_are_refused():
    tx = cg.clip_by_norm(cg.PercentileThreshold(90))
    with pytest.raises(ValueError, match="got 2 leaves to clip, but the state has 0 thresholds"):
        jax.jit(tx.update)([array(np.ones(2))] * 2, tx.init(None))


@pytest.mark.parametrize("threshold", [cg.PercentileThreshold(90), lambda step: 1.0], ids=[0, 1])
@pytest.mark.parametrize("name", ["clip_by_global_norm", "clip_by_norm"])
@pytest.mark.parametrize("state", [optax.EmptyState(), None], ids=str)
def test_a_state_without_history_is_refused(state, name, threshold):
    tx = CLIPS[name](threshold)
    with pytest.raises(ValueError, match=r"state: got .* expected the GradientClipState of init"):
        tx.update(array(np.ones(2)), state)


@each_value
@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.float64, jnp.bfloat16], ids=lambda d: d.__name__
)
@pytest.mark.parametrize("number", [float, np.float64, np.float32])
def test_numbers_of_numpy_and_64_bits_keep_the_dtype_of_the_norms(number, dtype):
    thresholds = (
        cg.PercentileThreshold(number(10), window=np.int64(4)),
        cg.HistoryThreshold(4, number(3.0), np.int64(2)),
        cg.ZScoreThreshold(number(2.5), number(0.97), 2, number(1e-6), number(5.0)),
        cg.EMAThreshold(number(0.98), number(1.05), number(1.0), np.int32(2)),
    )
    with jax.enable_x64(True):
        for threshold in thresholds:
            jax.eval_shape(
                functools.partial(scan, cg.clip_by_norm(threshold)), [np.ones((3, 2), dtype)],
                [np.ones(2, dtype)])  # fmt: skip
        skip = cg.skip_spikes(optax.identity(), max_norm=number(9), sigma=number(6), window=4)
        jax.eval_shape(functools.partial(scan, skip), np.ones((3, 2), dtype), np.ones(2, dtype))
