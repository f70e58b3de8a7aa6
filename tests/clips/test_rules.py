"""Known answers of single rules: units, axes, bounds, orders."""

import copy
import dataclasses
import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from clipgrad._arrays import Norm
from clipgrad._clip import MeasuringRule, known_rules
from clipgrad._clip.limits import limits_by_leaf
from clipgrad._clip.rule_thresholds import main_fields
from clipgrad._clip.rules.measuring_rule import scaled_down
from clipgrad._clip.rules.rule_fields import pytree_rule, threshold
from tests.helpers import array, assert_close, stable_id
from tests.rows import first_row


def test_error_clip_by_value_is_clip_by_value():
    assert cg.ErrorClipByValue is cg.ClipByValue
    assert cg.ErrorClipByValue(max=5.0) == cg.ClipByValue(5.0, None)


@pytest.mark.parametrize(
    "rule, expected",
    [
        (cg.ClipByValue(2.0), [-2, -1, 0, 1, 2]),
        (cg.ClipByValue(2.0, 0.5), [0.5, 0.5, 0.5, 1, 2]),
        (cg.ClipByValue(-1.0, -2.0), [-2, -1, -1, -1, -1]),
        (cg.ClipByValue(max=1.0, min=1.0), [1, 1, 1, 1, 1]),
        (cg.ClipByValue(np.array([9, 8, 7, 0.5, 1])), [-3, -1, 0, 0.5, 1]),
        (cg.ClipByValue(jnp.inf, -2), [-2, -1, 0, 1, 3]),
    ],
    ids=range(6),
)
def test_value_clip(rule, expected):
    np.testing.assert_array_equal(rule(array([-3.0, -1.0, 0.0, 1.0, 3.0])), expected)


def test_bounds_broadcast_into_a_leaf():
    x = array(np.full((2, 3), 9.0))
    np.testing.assert_array_equal(cg.ClipByValue(array([1.0, 2, 3]))(x), [[1, 2, 3]] * 2)
    np.testing.assert_array_equal(cg.ClipByValue(array([[1.0], [2]]))(x), [[1] * 3, [2] * 3])


@pytest.mark.parametrize("bad", [(1.0, 2.0), (np.ones(2), np.array([0.0, 3.0]))], ids=str)
def test_an_empty_interval_is_refused(bad):
    with pytest.raises(ValueError, match="min: got .*expected at most max"):
        cg.ClipByValue(*bad)


def test_a_nan_replacement_must_be_a_number():
    with pytest.raises(TypeError, match="nan: got 'zero'"):
        cg.ClipByValue(1.0, nan="zero")
    with pytest.raises(ValueError, match="nan: got nan"):
        cg.ClipByValue(1.0, nan=float("nan"))


@first_row
@pytest.mark.parametrize(
    "axis, expected",
    [
        (None, [[[0.4, 0.4]], [[0.4, 0.4]]]),
        (-1, [[[0.5657, 0.5657]], [[0.5657, 0.5657]]]),
        (0, [[[0.5657, 0.5657]], [[0.5657, 0.5657]]]),
        (1, [[[0.8, 0.8]], [[0.8, 0.8]]]),
        ((0, 2), [[[0.4, 0.4]], [[0.4, 0.4]]]),
        ((), [[[0.8, 0.8]], [[0.8, 0.8]]]),
    ],
)
def test_norms_over_slices(axis, expected):
    clipped = cg.ClipByNorm(0.8, axis=axis)(array(np.ones((2, 1, 2))))
    np.testing.assert_allclose(clipped, expected, rtol=1e-4)


def test_slices_may_have_limits_of_their_own():
    rule = cg.ClipByNorm(array([[1.0], [10.0]]), axis=-1)
    np.testing.assert_allclose(rule(array([[3.0, 4], [3, 4]])), [[0.6, 0.8], [3, 4]], rtol=1e-6)


