"""A diagnosis of a loss in which a callback raises, as a check or a solver does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.diagnose.diagnose_numbers import FINE, SINGULAR, solve, solver
from tests.helpers import array, line_of


def logs(a):
    """The solver gets a NaN of another operation."""
    return solver(jnp.log(a))


@pytest.mark.parametrize("bad, operation", [(-1.0, "log"), (np.nan, "argument")])
def test_where_what_is_not_finite_is_from_comes_before_the_check_that_raises(bad, operation):
    matrices = np.asarray(FINE) + 1e-3
    matrices[1, 0, 0] = bad
    report = cg.diagnose(logs, (array(matrices),))
    assert [(f.kind, f.operation) for f in report.findings[:1]] == [("value", operation)]
    assert "pure_callback raises SolverError" in report.notes[-1]


@pytest.mark.slow
def test_examples_that_raise_are_the_bad_ones():
    diagnosis = cg.diagnose(lambda scale, a: jax.vmap(solve)(scale * a).mean(), (1.0, SINGULAR),
                        examples="a")  # fmt: skip
    assert [(e.index, np.isnan(e.loss)) for e in diagnosis.examples] == [(1, True)]
    assert diagnosis.findings[0].kind == "raises"


def test_other_errors_are_not_taken_for_those_of_callbacks():
    def loss(x):
        raise ValueError("a callback of the user's own")

    with pytest.raises(ValueError, match="^a callback of"):
        cg.diagnose(loss, (1.0,))


@pytest.mark.slow
def test_a_check_of_equinox_leads_to_what_it_checks():
    eqx = pytest.importorskip("equinox")

    def loss(a):
        with jax.named_scope("fit"):
            x = jnp.linalg.solve(a, jnp.ones(2))
        return eqx.error_if(x, ~jnp.isfinite(x).all(), "not finite").sum()

    assert cg.diagnose(loss, (FINE[0],)).ok
    report = cg.diagnose(loss, (jnp.zeros((2, 2)),))
    assert (report.findings[0].kind, report.findings[0].module) == ("value", "fit")
    assert report.findings[0].line == line_of(loss, "linalg.solve")
    assert "raises EquinoxRuntimeError: not finite" in report.notes[-1]
    positive = lambda x: eqx.error_if(x, x < 0, "negative")  # noqa: E731
    (finding,) = cg.diagnose(positive, (-1.0,)).findings
    assert finding.kind == "raises" and "EquinoxRuntimeError: negative" in finding.message


@pytest.mark.slow
@pytest.mark.parametrize("other", [jax.jit(solver), "float64"], ids=["jit", "float64"])
def test_a_comparison_names_the_operation_that_raises(other):
    with pytest.raises(ValueError, match=r"diagnose_numbers.py:\d+: pure_callback raises Solv"):
        cg.compare(solver, other, (SINGULAR,))
    assert cg.compare(solver, other, (FINE,)).ok
