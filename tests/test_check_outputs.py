"""Outputs that cancel in a cotangent, that hold a mask, or where the function jumps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipgrad._check import check_grads
from clipgrad._check.gradients import differentiated, drawn
from clipgrad._check.subject import make_subject

from tests.check_zoo import custom

NUMBER = jnp.asarray(0.7, jnp.float32)
SUMS = {
    "two": lambda x: jnp.broadcast_to(x, (2,)),
    "three": lambda x: jnp.broadcast_to(x, (3,)),
    "of both signs": lambda x: jnp.stack([x, x, x, -x]),
    "doubled": lambda x: (x, 2 * x),
    "in tenths": lambda x: (0.3 * x, 0.1 * x),
}


def run(function, *args, **options):
    return check_grads(function, args, raise_on_failure=False, **options)


@pytest.mark.parametrize("name", SUMS)
def test_no_cotangent_cancels_what_an_input_does_to_several_outputs(name):
    subject = make_subject(SUMS[name], (NUMBER,))
    vjp = differentiated(subject, subject.inputs)
    for seed in range(60):
        _, gradient = drawn(subject, vjp, seed)
        assert np.abs(gradient).min() > 1e-2, seed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_number_that_is_there_twice_is_verified_at_the_default_seed(dtype):
    report = run(SUMS["two"], NUMBER.astype(dtype))
    assert report.ok and report.verified == 1, str(report)
    report = run(SUMS["two"], NUMBER.astype(dtype), order=2)
    assert report.ok, str(report)


def test_an_input_without_any_effect_is_drawn_for_once():
    subject = make_subject(lambda x, y: x + 0 * y, (NUMBER, NUMBER))
    covectors, gradient = drawn(subject, differentiated(subject, subject.inputs), 0)
    assert gradient[:, 0].all() and not gradient[:, 1].any() and covectors.all()


SEEN = np.tril(np.ones((4, 4), bool))
SCORES = np.random.default_rng(0).normal(size=(4, 4))


def scores(value, leaks):
    primal = lambda x: jnp.where(SEEN, 2 * x, jnp.asarray(value, x.dtype))  # noqa: E731
    return custom(primal, lambda _, g: (2 * g if leaks else jnp.where(SEEN, 2 * g, 0),))


MASKS = {
    "float32": (-1e9, -1e15, -1e30, float(jnp.finfo(jnp.float32).min)),
    "bfloat16": (-1e15, float(jnp.finfo(jnp.bfloat16).min)),
    "float64": (-1e30, float(np.finfo(np.float64).min)),
}


@pytest.mark.kinds("dtype")
@pytest.mark.parametrize(("dtype", "value"), [(d, v) for d in MASKS for v in MASKS[d]])
def test_a_mask_among_the_outputs_has_no_noise(dtype, value):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(SCORES, dtype)
        report = run(scores(value, leaks=False), x)
        assert report.ok and report.verified == report.elements, str(report)
        report = run(scores(value, leaks=True), x)
        assert "6 of 16 elements wrong" in report.failures[0].detail, str(report)


@pytest.mark.parametrize("value", [-1e15, -1e30])
def test_outputs_that_are_lost_beside_a_mask_are_named_and_left_out(value):
    report = run(lambda x: 2 * x + np.where(SEEN, 0, value), jnp.asarray(SCORES, jnp.float32))
    assert report.ok and report.verified == 10, str(report)
    assert "out[0, 1]: 6 of 16 outputs not verified: lost beside" in report.notes[0]


def routed(x, values):
    """The value of the largest number of each row; those of row 3 are equal but in float64."""
    tie = jnp.asarray(3e-9 * np.arange(6.0)).astype(x.dtype)
    weight, place = jax.lax.top_k(x + tie[None], 1)
    return jax.nn.sigmoid(weight) * jnp.take_along_axis(values, place[..., None], 1)[:, 0]


def at_a_tie(rows, dtype):
    rng = np.random.default_rng(0)
    x = rng.permuted(np.tile(np.arange(6.0), (rows, 1)), axis=1)
    values = rng.normal(size=(rows, 6, 3))
    x[3] = [4, 4, -1, -2, -3, 0.5]
    return jnp.asarray(x / 4, dtype), jnp.asarray(values, dtype)


@pytest.mark.kinds("dtype")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [8, 200])
def test_a_tie_that_float64_breaks_otherwise_is_not_verified(rows, dtype):
    report = run(routed, *at_a_tie(rows, dtype))
    assert report.ok and report.verified >= 24 * rows - 18, str(report)
    assert report.verified < 24 * rows, str(report)
    assert f"out[3, 0]: 3 of {3 * rows} outputs not verified: the function jumps here" in str(
        report
    )