@pytest.mark.parametrize("bad", ["rows", 1.5, True, (0, "x")], ids=str)
def test_an_axis_that_is_none_is_refused(bad):
    with pytest.raises(TypeError, match="axis: got .*expected an int, a tuple of them or None"):
        cg.ClipByNorm(1.0, axis=bad)


@pytest.mark.parametrize("axis", [2, -3, (0, 0), (0, -2)], ids=str)
def test_an_axis_that_a_leaf_lacks_is_refused(axis):
    with pytest.raises(ValueError, match=r"axis: got .* for layer/w of shape \(2, 2\)"):
        cg.ClipByNorm(1.0, axis=axis)({"layer": {"w": array(np.ones((2, 2)))}})


# Adaptive clipping: what a unit is. A leaf of ones, a gradient with one spike in it.


def spike(shape, value=0.05):
    x = np.zeros(shape)
    x[(0,) * len(shape)] = value
    return array(x)


@first_row
@pytest.mark.parametrize(
    "shape, unit",
    [
        ((4,), 4),
        ((), 1),
        ((1, 4), 1),
        ((8, 4), 8),
        ((3, 16, 8), 48),
        ((2, 4, 3), 8),
        ((3, 3, 4, 8), 36),
        ((2, 2, 2, 2, 2, 2), 32),
    ],
    ids=str,
)
def test_a_unit_is_what_makes_one_output(shape, unit):
    clip = jax.jit(lambda g, p: cg.AdaptiveClip(0.02)(g, p))
    clipped = clip(spike(shape, 1.0), np.ones(shape, np.float32))
    np.testing.assert_allclose(np.max(clipped), 0.02 * unit**0.5, rtol=1e-6)


def test_axis_names_may_be_a_list():
    for rule in (cg.ClipByGlobalNorm, cg.AdaptiveClip, cg.AutoNorm):
        assert rule(1.0, axis_name=["x", "y"]).axis_name == ("x", "y")


# `AutoNorm`: a rule whose threshold is no limit, so that it scales every gradient.

clip = jax.jit(cg.clip_grads)


def normalized(norm, c=1.0, gamma=0.01):
    return norm * c / (norm + gamma)


@pytest.mark.parametrize("norm", [0.0, 5e-38, 5e-30, 1e-4, 0.01, 1.0, 5e5, 1e19, 1e30, 2e38])
def test_an_auto_norm_is_the_formula_of_the_paper_at_every_size(norm):
    grads = {"a": array(np.float32([0.6, 0.0]) * norm), "b": array(np.float32(0.8) * norm)}
    for c, gamma in ((1.0, 0.01), (3.0, 1e-6), (0.5, 100.0), (1.0, 0.0)):
        clipped, stats = jax.device_get(clip(grads, cg.AutoNorm(c, gamma)))  # one program for all
        wide = np.append(np.float64(grads["a"]), grads["b"])
        n = np.linalg.norm(wide)
        factor = c / (n + gamma) if n + gamma else 0.0
        assert_close(np.append(clipped["a"], clipped["b"]), wide * factor, 1e-6, 2e-38)
        np.testing.assert_allclose(stats.clipped_norm, n * factor, rtol=2e-6, atol=2e-38)
        assert stats.clipped == (norm > 0) and stats.size == 3


@pytest.mark.slow
def test_numbers_of_an_auto_norm_may_be_traced_and_scheduled():
    x = jnp.array([3.0, 4.0])
    swept = jax.vmap(lambda c: cg.AutoNorm(c, gamma=5.0)(x))(jnp.arange(3.0))
    assert_close(jnp.linalg.norm(swept, axis=1), normalized(5.0, np.arange(3.0), 5.0))
    tx = cg.gradient_clip(cg.AutoNorm(gamma=optax.linear_schedule(0.0, 5.0, 1)), stats=True)
    state = tx.init(x)
    for gamma in (0.0, 5.0):
        updates, state = tx.update(x, state)
        assert_close(jnp.linalg.norm(updates), normalized(5.0, gamma=gamma))
        assert state.threshold == 1


