"""The contract of differentiation, what is counted and said of values, and outputs that cancel."""

import ast
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._check import check_grads, contract
from clipgrad._check.checked_function import checked_function
from clipgrad._check.tolerances import tolerance_of
from clipgrad._check.verdict import (
    DISPUTED,
    FAILED,
    KINK,
    NOISE,
    NOTES,
    OK,
    ROUNDING,
    UNDECIDED,
    UNSEEN,
    VERIFIED,
    WRONG,
    FiniteDifferences,
    judge_slopes,
    majority,
)
from tests.check.check_zoo import custom
from tests.helpers import array
from tests.rows import first_row, some_of

X = array([0.4, 1.2, 2.5])


@functools.cache
def doubled():
    return checked_function(lambda x: 2 * x, (X,))


def test_kinds_stand_in_order_of_severity_and_each_that_is_not_right_is_said():
    assert min(FAILED) > max(OK, ROUNDING, KINK, NOISE, UNDECIDED, UNSEEN)
    assert max(VERIFIED) < min(KINK, NOISE, UNDECIDED, UNSEEN)
    assert sorted([OK, *NOTES, *FAILED]) == list(range(WRONG + 1))


@pytest.mark.parametrize(
    ("rule", "plain", "is_smooth", "is_between", "kind"),
    [
        (OK, OK, True, False, OK),
        (OK, WRONG, True, False, OK),  # whatever plain AD says
        (KINK, UNSEEN, False, False, KINK),
        (WRONG, OK, True, False, WRONG),
        (WRONG, NOISE, True, False, WRONG),
        (WRONG, UNSEEN, True, False, WRONG),  # without plain AD the slopes decide
        (WRONG, WRONG, True, False, DISPUTED),
        (WRONG, WRONG, False, False, UNDECIDED),
        (NOISE, UNSEEN, True, True, WRONG),  # none is for the rule
        (NOISE, UNSEEN, True, False, NOISE),
        (UNSEEN, UNSEEN, False, False, UNSEEN),
    ],
)
def test_two_of_three_witnesses_must_agree(rule, plain, is_smooth, is_between, kind):
    columns = (np.asarray([x]) for x in (rule, plain, is_smooth, is_between))
    assert majority(*columns) == [kind]


def test_all_numbers_that_decide_stand_in_one_file():
    """But for the kinds, and for how long a text is."""
    apart = {"verdict.py", "report.py", "log.py", "tolerances.py"}
    for path in pathlib.Path(contract.__file__).parent.glob("*.py"):
        for node in [] if path.name in apart else ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign):
                parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                values = [part.value for part in parts if isinstance(part, ast.Constant)]
                numbers = [x for x in values if isinstance(x, int | float)]
                assert not numbers, f"{path.name}:{node.lineno}"


H = 2.0 ** -np.arange(4.0, 33, 4)


def verdict(function, analytic, noise=0.0):
    """The kind of a slope at 0 by the steps of float64."""
    slope = lambda s: np.asarray([s * (function(s * h) - function(0.0)) / h for h in H])  # noqa: E731
    sides = [slope(s) for s in (1, -1)]
    ahead, behind = (side[None, :, None] for side in sides)
    noises = (noise / H)[None, :, None]
    along, groups = np.ones(1), [np.zeros(1, int)]
    differences = FiniteDifferences(
        ahead, behind, np.abs(ahead - behind) / 2, noises, H, along, groups
    )
    gradient, typical = np.asarray([[analytic]]), np.ones((1, 1))
    return judge_slopes(differences, gradient, tolerance_of("float64"), typical).kind[0]


@pytest.mark.parametrize(
    ("function", "analytic", "kind"),
    [
        (np.sin, 1.0, OK),
        (np.sin, 1.00001, WRONG),
        (np.exp, 1.0, OK),
        (np.abs, 0.3, KINK),
        (np.abs, 1.2, WRONG),
        (lambda x: np.maximum(x, 0.0), 0.5, KINK),
        (lambda x: np.sqrt(np.abs(x)) * np.sign(x), 1e3, NOISE),  # slopes grow without bound
        (lambda x: float(x > 0), 0.0, NOISE),
    ],
)
def test_slopes_are_told_apart(function, analytic, kind):
    assert verdict(function, analytic) == kind


def test_noise_above_the_slope_tells_nothing_and_below_it_is_allowed_for():
    assert verdict(np.sin, 1.0, noise=1e-2) == NOISE
    assert verdict(np.sin, 1.0 + 1e-9, noise=1e-18) == OK


def test_a_value_that_differs_when_differentiated_is_named():
    (failure,) = contract.primal(doubled(), [array([0.8, 2.5, 5.0])], "differentiated")
    assert failure.check == "primal" and failure.where == "out[1]"
    assert "value 2.4 when called, 2.5 when differentiated; 1 of 3 elements" in failure.detail


