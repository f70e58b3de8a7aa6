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
    "grad_norm": r"global_norm\(grads\)",
    "clip": r"clip_by_value\(max\)",
    "adaptive_error_clip": r"ErrorClipByValue\(max\), with a number from value_and_grad_with_stats",
    "SUGGESTED_THRESHOLDS": "published.SUGGESTED_THRESHOLDS",
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


NO_HINT = ["numpy", "loss", "zz", "stats", "_stat", "__wrapped__", "qk_clip", "u_clip"]


@pytest.mark.parametrize("name", NO_HINT)
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
    assert repr(cg.ErrorClipByValue(1.0)) == "ClipByValue(max=1.0, min=-1.0, nan=None)"


# ---- percentiles --------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "meant"), [(0.9, "90"), (0.25, "25"), (0.995, "99.5")])
def test_a_percentile_that_looks_like_a_share_is_asked_about(given, meant):
    with pytest.warns(UserWarning, match=rf"got {given}, which is the .*; .* write {meant}$"):
        cg.PercentileThreshold(given)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("given", [0, 1, 1.0, 1.5, 10, 90.0, 99.5, 100])
def test_other_percentiles_are_taken_as_they_are(given):
    assert cg.PercentileThreshold(given).percentile == given


# ---- gradients where a loss is meant ------------------------------------------------------------

SMALL = cg.ErrorClipByValue(1e-9)
TRANSFORMS = {
    "error_clip_by_name": lambda f: cg.error_clip_by_name(f, {"h": SMALL}),
    "error_clip_everywhere": lambda f: cg.error_clip_everywhere(f, SMALL),
}


def step_by_hand(w, x):
    value, grads = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * grads, value