@pytest.mark.parametrize(
    "error, make, match",
    [
        (ValueError, lambda: cg.AutoNorm(gamma=-0.1), "gamma: got -0.1, expected .*not negative"),
        (ValueError, lambda: cg.AutoNorm(jnp.inf), "max_norm: got inf, expected .*finite"),
        (
            TypeError,
            lambda: cg.AutoNorm(cg.PercentileThreshold(90)),
            "a clip by limits can be adapt",
        ),
    ],
    ids=range(3),
)
def test_an_auto_norm_that_makes_no_sense_is_refused(error, make, match):
    with pytest.raises(error, match=match):
        make()


# Rules are values.

THRESHOLDS = {
    "number": (1.0, 1.0, 2.0),
    "NumPy": (np.float32([1, 2]), np.float32([1, 2]), np.float32([1, 3])),
    "JAX": (array([1.0, 2.0]), array([1.0, 2.0]), array([1.0, 3.0])),
    "another shape": (array(np.ones(2)), array(np.ones(2)), array(np.ones(3))),
    "number and array": (1.0, np.ones(()), array(np.ones(1))),
    "schedule": (optax.constant_schedule, optax.constant_schedule, optax.linear_schedule),
    "adaptive": (cg.EMAThreshold(), cg.EMAThreshold(), cg.EMAThreshold(decay=0.5)),
}
MAKES = {
    "value": cg.ClipByValue, "norm": cg.ClipByNorm, "global": cg.ClipByGlobalNorm,
    "rms": cg.ClipByBlockRMS, "adaptive": cg.AdaptiveClip, "auto": cg.AutoNorm,
}  # fmt: skip
PAIRS = [(t, m) for t in THRESHOLDS for m in MAKES if (t, m) != ("adaptive", "auto")]


@pytest.mark.parametrize(("threshold", "make"), PAIRS)
def test_rules_with_equal_thresholds_are_equal(threshold, make):
    one, same, another = map(MAKES[make], THRESHOLDS[threshold])
    assert (one == same, one != same, one == another) == (True, False, False)
    assert one != MAKES["norm" if make == "value" else "value"](THRESHOLDS[threshold][0])
    if callable(THRESHOLDS[threshold][0]) or threshold == "number":
        assert hash(one) == hash(same) and len({one, same, another}) == 2
    elif threshold != "adaptive" and threshold != "number and array":
        with pytest.raises(TypeError, match="got an array in a rule that is to be hashed"):
            hash(one)


def test_rules_with_other_options_or_a_traced_threshold_are_not_equal():
    options = [{}, {"ord": 1}, {"axis": -1}, {"axis": (0, 1)}, {"axis_name": "x"}]
    rules = [cg.ClipByNorm(array(np.ones(3)), **option) for option in options]
    assert [[a == b for a in rules] for b in rules] == np.eye(5, dtype=bool).tolist()

    @jax.jit
    def traced(x, y):
        rule = cg.ClipByNorm(x)
        assert rule == rule and rule == cg.ClipByNorm(x)
        assert rule != cg.ClipByNorm(y) and rule != cg.ClipByNorm(1.0)
        return x

    traced(1.0, 1.0)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("limit", ["number", "absolute value"])
def test_a_complex_element_at_its_limit_stays_bit_for_bit_at_every_angle(dtype, limit):
    angles = np.linspace(0, 2 * np.pi, 400)
    with jax.enable_x64(dtype == "complex128"):
        for size in (1.0, 0.3, 1e-20, 7e20):
            size = np.zeros(0, dtype).real.dtype.type(size)
            z = array(np.float64(size) * np.exp(1j * angles), dtype)
            rule = cg.ClipByValue(size if limit == "number" else jnp.abs(z))
            clip = functools.partial(jax.jit(lambda rule, z: rule(z)), rule)
            np.testing.assert_array_equal(clip(z), z)
            clipped = clip(3 * np.asarray(z))
            np.testing.assert_array_equal(clip(clipped), clipped)
            eps = 4e-7 if dtype == "complex64" else 1e-15
            assert np.abs(np.asarray(clipped, complex)).max() <= size * (1 + eps)


