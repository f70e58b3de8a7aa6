"""The verdict on a ladder of one-sided slopes: right, kink, too noisy, wrong."""

import numpy as np
import pytest
from clipgrad._check.differences import Slopes
from clipgrad._check.tolerances import Allowed
from clipgrad._check.verdicts import (
    KINDS,
    KINK,
    OK,
    ROUNDING,
    SINGULAR,
    SYMMETRIC,
    UNSURE,
    WRONG,
    judge_ladder,
    judge_two,
    settled,
)

RATIO = 8.0
STEPS = RATIO ** -np.arange(1.0, 8)


def ladder(function, analytic, noise=0.0, steps=STEPS):
    """The slopes of a function of one number, at 0, with one cotangent."""
    ahead = (function(steps) - function(0 * steps)) / steps
    behind = (function(0 * steps) - function(-steps)) / steps
    width = np.abs(ahead - behind) / 2
    full = np.full_like(steps, analytic)
    columns = ((ahead + behind) / 2, ahead, behind, width, noise / steps, full, np.abs(full))
    return Slopes(*(column[None, :, None] for column in columns))


def allowed(relative=1e-6, floor=0.0, typical=1.0, paddle=None):
    one = np.ones((1, 1))
    return Allowed(relative * one, floor * one, typical * one, one, paddle)


def verdict(function, analytic, noise=1e-15, **options):
    found = judge_ladder(ladder(function, analytic, noise), RATIO, allowed(**options))
    return found._replace(kind=int(found.kind[0]))


def relu(x):
    return np.maximum(x, 0)


@pytest.mark.parametrize(
    ("function", "analytic", "kind"),
    [
        (np.sin, 1.0, OK),
        (np.sin, 1.00001, WRONG),
        (lambda x: x**3, 0.0, OK),
        (relu, 0.0, KINK),
        (relu, 1.0, KINK),
        (relu, 1.01, WRONG),
        (relu, -0.01, WRONG),
        (np.abs, 0.0, KINK),
        (np.abs, 1.5, WRONG),
        (lambda x: 2 * x + 0.3 * np.abs(x), 2.2, KINK),
        (lambda x: 2 * x + 0.3 * np.abs(x), 1.6, WRONG),
        (lambda x: np.sign(x) * np.sqrt(np.abs(x)), 0.0, SINGULAR),
        (lambda x: relu(x + 1e-5) - 1e-5, 1.0, OK),
        (lambda x: relu(x + 1e-5) - 1e-5, 1.01, WRONG),
        (lambda x: relu(x - 1e-5), 0.0, OK),
        (lambda x: relu(x - 1e-5), -0.1, WRONG),
        (lambda x: x * np.nan, 1.0, UNSURE),
    ],
)
def test_slopes_are_told_apart(function, analytic, kind):
    assert verdict(function, analytic).kind == kind


def test_a_kink_nearer_than_the_smallest_steps_is_seen_only_where_these_are_precise():
    near = lambda x: relu(x + 1e-5) - 1e-5  # noqa: E731
    assert verdict(near, 1.0, noise=1e-12, relative=1e-4).kind == OK
    assert verdict(near, 1.0, noise=1e-9, relative=1e-4).kind == UNSURE
    assert verdict(near, 1.01, noise=1e-9, relative=1e-4).kind == WRONG
    assert verdict(np.sin, 1.001, noise=1e-9, relative=1e-4).kind == WRONG


def test_a_gap_within_the_noise_is_no_kink():
    assert verdict(lambda x: x + 0.04 * np.abs(x), 1.3, noise=0.01).kind != WRONG


def test_slopes_that_never_settle_are_no_verdict():
    turning = lambda x: x * (3 + 2 * np.sin(1.7 * np.log(np.abs(x) + 1e-30)))  # noqa: E731
    assert verdict(turning, 3.5).kind == UNSURE


@pytest.mark.parametrize(
    ("function", "analytic", "kind"),
    [
        (np.sign, 0.0, SINGULAR),
        (np.sign, 42.0, WRONG),
        (np.sign, -1e-3, WRONG),
        (lambda x: np.sign(x) + 3 * x, 3.0, SINGULAR),
        (lambda x: np.sign(x) + 3 * x, 0.0, WRONG),
        (lambda x: np.floor(x) + np.maximum(x, 0), 0.5, SINGULAR),
        (lambda x: np.floor(x) + np.maximum(x, 0), 1.5, WRONG),
    ],
)
def test_a_jump_has_the_slopes_beside_it(function, analytic, kind):
    assert verdict(function, analytic).kind == kind


