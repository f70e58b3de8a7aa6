"""Bad input gets a clear error or a documented failure; an empty check is never ok."""

import inspect
import re
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipgrad as cg
from clipgrad._check import CHECKS
from clipgrad._check.options import Check
from tests.check.check_zoo import custom
from tests.helpers import array
from tests.rows import crossed

X = array([0.5, 1.5])


def failed(function, *args, **options):
    report = cg.check_grads(function, args, raise_on_failure=False, **options)
    assert not report.ok
    return str(report)


CYCLE = [X]
CYCLE.append(CYCLE)
NAN, INF = array([0.5, np.nan]), array([np.inf, 1.5])
REFUSED = [
    (TypeError, r"^args: got list, expected a tuple; .*write \(x,\)", jnp.sin, [X], {}),
    (ValueError, r"^fun: got \['bool'\] from it, expected a floating", lambda x: x > 0, (X,), {}),
    (
        ValueError,
        r"^args: got leaves of \['int32'\], expected a floating",
        jnp.sin,
        (array(np.arange(3), np.int32),),
        {},
    ),
    (
        ValueError,
        r"^wrt: got 'y', expected .* leaf; there are \['x or 0'",
        jnp.sin,
        (X,),
        {"wrt": "y"},
    ),
    (
        TypeError,
        "^args: got a leaf of type ShapeDtypeStruct at '0', expected arrays",
        jnp.sin,
        (jax.ShapeDtypeStruct((2,), "float32"),),
        {},
    ),
    (TypeError, r"is not a dtype of JAX; write x.astype", jnp.sin, (np.ones(2, ">f4"),), {}),
    (ValueError, "keys can't be sorted", lambda x: x[1], ({1: X, "a": X},), {}),
    (ValueError, "^args: got a tree that contains itself", lambda x: x[0], (CYCLE,), {}),
    (ValueError, "^no_grad: got 3, expected one that selects", jnp.sin, (X,), {"no_grad": 3}),
    (ValueError, "^output: got 'loss', expected one that", jnp.sin, (X,), {"output": "loss"}),
    (TypeError, "^wrt: got 1.5, expected a position", jnp.sin, (X,), {"wrt": [1.5]}),
    (
        ValueError,
        "^wrt: got None, with no_grad=0, which leaves nothing to check of x",
        jnp.sin,
        (X,),
        {"no_grad": 0},
    ),
    (ValueError, r"^args\[0\]\[1\]: got nan, expected a finite number", jnp.sin, (NAN,), {}),
    (ValueError, r"^args\[0\]\[0\]: got inf, expected a finite number", jnp.sin, (INF,), {}),
]


@pytest.mark.parametrize(("error", "match", "function", "args", "options"), REFUSED)
def test_a_wrong_request_is_refused(error, match, function, args, options):
    with pytest.raises(error, match=match):
        cg.check_grads(function, args, **options)


ALL_CHECKS = ", ".join(CHECKS)
KINDS = "cpu, gpu, tpu, cuda, rocm, METAL, or None for all devices here"


@pytest.mark.parametrize(
    ("option", "value", "shown", "expected"),
    [
        ("order", 3, "3", "1, or 2 to check the second derivative as well"),
        ("mode", "fast", "'fast'", "one of auto, full"),
        ("max_relative_error", 0, "0", "a number above 0, or None"),
        ("points", 1.5, "1.5", "a whole number, 1 or more"),
        ("seed", -1, "-1", "a whole number, 0 or more"),
        ("skip", ["vmap", "speed"], "['speed']", f"some of {ALL_CHECKS}"),
        ("skip", "speed", "['speed']", f"some of {ALL_CHECKS}"),
        ("devices", ("cpu", "xpu"), "('xpu',)", f"some of {KINDS}"),
        ("tolerance", 2.0, "2.0", "a number between 0 and 1, or None"),
        ("min_verified", 1.5, "1.5", "a share from 0 to 1, or None for a half"),
        ("time_budget", 0.0, "0.0", "a number of seconds above 0, or None"),
    ],
)
def test_an_option_of_no_sense_is_refused_by_what_was_expected(option, value, shown, expected):
    line = f"{option}: got {shown}, expected {expected}"
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        cg.check_grads(jnp.sin, (X,), **{option: value})


def test_the_names_of_checks_are_those_of_the_docstrings_table():
    table = inspect.getdoc(cg.check_grads).split("===\n")[2]
    names = [
        name for row in table.splitlines() for name in row[:11].strip(" =").split(", ") if name
    ]
    assert sorted(names) == sorted(CHECKS)


def test_a_check_is_added_to_the_table_of_behaviors_and_then_named_for_type_checkers():
    """A new row of `BEHAVIORS` fails here until `options.Check` and the docstring have it too."""
    assert set(get_args(Check)) == set(CHECKS)


