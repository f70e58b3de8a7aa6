"""What somebody writes first by mistake gets a sentence that says what to write."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import NAMES

W, X = jnp.ones(3), jnp.arange(3.0)


def loss(w, x):
    return jnp.sum(checkpoint_name(2 * w, "h") * x)


def with_aux(w, x):
    return loss(w, x), {"more": x}


# ---- a name that is elsewhere, or misspelt ------------------------------------------------------

ELSEWHERE = {
    "gradcheck": r"check_grads\(fun, args\)",
    "clip_grad_norm": r"clip_grads\(grads, ClipByGlobalNorm\(max_norm\)\), or clip_by_global_norm",
    "clip_gradnorm": r"clip_grads\(grads, ClipByGlobalNorm\(max_norm\)\), or clip_by_global_norm",
    "get_total_norm": r"global_norm\(grads\)",
    "ClipGradByGlobalNorm": r"clip_by_global_norm\(max_norm\)",
    "detect_anomaly": r"diagnose\(loss, args\)",
    "clip": r"clip_by_value\(max\)",
}
MISSPELT = {
    "clip_by_globalnorm": "clip_by_global_norm", "ClipByGlobalnorm": "ClipByGlobalNorm",
    "clipbynorm": "clip_by_norm", "check_grad": "check_grads", "diagnoze": "diagnose",
    "FlightRecoder": "FlightRecorder", "train_steps": "train_step", "ValueStat": "types.ValueStats",
}  # fmt: skip


@pytest.mark.parametrize("name", [*ELSEWHERE, *MISSPELT])
def test_a_name_that_is_not_here_says_what_to_write(name):
    wanted = ELSEWHERE.get(name) or MISSPELT[name]
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; write clipgrad\.{wanted}$"):
        getattr(cg, name)


@pytest.mark.parametrize("name", ["numpy", "loss", "zz", "stats", "_stat", "__wrapped__"])
def test_a_name_that_is_like_no_public_one_has_no_hint(name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'$"):
        getattr(cg, name)


def test_each_public_name_misses_no_letter_without_a_hint():
    for name in NAMES:
        for wrong in (name[:-1], name + "s", name.replace("_", ""), name[0] + name[2:]):
            if wrong not in NAMES and not hasattr(cg, wrong):
                with pytest.raises(AttributeError, match="; write clipgrad"):
                    getattr(cg, wrong)


def test_the_rule_of_paddle_prints_as_the_class_that_it_is():
    assert repr(cg.ErrorClipByValue(1.0)) == "ClipByValue(max=1.0, min=None, nan=None)"


# ---- percentiles --------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "meant"), [(0.9, "90"), (0.25, "25"), (0.995, "99.5")])
def test_a_percentile_that_looks_like_a_share_is_asked_about(given, meant):
    with pytest.warns(UserWarning, match=rf"got {given}, which is the .*; .* write {meant}$"):
        cg.PercentileThreshold(given)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("given", [0, 1, 1.0, 1.5, 10, 90.0, 99.5, 100])
def test_other_percentiles_are_taken_as_they_are(given):
    assert cg.PercentileThreshold(given).percentile == given


# ---- states, arguments and losses ---------------------------------------------------------------

@pytest.mark.parametrize("given", [2, True, np.arange(3), jnp.arange(3)], ids=str)
def test_an_integer_to_differentiate_by_is_refused_with_what_to_write(given):
    run = cg.value_and_grad_with_stats(loss)
    with pytest.raises(TypeError, match=r"^args: got \w+.* at position 0, .*; write 1.0 for 1"):
        run(given, 2.0)


THRESHOLDS = [jnp.array(1.0), jnp.ones(2), np.ones(2), {"a": 1.0}]


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=str)
def test_a_rule_with_an_array_is_compiled_as_an_argument(threshold):
    makers = [cg.ClipByNorm] if isinstance(threshold, dict) else [
        cg.ClipByNorm, cg.ClipByValue, cg.ClipByGlobalNorm, cg.AutoNorm, cg.ClipByBlockRMS,
    ]  # fmt: skip
    for make in makers:
        rule = make(threshold)
        with pytest.raises(
            TypeError, match=r"^\w+: got .*; where it is an array write jax.jit\(la"
        ):
            jax.jit(rule)({"a": jnp.ones((3, 2))})
    rule = cg.ClipByNorm(jnp.array(1.0))
    found = jax.jit(lambda rule, grads: rule(grads))(rule, {"a": jnp.array([3.0, 4.0])})
    np.testing.assert_allclose(found["a"], [0.6, 0.8], rtol=1e-6)


def step_of(loss_fn, **options):
    step = cg.train_step(loss_fn, optax.sgd(0.1), donate=False, **options)
    return lambda w, x: step(step.init(w), x)


OF_AUX = {
    "value_and_grad_with_stats": lambda f, **o: cg.value_and_grad_with_stats(f, **o),
    "train_step": step_of,
    "train_step, watched": lambda f, **o: step_of(f, watch_values=["h"], **o),
    "train_step, clipped": lambda f, **o: step_of(f, error_clip={"h": None}, **o),
    "clip_per_example": lambda f, **o: (
        lambda w, x: cg.clip_per_example(f, cg.ClipByGlobalNorm(1.0), **o)(w, x[None])
    ),
}


@pytest.mark.parametrize("name", OF_AUX)
def test_aux_that_is_forgotten_or_not_there_is_said(name):
    def trace(fun, **options):
        jax.eval_shape(OF_AUX[name](fun, **options), W, X)

    with pytest.raises(ValueError, match=r"^(loss_fn|fun): got a tuple .*; write has_aux=True"):
        trace(with_aux)
    if name != "train_step, watched":  # it has statistics beside the loss
        with pytest.raises(ValueError, match=r": got float32\[\] from it, .*; leave has_aux out"):
            trace(loss, has_aux=True)
    trace(with_aux, has_aux=True)
    trace(loss)


BATCH_LOSSES = {
    "index": lambda w, b: jnp.mean((b[0] @ w)[:, 0] - b[1]),
    "axis": lambda w, b: jnp.mean(jnp.sum(b[0] @ w, axis=1) - b[1]),
    "shape": lambda w, b: jnp.sum(b[0] @ w) / b[1].shape[0],
    "len": lambda w, b: jnp.sum(b[0] @ w) / len(b[1]),
    "vmap": lambda w, b: jnp.mean(jax.vmap(lambda x, y: (x @ w)[0] - y)(*b)),
    "result": lambda w, b: jnp.atleast_1d((b[0] @ w).ravel() - b[1]),
}


@pytest.mark.parametrize(
    "loss_of", [lambda w, x: w * x, lambda w, x: jnp.sum(w * x, keepdims=True)]
)
def test_a_loss_of_several_numbers_in_a_training_step_says_what_is_expected(loss_of):
    step = cg.train_step(loss_of, optax.sgd(0.1))
    with pytest.raises(
        ValueError, match=r"loss_fn: got float32\[\d\] .* scalar; write its mean or"
    ):
        step(step.init(W), X)


@pytest.mark.kinds()
@pytest.mark.parametrize("name", BATCH_LOSSES)
def test_a_loss_of_a_batch_says_how_to_write_that_of_one_example(name):
    w, batch = jnp.ones((3, 1)), (jnp.ones((4, 3)), jnp.ones(4))
    batch_loss, rule = BATCH_LOSSES[name], cg.ClipByGlobalNorm(1.0)
    clip = cg.clip_per_example(batch_loss, rule)
    norms = cg.per_example_norms(batch_loss)
    for run in (clip, clip.plan, norms, cg.clip_per_example(batch_loss, rule, method="direct")):
        with pytest.raises(
            ValueError, match=r"(?s)^loss_fn: got .*one example.*; write .*\[None\]"
        ):
            run(w, batch)
    if name != "result":
        one = lambda w, b: batch_loss(w, jax.tree.map(lambda x: x[None], b))  # noqa: E731
        value, *_ = jax.jit(cg.clip_per_example(one, rule))(w, batch)
        assert value == batch_loss(w, batch)


def test_a_loss_that_fails_for_another_reason_raises_its_own_error():
    def broken(w, x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="^mine"):
        cg.clip_per_example(broken, cg.ClipByGlobalNorm(1.0))(W, jnp.ones((4, 3)))
