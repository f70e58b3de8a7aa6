"""Sketches: how near the norm of a difference is, and what they must not hide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import clipgrad as cg
from clipgrad._compare import recording, sketches
from clipgrad._compare.judge import floor_of, judge_sketches
from clipgrad._compare.loss_recording import recorded_by_all, recorded_loss
from clipgrad._compare.sketches import (
    LARGEST_AT,
    LENGTH,
    NORM_AT,
    NUMBERS,
    host_sketch,
    host_sketches,
    orders_of,
    scalar_of,
    sketch,
    tapped,
    turned_sketches,
)
from clipgrad._programs import Hook, opened_scans, rounded, trace
from tests.helpers import RELEASED, array
from tests.rows import first_row

EPS = float(jnp.finfo("float32").eps)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def sketched(x, dtype=jnp.float32):
    return np.asarray(sketch(array(x, dtype)), np.float64)


DIFFERENCES = {
    "everywhere": lambda d: d,
    "one row": lambda d: d * (np.arange(40)[:, None] == 7),
    "one column": lambda d: d * (np.arange(512)[None] == 256),
    "one block": lambda d: d * (np.arange(512)[None] < 64),
    "all the same": np.ones_like,
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_norm_of_a_difference_of_sketches_is_that_of_the_values(name):
    """To sqrt(2 / 256), 9 %, on average; to three times that each."""
    x = normal(40, 512)
    ratios = []
    for seed in range(6):
        d = DIFFERENCES[name](normal(40, 512, seed=1 + seed))
        distance = np.linalg.norm((sketched(x + d) - sketched(x))[:NORM_AT])
        ratios.append(distance / np.linalg.norm(d))
    if name in ("one row", "everywhere", "one block"):
        assert 0.05 > abs(np.mean(ratios) - 1), ratios
    assert max(abs(np.array(ratios) - 1)) < 0.35, ratios


slow_shapes = [pytest.param(shape, marks=pytest.mark.slow) for shape in [(1,), (3, 5)]]


@pytest.mark.parametrize("shape", [(), (0, 3), (256,), (257,), *slow_shapes])
def test_every_shape_has_a_sketch(shape):
    x = normal(*shape)
    sketch_of_x = sketched(x)
    assert sketch_of_x.shape == (LENGTH,)
    if np.size(x) <= 256:  # nothing is added
        np.testing.assert_allclose(
            np.linalg.norm(sketch_of_x[:NORM_AT]), np.linalg.norm(x), rtol=1e-6
        )
    for scale in (1, 1e30):  # whose square is no float32
        sizes = sketched(np.append(x * scale, np.nan))[[NORM_AT, LARGEST_AT]]
        expected = np.linalg.norm(x), np.max(np.abs(x), initial=0)
        np.testing.assert_allclose(sizes, np.multiply(expected, scale), rtol=1e-6)


def test_a_complex_value_is_two_real_ones():
    x = normal(5, 3) + 1j * normal(5, 3, seed=1)
    norm = np.linalg.norm(sketched(x, jnp.complex64)[:NORM_AT])
    np.testing.assert_allclose(norm, np.linalg.norm(x), rtol=1e-6)


@pytest.mark.parametrize("mask", [-1e9, float(np.finfo(np.float32).min), -np.inf, np.nan])
def test_masks_hide_nothing(mask):
    x = normal(40, 40)
    where = np.arange(1600).reshape(40, 40) % 3 == 0
    pair = [sketched(np.where(where, mask, y)) for y in (x, x * 1.001)]
    moved = sketched(np.where(where, mask * (1 - EPS), x * (1 - EPS)))
    floor = floor_of({0: pair[0]}, [{0: moved}])[0]
    judged = judge_sketches(*pair, floor, EPS, None)
    assert judged.differs and 0.0005 < judged.difference < 0.002
    assert not judge_sketches(pair[0], pair[0], floor, EPS, None).differs


@pytest.mark.parametrize("other", [np.nan, np.inf, -np.inf, 0.0])
def test_values_that_are_not_finite_are_compared_exactly(other):
    x = normal(40, 40)
    x[3, 4] = np.nan
    y = x.copy()
    y[3, 4] = other
    same = np.isnan(other)
    none = np.zeros(LENGTH)
    assert judge_sketches(sketched(x), sketched(y), none, EPS, None).differs is not same
    z = x.copy()
    z[3, 4], z[5, 6] = z[5, 6], z[3, 4]
    assert judge_sketches(sketched(x), sketched(z), none, EPS, None).differs
    y[3, 4], z = np.inf, y.copy()
    z[3, 4] = -np.inf
    assert judge_sketches(sketched(y), sketched(z), none, EPS, None).differs


def test_the_cotangent_of_a_tap_is_the_sketch_of_the_cotangent():
    x, c = array(normal(6, 5)), array(normal(6, 5, seed=1))
    loss = lambda x, t: jnp.sum(c * tapped(x, t))  # noqa: E731
    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, array(np.zeros(LENGTH)))
    np.testing.assert_array_equal(grads[0], c)
    np.testing.assert_array_equal(grads[1], sketch(c))
    np.testing.assert_allclose(value, np.vdot(c, x), rtol=1e-6)


def test_float64_has_a_sketch_in_float64():
    with jax.enable_x64(True):
        x = normal(40, 40)
        moved, own = (np.asarray(sketch(array(y, float))) for y in (x * (1 + 1e-12), x))
        difference = (moved - own)[:NORM_AT]
        assert difference.dtype == np.float64
    size = np.linalg.norm(difference) / np.linalg.norm(x)
    assert 0.5e-12 < size < 2e-12


@pytest.mark.parametrize("by, moves", [(1.0, False), (1.1, True)])
def test_rounding_moves_a_value_and_leaves_its_sketch_whole(by, moves):
    x = array(normal(40, 20))
    program = trace(lambda x: sketch(x * by if moves else x), (x,), {}).program
    (moved,) = jax.jit(lambda x: rounded(program, [x], jnp.uint32(1)))(x)
    assert np.any(moved != jax.jit(lambda x: sketch(x * by if moves else x))(x)) == moves


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda body: body])
def test_a_comparison_takes_the_memory_of_a_gradient(wrap, monkeypatch):
    """Of a scan of 32 steps: what the backward pass needs, and no value for its sketch."""
    monkeypatch.setattr(recording, "_most_whole", lambda record: 0)  # or else values leave whole

    def loss(w, x):
        def body(h, _):
            with jax.named_scope("layer"):
                return jnp.tanh(h @ w), None

        h, _ = jax.lax.scan(wrap(body), x, length=32)
        return jnp.mean(h**2)

    args = jnp.ones((64, 64)) / 64, jnp.ones((1024, 64))
    plain = jax.jit(jax.value_and_grad(loss)).lower(*args).compile(RELEASED).memory_analysis()
    traced = recorded_loss(loss, args, {}, 0, False).traced.program
    lowered = jax.jit(jaxpr_as_fun(traced)).lower(*traced.in_avals)
    ours = lowered.compile(RELEASED).memory_analysis()
    value = 1024 * 64 * 4
    assert ours.temp_size_in_bytes < plain.temp_size_in_bytes + 20 * value  # 16 on JAX 0.10


@pytest.mark.slow
def test_a_comparison_by_lines_takes_at_most_half_more_memory_than_a_gradient(monkeypatch):
    """The program, and the one of its rounding; 2 times with sketches made at once."""
    monkeypatch.setattr(recording, "_most_whole", lambda record: 0)
    monkeypatch.setattr(recording, "can_be_cut", lambda program: False)

    def loss(ws, x):
        for w in ws:
            h = x @ w
            h = jnp.tanh(h)
            x = x + h
        return jnp.mean(x**2)

    args = list(jnp.ones((8, 128, 128)) / 128), jnp.ones((2048, 128))
    plain = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args)
    made = recorded_by_all(loss, args, {}, False)
    assert made.has_lines and made.sketched
    program, leaves = made.traced.program, made.leaves
    moved = jax.jit(lambda leaves, seed: rounded(program, leaves, seed))
    forms = made._jitted(Hook()).lower(leaves), moved.lower(leaves, jnp.uint32(1))
    most = 1.5 * memory_of(plain) + 2048 * len(made.record.rows)
    for form in forms:
        assert memory_of(form) < most


@pytest.mark.slow
@pytest.mark.parametrize("form", ["unrolled", "scanned"])
def test_a_comparison_piece_by_piece_takes_at_most_half_more_memory_than_a_gradient(
    form, monkeypatch
):
    """The arrays that live while the pieces run, of the program and of its rounding."""
    monkeypatch.setattr(opened_scans, "AT_ONCE", 2**20)  # of 8 MiB; all steps have 18 MiB
    live = []

    def watched(jit):
        def compiled(function, **options):
            run = jit(function, **options)

            def watching(*inputs):
                outputs = run(*inputs)
                live.append(sum(x.nbytes for x in jax.live_arrays()))
                return outputs

            return watching

        return compiled

    by_pieces = recording.ByPieces
    monkeypatch.setattr(
        recording, "ByPieces", lambda run, jit, taken: by_pieces(run, watched(jit), taken)
    )
    monkeypatch.setattr(recording, "_most_whole", lambda record: 0)

    def layer(x, w, factor):
        h = x @ w
        h = jnp.tanh(h)
        h = h if factor is None else h * factor
        return x + h

    def loss(ws, x, times=1.0):
        if form == "scanned":
            factors = jnp.ones(24).at[12].set(times)
            x, _ = jax.lax.scan(lambda x, e: (layer(x, *e), None), x, (ws, factors))
        for i, w in enumerate(ws if form == "unrolled" else ()):
            x = layer(x, w, times if i == 12 else None)
        return jnp.mean(x**2)

    ws = jnp.ones((24, 64, 64)) / 64
    args = ws if form == "scanned" else list(ws), jnp.ones((1024, 64))
    plain = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args)
    before = sum(x.nbytes for x in jax.live_arrays())
    comparison = cg.compare(loss, lambda ws, x: loss(ws, x, 1.01), args)
    assert comparison.findings[0].kind == "value"
    assert max(live) - before < 1.5 * memory_of(plain), (max(live), before, memory_of(plain))


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int32", "uint32", "float16", "bfloat16", "float8_e4m3fn", "float64"]
)
def test_the_sketch_of_ordinary_numbers_is_that_of_the_same_numbers_beside_others(
    dtype, monkeypatch
):
    """Of every type: ordinary numbers alone are summed in another way, which takes less time."""
    x = np.asarray(normal(2, 3, 700) * 20)
    x = (np.abs(x) if dtype == "uint32" else x).astype(jnp.dtype(dtype))
    x[1] = 0
    ordinary = host_sketches(x, 1)
    monkeypatch.setattr(sketches, "TINY", np.inf)
    np.testing.assert_allclose(host_sketches(x, 1), ordinary, rtol=1e-12, atol=1e-10)
    assert ordinary[0].any() and not ordinary[1].any()


def memory_of(lowered):
    """The bytes of arguments, results and temporaries, optimized as users' programs are."""
    sizes = lowered.compile(RELEASED).memory_analysis()
    results = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    return sizes.temp_size_in_bytes + results


