"""Two gradients compared; values and types compared; failures and notes told in words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clipgrad._check import structure
from clipgrad._check.compare import Comparison
from clipgrad._check.verdicts import KINK, OK, UNSURE, WRONG, Verdict
from clipgrad._check.subject import make_subject
from clipgrad._check.report import Failure
from clipgrad._check.search import ROUNDING, Finding, Search
from clipgrad._check.session import Point
from clipgrad._check.tolerances import make_tolerance
from clipgrad._check.values import told, undecided

X = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
PROBLEM = make_subject(lambda x, y: (x * x, y), (X, jnp.float32(3)))
G = np.asarray([1.0, -2.0, 3.0, 4.0, 5.0])
TOLERANCE = make_tolerance(PROBLEM.leaf_ranges(), ["float32"] * 2)


def comparison(rounding=None):
    error = None if rounding is None else np.asarray([rounding])
    return Comparison(PROBLEM, TOLERANCE, lambda: error)


def test_equal_gradients_are_no_failure():
    assert comparison()("jit", G, G, "here") == []
    assert comparison()("jit", G * (1 + 1e-5), G, "here") == []
    assert comparison()("jit", 0 * G + 1e-36, 0 * G, "underflow") == []
    assert comparison()("jit", 0 * G + 1e-33, 0 * G, "a number")


def test_a_different_one_names_the_worst_element_and_both_values():
    (failure,) = comparison()("jit", G * [1, 1, 1.5, 1.1, 1], G, "under jit")
    expected = "under jit: 2 of 5 elements differ; worst: 4.5, expected 3"
    assert failure == ("jit", "args[0][1, 0]", expected, *failure[3:])


def test_what_plain_ad_loses_too_is_excused_leaf_by_leaf():
    off = G + np.asarray([0.1, 0, 0, 0, 0])
    assert comparison([0, 0, 0.01, 0, 0])("vmap", off, G, "") == []
    assert len(comparison([0, 0, 0.001, 0, 9.0])("vmap", off, G, "")) == 1


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
    assert (comparison()("jit", first, second, "") == []) == same


def test_exactly_means_to_the_last_bit():
    last = np.nextafter(G, 10)
    (failure,) = comparison().exactly("determinism", last, G, "twice")
    assert failure.detail == "twice: 5 of 5 elements differ in their last bits"
    assert comparison().exactly("determinism", G, G, "twice") == []
    (worse,) = comparison().exactly("determinism", 2 * G, G, "twice")
    assert "worst: 10, expected 5" in worse.detail


def test_a_value_that_differs_when_differentiated_is_named():
    other = [X * X + jnp.asarray([[0.0, 0.5], [0, 0]]), jnp.float32(3)]
    (failure,) = structure.primal(PROBLEM, other, "differentiated")
    assert failure.where == "out[0][0, 1]"
    expected = "value 4 when called, 4.5 when differentiated; 1 of 4 elements differ"
    assert failure.detail == expected


def test_an_output_of_another_type_or_shape_is_named():
    other = [(X * X).astype(jnp.bfloat16), jnp.ones(2)]
    details = [failure.detail for failure in structure.primal(PROBLEM, other, "differentiated")]
    assert "dtype float32 when called, bfloat16 when differentiated" in details
    assert "shape () when called, (2,) when differentiated" in details


def test_a_cotangent_has_the_type_and_shape_of_its_input():
    failures = structure.same_types(PROBLEM, [X.astype(jnp.float16), None])
    assert [f.detail for f in failures] == [
        "the input has dtype float32, its cotangent float16",
        "the input has dtype float32, its cotangent None",
        "the input has shape (), its cotangent None",
    ]
    assert structure.same_types(PROBLEM, [X, jnp.float32(0)]) == []


def test_an_integer_input_has_a_cotangent_of_float0():
    right = make_subject(lambda x, i: x[i], (X, jnp.asarray([0])))
    assert structure.integers(right, np.ones(2)) == []


def test_elements_that_are_not_finite_are_counted_and_the_first_is_named():
    gradient = np.ones((2, 5))
    gradient[1, 2] = gradient[0, 3] = np.nan
    (failure,) = structure.finite_gradient(PROBLEM, gradient)
    assert failure.where == "args[0][1, 0]" and list(failure.indices) == [2, 3]
    assert failure.detail == "2 of 4 elements of the gradient are not finite"


def point(reference=None):
    gradient = np.stack([G, G])
    return Point(PROBLEM.inputs, gradient, np.ones(5, bool), reference, [], np.ones((4, 5)))


def finding(kinds, numeric=None, analytic=None, kink=False, suspects=None, exact=True):
    count = len(kinds)
    numeric = np.arange(1.0, count + 1) if numeric is None else np.asarray(numeric)
    analytic = 3 * numeric**2 if analytic is None else np.asarray(analytic)
    verdict = Verdict(
        np.asarray(kinds),
        numeric,
        analytic,
        np.full(count, 1e-9),
        numeric + 1,
        numeric - 1,
        np.full(count, kink),
    )
    return Finding(0, np.arange(count), verdict, suspects or count, exact)


def texts(*findings, kinks=(), unsure=(), where=""):
    failures, notes = told(
        PROBLEM, point(), Search(list(findings), list(kinks), list(unsure)), where=where
    )
    return [str(failure) for failure in failures], notes


def test_a_failure_counts_the_wrong_elements_and_shows_the_worst():
    (text,), notes = texts(finding([OK, WRONG, WRONG]))
    expected = (
        "[value] args[0][1, 0]: 2 of 4 elements wrong; worst: numeric 3 +- 1e-09, analytic 27"
    )
    assert text == expected and notes == []


def test_suspects_that_were_not_looked_at_are_counted_as_well():
    (text,), _ = texts(finding([WRONG, OK], suspects=4))
    assert "3 of 4 elements wrong" in text
    (text,), _ = texts(finding([WRONG], exact=False))
    assert "at least 1 of 4 elements wrong" in text


def test_a_failure_holds_its_numbers():
    (failure,), _ = told(PROBLEM, point(), Search([finding([WRONG, WRONG])], [], []))
    assert (failure.numeric, failure.analytic, failure.error) == (2.0, 12.0, 1e-9)
    np.testing.assert_array_equal(failure.indices, [0, 1])
    np.testing.assert_array_equal(failure.ratio, [3.0, 6.0])


def test_a_kink_shows_its_slopes_and_a_second_point_is_named():
    (text,), _ = texts(finding([WRONG], kink=True), where="at a second point ")
    expected = "at a second point 1 of 4 elements wrong; worst: kink: slopes 0 and 2, analytic 3"
    assert expected in text


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        (KINK, "not differentiable; the gradient lies between the one-sided slopes"),
        (UNSURE, "could not be verified by differences, which are too noisy"),
        (ROUNDING, "off by rounding, as plain AD in this precision is"),
    ],
)
def test_what_is_no_failure_is_a_note(kind, note):
    failures, notes = texts(finding([kind, OK, kind]))
    assert failures == [] and notes == [f"args[0]: 2 of 4 elements {note}"]


def test_ranges_are_noted_once_for_each_leaf():
    _, notes = texts(kinks=[(0, 2), (2, 4)], unsure=[(4, 5)])
    assert notes == [
        "args[0]: along random directions not differentiable; the gradient lies between the "
        "one-sided slopes",
        "args[1]: along random directions could not be verified by differences, which are too "
        "noisy",
    ]


def test_what_the_reference_verified_is_not_undecided():
    found = Search([finding([UNSURE, OK])], [], [(0, 3)])
    assert undecided(point(), found) == 4
    assert undecided(point(reference=np.stack([G, G])), found) == 0


def test_elements_of_outputs_have_names_too():
    assert PROBLEM.output_element(3) == "out[0][1, 1]"
    assert PROBLEM.output_element(4) == "out[1]"


def test_a_failure_without_numbers_is_a_line():
    failure = Failure("jit", "args[0]", "raises ValueError: no")
    assert str(failure) == "[jit] args[0]: raises ValueError: no"
    assert np.isnan(failure.numeric) and failure.indices.size == 0


def test_the_arrays_of_a_problem_count_integers_too():
    problem = make_subject(lambda x, i: x[i], (X, jnp.asarray([0])))
    assert problem.positions == [0] and len(problem.arrays) == 2
    assert jax.tree.leaves(problem.inputs)[0] is problem.arrays[0]
