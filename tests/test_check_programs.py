"""Programs that are kept: nothing is compiled twice, and none is stale."""

import collections
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipgrad._check.gradients import Gradient, PlainAD
from clipgrad._check.rounding import CONSTANTS, IN_FLOAT64, OWN, gradient_movement
from clipgrad._check.subject import make_subject
from clipgrad._check.widening import widened_program
from jax import lax

import clipgrad as cg
from clipgrad._jaxpr import kept as programs
from clipgrad._jaxpr import kept_by_key, quick_jit
from tests.check_zoo import custom

X = jnp.asarray([0.3, -0.7, 1.1])
X5 = jnp.asarray([0.3, 0.7, 1.1, 1.4, 0.2])
KEY = jax.random.key(0)
FIRST, OTHER = np.float32([1, 2, 3]), np.float32([1, 2, 3.5])


def report(function, *args, **options):
    return cg.check_grads(function, args, raise_on_failure=False, **options)


def cosine(k=1.0):
    return lambda r, g: (k * g * jnp.cos(r[0]),)


CHECKED = {
    "operations of jax": (lambda x: jnp.sin(x) * FIRST, {}),
    "a rule": (custom(lambda x: jnp.sin(x), cosine()), {}),
    "a wrong rule": (custom(lambda x: jnp.sin(x), cosine(1.1)), {}),
    "a rule, twice": (custom(lambda x: jnp.sin(x), cosine()), {"order": 2}),
    "held values": (lambda x: jnp.sin(x + lax.stop_gradient(jnp.round(x) - x)), {}),
    "random directions": (
        custom(lambda x: jnp.sin(x) - x, lambda r, g: (jnp.cos(r[0]) * g - g,)),
        {"mode": "fast"},
    ),
    "a jitted function": (jax.jit(lambda x: jnp.sin(x) * FIRST), {}),
}


@pytest.mark.kinds()
@pytest.mark.parametrize("name", CHECKED)
def test_a_second_check_of_the_same_function_compiles_nothing(name, compiled):
    function, options = CHECKED[name]
    first = report(function, X, **options)
    assert compiled["compiled"] > 0
    compiled.clear()
    count = len(programs._kept_by_key)
    second = report(function, X, **options)
    assert compiled["compiled"] == 0 and len(programs._kept_by_key) == count
    assert list(map(str, second.failures)) == list(map(str, first.failures))
    assert second.evaluations == first.evaluations


def plain_ad(function, x):
    """Plain AD of a function of one array, and a cotangent of ones."""
    subject = make_subject(function, (x,), None, None, None, None)
    constants = subject.program.consts
    gradient = Gradient(PlainAD(widened_program(subject.program), 1), constants, subject.outputs)
    return gradient, subject.inputs, np.ones((1, subject.outputs[0].size))


@pytest.mark.parametrize("solves", [False, True])
def test_all_roundings_share_a_program(solves, compiled):
    solve = lambda x: jnp.linalg.solve(jnp.diag(x + 0.1), x)  # noqa: E731
    gradient, xs, ones = plain_ad(solve if solves else lambda x: 0.1 * jnp.sin(x) ** 3, X5)
    gradient(xs, ones)
    compiled.clear()
    moved = [
        gradient_movement(gradient, xs, ones, parts).max() for parts in (OWN, CONSTANTS, IN_FLOAT64)
    ]
    assert compiled["compiled"] == 1
    own, constants, wide = moved
    assert 0 < wide < 1e-14 < constants < own < 3e-6
    twice = OWN._replace(results=2.0, constants=2.0)
    doubled = gradient_movement(gradient, xs, ones, twice)
    np.testing.assert_allclose(doubled.max(), 2 * own, rtol=1e-4)


