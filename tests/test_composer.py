"""`apply_gradient_clipping`: Composer's arguments, and the values of its adaptive rule."""

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
        ([1.0, 1.0], [0.0, 0.0], 1e-4, [0.0, 0.0]),
        ([0.0, 0.0], [0.0, 0.0], 1e-4, [0.0, 0.0]),
        ([[3.0, 4], [9, 40]], [[7.0, 24], [5, 12]], 0.5, [[0.7, 2.4], [5, 12]]),
        (W3, G3, 1 / 3, C3),
        (W3[..., None], G3[..., None], 1 / 3, C3[..., None]),
        (2.0, 8.0, 0.5, 1.0),
    ],
    ids=range(8),
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


def test_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match="got 'agc', expected one of norm, value, adaptive"):
        clip(jnp.ones(2), kind="agc")


def test_missing_or_unfitting_parameters_are_refused():
    with pytest.raises(ValueError, match="params: got None, expected .* clipping_type='adaptive'"):
        clip(jnp.ones(2))
    with pytest.raises(ValueError, match=r"params: got \(3,\) for a"):
        clip({"a": jnp.ones(2)}, {"a": jnp.ones(3)})


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
@pytest.mark.parametrize("threshold", [lambda step: 1.0, cg.PercentileThreshold()])
def test_a_threshold_that_changes_with_the_steps_is_refused(kind, threshold):
    match = "clipping_threshold: got .*expected a number.*such as schedule.step.*gradient_clip"
    with pytest.raises(TypeError, match=match):
        cg.published.apply_gradient_clipping(
            jnp.ones(2), jnp.ones(2), clipping_type=kind, clipping_threshold=threshold
        )


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_an_axis_where_there_are_no_units_is_refused(kind):
    match = f"axis: got 1 with clipping_type='{kind}', which has no units; expected axis to be left"
    with pytest.raises(ValueError, match=match):
        clip(jnp.ones(2), kind=kind, axis=1)
