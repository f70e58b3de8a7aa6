"""What a report says: where, how many, how much, and what it looks like."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._check.checked_point import ratio_hint
from clipgrad._check.log import Log
from clipgrad._check.options import Options
from clipgrad._check.report import Failure, GradCheckReport
from clipgrad._check.verdict import told_apart
from clipgrad._errors import first_line
from tests.check.check_zoo import PAIRS, custom
from tests.helpers import array


def wrong(name, **options):
    function, _, args = PAIRS[name][0](jnp.dtype("float32"))
    return cg.check_grads(function, args, raise_on_failure=False, **options)


def made(failures=(), notes=(), verified=1, **counts):
    return GradCheckReport(
        tuple(failures), tuple(notes), {}, 10, 0.5, "float64", ("cpu",), verified, **counts
    )


def test_a_report_is_ok_if_something_was_verified_and_nothing_failed():
    assert made().ok
    assert not made(verified=0).ok
    assert not made([Failure("value", "x", "wrong")]).ok


def test_the_first_line_says_what_share_was_not_verified_and_how_many_are_at_kinks():
    head = lambda report: str(report).split(" (")[0]  # noqa: E731
    assert head(made(verified=60, elements=100)) == "gradient check passed, 40% not verified"
    assert head(made(verified=95, elements=100)) == "gradient check passed"
    kinks = made(verified=45, elements=100, at_kinks=50)
    assert head(kinks) == "gradient check passed, 50 at kinks" and kinks.ok
    assert made(verified=0, elements=3, at_kinks=3).ok


HALF_OF_IT = array([0.0, 0.0, 0.0, 2.0])


def half_verified(**options):
    safe = custom(
        lambda x: jnp.sign(x) * jnp.sqrt(jnp.abs(x)),
        lambda r, g: (g * jnp.where(r[0] == 0, 0, 0.5 / jnp.sqrt(jnp.abs(r[0]))),),
    )
    return cg.check_grads(safe, (HALF_OF_IT,), points=1, raise_on_failure=False, **options)


@pytest.mark.slow
def test_fewer_elements_verified_than_asked_for_are_a_failure():
    assert "25% of the elements were verified, of 50% at least" in str(half_verified())
    report = half_verified(min_verified=0.2)
    assert report.ok and str(report).startswith("gradient check passed, 75% not verified (")
    assert not half_verified(min_verified=0.3).ok


def test_what_is_left_when_the_time_is_spent_is_not_verified():
    square = custom(lambda x: x * x, lambda r, g: (2 * r[0] * g,))
    report = cg.check_grads(
        square, (array(np.ones(3)),), mode="full", time_budget=1e-6, raise_on_failure=False
    )
    assert report.verified == 0 and not report.ok
    assert "the time budget of 1e-06 s is spent" in str(report)
    assert cg.check_grads(square, (array(np.ones(3)),), time_budget=1e6).verified == 3


@pytest.mark.parametrize(
    "seconds, budget, says", [(75, None, True), (59, None, False), (75, 90, False)]
)
def test_a_check_of_over_a_minute_says_what_a_time_budget_does(seconds, budget, says, monkeypatch):
    monkeypatch.setattr(Options, "seconds", property(lambda options: seconds))
    log = Log(Options(1, "auto", None, None, 0.0, budget, 1, 0, ()))
    text = "the check took 75 s; with time_budget=60, it stops after 60 s, and what is left then"
    assert any(text in note for note in log.report().notes) is says


@pytest.mark.slow
def test_a_tolerance_of_ones_own_is_that_of_the_backward():
    off = custom(lambda x: jnp.sin(x), lambda r, g: (1.004 * jnp.cos(r[0]) * g,))
    assert not cg.check_grads(off, (jnp.ones(3),), raise_on_failure=False).ok
    assert cg.check_grads(off, (jnp.ones(3),), tolerance=0.01).ok
    assert not cg.check_grads(off, (jnp.ones(3),), tolerance=1e-3, raise_on_failure=False).ok


@pytest.mark.slow
def test_the_text_names_check_element_count_and_both_values():
    report = wrong("missing_factor")
    (failure,) = report.failures
    text = str(report)
    assert text.startswith("gradient check FAILED (")
    assert f"[value] {failure.where}: 12 of 12 elements wrong; worst: numeric " in text
    assert f"analytic {failure.analytic:.7g}; analytic/numeric is 0.5 throughout" in text
    np.testing.assert_allclose(failure.ratio, 0.5, rtol=1e-4)
    assert sorted(failure.indices) == list(range(12))


def test_the_header_tells_evaluations_seconds_precision_and_devices():
    report = cg.check_grads(jnp.sin, (array(np.ones(2)),))
    head = str(report).splitlines()[0]
    expected = (
        f"gradient check passed ({report.evaluations} evaluations, {report.seconds:.2f} s, "
        "differences in float64, devices cpu)"
    )
    assert head == expected


@pytest.mark.slow
def test_the_parts_of_a_complex_number_are_named():
    where = wrong("complex_conjugate_of_the_other_convention").failures[0].where
    assert where.endswith((".real", ".imag"))


@pytest.mark.slow
def test_a_transposed_gradient_is_called_that():
    assert "analytic is the transpose of numeric" in str(wrong("transposed_weight_gradient"))


@pytest.mark.slow
def test_a_kink_is_told_with_its_slopes():
    text = str(wrong("a_kink_outside_of_its_subdifferential"))
    assert "worst: kink: slopes 0 and " in text


@pytest.mark.parametrize(
    ("numeric", "analytic", "hint"),
    [
        ([1.0, 2.0], [2.0, 4.0], "; analytic/numeric is 2 throughout"),
        ([1.0, 2.0], [0.0, 0.0], "; analytic is 0 throughout"),
        ([1.0, 2.0], [2.0, 5.0], ""),
        ([1.0, 0.0], [2.0, 0.0], ""),
        ([1.0], [2.0], ""),
        ([1.0, 2.0], [-1.0, -2.0], "; analytic/numeric is -1 throughout (the sign)"),
        ([1.0, 2.0, 4.0], [0.5, 1.001, 2.0], "; analytic/numeric is 0.5 throughout"),
        ([1.0, 2.0, 4.0], [-1.0, -2.008, -4.0], "; analytic/numeric is -1 throughout (the sign)"),
        ([1.0, 2.0, 4.0], [0.5, 1.02, 2.0], ""),
        ([1.0, 2.0, 4.0], [1.005, 2.02, 4.06], ""),
        ([1.0, 2.0, 4.0], [1.01, 2.02, 4.0408], ""),
        ([1.0, 2.0, 4.0], [1.01, 2.02, 4.0401], "; analytic/numeric is 1.01 throughout"),
        ([1.0, 2.0], [1.00001, 2.00002], "; analytic/numeric is 1.00001 throughout"),
        ([1.0, 2.0], [0.001, 0.0022], ""),
    ],
)
def test_a_ratio_that_spreads_far_less_than_it_differs_from_one_is_a_hint(numeric, analytic, hint):
    assert ratio_hint(np.array(numeric), np.array(analytic)) == hint


def test_the_error_is_an_assertion_error_whose_text_is_the_report():
    function, _, args = PAIRS["wrong_sign"][0](jnp.dtype("float32"))
    with pytest.raises(cg.GradCheckError, match=r"(?s)FAILED.*\[value\]") as caught:
        cg.check_grads(function, args)
    assert isinstance(caught.value, AssertionError)
    assert str(caught.value) == str(caught.value.report)
    assert not caught.value.report.ok


@pytest.mark.slow
def test_the_same_seed_gives_the_same_report():
    first, second = wrong("wrong_sign"), wrong("wrong_sign")
    assert [str(f) for f in first.failures] == [str(f) for f in second.failures]
    assert str(wrong("wrong_sign", seed=1).failures[0]) != str(first.failures[0])


def test_the_text_never_has_more_than_25_lines():
    failures = [Failure("value", f"args[{k}]", "wrong\nin two lines") for k in range(40)]
    report = made(failures, [f"remark {k}\nin two lines" for k in range(40)])
    lines = str(report).splitlines()
    assert len(lines) == 25
    assert lines[1] == "  [value] args[0]: wrong in two lines"
    assert lines[12] == "  ... and 29 more failures (see report.failures)"
    assert lines[24] == "  ... and 29 more notes (see report.notes)"
    assert len(str(made(failures[:11])).splitlines()) == 12


LONG = "gradients " * 20


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("too small"), "ValueError: too small"),
        (ValueError("too small\nby far"), "ValueError: too small"),
        (ValueError("  \n too small"), "ValueError: too small"),
        (ValueError(), "ValueError"),
        (KeyError("w"), "KeyError: 'w'"),
        (SystemExit(0), "SystemExit: 0"),
        (ValueError(LONG), f"ValueError: {LONG[:89]} ..."),
        (ValueError(LONG[:89]), f"ValueError: {LONG[:89]}"),
        (ValueError("x" * 200), f"ValueError: {'x' * 200}"),
        (ValueError("x" * 200 + " y"), f"ValueError: {'x' * 200} ..."),
        (ValueError("half-precision " * 9), f"ValueError: {('half-precision ' * 6)[:-1]} ..."),
    ],
)
def test_the_first_line_of_an_error_is_shortened_at_a_word(error, line):
    assert first_line(error) == line


@pytest.mark.slow
def test_pytest_shows_the_report_and_not_the_source_of_the_library(tmp_path):
    (tmp_path / "test_half.py").write_text(
        "import clipgrad as cg, jax, jax.numpy as jnp\n\n"
        "half = jax.custom_vjp(lambda x: x * x)\n"
        "half.defvjp(lambda x: (x * x, x), lambda x, g: (x * g,))\n\n"
        "def test_value():\n    cg.check_grads(half, (jnp.ones(2),), points=1)\n\n"
        "def test_usage():\n    cg.check_grads(half, (jnp.ones(2),), modes=['rev'])\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    text = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    ).stdout
    assert "gradient check FAILED (" in text and "2 failed" in text
    assert re.search(r"E .*\[value\] args\[0\]\[\d\]: 2 of 2 elements wrong; worst: numeric ", text)
    assert ">       cg.check_grads(half, (jnp.ones(2),), points=1)" in text
    assert ">       cg.check_grads(half, (jnp.ones(2),), modes=['rev'])" in text
    assert "raise " not in text and ".py:7: GradCheckError" in text
    assert set(re.findall(r"(\w+)\.py:\d+", text)) == {"test_half"}


ARGS = ({"w": np.asarray([[0.5, 1.5], [2.5, 0.25]], np.float32)}, np.float32(0.7))


def scaled(k):
    """The second of two arguments has k times its gradient."""

    def backward(saved, g):
        params, y = saved
        return {"w": g * jnp.cos(params["w"]) * y}, k * jnp.sum(g * jnp.sin(params["w"]))

    return custom(lambda params, y: jnp.sin(params["w"]) * y, backward)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1.0, 1.5])
def test_the_largest_error_of_each_leaf_stands_in_the_report(k):
    args = jax.tree.map(jnp.asarray, ARGS)
    report = cg.check_grads(scaled(k), args, raise_on_failure=False)
    assert set(report.errors) == {"args[0]['w']", "args[1]"}
    assert report.errors["args[0]['w']"] < 1e-6
    np.testing.assert_allclose(report.errors["args[1]"], k - 1, atol=1e-6)
    assert report.max_relative_error == max(report.errors.values())
    line = str(report).splitlines()[1]
    assert line.startswith(f"  largest error {report.max_relative_error:.1g}, at args[")
    assert k == 1 or line.endswith("at args[1]")


def test_the_largest_error_by_paddles_rule_is_paddles():
    args = jax.tree.map(jnp.asarray, ARGS)
    report = cg.check_grads(scaled(1.003), args, max_relative_error=0.005, skip=("linearity",))
    np.testing.assert_allclose(report.errors["args[1]"], 0.003, rtol=1e-2)


def test_the_message_is_the_first_failure_or_what_is_right():
    report = cg.check_grads(jnp.sin, (array(np.ones(3)),))
    assert report.message == "the gradient is right: 3 of 3 elements verified"
    report = wrong("missing_factor")
    assert report.message == str(report.failures[0])


@pytest.mark.slow
def test_a_cotangent_of_the_user_is_the_one_of_the_check():
    x = jnp.asarray([0.5, 1.5])
    size = custom(lambda x: x * x, lambda r, g: (2 * r[0] * jnp.asarray([1.0, 3.0]) * g,))
    first = cg.check_grads(size, (x,), cotangent=jnp.asarray([1.0, 0.0]), skip=("linearity",))
    assert first.ok and first.errors == {"args[0]": 0.0}
    both = cg.check_grads(size, (x,), cotangent=jnp.asarray([1.0, 1.0]), raise_on_failure=False)
    assert both.failures[0].where == "args[0][1]" and both.failures[0].numeric in (3.0, -3.0)
    tree = lambda x: {"a": x * x, "b": x.sum()}  # noqa: E731
    assert cg.check_grads(tree, (x,), cotangent={"a": jnp.ones(2), "b": jnp.float32(0)}).ok
    with pytest.raises(ValueError, match=r"cotangent: got the shapes \[\(3,\)\], expected"):
        cg.check_grads(size, (x,), cotangent=jnp.ones(3))


@pytest.mark.parametrize(
    ("a", "b", "texts"),
    [
        (1.0, 2.0, ("1", "2")),
        (1 / 3, 1 / 3 + 1e-9, ("0.333333333", "0.333333334")),
        (1.0, 1.0, ("1", "1")),
        (2.0, float("nan"), ("2", "nan")),
    ],
)
def test_two_numbers_are_shown_with_the_digits_that_tell_them_apart(a, b, texts):
    assert told_apart(a, b) == texts


def test_an_error_of_jax_is_shown_whole_and_once():
    def backward(saved, g):
        raise ValueError(f"{LONG}\nand a second line")

    report = cg.check_grads(custom(jnp.sin, backward), (array(np.ones(2)),), raise_on_failure=False)
    assert str(report).count("and a second line") == 1 and str(report).count(LONG) == 1


@pytest.mark.parametrize("option", ["tolerance", "max_relative_error", "min_verified"])
@pytest.mark.parametrize("value", ["1e-3", [0.1], True])
def test_a_number_of_another_type_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"^{option}: got .*, expected a "):
        cg.check_grads(jnp.tanh, (array(np.ones(3)),), **{option: value})


@pytest.mark.slow
def test_nothing_of_a_check_stays_alive():
    import gc
    import weakref

    def checked(k):
        x = jnp.linspace(0, 1, 7) + k
        lost = lambda x: (1e4 + x) - 1e4  # noqa: E731
        careless = custom(lost, lambda r, g: (lost(r[0]) / r[0] * g,))
        cg.check_grads(careless, (x + 1,), points=1, raise_on_failure=False)
        return weakref.ref(x)

    alive = [checked(k) for k in range(2)]
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
