"""The tables of the checker: each wrong gradient fails, each right one passes, at the defaults."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from clipgrad._check import check_grads
from tests.check import check_cases, check_functions
from tests.check.check_tables import LIMITS, LIMITS_OF_TYPES, RIGHT, WRONG, Row
from tests.helpers import SEED
from tests.rows import some_of

CORE = {"wrong": "wrong_deep_inside_a_scan", "right": "missing_factor"}


def rows(kind, table):
    """Half of the rows, each in one of its types, in turn: others with another `helpers.SEED`.

    A row takes over a CPU second. What one seed leaves out, the next one has; six of them have each
    row in each type, and eighteen at each point.
    """
    turn = [(i, *row) for i, row in enumerate(table.items(), SEED)]
    chosen = [
        (name, row.dtypes[(i // 2) % len(row.dtypes)])
        for i, name, row in turn
        if i % 2 == 0 or name == CORE[kind]
    ]
    chosen = [row for row in chosen if (kind, row[0]) not in LIMITS]
    chosen = [row for row in chosen if kind == "wrong" or row not in LIMITS_OF_TYPES]
    return some_of(chosen, [row for row in chosen if row[0] == CORE[kind]])


def run(row, dtype):
    promotion = contextlib.ExitStack()
    if not row.strict:
        promotion.enter_context(jax.numpy_dtype_promotion("standard"))
        promotion.enter_context(jax.numpy_rank_promotion("allow"))
    with promotion, jax.enable_x64(dtype == "float64"):
        function, args, *options = row.make(jnp.dtype(dtype))
        return check_grads(function, args, raise_on_failure=False, **(options or [{}])[0])


@pytest.fixture(scope="module", autouse=True)
def programs_of_this_file():
    """Programs that serve no other test, of which JAX keeps 8,192 in a process."""
    yield
    jax.clear_caches()


@pytest.mark.parametrize(("name", "dtype"), rows("wrong", WRONG))
def test_a_wrong_gradient_fails_the_check_that_it_violates(name, dtype):
    report = run(WRONG[name], dtype)
    failed = {failure.check for failure in report.failures}
    assert failed and WRONG[name].check in {None, *failed}, str(report)
    assert "nothing was verified" not in str(report)


@pytest.mark.parametrize(("name", "dtype"), rows("right", RIGHT))
def test_a_right_gradient_passes(name, dtype):
    report = run(RIGHT[name], dtype)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), LIMITS)
def test_a_known_limit_is_what_it_is_said_to_be(kind, name):
    """In one type at least a wrong one passes, or nothing of it was verified; a right one fails."""
    row = (WRONG if kind == "wrong" else RIGHT)[name]
    reports = [run(row, dtype) for dtype in row.dtypes]
    assert any(r.ok == (kind == "wrong") or "nothing was verified" in str(r) for r in reports)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), LIMITS_OF_TYPES)
def test_what_half_precision_cannot_tell_is_not_called_wrong(name, dtype):
    report = run(RIGHT[name], dtype)
    assert [failure.where for failure in report.failures] == ["all inputs"], str(report)
    assert "verified" in report.failures[0].detail and "float32" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", check_cases.UNKNOWN)
def test_what_cannot_be_known_is_not_called_wrong(name):
    report = run(Row(check_cases.UNKNOWN[name]), "float32")
    assert all("nothing was verified" in failure.detail for failure in report.failures), str(report)


SMOOTH = ("tanh", "power", "softmax", "logsumexp", "attention", "var", "solve", "scan", "huber")


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOOTH)
def test_a_right_function_passes_in_second_order(name):
    function, make = check_functions.FUNCTIONS[name]
    with jax.enable_x64(True):
        report = check_grads(function, make(jnp.dtype("float64")), order=2, raise_on_failure=False)
    assert report.ok, str(report)
