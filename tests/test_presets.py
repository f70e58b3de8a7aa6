"""Published thresholds, and one's own."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg


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
def test_bad_input_is_refused(norms, percentile, match):
    with pytest.raises(ValueError, match=match):
        cg.published.suggest_threshold(norms, percentile)