def test_what_is_zero_but_for_noise_is_right():
    assert verdict(lambda x: 0 * x, 0.0, noise=1e-3, typical=0.0, floor=1e-5).kind == OK
    assert verdict(lambda x: 0 * x, 0.0, noise=1e-3, typical=0.0).kind == UNSURE


def test_a_kink_is_reported_with_both_slopes():
    found = verdict(relu, 2.0)
    assert found.kink[0] and found.ahead[0] == 1 and found.behind[0] == 0
    assert found.analytic[0] == 2


@pytest.mark.parametrize("noise", [1e-15, 1e-9, 1e-5])
def test_the_settled_slope_is_within_its_error_of_the_truth(noise):
    rng = np.random.default_rng(0)
    rough = lambda x: np.exp(x) + noise * rng.uniform(-1, 1, x.shape)  # noqa: E731
    slope, error = settled(ladder(rough, 1.0, noise), RATIO)
    assert abs(slope[0, 0] - 1) < 5 * error[0, 0] < 0.1


def test_the_worst_cotangent_decides():
    good, bad = ladder(np.sin, 1.0, 1e-15), ladder(np.sin, 2.0, 1e-15)
    both = Slopes(*(np.concatenate(c, axis=2) for c in zip(good, bad, strict=True)))
    found = judge_ladder(both, RATIO, allowed())
    assert found.kind[0] == WRONG and found.analytic[0] == 2.0


@pytest.mark.parametrize(("analytic", "kind"), [(1.004, OK), (1.006, WRONG)])
def test_paddles_rule_is_relative_to_the_numeric_slope(analytic, kind):
    assert verdict(np.sin, analytic, paddle=0.005).kind == kind


TWO = np.asarray([2.0**-16, 2.0**-18])


def by_two(function, analytic, as_they_are=False, noise=1e-15, steps=TWO, **options):
    slopes = ladder(function, analytic, noise, steps)
    return judge_two(slopes, steps[0] / steps[1], allowed(**options), as_they_are)


@pytest.mark.parametrize(
    ("function", "analytic", "kind"),
    [
        (np.sin, 1.0, OK),
        (np.sin, 1.00001, WRONG),
        (np.abs, 0.0, OK),
        (np.abs, 0.5, WRONG),
        (lambda x: x * np.nan, 1.0, WRONG),
    ],
)
def test_two_steps_tell_right_from_what_needs_a_closer_look(function, analytic, kind):
    assert by_two(function, analytic).kind[0] == kind


def test_two_steps_too_noisy_to_tell_are_not_right():
    assert by_two(np.sin, 1.0, noise=1e-9).kind[0] == WRONG
    assert by_two(np.sin, 1.0, noise=1e-9, as_they_are=True).kind[0] == OK


def test_steps_as_they_are_do_not_extrapolate():
    steps = np.asarray([0.5, 0.25])
    cube = lambda x: x**3  # noqa: E731
    assert by_two(cube, 0.0, steps=steps).numeric[0] == 0
    assert by_two(cube, 0.25, as_they_are=True, steps=steps).numeric[0] == 0.25


def test_every_kind_but_right_and_wrong_has_a_note_and_all_differ():
    assert set(KINDS) == set(range(len(KINDS) + 2)) - {OK, WRONG}
    assert len({kind.note for kind in KINDS.values()}) == len(KINDS)
    assert {kind for kind, meaning in KINDS.items() if meaning.verified} == {ROUNDING, SYMMETRIC}


@pytest.mark.parametrize(
    ("bend", "analytic", "kind"), [(0.05, 1.03, KINK), (0.005, 1.003, WRONG), (0.05, 1.06, WRONG)]
)
def test_slopes_that_differ_by_a_fiftieth_are_those_of_a_kink(bend, analytic, kind):
    assert verdict(lambda x: x + bend * np.abs(x), analytic).kind == kind
