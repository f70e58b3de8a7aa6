"""Outputs that cancel in a cotangent, and those that hold a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clipgrad._check import check_grads
from tests.check.check_zoo import custom
from tests.rows import first_row, some_of

NUMBER = jnp.asarray(0.7, jnp.float32)
SUMS = {
    "two": lambda x: jnp.broadcast_to(x, (2,)),
    "of both signs": lambda x: jnp.stack([x, x, x, -x]),
    "doubled": lambda x: (x, 2 * x),
}


def run(function, *args, **options):
    return check_grads(function, args, raise_on_failure=False, **options)


@first_row
@pytest.mark.parametrize("name", SUMS)
def test_a_number_that_is_in_several_outputs_is_verified(name):
    report = run(SUMS[name], NUMBER, order=2)
    assert report.ok and report.verified == 1, str(report)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "value"),
    some_of([(d, v) for d in MASKS for v in MASKS[d]], [("bfloat16", -1e15)]),
)
def test_a_mask_among_the_outputs_has_no_noise(dtype, value):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(SCORES, dtype)
        report = run(scores(value, leaks=False), x)
        assert report.ok and report.verified == report.elements, str(report)
        report = run(scores(value, leaks=True), x)
        assert "6 of 16 elements wrong" in report.failures[0].detail, str(report)
