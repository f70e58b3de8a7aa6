"""Two gradients compared; values and types compared; failures and notes told in words."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from clipgrad._check import contract
from clipgrad._check.behavior import _exactly
from clipgrad._check.check import Check, Log, prepare
from clipgrad._check.options import Options
from clipgrad._check.points import Point
from clipgrad._check.search import Finding
from clipgrad._check.subject import make_subject
from clipgrad._check.tolerances import make_tolerance
from clipgrad._check.values import failures_and_notes
from clipgrad._check.verdicts import (
    KINDS,
    KINK,
    LOST,
    OK,
    ROUNDING,
    SINGULAR,
    SYMMETRIC,
    UNSEEN,
    UNSURE,
    VANISHED,
    WRONG,
    Verdict,
)

from tests.check_zoo import custom

X = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
SUBJECT = make_subject(lambda x, y: (x * x, y), (X, jnp.float32(3)))
G = np.asarray([1.0, -2.0, 3.0, 4.0, 5.0])
TOLERANCE = make_tolerance(SUBJECT.ranges, ["float32"] * 2)


class Compared(Check):
    """A check of which it is known how far roundings move plain AD."""

    error = None

    def _noise_at(self, *_):
        return self.tolerance.explained(0 * G if self.error is None else np.asarray(self.error))


def checked(error=None):
    fields = dict.fromkeys(field.name for field in dataclasses.fields(Check))
    known = {
        "subject": SUBJECT,
        "tolerance": TOLERANCE,
        "gradient": np.stack([G, G]),
        "log": Log(Options()),
        "_noise": [],
    }
    check = Compared(**(fields | known))
    check.error = error
    return check


@pytest.mark.parametrize(("factor", "is_shared"), [(1.0, True), (1 + 1e-5, False)])
def test_plain_ad_takes_memory_only_where_the_rule_is_another(factor, is_shared):
    rule = custom(lambda x: jnp.sin(x), lambda r, g: (factor * g * jnp.cos(r[0]),))
    point = prepare(make_subject(rule, (X,)), Log(Options())).point()
    assert np.shares_memory(point.exact, point.reference) == is_shared
    np.testing.assert_allclose(point.exact, factor * point.reference, rtol=1e-7)


def compared(*args, error=None):
    return checked(error).compare(*args)


def test_equal_gradients_are_no_failure():
    assert compared("jit", G, G, "here") == []
    assert compared("jit", G * (1 + 1e-5), G, "here") == []
    assert compared("jit", 0 * G + 1e-36, 0 * G, "underflow") == []
    assert compared("jit", 0 * G + 1e-33, 0 * G, "a number")


def test_a_different_one_names_the_worst_element_and_both_values():
    (failure,) = compared("jit", G * [1, 1, 1.5, 1.1, 1], G, "under jit")
    expected = "under jit: 2 of 5 elements differ; worst: 4.5, expected 3"
    assert failure == ("jit", "args[0][1, 0]", expected, *failure[3:])


def test_what_plain_ad_loses_too_is_excused_leaf_by_leaf():
    off = G + np.asarray([0.1, 0, 0, 0, 0])
    assert compared("vmap", off, G, "", error=[0, 0, 0.02, 0, 0]) == []
    assert len(compared("vmap", off, G, "", error=[0, 0, 0.001, 0, 9.0])) == 1


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (np.nan, np.nan, True),
        (np.inf, np.inf, True),
        (np.inf, -np.inf, False),
        (np.nan, 1.0, False),
        (1.0, np.inf, False),
    ],
)
def test_what_is_not_finite_must_be_the_same(got, expected, same):
    first, second = G.copy(), G.copy()
    first[1], second[1] = got, expected
    assert (compared("jit", first, second, "") == []) == same


def test_exactly_means_to_the_last_bit():
    last = np.nextafter(G, 10)
    (failure,) = _exactly(checked(), last, G, "twice")
    assert failure.check == "determinism"
    assert failure.detail == "twice: 5 of 5 elements are not bit-identical"
    assert _exactly(checked(), G, G, "twice") == []
    (worse,) = _exactly(checked(), 2 * G, G, "twice")
    assert worse.check == "determinism" and "worst: 10, expected 5" in worse.detail


def test_a_value_that_differs_when_differentiated_is_named():
    other = [X * X + jnp.asarray([[0.0, 0.5], [0, 0]]), jnp.float32(3)]
    (failure,) = contract.primal(SUBJECT, other, "differentiated")
    assert failure.where == "out[0][0, 1]"
    expected = "value 4 when called, 4.5 when differentiated; 1 of 4 elements differ"
    assert failure.detail == expected


@pytest.mark.parametrize(("part", "differ"), [(1e-5, 0), (2.0, 4), (0.05, 0), (0.2, 4)])
def test_values_are_the_same_to_a_tenth_of_the_tolerance(part, differ):
    other = [X * X * np.float32(1 + part * 5e-4), jnp.float32(3)]
    details = [failure.detail for failure in contract.primal(SUBJECT, other, "compiled")]
    assert [d.split("; ")[1] for d in details] == [f"{differ} of 4 elements differ"] * bool(differ)


def test_a_value_near_zero_may_differ_by_a_hundredth_of_the_tolerance_of_the_others():
    zero = make_subject(lambda x: x * jnp.asarray([0.0, 1, 1, 1]), (jnp.full(4, 1000.0),))
    for off, differs in ((2e-3, False), (2e-2, True)):
        other = [zero.outputs[0] + jnp.asarray([off, 0, 0, 0])]
        assert bool(contract.primal(zero, other, "compiled")) == differs


def test_an_output_of_another_type_or_shape_is_named():
    other = [(X * X).astype(jnp.bfloat16), jnp.ones(2)]
    details = [failure.detail for failure in contract.primal(SUBJECT, other, "differentiated")]
    assert "dtype float32 when called, bfloat16 when differentiated" in details
    assert "shape () when called, (2,) when differentiated" in details


def test_a_cotangent_has_the_type_and_shape_of_its_input():
    failures = contract.same_types(SUBJECT, [X.astype(jnp.float16), None])
    assert [f.detail for f in failures] == [
        "the input has dtype float32, its cotangent float16",
        "the input has dtype float32, its cotangent None",
        "the input has shape (), its cotangent None",
    ]
    assert contract.same_types(SUBJECT, [X, jnp.float32(0)]) == []


def test_elements_that_are_not_finite_are_counted_and_the_first_is_named():
    gradient = np.ones((2, 5))
    gradient[1, 2] = gradient[0, 3] = np.nan
    (failure,) = contract.finite_gradient(SUBJECT, gradient)
    assert failure.where == "args[0][1, 0]" and list(failure.indices) == [2, 3]
    assert failure.detail == "2 of 4 elements of the gradient are not finite"


def point(reference=None):
    gradient = np.stack([G, G])
    ones = np.ones(5)
    return Point(
        SUBJECT.inputs, gradient, np.ones(5, bool), None, reference, ones, lambda row: ones
    )


def finding(kinds, numeric=None, kink=False, exact=True, seen=None):
    count = len(kinds)
    numeric = np.arange(1.0, count + 1) if numeric is None else np.asarray(numeric)
    verdict = Verdict(
        np.asarray(kinds),
        numeric,
        3 * numeric**2,
        np.full(count, 1e-9),
        numeric + 1,
        numeric - 1,
        np.full(count, kink),
    )
    looked_at = np.arange(count) < (count if seen is None else seen)
    return Finding(0, np.arange(count), verdict, looked_at, exact)


def texts(*findings, where=""):
    failures, notes = failures_and_notes(SUBJECT, point(), list(findings), where=where)
    return [str(failure) for failure in failures], notes


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_failure_is_a_note(kind):
    failures, notes = texts(finding([kind, OK, kind]))
    assert failures == [] and notes == [f"args[0]: 2 of 4 elements {KINDS[kind].note}"]


@pytest.mark.parametrize(
    ("kind", "verified", "at_kinks"),
    [(OK, 5, 0), (KINK, 3, 2), (SINGULAR, 3, 0), (SYMMETRIC, 5, 0), (ROUNDING, 5, 0), (LOST, 3, 0),
     (VANISHED, 3, 0), (UNSURE, 3, 0), (UNSEEN, 3, 0), (WRONG, 3, 0)],
)  # fmt: skip
def test_what_is_excused_is_not_verified_and_kinks_are_counted_apart(kind, verified, at_kinks):
    log = Log(Options())
    log.count(point(), [finding([kind, OK, kind])])
    assert (log.elements, log.verified, log.at_kinks) == (5, verified, at_kinks)


def test_what_vanishes_is_verified_by_a_further_point_that_does_not_vanish():
    log = Log(Options())
    log.count(point(), [finding([VANISHED, UNSURE, VANISHED])])
    for kinds, verified in (([VANISHED, OK, VANISHED], 2), ([OK, OK, UNSEEN], 3), ([OK] * 3, 4)):
        log.count_elsewhere(point(), [finding(kinds)])
        assert log.verified == verified
