"""Examples that only fill a batch, and how much one example changes the sum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.rows import crossed, each_value, first_row

PARAMS = {"w": np.float32([[1, 2], [3, 4]]), "b": np.float32([1, 1])}
BATCH = np.float32([[1, 2], [3, 1], [0, 2], [2, 2]])
NOTHING = np.float32([np.nan, 1e38])


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w["w"] / 8 + w["b"]) ** 2)


RULES = {"by norms": cg.ClipByGlobalNorm(0.1), "by elements": cg.ClipByValue(0.05), "none": None}


@crossed(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("microbatch", [None, 3])
def test_padding_adds_nothing_whatever_it_holds(rule, reduce, microbatch):
    clip = cg.clip_per_example(loss, RULES[rule], reduce=reduce, microbatch=microbatch)
    batch = np.insert(BATCH, [0, 2], NOTHING, axis=0)
    mask = np.isin(np.arange(6), [0, 3])
    value, grads, stats = jax.device_get(jax.jit(clip)(PARAMS, batch, is_padding_example=mask))
    expected = jax.jit(cg.clip_per_example(loss, RULES[rule], reduce=reduce))(PARAMS, BATCH)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), grads, expected[1])
    if rule != "none":
        np.testing.assert_allclose(stats.norm[~mask], expected[2].norm, rtol=1e-5)


def test_a_batch_of_padding_alone_is_zero():
    clip = cg.clip_per_example(loss, RULES["by norms"])
    results = jax.jit(clip)(PARAMS, BATCH, is_padding_example=np.ones(4, bool))
    value, grads, _ = jax.device_get(results)
    assert value == 0 and not any(leaf.any() for leaf in jax.tree.leaves(grads))


# The rows of the table in the docstring: the limit, the scale of the loss, the nonfinite policy,
# whether it is padding, and the gradient as a multiple of that of the loss.
EDGES = {
    "a gradient of norm 0": (1.0, 0.0, "propagate", False, 0),
    "a norm within the limit": (1e3, 1.0, "propagate", False, 1),
    "max_norm=0": (0.0, 1.0, "propagate", False, 0),
    "max_norm=inf": (np.inf, 1.0, "propagate", False, 1),
    "max_norm below 0, traced": (-1.0, 1.0, "propagate", False, 0),
    "NaN": (1.0, np.nan, "propagate", False, np.nan),
    "inf": (1.0, np.inf, "propagate", False, np.nan),
    "NaN that is left out": (1.0, np.nan, "zero", False, 0),
    "inf that is left out": (1.0, np.inf, "zero", False, 0),
    "padding": (1.0, 1.0, "propagate", True, 0),
    "padding that is NaN": (1.0, np.nan, "propagate", True, 0),
}


def repeated(w, x, positions):
    return jnp.sum(jax.vmap(loss, (None, 0))(w, jnp.tile(x, (positions, 1))))


@functools.cache
def edge_program(nonfinite, is_padding, method, reduce, positions):
    """What a clip of one example gives, and the gradient of its loss: one for several rows."""

    @jax.jit
    def run(limit, example):
        clip = cg.clip_per_example(
            lambda w, example: example[0] * repeated(w, example[1], positions),
            cg.ClipByGlobalNorm(limit),
            reduce=reduce,
            nonfinite=nonfinite,
            method=method,
        )
        plain = jax.grad(repeated)(PARAMS, example[1][0], positions)
        return clip(PARAMS, example, is_padding_example=np.array([is_padding])), plain

    return run


@each_value
@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("method", ["auto", "direct"])
@pytest.mark.parametrize("name", EDGES)
def test_edge_cases_are_as_in_the_table(name, method, reduce, positions):
    """Also where the mask is a constant of the program, and so is the gradient."""
    limit, size, nonfinite, is_padding, factor = EDGES[name]
    run = edge_program(nonfinite, is_padding, method, reduce, positions)
    results = run(np.float32(limit), (np.float32([size]), BATCH[:1]))
    (value, grads, stats), plain = jax.device_get(results)
    for path, grad in grads.items():
        np.testing.assert_allclose(grad, factor * plain[path], rtol=1e-6, err_msg=path)
    if is_padding:
        assert value == 0 and stats.norm == 0 and not stats.clipped and not stats.nonfinite


@pytest.mark.parametrize("mask", [np.ones(3, bool), np.ones(4, np.float32), [[True] * 4]])
def test_a_mask_is_a_boolean_for_each_example(mask):
    clip = cg.clip_per_example(loss, RULES["by norms"])
    with pytest.raises(ValueError, match="expected an array of 4 booleans, one for each example"):
        clip(PARAMS, BATCH, is_padding_example=mask)


SENSITIVITIES = [
    (cg.ClipByGlobalNorm(0.5), 0.5),
    (cg.AutoNorm(max_norm=0.5), 0.5),
    (cg.ClipByNorm(0.5), 0.5 * 2**0.5),
    (cg.ClipByBlockRMS(0.5), 0.5 * 6**0.5),
]


@pytest.mark.parametrize(("rule", "bound"), SENSITIVITIES, ids=str)
def test_the_sensitivity_is_the_bound_of_the_sum(rule, bound):
    clip = cg.clip_per_example(loss, rule, reduce="sum", nonfinite="zero")
    assert clip.sensitivity(params=PARAMS) == pytest.approx(bound, rel=1e-6)
    assert clip.sensitivity("add_or_remove_one", params=PARAMS) == pytest.approx(bound, rel=1e-6)
    assert clip.sensitivity("replace_one", params=PARAMS) == pytest.approx(2 * bound, rel=1e-6)


@first_row
@pytest.mark.parametrize(("rule", "bound"), SENSITIVITIES, ids=str)
def test_one_example_changes_the_sum_by_no_more_than_the_sensitivity(rule, bound):
    far = jax.jit(cg.clip_per_example(lambda w, x: 1e3 * loss(w, x), rule, reduce="sum"))
    for x in BATCH:
        _, grads, _ = far(PARAMS, x[None])
        norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in grads.values()))
        assert norm <= bound * (1 + 1e-6)


REFUSED = [
    ({"reduce": "mean"}, {}, "whose bound depends on the batch"),
    ({"nonfinite": "propagate"}, {}, "with which NaN has no bound"),
    ({"where": "w"}, {}, "whose sum has no bound"),
    ({"rule": cg.ClipByValue(1.0)}, {}, "have no bound that is known"),
    ({"rule": None}, {}, "have no bound that is known"),
    ({"rule": cg.ClipByNorm(1.0)}, {}, "the bound of ClipByNorm depends on their shapes"),
    ({}, {"neighboring_relation": "swap"}, "expected one of add_or_remove_one"),
]


@pytest.mark.parametrize(("options", "call", "match"), REFUSED, ids=lambda x: str(x)[:30])
def test_what_has_no_bound_is_refused(options, call, match):
    options = {"rule": cg.ClipByGlobalNorm(1.0), "reduce": "sum", "nonfinite": "zero"} | options
    with pytest.raises(ValueError, match=match):
        cg.clip_per_example(loss, options.pop("rule"), **options).sensitivity(**call)