@pytest.mark.slow
def test_a_function_in_a_rule_is_asked_anew_in_each_call():
    """A program that is kept for a rule is not used for one whose function may have changed."""
    axes = {"now": 0}
    rule = cg.AdaptiveClip(0.1, axis=lambda path, leaf: axes["now"])
    w, grads = jnp.arange(1.0, 7.0).reshape(2, 3), jnp.array([[9.0, 1.0, 2.0], [3.0, 5.0, 7.0]])
    results = []
    for axis in (0, 1, 0):
        axes["now"] = axis
        clipped = jax.grad(lambda w: jnp.vdot(cg.clip_cotangent(w, rule), grads))(w)
        np.testing.assert_allclose(clipped, cg.AdaptiveClip(0.1, axis=axis)(grads, w), rtol=1e-6)
        np.testing.assert_allclose(clipped, cg.clip_grads(grads, rule, w)[0], rtol=1e-6)
        results.append(clipped)
    assert np.abs(results[0] - results[1]).max() > 0.1


# The lower bound that was left out.

BOUNDS = {
    "int": (5, -5.0), "float": (5.0, -5.0), "text": ("5.0", -5.0), "zero": (0, 0.0),
    "NumPy": (np.float32(5), -5.0), "inf": (np.inf, -np.inf),
    "an array": (np.float32([1, 2]), [-1, -2]), "an array of JAX": (array([0, 1]), [0, -1]),
    "schedule": (optax.constant_schedule(1.0), None), "adaptive": (cg.EMAThreshold(), None),
}  # fmt: skip


class OfTheUser(cg.ClipByValue):
    pass


@pytest.mark.parametrize("cls", [cg.ErrorClipByValue, OfTheUser])
@pytest.mark.parametrize("bound", BOUNDS)
def test_a_lower_bound_that_is_left_out_is_the_negative_of_the_upper(bound, cls):
    maximum, expected = BOUNDS[bound]
    rule = cls(maximum)
    assert jax.tree.leaves(jax.tree.map(lambda x: 0, rule)) == [0], "max is the only threshold"
    assert dataclasses.asdict(rule)["min"] is None
    copies = [rule, copy.copy(rule), dataclasses.replace(rule), cls(rule.max, None)]
    copies += [pickle.loads(pickle.dumps(rule))] if bound != "schedule" else []
    for one in copies:
        assert (one.min is None) == (expected is None)
        if expected is not None:
            np.testing.assert_array_equal(one.min, expected)
            assert one == rule == cls(rule.max, rule.min)
        assert dataclasses.replace(one, max=7.0).min == -7
    assert dataclasses.replace(rule, max=7.0, min=-1.0).min == -1 == cls(2.0, -1.0).min


@pytest.mark.slow
def test_a_lower_bound_of_a_traced_rule_follows_its_upper_one():
    rule = cg.ErrorClipByValue(2.0)
    assert jax.jit(lambda rule: rule.min)(rule) == -2
    assert jax.tree.map(lambda c: 3 * c, rule).min == -6
    np.testing.assert_array_equal(
        jax.vmap(lambda c: cg.ClipByValue(c).min)(jnp.arange(3.0)), [0, -1, -2]
    )
    clip = lambda c: cg.ClipByValue(c)(jnp.array([-9.0, 1.0, 9.0]))  # noqa: E731
    np.testing.assert_array_equal(jax.jacobian(clip)(2.0), [-1, 0, 1])
    assert jax.tree.map(lambda c: object(), rule).min is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.min = -1.0
    assert hash(rule) == hash(cg.ClipByValue(2.0, -2.0)) and "min=-2.0" in repr(rule)


# The main threshold of a rule is marked, wherever it stands among the fields.

MAIN = {
    cg.ClipByValue: "max", cg.ClipByNorm: "max_norm", cg.ClipByGlobalNorm: "max_norm",
    cg.ClipByBlockRMS: "threshold", cg.AdaptiveClip: "clipping", cg.AutoNorm: "max_norm",
}  # fmt: skip


