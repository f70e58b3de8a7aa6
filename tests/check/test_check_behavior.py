"""The checks beside the values: each fails alone, can be switched off, and says what it is."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipgrad as cg
from tests.check.check_zoo import PAIRS, custom
from tests.helpers import array
from tests.rows import first_row, some_of

X = array([0.3, -0.7, 1.1])


def checks(function, args=(X,), **options):
    report = cg.check_grads(function, args, raise_on_failure=False, **options)
    return {failure.check for failure in report.failures}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["wrong_only_under_jit", "stale_residual", "wrong_dtype", "nan_where_the_argument_is_zero"],
)
def test_a_check_that_is_switched_off_finds_nothing(name):
    make, check = PAIRS[name]
    function, _, args = make(jnp.dtype("float32"))
    assert check in checks(function, args)
    assert check not in checks(function, args, skip=[check])


@pytest.mark.slow
def test_a_gradient_that_raises_under_jit_fails_if_the_function_does_not():
    def backward(r, g):
        return (g * jnp.cos(r[0]) if float(g[0]) < 1e9 else g,)

    assert checks(custom(lambda x: jnp.sin(x), backward)) >= {"jit", "vmap"}


@pytest.mark.slow
def test_outputs_differentiated_alone_must_agree_with_zero_cotangents():
    def forward(x):
        return (jnp.sin(x.value), x.value**2), x.value

    def backward(x, g):
        if _is_zero(g[0]):
            return (x * g[1],)
        return (jnp.cos(x) * g[0] + 2 * x * (0 if _is_zero(g[1]) else g[1]),)

    def _is_zero(g):
        return type(g).__name__ == "SymbolicZero"

    rule = jax.custom_vjp(lambda x: (jnp.sin(x), x**2))
    rule.defvjp(forward, backward, symbolic_zeros=True)
    assert "outputs" in checks(rule)


@pytest.mark.slow
def test_what_is_wrong_at_a_third_point_is_not_said_to_be_at_the_second():
    def backward(r, g):
        points.add(float(r[0][0]))
        return (g * jnp.cos(r[0]) * (1.0 + (len(points) > 2)),)

    points = set()
    report = cg.check_grads(custom(jnp.sin, backward), (X,), points=3, raise_on_failure=False)
    assert "at a further point 3 of 3 elements wrong" in str(report)
    assert "at a second point" not in str(report)


@pytest.mark.slow
def test_the_second_order_is_not_run_after_a_failure():
    function, _, args = PAIRS["wrong_sign"][0](jnp.dtype("float32"))
    report = cg.check_grads(function, args, order=2, raise_on_failure=False)
    assert report.not_run["second order"] == "the first order fails"


def test_a_vjp_that_cannot_be_differentiated_fails_the_second_order():
    @jax.custom_jvp
    def stubborn(x):
        return jnp.cos(x)

    @stubborn.defjvp
    def _(primals, tangents):
        raise NotImplementedError("no second derivative")

    once = custom(lambda x: jnp.sin(x), lambda r, g: (stubborn(r[0]) * g,))
    report = cg.check_grads(once, (X,), order=2, raise_on_failure=False)
    assert "cannot be differentiated: it raises NotImplementedError" in str(report)


def test_a_rule_that_raises_in_one_of_the_checks_fails_that_check():
    def backward(r, g):
        first, second = g
        return (jnp.cos(r[0]) * first + 2 * r[0] * second,)

    rule = jax.custom_vjp(lambda x: (jnp.sin(x), x**2))
    rule.defvjp(
        lambda x: ((jnp.sin(x.value), x.value**2), (x.value,)), backward, symbolic_zeros=True
    )
    report = cg.check_grads(rule, (X,), raise_on_failure=False)
    assert "[outputs] args[0]: the gradient raises TypeError" in str(report)


TRACED = jax.core.Tracer


def is_eager(x):
    """Whether a value is differentiated outside of `jax.jit`."""
    return isinstance(x, TRACED) and not isinstance(getattr(x, "primal", x), TRACED)


def doubled_by_half_the_calls():
    calls = []
    return lambda x: calls.append(1) or x * (x if len(calls) % 2 else lax.stop_gradient(x))


UNSTEADY = {
    "its value when traced": (lambda x: x * (2.0 if isinstance(x, TRACED) else 1.0), "primal"),
    # Which checks see it depends on how many calls come before.
    "its gradient by turns": (doubled_by_half_the_calls(), None),
}


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("name", UNSTEADY)
def test_a_function_without_rules_that_changes_with_its_context_fails(name):
    function, check = UNSTEADY[name]
    failed = checks(function)
    assert failed and check in {None, *failed}


def test_a_function_differentiated_twice_must_have_one_gradient():
    """Here the pull-back of each time is steady, and that of the first time is right."""

    def forward(x):
        times.append(x)
        return jnp.sin(x), (x, 1.0 if len(times) == 1 else 2.0)

    times = []
    rule = jax.custom_vjp(lambda x: jnp.sin(x))
    rule.defvjp(forward, lambda r, g: (r[1] * g * jnp.cos(r[0]),))
    report = cg.check_grads(rule, (X,), raise_on_failure=False)
    assert "the function differentiated twice" in report.failures[0].detail


@pytest.mark.slow
def test_what_differs_so_much_when_compiled_that_nothing_can_be_measured_fails_jit():
    def inside_jit(x):
        compiled = isinstance(x, TRACED) and not is_eager(x)
        return jnp.sin(x) * (2.0 if compiled else 1.0)

    report = cg.check_grads(inside_jit, (X,), raise_on_failure=False)
    assert "[jit]" in str(report)


@pytest.mark.slow
def test_a_product_that_xla_lacks_on_this_device_is_not_run():
    """Of bfloat16 arrays, one of them mapped: JAX 0.10.2 raises "UNIMPLEMENTED" on a CPU."""

    def product(a, b):
        return jnp.dot(a.astype("bfloat16"), b.astype("bfloat16"), preferred_element_type="float32")

    @jax.custom_vjp
    def head(h, w):
        return jnp.sum(jnp.sin(product(h, w)))

    def backward(saved, cotangent):
        h, w = saved
        d = cotangent * jnp.cos(product(h, w))
        return product(d, w.T), product(h.T, d)

    head.defvjp(lambda h, w: (head(h, w), (h, w)), backward)
    args = jnp.linspace(-1.0, 1.0, 48).reshape(6, 8), jnp.linspace(-1.0, 0.5, 40).reshape(8, 5)
    report = cg.check_grads(head, args, raise_on_failure=False)
    assert report.ok, report
    try:
        jax.jit(jax.vmap(lambda c: jax.vjp(head, *args)[1](c)))(jnp.ones(2))
    except jax.errors.JaxRuntimeError:
        assert "UNIMPLEMENTED" in report.not_run["vmap"]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [10.0, 1e6])
def test_a_clip_that_acts_is_not_linear_and_the_text_says_what_to_write(limit):
    clipped = custom(lambda x: 1.0 * x, lambda r, g: (jnp.clip(g, -limit, limit),))
    (failure,) = cg.check_grads(clipped, (X,), raise_on_failure=False).failures
    assert failure.check == "linearity" and 'skip="linearity"' in failure.detail
    assert cg.check_grads(clipped, (X,), skip="linearity").ok


def test_skip_determinism_goes_on_where_two_calls_differ():
    rng = np.random.default_rng(0)
    noisy = lambda x: jnp.sin(x) * (1 + 1e-7 * float(rng.uniform()))  # noqa: E731
    rule = custom(noisy, lambda r, g: (g * jnp.cos(r[0]),))
    assert checks(rule) == {"determinism"}
    report = cg.check_grads(rule, (X,), skip=("determinism", "jit"))
    assert report.verified == 3 and "two calls" not in str(report)


def test_a_complex_cotangent_of_a_real_input_is_named_with_both_types():
    """JAX accepts it."""
    rule = custom(lambda x: jnp.sin(x), lambda r, g: ((g * jnp.cos(r[0])).astype(jnp.complex64),))
    (failure,) = cg.check_grads(rule, (X,), raise_on_failure=False).failures
    assert failure.check == "cotangent" and failure.where == "args[0]"
    assert "float32, its cotangent complex64" in failure.detail
    report = cg.check_grads(rule, (X,), skip="cotangent", raise_on_failure=False)
    assert "nothing was verified" in str(report) and "complex64" in str(report)


@pytest.mark.slow
def test_jaxs_own_qr_at_the_identity_is_not_called_wrong():
    """The signs of LAPACK jump there: it is not verified, and verified at a further point."""
    report = cg.check_grads(lambda a: jnp.linalg.qr(a)[0], (jnp.eye(3),))
    assert "not verified" in report.notes[0] and "kink" not in str(report)


@pytest.mark.parametrize("budget", [0.3, 1.0])
def test_a_time_budget_counts_the_first_program_too(budget):
    def slow(x):
        time.sleep(0.3)
        return jnp.sin(x)

    report = cg.check_grads(slow, (X,), time_budget=budget, raise_on_failure=False)
    assert f"the time budget of {budget:g} s is spent" in str(report)


@pytest.mark.parametrize(
    "where", ["evidence.Search.run", "slopes.Evaluation.values", "points.scale_of"]
)
def test_a_fault_of_the_checker_itself_is_an_error(where, monkeypatch):
    def broken(*args, **kwargs):
        raise KeyError("a fault")

    monkeypatch.setattr(f"clipgrad._check.{where}", broken)
    with pytest.raises(KeyError, match="a fault"):
        cg.check_grads(custom(lambda x: jnp.sin(x), lambda r, g: (g * jnp.cos(r[0]),)), (X,))


def test_a_fault_inside_of_a_compiled_program_of_the_checker_is_an_error(monkeypatch):
    """Traced with the function under test, it is told from what that raises."""
    monkeypatch.setattr("clipgrad._check.vectors.to_vector", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cg.check_grads(jnp.sin, (X,))


def ruled(rule):
    """The square of each element, with a rule of its own."""

    @jax.custom_vjp
    def square(x):
        return x * x

    square.defvjp(lambda x: (x * x, x), lambda x, g: (rule(x, g),))
    return square


def test_check_grads_finds_a_rule_that_is_wrong_where_a_part_of_the_cotangent_is_zero():
    """As of masked losses: each random cotangent is right, and so are its multiples."""

    def rule(x, g):
        is_masked = jnp.any(g == 0) & jnp.any(g != 0)
        return jnp.where(is_masked, 4 * x * g, 2 * x * g)

    report = cg.check_grads(ruled(rule), (X,), raise_on_failure=False)
    assert {f.check for f in report.failures} == {"linearity"} and "masked rows" in str(report)


@pytest.mark.parametrize("k", some_of(range(6), [5]))
def test_check_grads_finds_a_rule_that_is_wrong_for_one_sign_of_the_cotangent(k):
    """Element 5 has the same sign in both cotangents that are drawn."""

    def rule(x, g):
        return jnp.where(g[k] < 0, 4 * x * g, 2 * x * g)

    report = cg.check_grads(ruled(rule), (array(np.linspace(0.5, 2, 6)),), raise_on_failure=False)
    assert not report.ok