SUMS = {
    "scan": lambda x: lax.scan(lambda y, w: (y + w * x[None], None), X5[None], jnp.ones(999))[0],
    "gather": lambda x: jnp.sin(x[None, jnp.arange(3000) % 5]),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_many_is_not_moved_one_way_by_roundings_whatever_the_promotion(name):
    gradient, xs, ones = plain_ad(SUMS[name], X5)
    exact, found = gradient(xs, ones), []
    for setting in ("allow", "raise"):
        with jax.numpy_rank_promotion(setting):
            found.append(gradient_movement(gradient, xs, ones, OWN._replace(results=2.0**16)))
    np.testing.assert_array_equal(*found)
    assert (found[0] > 0).all() and (found[0] < np.abs(exact) / 2).all()


def test_plain_ad_at_a_point_in_float64_is_the_program_of_the_one_in_float32(compiled):
    gradient, xs, ones = plain_ad(lambda x: jnp.cos(x) ** 3 + x, X5)
    gradient(xs, ones)
    compiled.clear()
    gradient([np.asarray(x, np.float64) for x in xs], ones)
    assert compiled["compiled"] == 0


def test_plain_ad_that_cannot_be_had_is_traced_once(monkeypatch):
    """Nor is it under another hook: of a loop that stops there is no gradient whatever it does."""
    loop = lambda x: lax.while_loop(lambda y: jnp.sum(y) < 9, lambda y: 2 * y, x)  # noqa: E731
    gradient, xs, ones = plain_ad(loop, jnp.ones(5))
    tried, pull_back = [], PlainAD.pull_back
    monkeypatch.setattr(PlainAD, "pull_back", lambda *args: tried.append(1) or pull_back(*args))
    again = lambda xs, ones: gradient_movement(gradient, xs, ones, OWN)  # noqa: E731
    for measured in (gradient, again, gradient):
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            measured(xs, ones)
    assert len(tried) == 1


@pytest.mark.exhaustive
def test_a_function_whose_state_changed_between_two_checks_is_seen_anew():
    state = {"k": 1.0}
    rule = custom(lambda x: jnp.sin(x), lambda r, g: (state["k"] * g * jnp.cos(r[0]),))
    for k, ok in ((1.0, True), (1.01, False), (1.0, True), (1.00001, False)):
        state["k"] = k
        assert report(rule, X).ok == ok


WITH_CONSTANTS = {
    "a rule": lambda w, v: custom(lambda x: jnp.sin(x) * w, lambda r, g: (g * jnp.cos(r[0]) * v,)),
    "a rule in a loop": lambda w, v: (
        lambda x: lax.fori_loop(0, 1, lambda i, c: WITH_CONSTANTS["a rule"](w, v)(c), x)
    ),
    "a jitted rule": lambda w, v: jax.jit(WITH_CONSTANTS["a rule"](w, v)),
    "a rule of a jitted function": lambda w, v: custom(
        jax.jit(lambda x: jnp.sin(x) * w), jax.jit(lambda r, g: (g * jnp.cos(r[0]) * v,))
    ),
    "a rule with a key": lambda w, v: jax.jit(
        lambda x: WITH_CONSTANTS["a rule"](w, v)(x) + jax.random.normal(KEY, x.shape, x.dtype)
    ),
    "a rule in a branch": lambda w, v: (
        lambda x: lax.cond(x[0] < 9, WITH_CONSTANTS["a rule"](w, v), jnp.sin, x)
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WITH_CONSTANTS)
def test_constants_of_a_kept_program_are_those_of_the_function_at_hand(name):
    make = WITH_CONSTANTS[name]
    for w, v in ((FIRST, FIRST), (OTHER, FIRST), (OTHER, OTHER), (FIRST, OTHER), (FIRST, FIRST)):
        assert report(make(w, v), X).ok == (w is v)


def test_a_compiled_function_keeps_its_shapes_and_structure_apart():
    added = quick_jit(lambda tree: {"sum": sum(tree.values())})
    one, two = {"a": X, "b": X}, {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
    for tree in (one, two, one):
        np.testing.assert_array_equal(added(tree)["sum"], 2 * tree["a"])
    assert added({"a": X, "c": X})["sum"].shape == (3,)


def test_only_so_many_programs_are_kept_the_last_used_ones(monkeypatch):
    monkeypatch.setattr(programs, "_kept_by_key", collections.OrderedDict())
    monkeypatch.setattr(programs, "KEPT", 2)
    made = []
    for key in "abaca":
        kept_by_key(key, lambda key=key: made.append(key))
    assert made == ["a", "b", "c"] and list(programs._kept_by_key) == ["c", "a"]


def test_many_checks_leave_no_functions_behind():
    functions = []
    for size in range(2, 8):
        function = custom(lambda x: jnp.sin(x), cosine())
        functions.append(weakref.ref(function))
        assert report(function, jnp.linspace(0.1, 1.0, size)).ok
    del function
    gc.collect()
    assert sum(function() is not None for function in functions) <= 2
