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