@pytest.fixture
def rule_with_another_field_first():
    """The clip by norm of a leaf times a factor, which is declared before the threshold."""
    before = list(known_rules.RULES)

    @pytree_rule
    class Scaled(MeasuringRule):
        factor: float = dataclasses.field(metadata=threshold())
        most: float = dataclasses.field(metadata=threshold(main=True, adaptive=True))

        def measure(self, grads, params=None):
            scaled = jax.tree.map(lambda x: x * self.factor, grads)
            return cg.ClipByNorm(1.0).measure(scaled)

        def norms_and_limits(self, norms):
            return list(zip(norms, limits_by_leaf(self, norms), strict=True))

    yield Scaled
    known_rules.RULES[:] = before


def test_each_rule_has_one_main_threshold():
    assert all(main_fields(rule) == [name] for rule, name in MAIN.items())
    assert all(len(main_fields(rule)) == 1 for rule in known_rules.RULES)


def test_the_state_shows_the_main_threshold_and_steps_and_histories_set_it(
    rule_with_another_field_first,
):
    make, grads = rule_with_another_field_first, array([3.0, 4.0])
    fixed = cg.clip_grads(grads, make(1.0, 2.5))[0]
    np.testing.assert_allclose(fixed, [1.5, 2.0], rtol=1e-6)

    class HalfOfTheNorm:
        def init(self, norms):
            return norms

        def update(self, state, norms):
            return norms / 2, state

    for most in (lambda count: 2.5, HalfOfTheNorm()):
        tx = cg.gradient_clip(make(1.0, most), stats=True)
        updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        np.testing.assert_allclose(updates, fixed, rtol=1e-6)
        np.testing.assert_allclose(state.threshold, 2.5, rtol=1e-6)
    with pytest.raises(TypeError, match=r"^most: got .* which only a gradient clip can use"):
        make(1.0, HalfOfTheNorm())(grads)
    with pytest.raises(TypeError, match="factor: got .*; only the first threshold of a clip"):
        make(HalfOfTheNorm(), 1.0)