@pytest.mark.parametrize(("part", "differ"), [(0.5, False), (2.0, True)])
def test_values_are_the_same_to_a_tenth_of_the_tolerance(part, differ):
    other = [array(np.asarray(doubled().outputs[0]) * (1 + part * 5e-5))]
    assert bool(contract.primal(doubled(), other, "differentiated")) == differ


def test_an_output_of_another_type_or_shape_is_named():
    (failure,) = contract.primal(doubled(), [array([0.8, 2.4, 5.0], jnp.bfloat16)], "compiled")[:1]
    assert failure.detail == "dtype float32 when called, bfloat16 when compiled"
    (failure,) = contract.primal(doubled(), [array([[0.8, 2.4, 5.0]])], "compiled")
    assert failure.detail == "shape (3,) when called, (1, 3) when compiled"


@pytest.mark.slow
def test_a_rule_that_is_as_wrong_as_plain_ad_is_disputed_and_said_so():
    """A derivative of JAX's own that is wrong at a point, used by a rule of the user's."""
    from jax.scipy.special import digamma

    rule = custom(digamma, lambda r, g: (g * jax.vmap(jax.grad(digamma))(r[0]),))
    x = jnp.asarray([-16.5, 2.0])
    (failure,) = cg.check_grads(rule, (x,), raise_on_failure=False).failures
    assert (
        failure.where == "args[0][0]"
        and "plain autodiff has the gradient of the rule" in failure.detail
    )
    (failure,) = cg.check_grads(digamma, (x,), raise_on_failure=False).failures
    assert failure.where == "args[0][0]" and "JAX's derivative of its own operations" in str(
        failure
    )


@pytest.mark.slow
def test_kinks_are_counted_apart_and_disputes_are_not_verified():
    report = cg.check_grads(lambda x: jnp.abs(x).sum(), (jnp.asarray([0.0, 1.0]),), points=1)
    assert (report.verified, report.at_kinks, report.elements) == (1, 1, 2)


@pytest.mark.parametrize(("part", "ok"), [(0.004, True), (0.006, False)])
def test_paddles_rule_is_its_published_one_at_every_element(part, ok):
    rule = custom(lambda x: jnp.sin(x), lambda r, g: ((1 + part) * g * jnp.cos(r[0]),))
    options = {"max_relative_error": 0.005, "skip": ("linearity",)}
    report = cg.check_grads(rule, (X,), raise_on_failure=False, points=1, **options)
    assert report.ok == ok, str(report)


def test_a_tolerance_that_is_stated_is_a_part_of_an_element_or_of_its_leaf():
    """The last element is off by twice its size, which is a hundredth of the others."""
    off = array([0, 0, 0, 0.01])
    square = custom(lambda x: x * x / 2, lambda r, g: (g * (r[0] + off),))
    options = {"points": 1, "cotangent": array(np.ones(4)), "raise_on_failure": False}
    args = (array([1, 1, 1, 0.005]),)
    assert cg.check_grads(square, args, tolerance=0.05, **options).ok
    assert not cg.check_grads(square, args, tolerance=0.001, **options).ok


# -- Outputs that cancel in a cotangent, and those that hold a mask.


NUMBER = array(0.7)
SUMS = {
    "two": lambda x: jnp.broadcast_to(x, (2,)),
    "of both signs": lambda x: jnp.stack([x, x, x, -x]),
    "doubled": lambda x: (x, 2 * x),
}


def run(function, *args, **options):
    return check_grads(function, args, raise_on_failure=False, **options)


@first_row
@pytest.mark.parametrize("name", SUMS)
def test_a_number_that_is_in_several_outputs_is_verified(name):
    report = run(SUMS[name], NUMBER, order=2)
    assert report.ok and report.verified == 1, str(report)


SEEN = np.tril(np.ones((4, 4), bool))
SCORES = np.random.default_rng(0).normal(size=(4, 4))


def scores(value, leaks):
    primal = lambda x: jnp.where(SEEN, 2 * x, jnp.asarray(value, x.dtype))  # noqa: E731
    return custom(primal, lambda _, g: (2 * g if leaks else jnp.where(SEEN, 2 * g, 0),))


MASKS = {
    "float32": (-1e9, -1e15, -1e30, float(jnp.finfo(jnp.float32).min)),
    "bfloat16": (-1e15, float(jnp.finfo(jnp.bfloat16).min)),
    "float64": (-1e30, float(np.finfo(np.float64).min)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "value"),
    some_of([(d, v) for d in MASKS for v in MASKS[d]], [("bfloat16", -1e15)]),
)
def test_a_mask_among_the_outputs_has_no_noise(dtype, value):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(SCORES, dtype)
        report = run(scores(value, leaks=False), x)
        assert report.ok and report.verified == report.elements, str(report)
        report = run(scores(value, leaks=True), x)
        assert "6 of 16 elements wrong" in report.failures[0].detail, str(report)
