"""What a comparison says: its message, its table, its lines, and what to write instead."""

import functools
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipgrad as cg
from clipgrad._compare.durations import ROUNDING, RUNS, TRACING, Durations
from clipgrad._programs import Widen, evaluate
from tests.helpers import array

OTHERS = pytest.mark.slow
X = array(np.linspace(0.1, 1.0, 12).reshape(4, 3))
PARAMS = {
    "l0": array(np.linspace(-1, 1, 9).reshape(3, 3)),
    "l1": array(np.linspace(-0.5, 1, 9).reshape(3, 3)),
}


def layers(params, x, dtype="float32", by=1.0, tags=True):
    for name in sorted(params):
        with jax.named_scope(name if tags else ""):
            x = jnp.tanh(x.astype(dtype) @ params[name].astype(dtype))
    return jnp.mean((x.astype("float32") * by) ** 2)


def in_bfloat16(params, x):
    return layers(params, x, "bfloat16")


def without_names(params, x):
    return layers(params, x, "bfloat16", tags=False)


# ---- the table of a dtype ----


@pytest.mark.slow
@pytest.mark.parametrize("loss", [in_bfloat16, pytest.param(without_names, marks=OTHERS)])
def test_the_errors_of_low_precision_are_always_printed(loss):
    comparison = cg.compare(loss, "float32", (PARAMS, X))
    text = str(comparison)
    assert (
        comparison.ok
        and comparison.message in " ".join(text.split())
        and "float32" in comparison.dtype
    )
    first = text.split("relative error  ")[0]
    assert "the largest relative errors" in first and "of the gradient of" in first
    exact = jax.jit(jax.grad(layers))(PARAMS, X)
    near = jax.jit(jax.grad(loss))(PARAMS, X)
    rows = {row.module: row.value for row in comparison.rows if row.kind == "gradient"}
    assert {*rows} == {"l0", "l1", "args[1]"}
    for name in PARAMS:
        error = np.linalg.norm(near[name] - exact[name]) / np.linalg.norm(exact[name])
        np.testing.assert_allclose(rows[name], error, rtol=1e-3)
        assert f"gradient of {name}" in text and f"{rows[name]:.1e}" in text
    named = [row for row in comparison.rows if row.kind == "module"]
    assert len(named) == (2 if loss is in_bfloat16 else 0)
    for row in named:
        assert re.search(rf"{row.module} +{row.value:.1e} +{row.cotangent:.1e}", text), text


def test_nothing_runs_where_nothing_is_narrower():
    runs = []

    def loss(x):
        jax.debug.callback(lambda: runs.append(1))
        return jnp.sum(jnp.tanh(x))

    comparison = cg.compare(loss, "float32", (X,))
    jax.effects_barrier()
    assert (
        comparison.ok and not runs and "nothing in fun is narrower than float32" in str(comparison)
    )


# ---- one and many ----


@pytest.mark.slow
def test_the_message_is_that_of_the_first_finding_or_says_that_there_is_none():
    same = cg.compare(layers, layers, (PARAMS, X), rtol=1e-3)
    assert same.message == "no difference beyond rounding, at 2 places" == str(same)
    one = cg.compare(layers, layers, ({"l0": PARAMS["l0"]}, X), rtol=1e-3)
    assert one.message == "no difference beyond rounding, at 1 place"
    wrong = cg.compare(layers, lambda p, x: layers(p, x, by=1.1), (PARAMS, X), rtol=1e-3)
    assert (
        wrong.message == wrong.findings[0].message and "all 2 named values agree" in wrong.message
    )
    wrong = cg.compare(layers, lambda p, x: layers(p, x, by=1.1), ({"l0": PARAMS["l0"]}, X), rtol=1)
    assert wrong.ok  # any difference of less than 100 %
    wrong = cg.compare(
        layers, lambda p, x: layers(p, x, by=9.0), ({"l0": PARAMS["l0"]}, X), rtol=0.9
    )
    assert "the only named value agrees" in wrong.message


@pytest.mark.parametrize(
    "pair, text",
    [
        (("a", "b"), "s: its text differs"),
        (("a", 1.0), "s is text in fun, float64 in other"),
        ((1.0, "a"), "s is float64 in fun, text in other"),
    ],
)
def test_texts_differ_as_texts(pair, text):
    versions = [lambda x, s=s: {"n": x, "s": s} for s in pair]
    assert cg.compare(*versions, (array(np.ones(2)),), argnums=None).message == text


def undecided(x, wave):
    return jnp.sum(wave(x * (30 / float(jnp.finfo(x.dtype).eps))))


@pytest.mark.parametrize("others, size, ok", [(4, 1.0, True), (1, 1.0, False), (4, 1e5, False)])
def test_a_few_outputs_that_rounding_decides_are_notes(others, size, ok):
    """Not half of them, and not most of their norm."""

    def step(x, wave):
        same = {f"same{i}": jnp.sum(x) + i for i in range(others)}
        return same | {"noise": size * undecided(x, wave)}

    pair = [lambda x, wave=wave: step(x, wave) for wave in (jnp.sin, jnp.cos)]
    comparison = cg.compare(*pair, (jnp.abs(jnp.sin(array(np.arange(1.0, 8.0)))),), argnums=None)
    assert comparison.ok is ok, str(comparison)
    assert (
        "noise: rounding decides here, so this is called neither equal nor different"
        in comparison.notes
    )