def test_statistics_of_a_rule_with_another_measure_are_of_the_elements(
    rule_with_another_field_first,
):
    """Of a rule that does not say that it measures L2 norms, no limit is one of these."""
    rule = rule_with_another_field_first(2.0, 5.0)  # of twice the norm
    clipped, stats = cg.clip_grads(array([3.0, 4.0]), rule)
    np.testing.assert_allclose(clipped, [1.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose([stats.norm, stats.clipped_norm], [5.0, 2.5], rtol=1e-6)
    assert stats.changed == 2


@pytest.mark.parametrize("marks", [(False, False), (True, True)])
def test_a_rule_without_one_main_threshold_is_refused(marks):
    class Unclear(MeasuringRule):
        low: float = dataclasses.field(metadata=threshold(main=marks[0]))
        high: float = dataclasses.field(metadata=threshold(main=marks[1]))

    with pytest.raises(TypeError, match="Unclear: got .* as the main threshold, expected one"):
        pytree_rule(Unclear)


# -- AdaptiveClip by unit, in the layouts of models; and where optax is wrong.


@pytest.mark.parametrize("clipping", [1.0, 1.5, np.float32(0.01), 0.0], ids=str)
def test_adaptive_clip_by_weights_whose_norm_is_larger_than_float32_scales(clipping):
    params, grads = array(np.full((4, 2), 3e38)), array(np.full((4, 2), 2.0))
    clipped = jax.jit(cg.AdaptiveClip(clipping))(grads, params)
    np.testing.assert_array_equal(clipped, grads if clipping else 0 * np.asarray(grads))


# Path, shape, and the axes that one unit spans.
LAYOUTS = {
    "dense/kernel": ((4, 6), (0,)),
    "dense/bias": ((6,), None),
    "norm/scale": ((6,), None),
    "scalar": ((), None),
    "one_input/kernel": ((1, 4), (0,)),
    "one_output/kernel": ((4, 1), (0,)),
    "conv1d/kernel": ((3, 4, 6), (0, 1)),
    "conv2d/kernel": ((3, 3, 2, 5), (0, 1, 2)),
    "conv3d/kernel": ((2, 2, 2, 3, 4), (0, 1, 2, 3)),
    "attention/out/kernel": ((2, 4, 3), (0, 1)),
    "six": ((1, 2, 1, 2, 2, 3), (0, 1, 2, 3, 4)),
    "embedding": ((7, 4), (1,)),
    "attention/query/kernel": ((5, 2, 4), (0,)),
    "layers/dense/kernel": ((3, 4, 6), (1,)),
    "layers/dense/bias": ((3, 6), (1,)),
    "layers/conv/kernel": ((3, 2, 2, 4, 5), (1, 2, 3)),
    "experts/kernel": ((4, 5, 3), (1,)),
    "layers/experts/kernel": ((3, 4, 5, 2), (2,)),
    "torch/linear/weight": ((6, 4), (1,)),
    "torch/conv/weight": ((5, 2, 3, 3), (1, 2, 3)),
}


def trees(seed=0):
    """Gradients and weights, both over several orders of magnitude, and some weights 0."""
    rng = np.random.default_rng(seed)

    def tree(spread):
        return {
            path: np.float32(rng.normal(size=s) * 10.0 ** rng.uniform(-spread, spread, size=s))
            for path, (s, _) in LAYOUTS.items()
        }

    grads, params = tree(2), tree(1)
    params["dense/kernel"][:, 0] = 0
    return grads, params


def reference(grad, weight, axes, clipping, eps=1e-3):
    g, w = np.float64(grad), np.float64(weight)
    norms = [np.sqrt(np.sum(x**2, axis=axes, keepdims=True)) for x in (g, w)]
    limit = clipping * np.maximum(norms[1], eps)
    return np.where(norms[0] > limit, g * limit / norms[0], g)


@pytest.mark.slow
def test_units_of_every_layout_in_one_tree():
    grads, params = trees()
    axis = lambda path, leaf: LAYOUTS[path][1]  # noqa: E731
    clip = jax.jit(lambda c: cg.clip_grads(grads, cg.AdaptiveClip(c, axis=axis), params)[0])
    for clipping in (0.01, 1.0, 30.0):
        clipped = clip(clipping)
        for path, (_, axes) in LAYOUTS.items():
            expected = reference(grads[path], params[path], axes, clipping)
            np.testing.assert_allclose(clipped[path], expected, rtol=2e-6, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axis, match",
    [
        (1, r"axis: got 1 for dense/bias of shape \(6,\)"),
        (
            lambda path, leaf: (0, -2)[: leaf.ndim],
            r"got \(0, -2\) for dense/kernel of shape \(4, 6\)",
        ),
        (lambda path, leaf: 9, "axis: got 9 for"),
    ],
    ids=range(3),
)
def test_units_that_the_tree_has_not_are_refused(axis, match):
    grads, params = ({k: t[k] for k in ("dense/kernel", "dense/bias")} for t in trees())
    with pytest.raises(ValueError, match=match):
        cg.adaptive_grad_clip(0.1, axis=axis).update(grads, optax.EmptyState(), params)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["rows", 1.5, {"kernel": 0}, lambda p, x: "last"], ids=stable_id)
def test_axes_that_are_none_are_refused(axis):
    x = {"kernel": jnp.ones((2, 2))}
    with pytest.raises(TypeError, match="axis: got .* expected an int, a tuple of them or None"):
        cg.AdaptiveClip(axis=axis)(x, x)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("rule", [cg.ClipByGlobalNorm, cg.ClipByNorm, cg.ClipByBlockRMS])
def test_a_limit_far_below_the_norm_is_reached(rule):
    clip, unit = jax.jit(lambda limit, x: rule(limit)([x])[0]), np.linspace(-1, 1, 4)
    norm = np.sqrt(np.mean(unit**2) if rule is cg.ClipByBlockRMS else np.sum(unit**2))
    for size, limit in [(1e16, 1e-25), (1e30, 1e-33), (1e37, 1e-20), (3e38, 1e-20), (1e-30, 1e-35)]:
        clipped = clip(np.float32(limit), np.float32(unit * size))
        np.testing.assert_allclose(clipped, unit / norm * limit, rtol=1e-6)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("rule", [cg.ClipByGlobalNorm, cg.ClipByNorm, cg.ClipByBlockRMS])
def test_derivatives_of_a_clip_are_right_far_from_1(rule):
    """Where the square of the norm, by which plain derivatives divide, is no float."""
    total = jax.jit(lambda x, limit: jnp.sum(rule(limit)([x])[0]))
    derivatives = jax.jit(jax.grad(total)), jax.jit(jax.hessian(total))
    unit, eye = np.array([3.0, 4.0]), np.eye(2)
    factor = 0.1 * (np.sqrt(2) if rule is cg.ClipByBlockRMS else 1)
    along, sums = unit / 5, np.add.outer(unit, unit) / 5
    first = factor * (1 - along * along.sum())
    second = -factor / 5 * (sums + along.sum() * (eye - 3 * np.outer(along, along)))
    for size in (1e-25, 1e15, 1e20, 1e30):
        x = np.float32(unit * size)
        args = x, np.float32(size / 2)
        np.testing.assert_allclose(derivatives[0](*args), first, rtol=1e-5)
        np.testing.assert_allclose(derivatives[1](*args) * size, second, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30, 3e38])
