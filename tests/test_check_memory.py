"""A check of a large model takes few arrays of its size."""

import os
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipgrad._check.beside import MANY, Beside, kept_beside
from clipgrad._check.rounding import OWN, gradient_movement

import clipgrad as cg
from tests.check_zoo import custom
from tests.test_check_programs import plain_ad

MODEL = """
import jax, jax.numpy as jnp, numpy as np
import clipgrad as cg
rng, width, depth = np.random.default_rng(0), {width}, {depth}
draw = lambda: jnp.asarray(rng.normal(size=(width, width)) / width**0.5, jnp.float32)
weights = [draw() for _ in range(depth)]
x = jnp.asarray(rng.normal(size=(32, width)), jnp.float32)
def loss(weights):
    y = x
    for weight in weights:
        y = {function}(y @ weight)
    return jnp.mean(y**2)
"""
PEAK = "print([line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line][0])"


def peak(program):
    """The largest memory of a process of its own."""
    command = [sys.executable, "-c", f"{program}\n{PEAK}"]
    # Else glibc keeps freed arrays of up to 32 MiB, how many depends on what runs beside this.
    returned = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"} | returned
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return 1024 * int(done.stdout.split()[-1])


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("function", "held"),
    [
        ("jax.nn.relu", "'vmap' not in found.not_run"),  # it has a rule
        ("jnp.tanh", "'off by rounding' in str(found)"),  # an element is in doubt
    ],
)
def test_a_check_of_ten_million_parameters_takes_eight_times_their_memory(function, held):
    model = MODEL.format(width=1000, depth=10, function=function)
    plain = peak(model + "jax.block_until_ready(jax.jit(jax.grad(loss))(weights))")
    whole = peak(model + f"found = cg.check_grads(loss, (weights,))\nassert found.ok and {held}")
    assert whole - plain <= 8 * 4 * 10 * 1000**2


def test_what_is_kept_in_numpy_is_at_most_seven_times_the_parameters():
    """The gradients as computed and what exact ones add, two each, a direction, and parts."""
    names: dict = {}
    exec(MODEL.format(width=384, depth=8, function="jnp.tanh"), names)
    weights = names["weights"]
    tracemalloc.start()
    try:
        found = cg.check_grads(names["loss"], (weights,))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.ok and found.verified == found.elements == 8 * 384**2

    assert most <= 7 * 4 * found.elements


def test_rounding_moves_many_elements_beside_their_gradient_as_far_as_alone():
    """Then distances are kept in float32, and so is what the exact gradient adds."""
    x = jnp.linspace(0.1, 2, MANY + 7)
    gradient, xs, ones = plain_ad(lambda x: jnp.sum(jnp.sin(3 * x) ** 2, keepdims=True), x)
    near = gradient(xs, ones).astype(np.float32)
    alone, beside = (gradient_movement(gradient, xs, ones, OWN, g) for g in (None, near))
    assert (alone.dtype, beside.dtype) == (np.float64, np.float32)
    np.testing.assert_allclose(beside, alone, rtol=1e-5, atol=1e-12)
    assert np.median(alone) > 1e-8


def rows_beside(gradient, exact):
    return kept_beside(gradient, lambda k: [jnp.asarray(exact[k])])


@pytest.fixture(scope="module")
def near():
    gradient = np.random.default_rng(1).normal(size=(2, MANY + 7)).astype(np.float32)
    with jax.enable_x64(True):
        exact = gradient + 1e-6 * np.random.default_rng(2).normal(size=gradient.shape)
        yield gradient, exact, rows_beside(gradient, exact)


def test_gradients_beside_those_of_float32_take_half_the_memory_and_lose_nothing(near):
    gradient, exact, kept = near
    assert isinstance(kept, Beside) and kept.shape == exact.shape and len(kept) == 2
    np.testing.assert_allclose(kept, exact, rtol=1e-15, atol=1e-12)
    off = np.abs(kept[1, 3:50] - exact[1, 3:50])
    assert (off <= kept.error(1, slice(3, 50))).all()
    assert isinstance(kept[:, 5:9], Beside) and kept[:, 5:9].shape == (2, 4)
    picked = kept[:, np.asarray([1, 4])]
    np.testing.assert_array_equal(picked, np.asarray(kept)[:, [1, 4]])
    np.testing.assert_array_equal(np.abs(kept - kept[:1]), np.abs(np.asarray(kept) - kept[0]))


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("number", [1e-38, 1e39, np.inf, np.nan])
def test_gradients_that_float32_does_not_hold_are_kept_as_they_are(near, where, number):
    gradient, exact, _ = near
    exact, gradient = exact.copy(), gradient.copy()
    gradient[where, 11], exact[where, 11] = 0.0, number
    with jax.enable_x64(True):
        kept = rows_beside(gradient, exact)
    assert isinstance(kept, np.ndarray) and kept.dtype == np.float64
    np.testing.assert_allclose(kept, exact, rtol=1e-15, atol=1e-12)
    assert kept[where, 11] == number or np.isnan(number)


def test_few_gradients_and_those_of_float64_are_kept_as_they_are(near):
    gradient, exact, _ = near
    with jax.enable_x64(True):
        for of, row in ((gradient[:, :9], exact[:, :9]), (exact, exact)):
            kept = rows_beside(of, row)
            assert isinstance(kept, np.ndarray)
            np.testing.assert_array_equal(kept, row)
        assert kept_beside(gradient, lambda k: None) is None


@pytest.mark.parametrize(("factor", "ok"), [(1.0, True), (1 + 1e-5, False)])
def test_a_rule_of_many_elements_is_judged_as_one_of_few(factor, ok):
    rule = custom(lambda x: jnp.sin(x), lambda r, g: (factor * g * jnp.cos(r[0]),))
    x = jnp.linspace(-1, 1, MANY + 5)
    wrong = x.size if not ok else 0
    found = cg.check_grads(lambda x: rule(x).sum(), (x,), raise_on_failure=False, points=1)
    assert found.ok is ok
    assert sum(len(f.indices) for f in found.failures if f.check == "value") == wrong
