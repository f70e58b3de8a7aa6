"""Which gradients are compared: of every argument, at each place, in functions and in files."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipgrad as cg
from tests.helpers import array
from tests.rows import first_row

OTHERS = pytest.mark.slow
RTOL = 1e-3  # no rounding is measured, so these rows are cheap


def with_rule(backward):
    """The identity with a rule."""
    passed = jax.custom_vjp(lambda x: x)
    passed.defvjp(lambda x: (x, None), lambda _, g: (backward(g),))
    return passed


FAULTS = {
    "too large": lambda g: 1.5 * g,
    "zero": jnp.zeros_like,
    "other sign": jnp.negative,
    "not finite": lambda g: g / 0,
}
PLACES = ["args[0]", "args[1]", "args[3]", "kwargs['k']"]


def loss_of(place=None, backward=None, scanned=False):
    """A loss of four arguments, one of which has a wrong gradient."""
    rule = with_rule(backward) if backward else lambda x: x

    def loss(p, x, ids, y, *, k):
        a, b, c, d = (rule(v) if v_at == place else v for v_at, v in zip(PLACES, (p["w"], x, y, k)))  # noqa: B905
        step = lambda h, row: (jnp.tanh(h @ a + row) * d, None)  # noqa: E731
        h = b
        if scanned:
            h, _ = lax.scan(step, h, c)
        for row in () if scanned else c:
            h, _ = step(h, row)
        return jnp.sum(h[ids] ** 2)

    return loss


PARAMS = {"w": array(np.linspace(-0.5, 0.7, 9).reshape(3, 3))}
GIVEN = (
    PARAMS,
    array(np.linspace(-1.0, 1.0, 6).reshape(2, 3)),
    array([0, 1], np.int32),
    array(np.ones((2, 1, 1))),
)
K = {"k": array(np.linspace(0.8, 1.1, 3).reshape(1, 3))}
TABLE = [
    pytest.param(*row, marks=() if i == 5 else OTHERS)
    for i, row in enumerate(itertools.product(PLACES, FAULTS, (False, True)))
]


@pytest.mark.slow
@pytest.mark.parametrize("place, fault, scanned", TABLE)
def test_a_wrong_gradient_is_found_at_every_argument(place, fault, scanned):
    wrong = loss_of(place, FAULTS[fault], scanned)
    comparison = cg.compare(loss_of(scanned=scanned), wrong, GIVEN, K, rtol=RTOL)
    assert not comparison.ok and [f.path for f in comparison.findings] == [
        "w" if place == "args[0]" else place
    ], str(comparison)
    assert (
        "custom rule" in comparison.message and "test_compare_arguments.py:" in comparison.message
    )


@pytest.mark.slow
def test_right_gradients_of_every_argument_agree_and_integers_have_none():
    comparison = cg.compare(loss_of(), loss_of(scanned=True), GIVEN, K)
    assert comparison.ok and comparison.message.startswith("no difference beyond rounding"), str(
        comparison
    )


@pytest.mark.slow
@pytest.mark.parametrize("saved", [0, 1, (0, 1), "all"], ids=str)
@pytest.mark.parametrize("place", ["args[0]", "args[1]", "kwargs['k']"])
def test_beside_a_file_the_gradients_are_those_that_it_has(saved, place, tmp_path):
    cg.save_run(loss_of(), GIVEN, tmp_path / "run", argnums=saved, kwargs=K)
    comparison = cg.compare(
        tmp_path / "run", loss_of(place, FAULTS["too large"]), GIVEN, K, rtol=RTOL
    )
    has = saved == "all" or place in {f"args[{i}]" for i in np.ravel(saved)}
    assert comparison.ok is not has, str(comparison)
    left = [note for note in comparison.notes if "was not compared: the file has none" in note]
    assert len(left) == (saved != "all")
    assert all(place in note for note in left) is (saved == "all" or not has)


def numbers_loss(x, scale, flag=2.0):
    if flag > 1:  # only a number of Python can be asked
        x = 2 * x
    return jnp.sum(jnp.tanh(x) * scale)


@pytest.mark.slow
def test_numbers_of_python_are_arguments_unless_the_function_needs_them_as_they_are():
    x = jnp.linspace(0.1, 1.0, 3)
    wrong = lambda x, s: numbers_loss(x, with_rule(FAULTS["too large"])(jnp.asarray(s)))  # noqa: E731
    comparison = cg.compare(numbers_loss, wrong, (x, 0.5), rtol=RTOL)
    assert [f.path for f in comparison.findings] == ["args[1]"], str(comparison)
    comparison = cg.compare(numbers_loss, numbers_loss, (x, 0.5, 3.0), rtol=RTOL)
    assert (
        comparison.ok
        and "args[2]" in comparison.notes[0]
        and "was not compared" in comparison.notes[0]
    )
    assert cg.compare(numbers_loss, numbers_loss, (x, 0.5), {"flag": 3.0}, rtol=RTOL).ok


def looped(x):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, x))[1]


@pytest.mark.slow
def test_an_argument_that_jax_cannot_differentiate_by_is_a_note_if_it_is_so_in_both():
    loss = lambda w, x, by=1.0: jnp.sum((looped(x) @ w * by) ** 2)  # noqa: E731
    args = jnp.ones((3, 2)), jnp.linspace(0.0, 1.0, 3).reshape(1, 3)
    comparison = cg.compare(loss, loss, args, rtol=RTOL)
    assert comparison.ok and comparison.notes[0].startswith(
        "the gradient of args[1] was not compared: Val"
    )
    plain = lambda w, x: jnp.sum((jnp.tanh(jnp.tanh(x)) @ w) ** 2)  # noqa: E731
    comparison = cg.compare(plain, loss, args, rtol=RTOL)
    assert not comparison.ok and "gradient args[1], only in fun" in str(comparison)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        cg.compare(lambda x, w: loss(w, x), plain, args[::-1], rtol=RTOL)


@pytest.mark.parametrize("argnums", ["every", "0", "float32"])
def test_another_text_as_argnums_is_told(argnums):
    with pytest.raises(ValueError, match=f'argnums: got {argnums!r}, expected "all", positions'):
        cg.compare(loss_of(), loss_of(), GIVEN, K, argnums=argnums)


@pytest.mark.slow
def test_trees_inside_of_others_are_matched_in_every_argument():
    loss = lambda p, b: jnp.sum((b["x"] @ p["w"]) ** 2)  # noqa: E731
    batch = {"x": jnp.ones((2, 3))}
    inner = lambda p, b: loss(p["params"], b["batch"])  # noqa: E731
    args = (PARAMS, batch), ({"params": PARAMS}, {"batch": batch})
    assert cg.compare(loss, inner, args[0], other_args=args[1], rtol=RTOL).ok
    wrong = functools.partial(loss, {"w": 2 * PARAMS["w"]})
    comparison = cg.compare(loss, lambda p, b: wrong(b["batch"]) + 0 * inner(p, b), args[0],
                       other_args=args[1], rtol=RTOL)  # fmt: skip
    assert not comparison.ok


# ---- what a scan carries ----


def carrying(depth, rule=lambda x: x, scanned=True):
    """A loss whose step uses what was computed `depth` steps before."""

    def loss(w, xs):
        def step(c, x):
            with jax.named_scope("pre"):
                u = rule(c[0]) * w
            with jax.named_scope("f"):
                y = jnp.tanh(u + x)
            return (*c[1:], y), None

        c = (xs[0],) * depth
        if scanned:
            c, _ = lax.scan(step, c, xs)
        for x in () if scanned else xs:
            c, _ = step(c, x)
        return c[0].sum()

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [True, pytest.param(False, marks=OTHERS)])
@pytest.mark.parametrize(
    "depth", [1, pytest.param(2, marks=OTHERS), 3, pytest.param(4, marks=OTHERS)]
)
def test_the_module_behind_what_is_carried_over_several_steps(depth, scanned):
    args = jnp.full(3, 0.5), jnp.linspace(-1.0, 1.0, 27).reshape(9, 3)
    wrong = carrying(depth, with_rule(FAULTS["too large"]), scanned)
    comparison = cg.compare(carrying(depth, scanned=scanned), wrong, args, rtol=RTOL)
    (finding,) = comparison.findings
    assert (finding.kind, finding.module) == ("vjp", "pre"), str(comparison)
    # The loss reads what is computed in this step, and that reads the last cotangent that differs.
    assert finding.step == (9 - depth if scanned else None)
    assert "  " not in finding.message and "test_compare_arguments.py:" in finding.message


# ---- infinite values ----


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("how", ["value", "output", "cotangent", "file"])
def test_inf_and_minus_inf_differ(dtype, how, tmp_path):
    """As an output, inside of a loss, and as a cotangent."""

    def fun(x, sign):
        infinite = jnp.array([np.inf, -np.inf, 1], dtype) * jnp.asarray(sign, dtype)
        if how in ("output", "file"):
            return x + infinite
        with jax.named_scope("inside"):
            h = with_rule(lambda g: g + infinite)(x) if how == "cotangent" else x + infinite
        return jnp.sum(jnp.where(jnp.isinf(h), 0, h).astype("float32"))

    x, options = jnp.ones(3, dtype), {"rtol": RTOL}
    options |= {"argnums": None} if how in ("output", "file") else {}
    plus, minus = (functools.partial(fun, sign=sign) for sign in ([1, 1, 1], [-1, 1, 1]))
    if how == "file":
        cg.save_run(minus, (x,), tmp_path / "run", argnums=None)
        minus = tmp_path / "run"
    same = cg.compare(plus, plus, (x,), **options)
    comparison = cg.compare(plus, minus, (x,), **options)
    assert same.ok, str(same)
    if how == "value":  # the loss masks it
        assert comparison.ok and "values of inside differ" in str(comparison.notes), str(comparison)
    else:
        assert not comparison.ok and "in one of the versions only" in comparison.message, str(
            comparison
        )