@pytest.mark.parametrize("shape", [(2**16 + 1,), (300, 300), (1000, 256)])
def test_the_sketch_of_a_large_array_is_made_of_parts(shape, monkeypatch):
    """With the numbers of a sketch that is made at once."""
    x = normal(*shape).astype(np.float32)
    x[5, ...], x[-1, ...] = 3e8, np.nan
    in_parts, on_host = np.asarray(sketch(array(x))), host_sketch(x)
    monkeypatch.setattr(sketches, "AT_ONCE", x.size)
    at_once = host_sketch(x)
    for part in slice(NUMBERS), slice(NUMBERS, 2 * NUMBERS), slice(NORM_AT, LENGTH):
        most = np.max(at_once[part])
        np.testing.assert_allclose(on_host[part], at_once[part], atol=1e-13 * most, rtol=1e-12)
        np.testing.assert_allclose(in_parts[part], at_once[part], atol=1e-5 * most, rtol=1e-5)
    assert in_parts[-1] == on_host[-1] == at_once[-1] != 0


@pytest.mark.parametrize("largest", [1e38, 3e38, 1e-37, 1e-30])
def test_a_sketch_has_the_norm_of_the_largest_and_of_tiny_numbers(largest):
    x = np.float32([largest, 0.2 * largest, 0])
    norm = np.linalg.norm(x.astype(np.float64))
    for made in (np.asarray(sketch(array(x))), host_sketch(x)):
        np.testing.assert_allclose(made[NORM_AT], norm, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_numpy_does_not_warn_of_what_is_not_finite(dtype, bad):
    x = np.array([[1.0, bad], [60000.0, 1e-7]], dtype)
    assert np.isfinite(sketches.host_sketches(x, 1)[1]).all()


@pytest.mark.parametrize("number", [0.0, 1.5, -2e-30, 3e7, -1e30])
def test_the_sketch_of_one_number_has_the_number(number):
    np.testing.assert_allclose(scalar_of(host_sketch(np.array(number))), number, rtol=1e-6)


@pytest.mark.parametrize("shape", [(), (1, 5), (4, 3), (2, 1, 3, 4), (2, 2, 3, 2, 2)])
def test_every_order_of_axes_is_sketched(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    in_orders, orders = turned_sketches(x, "all"), orders_of(shape, "all")
    assert len(in_orders) == len(orders) <= 24
    for order, sketch_of_order in zip(orders, in_orders, strict=True):
        turned = np.squeeze(x).transpose(np.argsort(np.argsort(order)).astype(int))
        np.testing.assert_array_equal(sketch_of_order, host_sketch(turned))
    if len(shape) == 4:
        assert (2, 3, 0) in orders  # OIHW with one input channel, as HWIO