# ---- the lines of both versions, and of rules ----


@jax.custom_vjp
def swish(x):
    return x * jax.nn.sigmoid(x)


def swish_backward(x, g):
    return (1.2 * g * jax.nn.sigmoid(x),)


swish.defvjp(lambda x: (swish(x), x), swish_backward)
RULE = f"its rule: .*test_compare_told.py:{swish_backward.__code__.co_firstlineno}"


def reference(w, x):
    with jax.named_scope("mlp"):
        h = x @ w
        h = h * jax.nn.sigmoid(h)
    return jnp.mean(h**2)


def kernel(w, x, by=1.0):
    with jax.named_scope("mlp"):
        h = swish(x @ w) * by
    return jnp.mean(h**2)


def scanned(w, x):
    def step(h, _):
        with jax.named_scope("mlp"):
            return swish(h @ w), None

    return jnp.mean(lax.scan(step, x, length=2)[0])


def scanned_reference(w, x):
    def step(h, _):
        with jax.named_scope("mlp"):
            h = h @ w
            return h * jax.nn.sigmoid(h), None

    return jnp.mean(lax.scan(step, x, length=2)[0])


@pytest.mark.slow
@pytest.mark.parametrize("pair", [(reference, kernel), (scanned_reference, scanned)])
def test_a_finding_has_the_line_of_the_rule_that_is_wrong(pair):
    comparison = cg.compare(*pair, (PARAMS["l0"], X), rtol=1e-3)
    assert not comparison.ok and re.search(rf"swish \(.*{RULE}\) in other", comparison.message), (
        str(comparison)
    )
    back = cg.compare(*pair[::-1], (PARAMS["l0"], X), rtol=1e-3)
    assert re.search(rf"swish \(.*{RULE}\) in fun", back.message), str(back)


def test_a_value_has_the_lines_of_both_versions():
    comparison = cg.compare(reference, lambda w, x: kernel(w, x, 1.5), (PARAMS["l0"], X), rtol=1e-3)
    lines = [code.__code__.co_firstlineno for code in (reference, kernel)]
    assert re.match(rf".*test_compare_told.py:{lines[0] + 3}: ", comparison.message), (
        comparison.message
    )
    assert re.search(rf"in other at .*test_compare_told.py:{lines[1] + 2}", comparison.message)


# ---- what to write instead ----


@pytest.mark.parametrize(
    "other, error, words",
    [
        (jnp.float32, TypeError, 'got float32 itself, .*write "float32"'),
        (np.float64, TypeError, 'got float64 itself, .*write "float64"'),
        (jnp.dtype("float32"), TypeError, 'write "float32"'),
        (
            "bfloat16",
            ValueError,
            r'cast inside: compare\(lambda params, x: fun\(cast\(params\), x\), "f',
        ),
        (jnp.float16, ValueError, "got 'float16', .*where cast makes arrays of float16"),
        ("missing.npz", ValueError, "'missing.npz', no such file"),
        ("no_folder/run", ValueError, "'no_folder/run', no such file"),
    ],
)
def test_what_is_no_second_version_is_told_before_anything_is_traced(other, error, words):
    calls = []

    def loss(params, x):
        calls.append(1)
        return jnp.sum(params * x)

    with pytest.raises(error, match=words):
        cg.compare(loss, other, (X, X))
    assert not calls


def test_a_rule_whose_program_stops_something_is_judged_by_what_it_computes():
    square = jax.custom_vjp(lambda x: x * lax.stop_gradient(x))
    square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))
    program = jax.make_jaxpr(square)(3.0)
    slope = jax.grad(lambda x: evaluate(program, [x], Widen("float32"))[0])(3.0)
    assert slope == 6.0
    stopped = jax.make_jaxpr(lambda x: x * lax.stop_gradient(x))(3.0)
    assert jax.grad(lambda x: evaluate(stopped, [x], Widen("float32"))[0])(3.0) == 3.0


@pytest.mark.parametrize("rounding, says", [(45, True), (15, False)])
def test_a_comparison_of_over_a_minute_says_what_took_the_time(rounding, says):
    now = [0.0]
    durations = Durations(lambda: now[0])
    for stage, seconds in ((TRACING, 2), (RUNS, 10), (RUNS, 20), (ROUNDING, rounding)):
        with durations.of(stage):
            now[0] += seconds
    first = "the comparison took 77 s; 45 s for measuring what rounding does, 30 s for one run of"
    notes = durations.notes()
    assert [note.startswith(first) and "rtol=" in note for note in notes] == [True] * says


def test_a_comparison_times_its_stages(monkeypatch):
    ticks = itertools.count(0, 100)
    clocked = functools.partial(Durations, lambda: float(next(ticks)))
    monkeypatch.setattr(sys.modules["clipgrad._compare.compare"], "Durations", clocked)
    comparison = cg.compare(jnp.sin, jnp.cos, (1.0,))
    assert "100 s for tracing, 100 s for one run" in comparison.notes[-1]
    assert "100 s for measuring" in comparison.notes[-1]
