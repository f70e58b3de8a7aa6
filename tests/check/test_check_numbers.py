"""The numbers: precision, steps, kinks, noise, modes, bounded cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import pallas_call

import clipgrad as cg
from tests.check.check_zoo import PAIRS, custom, normal
from tests.helpers import array

pytestmark = pytest.mark.slow

X = array([0.4, -1.2, 2.5])


def passed(function, *args, **options):
    report = cg.check_grads(function, args, raise_on_failure=False, **options)
    assert report.ok, str(report)
    return report


def failed(function, *args, **options):
    report = cg.check_grads(function, args, raise_on_failure=False, **options)
    assert not report.ok, str(report)
    return report


def called_back(function, cast):
    """sin by a callback, which cannot be widened; `cast` narrows its input."""

    def call(x):
        inner = x.astype(cast(x.dtype))
        out = jax.ShapeDtypeStruct(x.shape, inner.dtype)
        return jax.pure_callback(np.sin, out, inner, vmap_method="sequential").astype(x.dtype)

    return custom(call, function)


def cosine(factor):
    return lambda r, g: (factor * g * jnp.cos(r[0]),)


def test_a_callback_is_evaluated_natively_where_its_thread_has_no_64_bit_types():
    report = passed(called_back(cosine(1), lambda dtype: dtype), X)
    assert report.precision == "float32"
    assert "it holds pure_callback" in report.notes[0] and "float32 alone" in str(report)
    failed(called_back(cosine(1.05), lambda dtype: dtype), X)


def in_pallas(backward):
    kernel = lambda source, target: target.__setitem__(..., jnp.sin(source[...]))  # noqa: E731

    def sin(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas_call(kernel, out_shape=shape, interpret=True)(x)

    return custom(sin, backward)


def with_backward_called_back(backward):
    def by_callback(r, g):
        call = lambda x, g: np.asarray(backward((x,), g)[0])  # noqa: E731
        return (jax.pure_callback(call, g, r[0], g, vmap_method="sequential"),)

    return custom(lambda x: jnp.sin(x), by_callback)


@pytest.mark.parametrize(
    ("make", "tolerance"),
    [
        (in_pallas, 5e-3),
        (with_backward_called_back, 5e-4),
        (lambda backward: called_back(backward, lambda dtype: dtype), 5e-3),
    ],
    ids=["a Pallas kernel", "a callback in the rule", "a callback in the function"],
)
def test_a_rule_that_cannot_be_widened_is_held_to_the_tolerance_of_its_type(make, tolerance):
    report = passed(make(cosine(1 + 0.5 * tolerance)), X)
    assert "float64" in report.notes[0] and "it holds" in report.notes[0]
    failed(make(cosine(1 + 2 * tolerance)), X)


def test_a_narrow_type_inside_sets_the_tolerance_and_is_noted():
    report = passed(lambda x: jnp.sin(x.astype(jnp.bfloat16)).astype(x.dtype), X)
    assert (
        "the function computes in bfloat16 inside, so the tolerances are those of bfloat16"
        in report.notes
    )


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_every_mode_tells_wrong_from_right(mode):
    wrong, right, args = PAIRS["wrong_deep_inside_a_scan"][0](jnp.dtype("float32"))
    failed(wrong, *args, mode=mode)
    passed(right, *args, mode=mode)


def test_blocks_are_searched_where_there_is_no_reference():
    def backward(r, g):
        return ((g * jnp.cos(r[0])).at[777].multiply(0.5),)

    wrong = called_back(backward, lambda dtype: dtype)
    report = failed(wrong, normal(1, 1500, dtype=jnp.float32))
    assert report.failures[0].where == "args[0][777]"


@pytest.mark.parametrize("size", [10, 100_000])
def test_auto_takes_under_a_hundred_evaluations_at_any_size(size):
    assert passed(jnp.sin, normal(2, size, dtype=jnp.float32)).evaluations < 100


@pytest.mark.parametrize("mode", ["auto", "full"])
@pytest.mark.parametrize("offset", [1.0, 1e5])
def test_a_kink_within_a_millionth_of_the_point_is_no_false_alarm(mode, offset):
    def beside(x):
        return jnp.concatenate([jnp.maximum(x, 0), offset + x[2:3]])

    passed(beside, jnp.asarray([1.5e-6, -1.5e-6, 0.7, -1.2]), mode=mode, points=1)


def test_auto_takes_under_a_hundred_evaluations_for_many_leaves():
    leaves = [normal(k, 3, dtype=jnp.float32) for k in range(30)]
    report = passed(lambda xs: jax.nn.logsumexp(jnp.concatenate(xs)), leaves)
    assert report.evaluations < 100


def test_a_kink_with_a_gradient_between_its_slopes_passes_with_a_note():
    relu = custom(lambda x: jnp.maximum(x, 0), lambda r, g: (g * (r[0] > 0).astype(g.dtype),))
    report = passed(relu, jnp.asarray([-1.0, 0.0, 1.0]))
    assert "args[0]: 1 of 3 elements at a kink: the gradient lies" in report.notes[0]


@pytest.mark.parametrize("rows", [1, 3])
def test_both_arguments_of_a_tie_cannot_have_the_whole_gradient(rows):
    def share(k):
        def backward(r, g):
            largest = r[0] == jnp.max(r[0], axis=1, keepdims=True)
            return (k * g[:, None] * largest.astype(g.dtype),)

        return custom(lambda x: jnp.max(x, axis=1), backward)

    x = jnp.asarray([[1.0, 2.0, 2.0]] * rows)
    passed(share(0.5), x, points=1)
    (failure,) = failed(share(1.0), x, points=1).failures
    assert failure.indices.tolist() == [k for k in range(3 * rows) if k % 3]


def test_a_small_kink_beside_large_slopes_is_a_kink():
    relu = custom(
        lambda x: jnp.asarray([1e-4, 1, 1]) * jax.nn.relu(x),
        lambda r, g: (jnp.where(r[0] > 0, jnp.asarray([1e-4, 1, 1]) * g, 0),),
    )
    assert "at a kink" in str(passed(relu, jnp.asarray([0.0, 1.2, 2.5])))


def test_a_small_gradient_beside_outputs_of_another_magnitude_is_judged_by_plain_ad():
    def both(x, y):
        return jnp.concatenate([1e6 * jnp.sin(x), 1e-6 * jnp.sin(y)])

    def scaled(k):
        return custom(
            both, lambda r, g: (1e6 * jnp.cos(r[0]) * g[:3], k * 1e-6 * jnp.cos(r[1]) * g[3:])
        )

    passed(scaled(1.0), X, X)
    assert failed(scaled(1.02), X, X).failures[0].where.startswith("args[1]")


def test_plain_ad_is_noise_where_a_few_roundings_of_the_point_change_it_altogether():
    def zero(f):
        return custom(f, lambda r, g: (0 * r[0],))

    logits = normal(212, 4, 6, dtype=jnp.float32)
    report = passed(zero(lambda x: jax.nn.softmax(x).sum(-1)), logits)
    assert report.verified == logits.size
    failed(zero(lambda x: 1 + 1e-18 * jnp.sin(1e6 * x)), logits)


@pytest.mark.parametrize("effect", [1e-14, 1e-15, 1e-16])
def test_zero_for_a_leaf_of_no_effect_beside_another_is_not_verified_or_wrong(effect):
    none = custom(lambda x: jnp.sum(jnp.sin(x)), lambda r, g: (0 * r[0],))
    beside = lambda x, y: jnp.sum(jnp.cos(x)) + np.float32(effect) * none(y)  # noqa: E731
    report = cg.check_grads(beside, (X, X), points=1, raise_on_failure=False)
    assert report.verified <= X.size


def test_the_factors_of_a_linear_solve_are_not_held():
    matrix = normal(3, 3, 3, dtype=jnp.float32) + 4 * jnp.eye(3)
    solve = custom(
        lambda a, b: jnp.linalg.solve(a, b),
        lambda r, g: jax.vjp(jnp.linalg.solve, *r)[1](g),
    )
    passed(solve, matrix, X)


def test_values_lost_to_rounding_are_excused_only_if_plain_ad_loses_them_too():
    report = passed(lambda x: jnp.sin((1e4 + x) - 1e4) ** 2, X, points=1)
    assert "off by rounding: plain autodiff or the rule's operations lose as much" in str(report)
    careless = custom(
        lambda x: x * x, lambda r, g: (g * (((1e4 + r[0]) ** 2 - 1e8 - r[0] ** 2) / 1e4),)
    )
    failed(careless, X)


@pytest.mark.parametrize(("times", "ok"), [(5, True), (20, False)])
def test_a_rule_may_lose_a_few_times_as_much_to_rounding_as_plain_ad(times, ok):
    def backward(r, g):
        moved = np.float32(times * 1e4) + r[0]
        return (g * jnp.sin(2 * (moved - np.float32(times * 1e4))),)

    rule = custom(lambda x: jnp.sin((1e4 + x) - 1e4) ** 2, backward)
    (passed if ok else failed)(rule, X, points=1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_cancels_in_half_precision_is_a_note(dtype):
    """tanh ** 2 + 1 / cosh ** 2 is 1: of the slope 1e-5 beside it, roundings leave nothing."""

    def one(x):
        return jnp.sum(jnp.tanh(x) ** 2 + 1 / jnp.cosh(x) ** 2 + 1e-5 * x)

    def beside(one):
        return lambda x, y: one(x) + jnp.sum(jnp.sin(y))

    args = X.astype(dtype), X.astype(dtype)
    checked = passed(beside(one), *args, points=1)
    assert "rounding explains the error" in str(checked)
    assert checked.verified == 3
    failed(beside(custom(one, lambda r, g: (g * jnp.ones_like(r[0]),))), *args)


@pytest.mark.parametrize(("off", "ok"), [(0.0, True), (1e-5, False)])
def test_a_slope_beside_large_values_is_verified_to_what_their_noise_leaves(off, ok):
    rule = custom(lambda x: 1e6 + jnp.sin(x), lambda r, g: ((1 + off) * g * jnp.cos(r[0]),))
    assert (passed if ok else failed)(rule, X, mode="full", points=1)


def test_ties_beside_large_values_are_verified_to_what_their_noise_leaves():
    with jax.enable_x64(True):
        x = jnp.zeros(3)
        rule = custom(lambda x: 1.1e8 + 1.3 * jnp.sum(jax.nn.relu(x)), lambda r, g: (1.3 * g + x,))
        passed(rule, x, points=1)
    weights = jnp.asarray([2.0, 1.0, 4.0])
    rule = custom(lambda x: 1e8 + jnp.max(weights * x), lambda r, g: (g * weights,))
    failed(rule, 0.7 / weights, points=1)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(("factor", "says"), [(1, "nothing was verified"), (7, "elements wrong")])
def test_where_slopes_are_lost_in_the_noise_of_large_values_plain_ad_decides(factor, says, wide):
    """float64 keeps nothing of a sine beside 1e20: slopes verify no rule, plain AD refutes one."""
    with jax.enable_x64(wide):
        large = custom(lambda x: 1e20 + jnp.sin(x), lambda r, g: (factor * g * jnp.cos(r[0]),))
        assert says in str(failed(large, jnp.asarray([0.4, 1.2]), mode="full"))


@pytest.mark.parametrize("wide", [True, False])
def test_a_leaf_that_vanishes_is_verified_without_a_reference(wide):
    with jax.enable_x64(wide):
        args = jnp.asarray([0.4, 1.2, 2.5]), jnp.asarray(0.5)
        report = passed(lambda x, b: jax.nn.softmax(x + b), *args, mode="full")
    assert report.verified >= 3


def test_an_offset_common_to_all_outputs_does_not_move_them():
    passed(lambda x, b: jax.nn.softmax(x + b), X, jnp.float32(0.5))


def test_where_plain_ad_is_not_finite_differences_judge_alone():
    def norm(x):
        return jnp.sqrt(jnp.sum(x * x))

    def safe(k):
        return custom(lambda x: norm(x), lambda r, g: (k * jnp.ones(3) * g,))

    both = lambda k: lambda x, y: safe(k)(x) + jnp.sum(jnp.sin(y))  # noqa: E731
    passed(both(0.5), jnp.zeros(3), X, points=1, skip=["finite"])
    failed(both(2.0), jnp.zeros(3), X, points=1)


def test_values_may_be_off_by_a_few_percent_of_those_in_float64():
    def multiple(x):
        return functools.reduce(lambda y, _: y + x, range(50), x)

    report = passed(multiple, X.astype(jnp.bfloat16))
    assert report.precision == "float64"


def test_a_function_that_looks_at_its_own_rounding_is_evaluated_natively():
    report = passed(lambda x: jnp.where(x + 1e-9 == x, 1.0, 2.0) * x, X)
    assert report.precision == "float32"
    assert (
        "float64 is not possible (its values differ from those of the function: " in report.notes[0]
    )


def test_a_function_that_cannot_be_evaluated_elsewhere_is_refused():
    def strict(x):
        if not np.array_equal(x, X):
            raise ValueError("elsewhere")
        return np.sin(x)

    def call(x):
        return jax.pure_callback(strict, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(ValueError, match="(?s)cannot be evaluated at a point nearby.*callback"):
        cg.check_grads(custom(call, cosine(1)), (X,))


@pytest.mark.parametrize("x", [[16.0, 15, 17, 18], [20.0, 25, 18, 22]])
def test_what_is_nothing_but_rounding_is_not_wrong_though_plain_ad_rounds_otherwise(x):
    rule = custom(lambda x: jnp.tanh(x), lambda r, g: (g * (1 - jnp.tanh(r[0]) ** 2),))
    zero = custom(lambda x: jnp.tanh(x) - 1e-14 * x, lambda r, g: (0 * g * r[0],))
    with jax.enable_x64(True):
        report = cg.check_grads(rule, (jnp.asarray(x),), raise_on_failure=False)
        assert all("verified" in failure.detail for failure in report.failures), str(report)
        assert not cg.check_grads(zero, (jnp.ones(4),), raise_on_failure=False).ok


@pytest.mark.parametrize("of_rule", [True, False])
def test_a_saturated_leaf_is_not_verified_and_not_wrong(of_rule):
    rule = custom(lambda x: jnp.tanh(x), lambda r, g: (g * (1 - jnp.tanh(r[0]) ** 2),))
    report = failed(rule if of_rule else jnp.tanh, jnp.asarray([9, -9.6, 9.24, 12]))
    (failure,) = report.failures
    assert "verified" in failure.detail and "wrong" not in failure.detail


def test_what_a_function_rounds_on_purpose_is_rounding_of_its_gradient():
    """Of plain AD, not of a rule: it may round too, but its formula is what it computes."""
    rounds = lambda x: jnp.sin(lax.reduce_precision(x, 8, 4))  # noqa: E731
    assert passed(rounds, X, points=1).verified == X.size
    pull = lambda r, g: (g * lax.reduce_precision(jnp.cos(r[0]), 8, 4),)  # noqa: E731
    off = custom(lambda x: jnp.sin(x), pull)
    failed(off, X, points=1)