OF_GRADIENTS = {
    "grad": jax.grad(loss),
    "value_and_grad": jax.value_and_grad(loss),
    "of one number": lambda w, x: jax.grad(lambda scale: loss(scale * w, x))(1.0),
    "jit inside and outside": jax.jit(jax.value_and_grad(jax.jit(loss))),
    "scan": jax.grad(lambda w, x: jax.lax.scan(lambda c, _: (loss(w + c, x), 0), 0.0, None, 2)[0]),
    "a step": step_by_hand,
}
# Gradients inside of a loss, which are differentiated once more: the clips act.
OF_LOSSES = {
    "meta-learning": lambda w, x: loss(w - 0.1 * jax.grad(loss)(w, x) ** 2, x),
    "a gradient penalty": lambda w, x: jnp.sum(jax.grad(loss, argnums=1)(w, x) ** 2),
    "the same compiled": jax.jit(lambda w, x: jnp.sum(jax.grad(loss, argnums=1)(w, x) ** 2)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("fun", OF_GRADIENTS.values(), ids=OF_GRADIENTS)
def test_a_clip_that_no_cotangent_passes_is_said(name, fun):
    match = rf"^{name}: got a rule.* computes gradients itself.*; write jax.grad\({name}\(loss, r"
    with pytest.warns(UserWarning, match=match):
        TRANSFORMS[name](fun)(W, X)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("fun", OF_LOSSES.values(), ids=OF_LOSSES)
def test_a_loss_with_gradients_inside_is_clipped_without_a_warning(name, fun):
    clipped = jax.grad(TRANSFORMS[name](fun))(W, X)
    assert jnp.max(jnp.abs(clipped)) < 1e-6 < jnp.max(jnp.abs(jax.grad(fun)(W, X)))


@pytest.mark.parametrize("watched", [{}, {"watch_values": ["h"]}, {"error_clip": {"h": None}}])
def test_the_gradient_of_a_loss_in_its_place_is_answered_by_the_loss(watched):
    with pytest.raises(ValueError, match="got a tuple from it, .*or give the loss itself instead"):
        step_of(jax.value_and_grad(loss), **watched)(W, X)
    with pytest.raises(ValueError, match=r"got dict from it, .*; give the loss, not its jax.grad"):
        step_of(lambda w, x: {"w": jax.grad(loss)(w, x)})(W, X)


# ---- calls as they are written elsewhere --------------------------------------------------------

BATCH = jnp.ones((4, 3))
CALLS = {
    "clip_by_global_norm: got clip_norm=1.0, expected max_norm=1.0": lambda: cg.clip_by_global_norm(
        clip_norm=1.0
    ),
    "clip_by_value: got max_delta=1.0, expected max=1.0": lambda: cg.clip_by_value(max_delta=1.0),
    "clip_by_norm: got max_nrom=1.0, expected max_norm=1.0": lambda: cg.clip_by_norm(max_nrom=1.0),
    "train_step: got grad_accum=4, expected accumulate=4": lambda: cg.train_step(
        loss, optax.sgd(0.1), grad_accum=4
    ),
    "train_step: got rules=..., expected error_clip=...": lambda: cg.train_step(
        loss, optax.sgd(0.1), rules={"h": SMALL}
    ),
    "value_and_grad_with_stats: got error_clip=..., expected rules=...": lambda: (
        cg.value_and_grad_with_stats(loss, error_clip={"h": SMALL})
    ),
    "train_step: got quick=True, expected some of loss_fn, optimizer, error_clip, watch_": lambda: (
        cg.train_step(loss, optax.sgd(0.1), quick=True)
    ),
    'positional arguments, expected at most 2, (fun, rules); write {"name": rule}': lambda: (
        cg.error_clip_by_name(loss, "h", SMALL)
    ),
    "got 4 positional arguments, expected at most 3, (self, state, batch); write step(": lambda: (
        cg.train_step(loss, optax.sgd(0.1))(W, X, X)
    ),
    "write the others by name, of error_clip=, watch_values=": lambda: cg.train_step(
        loss, optax.sgd(0.1), {"h": SMALL}
    ),
    "rules={'h': ...}": lambda: cg.value_and_grad_with_stats(loss, {"h": SMALL}),
    "list_names: got 4 positional arguments, expected those of fun in one tuple; write "
    "list_names(fun, (w, x, x2))": lambda: cg.list_names(loss, W, X, X),
}


@pytest.mark.parametrize("message", CALLS)
def test_a_call_as_it_is_written_elsewhere_says_what_to_write_here(message):
    with pytest.raises(TypeError) as raised:
        CALLS[message]()
    assert message in str(raised.value)


def test_an_error_of_the_function_itself_stays_as_it_is():
    def broken(w, x):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="^mine"):
        cg.list_names(broken, (W, X))


# What takes the arguments of a function as one tuple.
READERS = {
    "list_names": cg.list_names,
    "diagnose": cg.diagnose,
    "check_grads": cg.check_grads,
    "compare": lambda fun, *call: cg.compare(fun, fun, *call),
}
ARGUMENTS = {
    "one by one": ((W, X), r"^args: got the arguments of fun one by one.*; write \(w, x\)"),
    "in a list": (([W, X],), r"^args: got list, expected a tuple; write \(w, x\)"),
    "alone": ((W,), r"^args: got float32\[3\], expected a tuple; for one argument write \(w,\)"),
    "a path": (("run.npz",), "^args: got 'run.npz', expected the tuple of arguments, before a"),
    "an option": (((W, X), 2), "^kwargs: got 2, expected a mapping.*; write an option by its name"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("given", ARGUMENTS)
def test_arguments_that_are_no_tuple_are_answered_by_the_tuple(reader, given):
    args, match = ARGUMENTS[given]
    with pytest.raises(TypeError, match=match):
        READERS[reader](loss, *args)


@pytest.mark.parametrize("reader", READERS)
def test_a_result_in_place_of_a_function_is_refused(reader):
    with pytest.raises(TypeError, match="^fun: got 3, expected a function"):
        READERS[reader](3, (W, X))
    with pytest.raises(TypeError, match=r"^fun: got float32\[\], expected a function; write the f"):
        READERS[reader](loss(W, X), (W, X))


MANY = {f"layer_{i}": jnp.ones((8, 8)) for i in range(61)}
PRINTED = {
    "list_names": lambda: cg.list_names(MANY, (W,)),
    "list_names, arguments": lambda: cg.list_names(loss, MANY),
    "error_clip_by_name": lambda: cg.error_clip_by_name(MANY, {"h": SMALL}),
    "error_clip_by_name, rules": lambda: cg.error_clip_by_name(loss, list(MANY.values())),
    "error_clip": lambda: cg.error_clip(SMALL)(MANY),
    "train_step": lambda: cg.train_step(loss, optax.sgd(0.1), error_clip=BATCH),
    "train_step, state": lambda: cg.train_step(loss, optax.sgd(0.1))(MANY, X),
    "value_and_grad_with_stats": lambda: cg.value_and_grad_with_stats(loss, watchh=MANY),
}


@pytest.mark.parametrize("name", PRINTED)
def test_no_message_prints_arrays(name):
    with pytest.raises(TypeError) as raised:
        PRINTED[name]()
    assert len(str(raised.value)) < 400 and "1., 1." not in str(raised.value)


# ---- states, arguments and losses ---------------------------------------------------------------


@pytest.mark.parametrize("given", [2, True, np.arange(3), jnp.arange(3)], ids=str)
def test_an_integer_to_differentiate_by_is_refused_with_what_to_write(given):
    run = cg.value_and_grad_with_stats(loss)
    with pytest.raises(TypeError, match=r"^args: got \w+.* at position 0, .*; write 1.0 for 1"):
        run(given, 2.0)


THRESHOLDS = [jnp.array(1.0), jnp.ones(2), np.ones(2)]


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=str)
def test_a_rule_with_an_array_is_compiled_as_an_argument(threshold):
    makers = (cg.ClipByNorm, cg.ClipByValue, cg.ClipByGlobalNorm, cg.AutoNorm, cg.ClipByBlockRMS)
    for make in makers:
        rule = make(threshold)
        with pytest.raises(TypeError, match=r"^\w+: got an array .*; or write jax.jit\(lambda rul"):
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
