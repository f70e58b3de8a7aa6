"""A diagnosis of a loss in which a callback raises, as a check or a solver does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.test_diagnose import line_of


class SolverError(RuntimeError):
    """Raised by the callback."""


def refuse(a):
    if not np.all(np.isfinite(a)) or np.linalg.matrix_rank(a) < 2:
        raise SolverError("The matrix is singular.\nMore of it. And more")
    return np.True_


def solve(a):
    """A solver that raises from a callback: of a singular matrix, and of one with NaN."""
    result, fixed = jax.ShapeDtypeStruct((), bool), jax.lax.stop_gradient(a)
    fine = jax.pure_callback(refuse, result, fixed, vmap_method="sequential")
    return jnp.where(fine, jnp.linalg.solve(a, jnp.ones(2)).sum(), 0.0)


def plain(a):
    with jax.named_scope("fit"):
        return solve(a[1])


def in_jit(a):
    return jax.jit(plain)(a)


def in_a_scan(a):
    return jax.lax.scan(lambda total, own: (total + solve(own), own), 0.0, a)[0]


def in_a_reversed_scan(a):
    return jax.lax.scan(lambda total, own: (total + solve(own), None), 0.0, a, reverse=True)[0]


def in_a_cond(a):
    return jax.lax.cond(a[0, 0, 0] > 0, lambda a: solve(a[1]), lambda a: a[1].sum(), a)


def in_a_loop(a):
    def body(state):
        return state[0] + 1, state[1] + jax.lax.stop_gradient(solve(a[state[0]]))

    count, total = jax.lax.while_loop(lambda state: state[0] < 3, body, (0, 0.0))
    return total + a.sum()


@jax.custom_vjp
def by_rule(a):
    return a.sum()


by_rule.defvjp(lambda a: (a.sum(), a), lambda a, g: (g * a * solve(a),))


def backward(a):
    return by_rule(a[1])


FINE = jnp.stack([jnp.eye(2), 2 * jnp.eye(2), 3 * jnp.eye(2)])
SINGULAR = FINE.at[1].set(1.0)
STEPS = {in_a_scan: 1, in_a_reversed_scan: 1}


@pytest.mark.parametrize(
    "loss", [plain, in_jit, in_a_scan, in_a_reversed_scan, in_a_cond, in_a_loop, backward]
)
def test_the_operation_that_raises_is_the_finding(loss):
    assert cg.diagnose(loss, (FINE,)).ok
    # In reverse, the first step that raises comes before another one.
    report = cg.diagnose(
        loss, (SINGULAR.at[0].set(1.0) if loss is in_a_reversed_scan else SINGULAR,)
    )
    (finding,) = report.findings
    is_rule = loss is backward
    assert finding.kind == "raises"
    assert finding.operation == ("by_rule" if is_rule else "pure_callback")
    place = (backward, "by_rule(") if is_rule else (solve, "pure_callback(")
    assert finding.line == line_of(*place) and finding.file == __file__
    assert finding.step == STEPS.get(loss)
    assert finding.module == ("fit" if loss in (plain, in_jit) else "")
    assert "raises SolverError: The matrix is singular" in finding.message
    assert "More" not in finding.message and "Traceback" not in str(report)
    assert ("its operands are finite" in finding.message) == (not is_rule)


def by_matvec(a):
    """A linear solve, whose matrix is a callback."""

    def matvec(v):
        refused = lambda v: refuse(np.zeros((2, 2))) * v  # noqa: E731
        return jax.pure_callback(refused, jax.ShapeDtypeStruct(v.shape, v.dtype), v)

    fixed = jax.lax.stop_gradient(a[0, 0])
    return jax.lax.custom_linear_solve(matvec, fixed, lambda f, b: f(b)).sum() + a.sum()


def of_another_shape(a):
    found = jax.pure_callback(lambda x: np.ones(3), jax.ShapeDtypeStruct((), a.dtype), a[0, 0, 0])
    return jax.lax.stop_gradient(found) + a.sum()


def of_two(a):
    result, fixed = jax.ShapeDtypeStruct((), bool), jax.lax.stop_gradient(a[1])
    first = jax.pure_callback(lambda a: refuse(0 * a), result, fixed)
    return jnp.where(first & jax.pure_callback(lambda a: 1 / 0, result, fixed), 0.0, a.sum())


@pytest.mark.parametrize(
    ("loss", "place"),
    [
        (by_matvec, "jax.lax.custom_linear_solve("),
        (of_another_shape, "jax.pure_callback("),
        (of_two, "first = "),
    ],
)
def test_the_first_callback_is_found_in_a_solver_and_if_jax_refuses_what_it_returns(loss, place):
    (finding,) = cg.diagnose(loss, (FINE,)).findings
    assert finding.kind == "raises" and finding.line == line_of(loss, place), finding
    assert "its operands are finite" in finding.message


def logs(a):
    """The solver gets a NaN of another operation."""
    return plain(jnp.log(a))


@pytest.mark.parametrize("bad, operation", [(-1.0, "log"), (np.nan, "argument")])
def test_where_what_is_not_finite_is_from_comes_before_the_check_that_raises(bad, operation):
    report = cg.diagnose(logs, (FINE.at[1, 0, 0].set(bad) + 1e-3,))
    assert [(f.kind, f.operation) for f in report.findings[:1]] == [("value", operation)]
    assert "pure_callback raises SolverError" in report.notes[-1]


def test_examples_that_raise_are_the_bad_ones():
    found = cg.diagnose(lambda scale, a: jax.vmap(solve)(scale * a).mean(), (1.0, SINGULAR),
                        examples="a")  # fmt: skip
    assert [(e.index, np.isnan(e.loss)) for e in found.examples] == [(1, True)]
    assert found.findings[0].kind == "raises"


def test_other_errors_are_not_taken_for_those_of_callbacks():
    def loss(x):
        raise ValueError("a callback of the user's own")

    with pytest.raises(ValueError, match="^a callback of"):
        cg.diagnose(loss, (1.0,))


@pytest.mark.exhaustive
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


@pytest.mark.parametrize("other", [in_jit, "float32"])
def test_a_comparison_names_the_operation_that_raises(other):
    with pytest.raises(ValueError, match=r"test_diagnose_raised.py:\d+: pure_callback raises Solv"):
        cg.compare(plain, other, (SINGULAR,))
    assert cg.compare(plain, other, (FINE,)).ok