STEP = "the step follows the scale of each element; numerical_grad(delta=...) takes one"
NONDET = 'to allow results that are not bit-identical write skip="determinism"'


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("eps", 1e-3, f"eps=0.001; {STEP}"),
        ("delta", 0.1, f"delta=0.1; {STEP}"),
        ("nondet_tol", 0.1, f"nondet_tol=0.1; {NONDET}"),
        ("atol", 0.01, "atol=0.01, expected tolerance=0.01"),
        ("ordr", 2, "ordr=2, expected order=2"),
        ("raise_exception", False, "raise_exception=False, expected raise_on_failure=False"),
        ("verbose", True, "verbose=True, expected some of fun, args, kwargs, wrt, no_grad"),
    ],
)
def test_an_argument_of_another_checker_is_answered_by_what_to_write(name, value, answer):
    with pytest.raises(TypeError, match=f"^check_grads: got {re.escape(answer)}"):
        cg.check_grads(jnp.sin, (X,), **{name: value})


@pytest.mark.parametrize(
    ("name", "answer"),
    [("eps", "eps=0.001, expected delta=0.001"), ("cotangents", "cotangents=0.001, expected cot")],
)
def test_numerical_grad_answers_likewise_with_what_it_has(name, answer):
    with pytest.raises(TypeError, match=f"^numerical_grad: got {re.escape(answer)}"):
        cg.numerical_grad(jnp.sin, (X,), **{name: 0.001})


def test_numerical_grad_refuses_a_wrong_delta_and_a_cotangent_of_another_shape():
    with pytest.raises(ValueError, match="delta: got -1, expected a positive number"):
        cg.numerical_grad(jnp.sin, (X,), delta=-1)
    with pytest.raises(ValueError, match=r"^cotangent: got the shapes \[\(3,\)\], expected"):
        cg.numerical_grad(jnp.sin, (X,), cotangent=array(np.ones(3)))


def test_an_excluded_input_may_hold_anything():
    mask = array([0.0, -np.inf])
    assert cg.check_grads(lambda x, m: x * jnp.exp(m), (X, mask), no_grad="m").ok


def test_a_value_that_is_not_finite_fails():
    assert "[finite] out[0]: the value is not finite at 1 of 2" in failed(
        jnp.log, array([-1.0, 1.5])
    )


@pytest.mark.parametrize("fun", [jnp.sqrt, jnp.cbrt, lambda x: jnp.where(x > 0, jnp.log(x), 0.0)])
def test_a_gradient_that_is_not_finite_is_one_failure(fun):
    report = cg.check_grads(fun, (array([0.0, 1.5]),), raise_on_failure=False)
    assert [(each.check, each.where) for each in report.failures] == [("finite", "args[0][0]")]


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_a_wrong_value_beside_one_that_is_not_finite_is_found(mode):
    root = jax.custom_vjp(jnp.sqrt)
    root.defvjp(lambda x: (jnp.sqrt(x), x), lambda x, g: (g / jnp.sqrt(x),))
    text = failed(root, array([0.0, 1.5]), mode=mode)
    assert "1 of 2 elements of the gradient are not finite" in text
    assert "[value] args[0][1]: 1 of 2 elements wrong" in text


def test_a_random_function_is_called_that():
    rng = np.random.default_rng(0)
    text = failed(lambda x: x * rng.uniform(), X)
    assert "[determinism] out: two calls of the function give different values (random" in text


def test_a_function_without_reverse_mode_fails_with_the_reason():
    loop = lambda x: lax.while_loop(lambda c: c[0] < 9, lambda c: 2 * c, x)  # noqa: E731
    assert "[cotangent] args[0]: differentiation raises ValueError: Reverse-mode" in failed(loop, X)


def test_absent_devices_are_not_run_and_alone_not_ok():
    report = cg.check_grads(jnp.sin, (X,), devices=("cpu", "tpu"))
    assert report.not_run["device tpu"] == "there is no such device here"
    assert report.devices == ("cpu",)
    assert "nothing was verified" in failed(jnp.sin, X, devices=("tpu",))


def test_a_gradient_of_zero_everywhere_is_noted():
    report = cg.check_grads(jnp.round, (array([0.6, 1.6]),))
    assert "the gradient is zero everywhere: does the output depend on the inputs?" in report.notes


@crossed(2)
@pytest.mark.parametrize("function", [jnp.square, lambda x: jnp.sum(x**3), jnp.cosh])
@pytest.mark.parametrize("rule", [1.0, 0.0])
def test_a_stationary_point_is_not_called_independent(function, rule):
    """Nor is a rule that is zero, which another point shows to be wrong."""
    ruled = custom(lambda x: function(x), lambda r, g: (rule * jax.vjp(function, *r)[1](g)[0],))
    report = cg.check_grads(ruled, (array(np.zeros(3)),), raise_on_failure=False)
    assert report.ok == (rule == 1.0)
    assert "depend" not in str(report)


@pytest.mark.slow
def test_integers_keys_none_and_strings_are_passed_over():
    def function(x, index, key, none, word):
        assert none is None and word == "normal"
        return x[index] * jax.random.normal(key, index.shape)

    args = (X, jnp.asarray([1, 0]), jax.random.key(0), None, "normal")
    assert cg.check_grads(function, args).verified == 2


@pytest.mark.parametrize(
    "other", [np.array(["a", "b"]), np.array([None]), object()], ids=["text", "None", "object"]
)
def test_what_holds_no_number_reaches_the_function_as_it_is(other):
    def function(x, thing):
        assert thing is other
        return jnp.sin(x)

    assert cg.check_grads(function, (X, other)).ok
