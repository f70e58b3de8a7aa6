"""What others published: thresholds, and the values of Composer's adaptive rule."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg


def pytorch(path, w):
    """The axes of a unit in PyTorch's layout, whose first axis is that of the outputs."""
    return tuple(range(1, w.ndim)) if w.ndim > 1 else None


def clip(grads, params=None, kind="adaptive", threshold=0.5, axis=None):
    return cg.published.apply_gradient_clipping(
        grads, params, clipping_type=kind, clipping_threshold=threshold, axis=axis
    )


def reference(w, g, threshold, axes_of=pytorch):
    """Composer's rule in float64: no least norm, NaN ratios count as 1."""
    axes = axes_of("", w)
    norms = [np.sqrt(np.sum(np.square(x), axis=axes, keepdims=True)) for x in (w, g)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = threshold * norms[0] / norms[1]
    return g * np.minimum(np.where(np.isnan(ratio), 1.0, ratio), 1.0)


W3 = np.array([[[3.0, 8], [2, 2]], [[1, 3], [3, 9]]])
G3 = np.array([[[1.0, 1], [3, 5]], [[1, 1], [1, 1]]])
C3 = np.array([[[0.5, 0.5], [1.5, 2.5]], [[1, 1], [1, 1]]])


@pytest.mark.kinds()
@pytest.mark.parametrize(
    "weights, grads, threshold, expected",
    [
        ([3.0, 4.0], [7.0, 24.0], 0.5, [0.7, 2.4]),
        ([0.0, 0.0], [1.0, 1.0], 1e-4, [0.0, 0.0]),
        ([0.0, 0.0], [0.0, 0.0], 1e-4, [0.0, 0.0]),
        ([[3.0, 4], [9, 40]], [[7.0, 24], [5, 12]], 0.5, [[0.7, 2.4], [5, 12]]),
        (W3[..., None], G3[..., None], 1 / 3, C3[..., None]),
        (2.0, 8.0, 0.5, 1.0),
    ],
    ids=range(6),
)
def test_known_answers_in_the_layout_of_pytorch(weights, grads, threshold, expected):
    """Composer's own tests."""
    weights, grads = jnp.float32(weights), jnp.float32(grads)
    clipped = clip(grads, weights, threshold=threshold, axis=pytorch)
    np.testing.assert_allclose(clipped, expected, rtol=1e-6)
    np.testing.assert_allclose(
        reference(np.float64(weights), np.float64(grads), threshold), expected, rtol=1e-6
    )


@pytest.mark.parametrize(
    "weights, grads, expected",
    [
        ([1.0, 1.0], [np.nan, 9.0], [np.nan, 9.0]),
        ([np.nan, 1.0], [9.0, 9.0], [9.0, 9.0]),
        ([1.0, 1.0], [np.inf, 9.0], [np.nan, 0.0]),
    ],
    ids=["nan gradient", "nan weight", "inf gradient"],
)
def test_what_is_not_finite_is_treated_as_composer_does(weights, grads, expected):
    np.testing.assert_array_equal(clip(jnp.float32(grads), jnp.float32(weights)), expected)
    with np.errstate(invalid="ignore"):
        theirs = reference(np.array(weights), np.array(grads), 0.5)
    np.testing.assert_array_equal(theirs, expected)


def test_dtypes_and_other_leaves_are_kept():
    grads = {"b": jnp.ones(2, jnp.bfloat16), "i": jnp.arange(2), "n": None}
    clipped = clip(grads, {"b": jnp.ones(2), "i": jnp.arange(2), "n": None})
    assert clipped["b"].dtype == jnp.bfloat16 and clipped["i"] is grads["i"]


X = jnp.ones(2)


@pytest.mark.parametrize("error, call, match", [
    (ValueError, lambda: clip(X, kind="agc"), "got 'agc', expected one of norm, value, adaptive"),
    (ValueError, lambda: clip(X), "params: got None, expected .* clipping_type='adaptive'"),
    (ValueError, lambda: clip({"a": X}, {"a": jnp.ones(3)}), r"params: got \(3,\) for a"),
    (ValueError, lambda: clip(X, kind="norm", axis=1),
     "axis: got 1 with clipping_type='norm', which has no units; expected axis to be left"),
    (TypeError, lambda: clip(X, X, threshold=lambda step: 1.0),
     "clipping_threshold: got .*expected a number.*such as schedule.step.*gradient_clip"),
], ids=range(5))  # fmt: skip
def test_bad_input_is_refused(error, call, match):
    with pytest.raises(error, match=match):
        call()


# Thresholds


def test_every_entry_says_where_it_is_from():
    for entry in cg.published.SUGGESTED_THRESHOLDS:
        assert entry.kind in ("norm", "value", "adaptive")
        assert entry.setting
        assert re.search(r", \d{4}, https://\S+$", entry.source)


@pytest.mark.parametrize("percentile", [0, 50, 90.0, 100])
def test_the_percentile_of_the_finite_norms(percentile):
    norms = np.random.default_rng(0).lognormal(size=(7, 30))
    expected = np.percentile(norms, percentile)
    spoilt = np.concatenate([norms.ravel(), [np.nan, np.inf]])
    assert cg.published.suggest_threshold(norms, percentile) == pytest.approx(expected)
    assert cg.published.suggest_threshold(spoilt, percentile) == pytest.approx(expected)


def test_the_default_is_the_ninetieth():
    assert cg.published.suggest_threshold(jnp.arange(101.0)) == pytest.approx(90)


@pytest.mark.parametrize(
    "norms, percentile, match",
    [
        ([], 90, "got 0 norms, expected at least one that is finite"),
        ([np.nan, np.inf], 90, "got 2 norms, expected at least one that is finite"),
        ([1.0, -2.0], 90, r"got -2.0, expected norms of 0 or more"),
        ([1.0], 101, r"percentile: got 101, expected a number in \[0, 100\]"),
        ([1.0], -1, "percentile: got -1"),
    ],
)
def test_norms_that_are_none_are_refused(norms, percentile, match):
    with pytest.raises(ValueError, match=match):
        cg.published.suggest_threshold(norms, percentile)
