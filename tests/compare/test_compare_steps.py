"""Whole training steps under their layout: the first wrong output, and silence for right ones."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._compare import recording
from clipgrad._programs import rounded
from tests.compare.compare_right_steps import MIXED_FAULTS, OF_FLOAT32, STEPS
from tests.compare.compare_trainers import (
    FAULTS,
    new_batch,
    new_state,
    numbers,
    plain_step,
    sharded_step,
)
from tests.helpers import array

CORE_FAULTS = ["the key is used again"]
RIGHT = {f"{name}, {dtype}": functools.partial(make, dtype) for name, make in STEPS.items()
         for dtype in ("float32", "bfloat16")} | OF_FLOAT32  # fmt: skip


# Rounding decides outputs of these: a bias before a normalization under Adam, moments in bfloat16.
UNDECIDED = {"NNX, float32", "NNX, bfloat16"}


def in_core(names, core):
    return [n if n in core else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", in_core(FAULTS, CORE_FAULTS))
def test_a_fault_of_a_trainer_is_found_where_it_is(name):
    fault = FAULTS[name]
    args = (new_state(), new_batch())
    comparison = cg.compare(plain_step, sharded_step(**fault.parts), args, argnums=None)
    first = comparison.findings[0]
    assert not comparison.ok and {f.kind for f in comparison.findings} == {"output"}
    assert first.path in fault.first, str(comparison)
    assert not fault.means or "8 is the number of devices" in first.message, str(comparison)
    assert not fault.ratio or math.isclose(first.ratio, fault.ratio, rel_tol=1e-3)
    # What the fault does not reach is the same.
    assert len(comparison.findings) < len(comparison.rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_has_no_findings(name, users_promotion):
    step = RIGHT[name]()
    comparison = cg.compare(
        step.fun, step.other, step.args, other_args=step.other_args, argnums=None
    )
    assert not comparison.unmatched and len(comparison.rows) >= 3, str(comparison)
    assert {f.kind for f in comparison.findings} <= ({"not judged"} if name in UNDECIDED else set())
    assert comparison.ok is not bool(comparison.findings), str(comparison)


@pytest.mark.slow
@pytest.mark.parametrize("name", in_core(MIXED_FAULTS, ["a leaf's gradient, 10 %"]))
def test_a_fault_of_a_step_in_bfloat16_is_found(name, users_promotion):
    make, path = MIXED_FAULTS[name]
    step = make(jnp.bfloat16)
    comparison = cg.compare(step.fun, step.other, step.args, argnums=None)
    assert not comparison.ok and path in {f.path for f in comparison.findings}, str(comparison)


def outputs(*, change=1.0, shift=0.0):
    def step(x):
        total = jnp.sum(x * x)
        norm = jnp.sqrt(total) * jnp.float32(change)
        return {"a/norm": norm, "b/total": total, "c/x": x + jnp.float32(shift)}

    return step


def test_outputs_are_in_the_order_in_which_they_are_computed():
    x = numbers(6, seed=1)

    def reversed_names(change):
        def step(x):
            first = jnp.tanh(x) * jnp.float32(change)
            return {"a": jnp.sum(jnp.exp(first)), "b": jnp.sum(first), "c": first}

        return step

    comparison = cg.compare(reversed_names(1.0), reversed_names(1.5), (x,), argnums=None)
    assert [f.path for f in comparison.findings] == ["c", "b", "a"]


def test_a_step_may_donate_its_arguments():
    x = numbers(6, seed=2)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert cg.compare(step, step, (x,), argnums=None).ok
    assert not x.is_deleted()


@pytest.mark.slow
def test_integers_booleans_and_keys_are_compared_exactly():
    def step(change):
        def run(n, key):
            keys = jax.random.split(key)
            return {"n": n + change, "flag": n > change, "key": keys[change], "text": "a", "no": 1}

        return run

    args = (jnp.asarray(1), jax.random.key(0))
    assert cg.compare(step(0), step(0), args, argnums=None).ok
    comparison = cg.compare(step(0), step(1), args, argnums=None)
    assert {f.path for f in comparison.findings} == {"n", "flag", "key"}
    assert all("compared exactly" in f.message for f in comparison.findings)


def test_an_integer_that_rounding_decides_is_not_judged():
    def step(limit):
        return lambda x: x > jnp.float32(limit)

    x = array(np.full((8,), 0.1))
    comparison = cg.compare(step(x[0]), step(0.099), (x,), argnums=None)
    assert "rounding decides here" in comparison.notes[0]
    assert not comparison.ok and comparison.findings[0].kind == "not judged"


def test_outputs_of_one_version_are_findings_and_those_of_none_are_an_error():
    x = array(np.ones(3))
    comparison = cg.compare(
        lambda x: {"a": x, "b": x}, lambda x: {"a": x, "c": x}, (x,), argnums=None
    )
    assert comparison.unmatched == ("output b, only in fun", "output c, only in other")
    assert not comparison.ok and [(f.kind, f.path) for f in comparison.findings] == [
        ("output", "b"), ("output", "c"),
    ]  # fmt: skip
    assert "not matched: output b, only in fun" in str(comparison)
    with pytest.raises(ValueError, match="expected the outputs of fun"):
        cg.compare(lambda x: {"a": x}, lambda x: {"b": x}, (x,), argnums=None)


def test_other_shapes_and_dtypes_are_told():
    x = numbers(4, seed=3)
    comparison = cg.compare(lambda x: x, lambda x: x[:1], (x,), argnums=None)
    assert "the shape is [4] in fun, [1] in other" in comparison.findings[0].message
    comparison = cg.compare(lambda x: x, lambda x: x.astype(jnp.bfloat16), (x,), argnums=None)
    assert comparison.ok and comparison.notes == ("the output: float32 in fun, bfloat16 in other",)


def test_a_step_of_python_that_reads_numbers_is_compared_too():
    def step(x):
        return {"b": x * float(x[0]), "a": x}

    comparison = cg.compare(
        step, lambda x: {"b": x * 2.0, "a": x}, (numbers(3, seed=4),), argnums=None
    )
    assert [f.path for f in comparison.findings] == ["b"]
    assert "can't be traced as one program (ConcretizationTypeError" in comparison.notes[0]


def test_a_number_beside_what_is_none_is_a_finding_and_a_whole_number_is_its_float():
    """The types of an output may differ in kind, with more than one number."""
    x, whole = array(np.arange(3.0)), lambda x: x.astype("int32")
    comparison = cg.compare(whole, lambda x: x, (x,), argnums=None)
    assert comparison.ok and comparison.notes == ("the output: int32 in fun, float32 in other",)
    for other in (lambda x: x + 0.5, lambda x: jax.random.key(0), lambda x: "a"):
        comparison = cg.compare(whole, other, (x,), argnums=None)
        assert not comparison.ok and [f.path for f in comparison.findings] == ["the output"], str(
            comparison
        )


@pytest.mark.slow
def test_paths_that_look_alike_are_two_outputs():
    def step(x, by=1.0):
        return {"a/b": x, "a": {"b": x * by}}

    x = numbers(3, seed=8)
    comparison = cg.compare(step, lambda x: step(x, 2.0), (x,), argnums=None)
    assert [f.path for f in comparison.findings] == ["['a']['b']"]
    loss = lambda p: jnp.sum(p["a/b"] * p["a"]["b"])  # noqa: E731
    assert cg.compare(loss, loss, ({"a/b": x, "a": {"b": x}},)).ok


def test_a_factor_that_is_nearly_one_is_not_told():
    x = numbers(6, seed=9)
    comparison = cg.compare(lambda x: x, lambda x: x * jnp.float32(1.0004), (x,), argnums=None)
    assert (
        not comparison.ok
        and "times other" not in str(comparison)
        and "share" not in str(comparison)
    )
    changed = lambda n: n.at[1].set(7)  # noqa: E731
    comparison = cg.compare(lambda n: n, changed, (array(np.arange(4), np.int32),), argnums=None)
    assert "its numbers differ, which are compared exactly" in comparison.findings[0].message


def block(x, by=1.0, back=1.0):
    @jax.custom_vjp
    def act(x):
        return jnp.tanh(x)

    act.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (back * g * (1 - jnp.tanh(x) ** 2),))
    with jax.named_scope("mlp"):
        return act(x) * by


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"by": 1.1}, {"back": 1.1}])
def test_a_step_that_names_its_values_has_its_fault_at_their_module(how):
    def step(w, **how):
        value, grads = jax.value_and_grad(lambda w: jnp.mean(block(w, **how) ** 2))(w)
        return {"loss": value, "w": w - 0.1 * grads}

    w = numbers(4, 3, seed=10)
    assert cg.compare(step, step, (w,), argnums=None).ok
    comparison = cg.compare(step, lambda w: step(w, **how), (w,), argnums=None)
    assert not comparison.ok and comparison.findings[0].module == "mlp", str(comparison)
    assert comparison.findings[-1].kind == "output"


def test_an_output_that_is_not_judged_is_never_ok():
    """Also beside outputs that agree."""

    def step(x, shift):
        return {"sum": jnp.sum(x), "noise": jnp.sin(1e9 * (jnp.sum(x * x) + shift))}

    x = numbers(7, seed=11)
    shifted = lambda x: step(x, 1e-6)  # noqa: E731
    comparison = cg.compare(lambda x: step(x, 0.0), shifted, (x,), argnums=None)
    assert not comparison.ok and [f.kind for f in comparison.findings] == ["not judged"], str(
        comparison
    )
    assert "the output noise" in comparison.findings[0].message
    assert (
        "noise: rounding decides here, so this is called neither equal nor different"
        in comparison.notes
    )


@pytest.mark.slow
def test_the_eight_runs_are_one_compiled_program(monkeypatch):
    """Their program is traced once; beside a wider type only if a leaf is off by more than 5 %."""
    traces = []

    def counted(*arguments):
        traces.append(1)
        return rounded(*arguments)

    monkeypatch.setattr(recording, "rounded", counted)
    loss, x = lambda x: jnp.mean(jnp.tanh(x) ** 2), numbers(5, seed=12)
    calls = {
        1: lambda: cg.compare(loss, lambda x: loss(x) * 1.1, (x,)),
        0: lambda: cg.compare(loss, loss, (x,), rtol=1e-3),
    }
    for count, call in calls.items():
        traces.clear()
        call()
        assert len(traces) == count
    narrow = (x + 10).astype("bfloat16")
    for fun, count in ((loss, 0), (lambda x: jnp.mean(x * x) - jnp.mean(x) ** 2, 1)):
        traces.clear()
        cg.compare(fun, "float32", (narrow if count else x.astype("bfloat16"),))
        assert len(traces) == count


@pytest.mark.parametrize("rtol, ok", [(0.2, True), (1e-3, False), (None, False)])
def test_rtol_replaces_the_floor(rtol, ok):
    comparison = cg.compare(
        outputs(), outputs(change=1.1), (numbers(6, seed=7),), argnums=None, rtol=rtol
    )
    assert comparison.ok is ok


def test_the_report_of_a_step():
    comparison = cg.compare(outputs(), outputs(change=2.0), (numbers(6, seed=7),), argnums=None)
    assert str(comparison).startswith("output: an output differs: a/norm\n")
    assert "fun is 0.5 times other" in " ".join(str(comparison).split())
    assert np.isclose(comparison.findings[0].ratio, 0.5)


def test_a_transposed_output_is_another_one_also_where_its_numbers_are_in_the_same_order():
    x = numbers(6, seed=13)
    pair = [lambda x, s=s: x.reshape(s) for s in ((2, 3), (3, 2))]
    comparison = cg.compare(*pair, (x,), argnums=None)
    assert not comparison.ok and "the shape is [2, 3] in fun, [3, 2] in other" in str(comparison)


def adam_of_attention(factor=1.0, written="one way"):
    """The first step of Adam; a softmax ignores the bias of keys, so its step is rounding."""

    def loss(p, x):
        q, k = x @ p["q"]["w"] + p["q"]["b"], x @ p["k"]["w"] + p["k"]["b"]
        v, scale = x @ p["v"]["w"] + p["v"]["b"], np.float32(x.shape[-1] ** -0.5)
        if written == "one way":
            weights = jax.nn.softmax(q @ k.T * scale)
        else:
            weights = jnp.exp((q * scale) @ k.T)
            weights = weights / weights.sum(-1, keepdims=True)
        return jnp.mean((weights @ v - x[::-1]) ** 2)

    def step(p, x):
        gradient = jax.grad(loss)(p, x)
        gradient["q"]["b"] = gradient["q"]["b"] * np.float32(factor)
        first = jax.tree.map(lambda g: np.float32(0.1) * g, gradient)
        moved = jax.tree.map(lambda w, g: w - 1e-3 * g / (jnp.abs(g) + 1e-8), p, gradient)
        return {"m": first, "p": moved}

    return step


def attention_arguments():
    weights = {name: numbers(4, 4, seed=i) / 2 for i, name in enumerate("qkv", start=20)}
    biases = {name: numbers(1, 4, seed=i) / 4 for i, name in enumerate("qkv", start=30)}
    return {n: {"w": weights[n], "b": biases[n]} for n in weights}, numbers(6, 4, seed=40)


@pytest.mark.slow
def test_a_key_bias_that_rounding_decides_is_a_note_and_hides_no_other_leaf():
    args = attention_arguments()
    other = adam_of_attention(written="by hand")
    comparison = cg.compare(adam_of_attention(), other, args, argnums=None)
    assert comparison.ok, str(comparison)
    assert any(note.startswith("m/k/b: rounding decides here") for note in comparison.notes), str(
        comparison
    )
    other = adam_of_attention(factor=1.1, written="by hand")
    comparison = cg.compare(adam_of_attention(), other, args, argnums=None)
    assert not comparison.ok and comparison.findings[0].path == "m/q/b", str(comparison)
