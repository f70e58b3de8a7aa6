"""Norms by rows as they are, as on accelerators, and again where numbers leave the range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._per_example import norms_of_rows, products
from tests.per_example.per_example_programs import PROGRAMS, arguments
from tests.per_example.per_example_references import OF_COTANGENT, OF_INPUT, norms_of, one_by_one

EXAMPLES, ROWS, IN, OUT = 96, 3, 12, 40


@pytest.fixture(params=["accelerator", "cpu"])
def form(request, monkeypatch):
    """The form of a program for one device of a kind, which runs here."""
    if request.param == "accelerator":
        choice = lambda *args, default, **forms: forms.get("cuda", default)(*args)  # noqa: E731
        monkeypatch.setattr(products, "platform_dependent", choice)
        monkeypatch.setattr(jax, "device_count", lambda: 1)
    return request.param


def loss(w, example):
    """The gradient of each row is an outer product of both."""
    x, y = example
    return jnp.sum(y * (x @ w))


def alone(w, batch):
    """The norm of each example in a batch of its own: of several, one chooses for all."""
    norms = cg.per_example_norms(loss)
    one = jax.tree.map(lambda x: x[:, None], batch)
    return np.float64(jax.jit(jax.vmap(norms, (None, 0)))(w, one)[:, 0])


def sized(of_x, of_y, seed=0):
    """Rows of these sizes, and the norms of their gradients in float64.

    No element is far below the size of its row: what is no normal number is 0 on a CPU.
    """
    rng = np.random.default_rng(seed)
    sides = (np.float32(of_x), IN), (np.float32(of_y), OUT)
    batch = tuple(
        (size[..., None] * rng.uniform(0.5, 1, (*size.shape, n))).astype("float32")
        for size, n in sides
    )
    x, y = (np.float64(side) for side in batch)
    with np.errstate(invalid="ignore"):
        grads = np.einsum("btn,btm->bnm", x, y)
    return batch, np.sqrt(np.sum(grads**2, (1, 2)))


W = np.zeros((IN, OUT), np.float32)


def test_norms_of_any_size_are_right(form):
    sides = (np.repeat(np.float32(s)[:, None], ROWS, 1) for s in (OF_INPUT, OF_COTANGENT))
    batch, exact = sized(*sides)
    norms, finite = alone(W, batch), np.isfinite(exact) & (exact < 1e38)
    np.testing.assert_allclose(norms[finite], exact[finite], rtol=1e-5)
    assert (norms[finite] >= exact[finite] * (1 - 4e-7)).all()
    assert not np.isfinite(norms[~np.isfinite(exact)]).any()


@pytest.mark.parametrize("spread", [6, pytest.param(9, marks=pytest.mark.slow)])
def test_rows_of_different_sizes_add_up(form, spread):
    """Of both sides, so that what is lost on one may be large on the other."""
    rng = np.random.default_rng(spread)
    of_x, of_y = (10.0 ** rng.uniform(-spread, spread, (EXAMPLES, ROWS)) for _ in range(2))
    batch, exact = sized(of_x, of_y)
    norms = alone(W, batch)
    np.testing.assert_allclose(norms, exact, rtol=1e-5)
    assert (norms >= exact * (1 - 4e-7)).all()


# Sizes of x and y, and whether the Gram matrices of rows as they are are right.
SIZES = {
    "ordinary": (1.0, 1e-6, True),
    "small cotangents": (1.0, 1e-12, True),
    "large inputs": (1e9, 1.0, True),
    "too large": (1e20, 1e-20, False),
    "too small": (1.0, 1e-25, False),
    "zero": (1.0, 0.0, False),
    "not finite": (np.inf, 1.0, False),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("form", ["accelerator"], indirect=True)
def test_rows_are_scaled_only_where_they_leave_the_range(form, name, monkeypatch):
    *sizes, is_right = SIZES[name]
    batch, exact = sized(*(np.full((2, ROWS), size) for size in sizes))
    spoiled = lambda parts: jnp.full(2, 7.0)  # noqa: E731  instead of what scaled rows give
    monkeypatch.setattr(norms_of_rows, "_of_one_key", spoiled)
    norms = jax.jit(cg.per_example_norms(loss))(W, batch)
    np.testing.assert_allclose(norms, exact if is_right else [7.0, 7.0], rtol=1e-5)


@pytest.mark.parametrize("form", ["accelerator"], indirect=True)
def test_padding_leaves_the_rows_of_others_as_they_are(form, monkeypatch):
    batch, exact = sized(np.ones((3, ROWS)), np.ones((3, ROWS)))
    batch[0][1] = np.nan
    monkeypatch.setattr(norms_of_rows, "_of_one_key", lambda parts: jnp.full(3, 7.0))
    clip = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0))
    _, _, stats = jax.jit(clip)(W, batch, is_padding_example=np.array([False, True, False]))
    np.testing.assert_allclose(stats.norm, [exact[0], 0, exact[2]], rtol=1e-5)


KINDS = ["embedding tied to the head", "lstm", "kernels in several places", "scanned layers"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [KINDS[0], *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS[1:])],
)
@pytest.mark.parametrize("form", ["accelerator"], indirect=True)
def test_uses_of_every_kind_are_measured_as_they_are(form, name, monkeypatch):
    params, batch = arguments(name)
    monkeypatch.setattr(norms_of_rows, "_of_one_key", lambda parts: jnp.full(3, 7.0))
    norms = jax.jit(cg.per_example_norms(PROGRAMS[name].loss, per_leaf=True))(params, batch)
    for path, norm in norms_of(one_by_one(PROGRAMS[name].loss, params, batch)).items():
        np.testing.assert_allclose(norms[path], norm, rtol=2e-5, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["accelerator"], indirect=True)
def test_norms_by_rows_as_they_are_have_derivatives(form):
    batch, _ = sized(np.ones((2, ROWS)), np.ones((2, ROWS)))
    total = lambda batch: jnp.sum(cg.per_example_norms(loss)(W, batch))  # noqa: E731
    direct = lambda batch: jnp.sum(cg.per_example_norms(loss, method="direct")(W, batch))  # noqa: E731
    pairs = zip(jax.jit(jax.grad(total))(batch), jax.jit(jax.grad(direct))(batch), strict=True)
    for derivative, expected in pairs:
        np.testing.assert_allclose(derivative, expected, rtol=1e-4, atol=1e-5)
