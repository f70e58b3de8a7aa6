"""What others published: thresholds, and the values of Composer's adaptive rule."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import array
from tests.rows import each_value, first_row


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


@first_row
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
    grads = {"b": array(np.ones(2), jnp.bfloat16), "i": array(np.arange(2), np.int32), "n": None}
    clipped = clip(grads, {"b": array(np.ones(2)), "i": array(np.arange(2), np.int32), "n": None})
    assert clipped["b"].dtype == jnp.bfloat16 and clipped["i"] is grads["i"]


X = array(np.ones(2))


@pytest.mark.parametrize("error, call, match", [
    (ValueError, lambda: clip(X, kind="agc"), "got 'agc', expected one of norm, value, adaptive"),
    (ValueError, lambda: clip(X), "params: got None, expected .* clipping_type='adaptive'"),
    (ValueError, lambda: clip({"a": X}, {"a": array(np.ones(3))}), r"params: got \(3,\) for a"),
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
    assert cg.published.suggest_threshold(array(np.arange(101.0))) == pytest.approx(90)


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


# Composer's algorithm as a transformation, and its calls as they are written there.

W, G = np.float32([[3, 0.3], [4, 0.4]]), np.float32([[30, -0.1], [40, 0.2]])
TREE, WEIGHTS = ({"a": array(x), "b": array(x[0])} for x in (G, W))
UNITS = {None: 0, -1: 1, pytorch: 1}  # the axis of a matrix that a unit spans


@each_value
@pytest.mark.parametrize("axis", UNITS)
@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_the_transformation_is_the_function_of_one_call(kind, axis):
    axis_of_kind = axis if kind == "adaptive" else None
    tx = optax.chain(
        cg.published.gradient_clipping(kind, 0.1, axis=axis_of_kind), optax.scale(-1.0)
    )
    state = tx.init(WEIGHTS)
    updates, after = jax.jit(tx.update)(TREE, state, WEIGHTS)
    expected = jax.jit(lambda g: clip(g, WEIGHTS, kind, 0.1, axis_of_kind))(TREE)
    assert after == state and jax.tree.leaves(state) == []
    for name in ("a", "b"):
        np.testing.assert_array_equal(updates[name], -expected[name])
    if kind == "adaptive":
        right = reference(np.float64(W), np.float64(G), 0.1, lambda path, w: UNITS[axis])
        np.testing.assert_allclose(expected["a"], right, rtol=1e-6)


def test_the_transformation_trains():
    tx = optax.chain(cg.published.gradient_clipping("adaptive", 0.01), optax.sgd(0.1))
    step = cg.train_step(lambda p, x: jnp.sum((p["w"] @ x) ** 2), tx)
    state, metrics = step(step.init({"w": array(np.ones((2, 2)))}), array(np.ones(2)))
    change = np.abs(np.asarray(state.params["w"]) - 1)
    np.testing.assert_allclose(np.linalg.norm(change, axis=0), 0.001 * 2**0.5, rtol=1e-3)


PAIRS = [(array(np.ones(n)), array(np.full(n, 9.0))) for n in (2, 3)]
COMPOSERS = {
    "positional": (lambda: cg.published.apply_gradient_clipping([W], "norm", 0.1),
                   r'at most 2, \(grads, params\); .*clipping_type="norm", clipping_threshold=0.1'),
    "half": (lambda: cg.published.apply_gradient_clipping(
        [W], "norm", clipping_type="norm", clipping_threshold=0.1), "params: got 'norm'"),
    "type as a rule": (lambda: cg.gradient_clip("norm"),
                       r"published.gradient_clipping\('norm', threshold\)"),
    "type and threshold": (lambda: cg.gradient_clip("norm", 0.1),
                           r"published.gradient_clipping\(clipping_type, threshold\)"),
    "keyword": (lambda: cg.gradient_clip(clipping_type="norm"),
                r"clipping_type='norm'; .*gradient_clipping\(.*ClipByGlobalNorm"),
    "keywords": (lambda: cg.gradient_clip(clipping_type="norm", clipping_threshold=0.1),
                 r"clipping_type='norm'; .*gradient_clipping\(.*ClipByGlobalNorm"),
    "clip_grads": (lambda: cg.clip_grads([W], "norm"), "apply_gradient_clipping"),
    "pairs": (lambda: cg.clip_grads(PAIRS, cg.ClipByGlobalNorm(1.0)), "pass the gradients"),
    "one pair": (lambda: cg.clip_grads(PAIRS[:1], cg.ClipByNorm(1.0)), "pass the gradients"),
    "pairs of Composer": (lambda: clip(PAIRS, kind="norm"), "pass the gradients"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSERS)
def test_a_call_of_another_library_says_what_to_write(name):
    call, match = COMPOSERS[name]
    with pytest.raises(TypeError, match=match):
        call()


@pytest.mark.slow
def test_a_tree_of_pairs_that_are_all_gradients_is_clipped():
    rule = cg.ClipByNorm(1.0)
    for grads in ([(W, W[0])], {"a": PAIRS[0]}, [list(PAIRS[0])], [PAIRS[0], W]):
        assert jax.tree.structure(cg.clip_grads(grads, rule)[0]) == jax.tree.structure(grads)
    clipped = cg.clip_grads(PAIRS, rule, PAIRS)[0]
    np.testing.assert_allclose(clipped[0][0], 0.5**0.5, rtol=1e-6)


@pytest.mark.parametrize("bad", [("nrm", 0.1), ("norm", -0.1), ("value", float("nan"))])
def test_a_transformation_is_refused_when_it_is_made(bad):
    with pytest.raises(ValueError, match="clipping_t"):
        cg.published.gradient_clipping(*bad)
    with pytest.raises(ValueError, match="axis: got 0 with clipping_type='norm'"):
        cg.published.gradient_clipping("norm", 0.1, axis=0)