def test_on_a_mesh_of_one_device_a_clip_has_the_form_of_one_device(size):
    """A branch for large leaves, float64 for small ones: one program of all rules, since few do."""
    rules = cg.ClipByGlobalNorm(0.5), cg.ClipByNorm(0.5), cg.ClipByBlockRMS(0.5)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    tree = [np.linspace(0.5, 1, n, dtype=np.float32) * np.float32(size) for n in (3, 4096)]
    with jax.set_mesh(mesh):
        lowered = clip_by_all(rules).lower(tree)
        clipped = clip_by_all(rules)(tree)
    assert "f64" in lowered.as_text() and "stablehlo.case" in lowered.as_text()
    wide = [np.float64(x) for x in tree]
    norms = [np.sqrt(np.sum(x**2)) for x in wide]
    means = [np.sqrt(np.mean(x**2)) for x in wide]
    of_rules = [[np.hypot(*norms)] * 2, norms, means]
    for found, each in zip(clipped, of_rules, strict=True):
        for x, y, norm in zip(wide, found, each, strict=True):
            np.testing.assert_allclose(y, x * min(1, 0.5 / norm), rtol=1e-6)


@functools.cache
def clip_by_all(rules):
    return jax.jit(lambda tree: [rule(tree) for rule in rules])


def test_an_element_costs_a_clip_what_it_costs_optax():
    """XLA compiles long what is done for each element of each shape."""
    numbers = array(np.ones(())), array(np.ones(())), array(np.ones(()))
    lowered = jax.jit(scaled_down).lower(array(np.ones((5, 7))), Norm(*numbers), array(np.ones(())))
    of_elements = re.findall(r"stablehlo\.(\w+) .*tensor<5x7xf32>$", lowered.as_text(), re.M)
    assert [x for x in of_elements if x != "broadcast_in_dim"] == ["divide", "multiply", "select"]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("limit", [1e-30, 1e-33, 1e-36])
@pytest.mark.parametrize("rule", [cg.ClipByNorm, cg.ClipByGlobalNorm, cg.ClipByBlockRMS])
def test_a_tiny_limit_of_the_largest_norms_is_no_zero(rule, limit):
    leaf = np.float32([3e38, 1e38, -2e38])
    (clipped,) = jax.jit(rule(limit))([leaf])
    wide = np.float64(leaf)
    norm = np.sqrt((np.mean if rule is cg.ClipByBlockRMS else np.sum)(wide * wide))
    np.testing.assert_allclose(clipped, wide / norm * limit, rtol=4e-7)
