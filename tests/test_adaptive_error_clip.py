"""Error clips that find their threshold: limits from the norms of the steps before."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import assert_close, assert_same

W, STEPS = jnp.ones(3), 4


def rnn(w, xs):
    def cell(h, x):
        h = checkpoint_name(jnp.tanh(w * h + x), "h")
        return h, h

    return jnp.sum(jax.lax.scan(cell, jnp.zeros(3), xs)[1] ** 2)


def blocks(w, xs):
    x = xs[0]
    for i in range(3):
        with jax.named_scope(f"block_{i}"):
            x = x + jnp.tanh(w * x)
    return jnp.sum(x**2)


def batches(count, scale=1.0):
    xs = np.random.default_rng(0).normal(size=(count, STEPS, 3)) * scale
    return [jnp.asarray(x * (1 + i % 3), jnp.float32) for i, x in enumerate(xs)]


THRESHOLDS = {
    "percentile": cg.PercentileThreshold(50, window=3),
    "z-score": cg.ZScoreThreshold(z=0.5, warmup=2),
    "ema": cg.EMAThreshold(warmup=2),
    "history": cg.HistoryThreshold(window=4, sigma=0.0, min_history=2),
}


@pytest.mark.kinds("rule")
@pytest.mark.ci("name", "rule")
@pytest.mark.parametrize("name", THRESHOLDS)
@pytest.mark.parametrize("rule", [cg.ClipByNorm, cg.ClipByGlobalNorm])
def test_the_limit_of_each_scan_step_comes_from_its_norms_in_the_steps_before(name, rule):
    clip = cg.adaptive_error_clip(rnn, {"h": rule(THRESHOLDS[name])})
    xs, run = batches(7), jax.jit(clip)
    # Each scan step by itself; a norm that is not finite leaves the history as it is.
    update = jax.jit(jax.vmap(THRESHOLDS[name].update))
    state, history = clip.init(W, xs[0]), jax.vmap(THRESHOLDS[name].init)(jnp.zeros(STEPS))
    for x in xs:
        limits, _ = update(history, jnp.full(STEPS, jnp.nan))
        np.testing.assert_allclose(state["h"].threshold, limits, rtol=1e-5)
        value, grads, state, stats = run(state, W, x)
        norms = stats["h"].norm
        np.testing.assert_allclose(stats["h"].clipped_norm, np.minimum(norms, limits), rtol=1e-5)
        _, history = update(history, norms)
    assert value == rnn(W, xs[-1])
    assert (np.array(stats["h"].clipped) if name != "ema" else stats["h"].clipped).any()


def test_value_and_gradient_are_those_of_the_limits_as_numbers():
    clip = cg.adaptive_error_clip(blocks, {"block_*": cg.ClipByNorm(cg.PercentileThreshold(50))})
    state, run = clip.init(W, batches(1)[0]), jax.jit(clip)

    @jax.jit
    def with_numbers(state, w, x):
        rules = {name: cg.ClipByNorm(kept.threshold) for name, kept in state.items()}
        return cg.value_and_grad_with_stats(blocks, rules=rules)(w, x)

    for x in batches(4, 0.1):
        expected = with_numbers(state, W, x)
        value, grads, state, stats = run(state, W, x)
        assert_close((value, grads, stats), expected, rtol=1e-6)
    assert list(state) == ["block_0", "block_1", "block_2"]
    assert any(s.clipped for s in stats.values())


def test_a_step_that_is_not_finite_does_not_enter_the_history():
    clip = cg.adaptive_error_clip(rnn, {"h": cg.ClipByNorm(cg.PercentileThreshold(50))})
    (x,), run = batches(1), jax.jit(clip)
    state = run(clip.init(W, x), W, x)[2]
    *_, after, stats = run(state, W, x * jnp.nan)
    assert_same(after, state)
    assert jnp.isnan(stats["h"].norm).all()


def test_rules_with_numbers_stay_as_they_are():
    rules = {"block_0": cg.ClipByNorm(0.25), "block_*": cg.ClipByNorm(cg.HistoryThreshold()),
             "**": None}  # fmt: skip
    with pytest.raises(ValueError, match="several rules for 'block_1'.*add a rule for 'block_1'"):
        cg.adaptive_error_clip(blocks, rules).init(W, batches(1)[0])
    clip = cg.adaptive_error_clip(blocks, dict(list(rules.items())[:2]))
    state = clip.init(W, batches(1)[0])
    assert list(state) == ["block_1", "block_2"]
    *_, stats = jax.jit(clip)(state, W, batches(1)[0])
    np.testing.assert_allclose(stats["block_0"].clipped_norm, 0.25, rtol=1e-6)


def test_arguments_and_aux_are_those_of_value_and_grad():
    def loss(a, b, scale=1.0):
        h = checkpoint_name(a * b, "h")
        return scale * jnp.sum(h), h

    rules = {"h": cg.ClipByNorm(cg.PercentileThreshold(50))}
    clip = cg.adaptive_error_clip(loss, rules, argnums=(0, 1), has_aux=True)
    state = clip.init(W, 2 * W, scale=3.0)
    (value, aux), (a, b), state, _ = clip(state, W, 2 * W, scale=3.0)
    assert value == 18 and (aux == 2).all() and (a == 6).all() and (b == 3).all()
    assert state["h"].threshold == pytest.approx(3 * 3**0.5)


# In a training step.


def step_of(loss=rnn, pattern="h", **options):
    rule = cg.ClipByNorm(cg.PercentileThreshold(50, window=5))
    return cg.train_step(loss, optax.sgd(0.01), error_clip={pattern: rule}, **options)


def test_a_training_step_keeps_the_histories_and_traces_nothing_again():
    traces = []

    def loss(w, xs):
        traces.append(w)
        return rnn(w, xs)

    step, seen = step_of(loss), []
    state = step.init(W)
    assert state.error_clip is None
    for x in batches(4):
        state, metrics = step(state, x)
        norms, clipped = (getattr(metrics["error_clip"]["h"], n) for n in ("norm", "clipped_norm"))
        if seen:
            np.testing.assert_allclose(clipped, np.minimum(norms, np.median(seen, 0)), rtol=1e-5)
        seen.append(norms)
        assert len(traces) == 2 and step.update._cache_size() == 1  # for the shapes, and the step
    assert state.error_clip["h"].history.norms.shape == (STEPS, 5)


def test_the_histories_are_of_one_microbatch():
    def loss(w, xs):
        return jnp.mean(jax.vmap(rnn, (None, 0))(w, xs))

    x = batches(1)[0]
    steps = [step_of(loss), step_of(loss, accumulate=4)]
    with pytest.warns(UserWarning, match="inside jax.vmap"):
        whole, parts = (s(s.init(W), jnp.stack([x] * 4))[0] for s in steps)
    one = jax.jit(cg.value_and_grad_with_stats(rnn))(W, x)[2]["h"].norm
    np.testing.assert_allclose(whole.error_clip["h"].threshold, one / 2, rtol=1e-5)
    np.testing.assert_allclose(parts.error_clip["h"].threshold, one, rtol=1e-5)


ADAPTIVE = cg.ClipByNorm(cg.PercentileThreshold(90))


@pytest.mark.parametrize(
    "run",
    [
        lambda: cg.clip_cotangent(W, ADAPTIVE),
        lambda: cg.error_clip(ADAPTIVE)(rnn),
        lambda: cg.error_clip_everywhere(rnn, ADAPTIVE),
        lambda: cg.value_and_grad_with_stats(rnn, rules={"h": ADAPTIVE}),
    ],
    ids=range(4),
)
def test_elsewhere_an_adaptive_threshold_is_refused_with_what_to_write(run):
    with pytest.raises(TypeError, match=r"train_step\(error_clip=...\) or adaptive_error_clip"):
        run()


def of_rule(rule):
    return lambda: cg.train_step(rnn, optax.sgd(1.0), error_clip={"h": rule})


@pytest.mark.parametrize(
    "error, run, match",
    [
        (TypeError, of_rule(cg.ClipByBlockRMS(cg.HistoryThreshold())), r"expected ClipByNorm\(thr"),
        (TypeError, of_rule(cg.ClipByNorm(cg.HistoryThreshold(), ord=1)), "the L2 norms of whole"),
        (TypeError, of_rule(cg.ClipByNorm(cg.HistoryThreshold(), axis=-1)), "the L2 norms of whol"),
        (TypeError, lambda: cg.adaptive_error_clip(rnn, ADAPTIVE), "rules: got .*a mapping"),
        (TypeError, lambda: cg.adaptive_error_clip(ADAPTIVE, {}), "fun: got .*expected a function"),
        (ValueError, lambda: cg.adaptive_error_clip(rnn, {"x": ADAPTIVE}).init(W, batches(1)[0]),
         "got 'x', expected a name"),
    ],
    ids=range(6),
)  # fmt: skip
def test_what_makes_no_sense_is_refused(error, run, match):
    with pytest.raises(error, match=match):
        run()


def test_the_state_of_another_function_or_length_is_refused():
    clip = cg.adaptive_error_clip(rnn, {"h": ADAPTIVE})
    (x,), state = batches(1), clip.init(W, batches(1)[0])
    with pytest.raises(ValueError, match="got 3 steps of the scan around 'h', .*histories of 4"):
        clip(state, W, x[:3])
    other = cg.adaptive_error_clip(blocks, {"block_*": ADAPTIVE})
    known = other.init(W, x)
    del known["block_1"]
    with pytest.raises(ValueError, match=r"histories of \['block_0', 'block_2'\], but the rules"):
        other(known, W, x)
