"""`AutoNorm`: a rule whose threshold is no limit, so that it scales every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import assert_close

clip = jax.jit(cg.clip_grads)


def normalized(norm, c=1.0, gamma=0.01):
    return norm * c / (norm + gamma)


@pytest.mark.parametrize("norm", [0.0, 5e-38, 5e-30, 1e-4, 0.01, 1.0, 5e5, 1e19, 1e30, 2e38])
def test_it_is_the_formula_of_the_paper_at_every_size(norm):
    grads = {"a": jnp.array([0.6, 0.0]) * norm, "b": jnp.array(0.8) * norm}
    for c, gamma in ((1.0, 0.01), (3.0, 1e-6), (0.5, 100.0), (1.0, 0.0)):
        clipped, stats = clip(grads, cg.AutoNorm(c, gamma))  # one program for all
        wide = np.float64([*grads["a"], grads["b"]])
        n = np.linalg.norm(wide)
        factor = c / (n + gamma) if n + gamma else 0.0
        assert_close(jnp.stack([*clipped["a"], clipped["b"]]), wide * factor, 1e-6, 2e-38)
        np.testing.assert_allclose(stats.clipped_norm, n * factor, rtol=2e-6, atol=2e-38)
        assert stats.clipped == (norm > 0) and stats.size == 3


def test_the_numbers_may_be_traced_and_scheduled():
    x = jnp.array([3.0, 4.0])
    swept = jax.vmap(lambda c: cg.AutoNorm(c, gamma=5.0)(x))(jnp.arange(3.0))
    assert_close(jnp.linalg.norm(swept, axis=1), normalized(5.0, np.arange(3.0), 5.0))
    tx = cg.gradient_clip(cg.AutoNorm(gamma=optax.linear_schedule(0.0, 5.0, 1)), stats=True)
    state = tx.init(x)
    for gamma in (0.0, 5.0):
        updates, state = tx.update(x, state)
        assert_close(jnp.linalg.norm(updates), normalized(5.0, gamma=gamma))
        assert state.threshold == 1


def test_the_norm_may_be_known_and_of_other_leaves():
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    tx = cg.gradient_clip(cg.AutoNorm(gamma=0.0), where="a", measure="a|b")
    assert_close(tx.update(grads, tx.init(grads))[0], {"a": np.array([0.6]), "b": np.array([4.0])})
    assert_close(cg.clip_grads(grads, cg.AutoNorm(gamma=0.0), norm=10.0)[0]["a"], np.array([0.3]))


def test_the_norm_is_summed_over_mapped_axes():
    x, rule = jnp.arange(8.0), cg.AutoNorm(gamma=1.0, axis_name="x")
    clipped = jax.vmap(rule, axis_name="x")(x)
    assert_close(clipped, cg.AutoNorm(gamma=1.0)(x))


def test_each_example_has_its_own_norm_by_every_method():
    x = jax.random.normal(jax.random.key(0), (6, 4)) * 10.0 ** jnp.arange(-3.0, 3.0)[:, None]
    w = {"v": jnp.ones((4, 2)), "b": jnp.zeros(2)}

    def loss(w, x):
        return jnp.sum(jnp.tanh(0.01 * x[None] @ w["v"] + w["b"][None]))

    rule = cg.AutoNorm()
    each = jax.vmap(jax.grad(loss), (None, 0))(w, x)
    norms = np.sqrt(sum((np.float64(g) ** 2).reshape(6, -1).sum(1) for g in each.values()))
    mean = {k: np.tensordot(1 / (norms + 0.01), np.float64(g), 1) / 6 for k, g in each.items()}
    for method in ("one pass", "two passes", "direct"):
        per_example = cg.clip_per_example(loss, rule, method=method)
        _, grads, stats = jax.jit(per_example)(w, x)
        assert_close(grads, mean, rtol=2e-5, atol=1e-7)
        assert_close(stats.norm, norms, rtol=1e-5)
        assert_close(stats.clipped_norm, normalized(norms), rtol=1e-5)
        assert stats.clipped.all()
    assert "does not scale" not in str(cg.clip_per_example(loss, rule).plan(w, x))


@pytest.mark.parametrize(
    "error, make, match",
    [
        (ValueError, lambda: cg.AutoNorm(gamma=-0.1), "gamma: got -0.1, expected .*not negative"),
        (ValueError, lambda: cg.AutoNorm(jnp.inf), "max_norm: got inf, expected .*finite"),
        (TypeError, lambda: cg.AutoNorm(cg.PercentileThreshold()), "a clip by limits can be adapt"),
        (ValueError, lambda: cg.clip_grads(1.0, cg.ClipByNorm(1.0), norm=1.0), "with one norm"),
    ],
    ids=range(4),
)
def test_what_makes_no_sense_is_refused(error, make, match):
    with pytest.raises(error, match=match):
        make()


def test_a_list_of_axes_is_a_tuple():
    assert cg.AutoNorm(axis_name=["x", "y"]) == cg.AutoNorm(axis_name=("x", "y"))
