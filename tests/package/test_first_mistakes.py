"""What somebody writes first by mistake gets a sentence that says what to write."""

import copy
import functools
import inspect
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._arrays import answers_lookups
from clipgrad._arrays.calls import ELSEWHERE as WORDS
from clipgrad._arrays.lookups import FIELDS_ELSEWHERE
from clipgrad._commands.help_search import search
from clipgrad._lazily import INSTEAD
from tests.helpers import NAMES, array
from tests.rows import first_row

W, X = array(np.ones(3)), array(np.arange(3.0))


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
    "clip_by_rms": r"clip_by_block_rms\(threshold\)",
    "get_numerical_gradient": r"numerical_grad\(fun, args\)",
    "l2_norm": r"global_norm\(grads\)",
    "torch": "torch after import clipgrad.torch",
    "zero_nans": r'gradient_clip\(rule, nonfinite="zero"\)',
    # by a word in it
    "AGC": r"adaptive_grad_clip\(clipping\)",
    "AutoClip": r"clip_by_global_norm\(PercentileThreshold\(90\)\)",
    "ZClip": r"clip_by_global_norm\(ZScoreThreshold\(\)\)",
    "ema_clip": r"clip_by_global_norm\(EMAThreshold\(\)\)",
    "register_hook": r"clip_cotangent\(x, rule\)",
    "differentially_private_aggregate": r"clip_per_example\(loss_fn, rule\)",
    "per_sample_clip": r"clip_per_example\(loss_fn, rule\)",
    "diff_grads": r"compare\(fun, other, args\)",
    "compare_models": "compare",
    "detect_anomaly": r"diagnose\(fun, args\)",
    "find_nan": r"diagnose\(fun, args\)",
    "Recorder": r"FlightRecorder\(directory\)",
    "list_tags": r"list_names\(fun, args\)",
    "replay": r"load_capture\(path\)",
    "log_metrics": r"scalars\(metrics\)",
    "skip_if_nonfinite": r"skip_spikes\(optimizer\)",
    "Trainer": r"train_step\(loss_fn, optimizer\)",
    "update_ratio": r"watch_updates\(optimizer\)",
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


def test_every_word_of_another_name_has_a_hint():
    for word, written in INSTEAD.items():
        with pytest.raises(AttributeError, match="; write clipgrad") as raised:
            getattr(cg, f"qqqqqqqqqqqq_{word}")
        assert str(raised.value).endswith(f"clipgrad.{written}")


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


@pytest.mark.parametrize(("percentile", "meant"), [(0.9, "90"), (0.25, "25"), (0.995, "99.5")])
def test_a_percentile_that_looks_like_a_share_is_asked_about(percentile, meant):
    with pytest.warns(UserWarning, match=rf"got {percentile}, which is the .*; .* write {meant}$"):
        cg.PercentileThreshold(percentile)
    with pytest.warns(UserWarning, match=rf"for this share write {meant}$"):
        cg.published.suggest_threshold([1.0, 2.0], percentile)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("percentile", [0, 1, 1.0, 1.5, 10, 90.0, 99.5, 100])
def test_other_percentiles_are_taken_as_they_are(percentile):
    cg.published.suggest_threshold([1.0, 2.0], percentile)
    assert cg.PercentileThreshold(percentile).percentile == percentile


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

BATCH = array(np.ones((4, 3)))
GRADS = {"head": array(np.ones(3)), "w": array(np.ones(3))}
NORM = cg.ClipByGlobalNorm(1.0)
SGD = optax.sgd(0.1)
CALLS = {
    "clip_by_global_norm: got clip_norm=1.0, expected max_norm=1.0": lambda: cg.clip_by_global_norm(
        clip_norm=1.0
    ),
    "clip_by_value: got max_delta=1.0, expected max=1.0": lambda: cg.clip_by_value(max_delta=1.0),
    "clip_by_norm: got max_nrom=1.0, expected max_norm=1.0": lambda: cg.clip_by_norm(max_nrom=1.0),
    "skip_spikes: got threshhold=1.0, expected max_norm=1.0": lambda: cg.skip_spikes(
        optax.sgd(0.1), threshhold=1.0
    ),
    "train_step: got grad_accum=4, expected accumulate=4": lambda: cg.train_step(
        loss, optax.sgd(0.1), grad_accum=4
    ),
    "train_step: got rules=..., expected error_clip=...": lambda: cg.train_step(
        loss, optax.sgd(0.1), rules={"h": SMALL}
    ),
    "value_and_grad_with_stats: got rules=..., expected error_clip=...": lambda: (
        cg.value_and_grad_with_stats(loss, **{"rules": {"h": SMALL}})
    ),
    "error_clip_by_name: got error_clip=..., expected rules=...": lambda: cg.error_clip_by_name(
        loss, **{"error_clip": {"h": SMALL}}
    ),
    "train_step: got quick=True, expected some of loss_fn, optimizer, error_clip, watch_": lambda: (
        cg.train_step(loss, optax.sgd(0.1), quick=True)
    ),
    'positional arguments, expected at most 2, (fun, rules); write {"name": rule}': lambda: (
        cg.error_clip_by_name(loss, "h", SMALL)
    ),
    "step: got 3 positional arguments, expected at most 2, (state, batch); write step(": lambda: (
        cg.train_step(loss, optax.sgd(0.1))(W, X, X)
    ),
    "step.init: got 2 positional arguments, expected at most 1, (params); write step.in": lambda: (
        cg.train_step(loss, optax.sgd(0.1)).init(W, X)
    ),
    "write the others by name, of error_clip=, watch_values=": lambda: cg.train_step(
        loss, optax.sgd(0.1), {"h": SMALL}
    ),
    "error_clip={'h': ...}": lambda: cg.value_and_grad_with_stats(loss, {"h": SMALL}),
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


# ---- every public function and rule, by its signature --------------------------------------------

EXPLAINED = {
    name: value
    for module in (cg, cg.published)
    for name in module.__all__
    if callable(value := getattr(module, name))
    and not (isinstance(value, type) and issubclass(value, tuple | Exception))
    and value not in (cg.ClipRule, cg.AdaptiveThreshold)
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_every_public_function_says_which_keywords_there_are(name):
    called = EXPLAINED[name].__name__
    with pytest.raises(TypeError, match=rf"^{called}: got qqq=1, expected some of \w+"):
        EXPLAINED[name](qqq=1)
    known = inspect.signature(EXPLAINED[name]).parameters
    with pytest.raises(TypeError, match=rf"^{called}: got \d+ positional .* at most|in one tuple"):
        EXPLAINED[name](*[(W,)] * (len(known) + 1))
    if any(p.default is p.empty for p in known.values()):
        with pytest.raises(TypeError, match=rf"^{called}: missing .*; write {called}\(\w+"):
            EXPLAINED[name]()


@pytest.mark.parametrize("name", EXPLAINED)
def test_every_word_of_another_library_is_answered_by_the_keyword_here(name):
    known = list(inspect.signature(EXPLAINED[name]).parameters)
    for parameter in known:
        for word in WORDS.get(parameter, ()):
            if word not in known:
                with pytest.raises(TypeError, match=rf"got {word}=1, expected \w+=1$") as raised:
                    EXPLAINED[name](**{word: 1})
                meant = re.findall(r"expected (\w+)=", str(raised.value))[0]
                assert meant in known and word in WORDS[meant]


def test_every_word_stands_for_a_parameter_that_there_is():
    there = {name for f in EXPLAINED.values() for name in inspect.signature(f).parameters}
    assert there >= set(WORDS)


# ---- a field of a rule instead of a rule ---------------------------------------------------------

FIELDS = {
    "error_clip": (cg.error_clip, "error_clip(ErrorClipByValue(max=1.0))", "max"),
    "error_clip, norm": (cg.error_clip, "error_clip(ClipByGlobalNorm(max_norm=1.0))", "max_norm"),
    "clip_cotangent": (cg.clip_cotangent, "clip_cotangent(x, ErrorClipByValue(max=1.0))", "max"),
    "error_clip_everywhere": (
        cg.error_clip_everywhere,
        "error_clip_everywhere(fun, ErrorClipByValue(max=1.0))",
        "clip_value",
    ),
    "error_clip_by_name": (
        cg.error_clip_by_name,
        'error_clip_by_name(fun, {"name": ErrorClipByValue(max=1.0)})',
        "max",
    ),
    "clip_grads": (cg.clip_grads, "clip_grads(grads, ClipByGlobalNorm(max_norm=1.0))", "clip_norm"),
    "gradient_clip": (cg.gradient_clip, "gradient_clip(AdaptiveClip(clipping=1.0))", "clip_factor"),
    "clip_per_example": (
        cg.clip_per_example,
        "clip_per_example(loss_fn, ClipByGlobalNorm(max_norm=1.0))",
        "l2_norm_clip",
    ),
    "train_step": (
        cg.train_step,
        "train_step(loss_fn, optax.chain(clip_by_global_norm(max_norm=1.0), optimizer))",
        "max_grad_norm",
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_instead_of_a_rule_is_answered_by_the_rule(name):
    function, written, word = FIELDS[name]
    with pytest.raises(TypeError, match=rf"got {word}=1.0, .*; write {re.escape(written)}$"):
        function(**{word: 1.0})


# ---- results that are read as elsewhere ----------------------------------------------------------

READ = {
    "clip": lambda: cg.types.ClipStats.of(X, X),
    "values": lambda: cg.types.ValueStats.of(X),
    "norms": lambda: cg.types.UpdateNorms(30.0, 8.0, 0.5),
    "clip state": lambda: cg.types.GradientClipState(0, None, None, None, 1.0),
    "skip state": lambda: cg.skip_spikes(SGD, halt=True).init(W),
    "train state": lambda: cg.types.TrainState(W, SGD.init(W)),
    "updates state": lambda: cg.types.WatchUpdatesState((), {}),
    "step": lambda: cg.train_step(loss, SGD),
    "diagnosis": lambda: cg.types.GradientDiagnosis((), (), ()),
    "comparison": lambda: cg.types.GradientComparison(True, (), ()),
    "report": lambda: cg.types.GradCheckReport((), (), {}, 1, 0.0, "float64", ("cpu",), 1),
    "capture": lambda: cg.types.Capture("step_57", {}, None, 57, {}, {}, W, X),
    "names": lambda: cg.list_names(loss, (W, X)),
}
ASKED = {
    "clip": {"zeros": "stats.all_zero", "grad_norm": "stats.norm", "['norm']": "stats.norm"},
    "values": {"zeros": "stats.zero_fraction", "amax": "stats.max", "['rms']": "stats.rms"},
    "norms": {"grad_norm": "norms.grad", "weight_norm": "norms.param", "['ratio']": "norms.ratio"},
    "clip state": {"clip_stats": "state.stats", "norm": "state.stats.norm"},
    "skip state": {
        "consecutive": "state.skipped_consecutive", "norm": "state.raw_norm",
        "['limit']": "state.limit",
    },
    "train state": {
        "parameters": "state.params", "stats": 'metrics["clips"]', "['params']": "state.params",
    },
    "updates state": {"norm": "state.norms"},
    "step": {"lower": "step.update.lower(", "step": "step(state, batch)", "state": "step.init("},
    "diagnosis": {"passed": "found.ok", "finding": "found.findings", "['ok']": "found.ok"},
    "comparison": {"success": "found.ok", "diff": "ok, findings, rows", "['rows']": "found.rows"},
    "report": {"passed": "report.ok", "max_error": "report.max_relative_error"},
    "capture": {"data": "capture.batch", "opt_state": "capture.state", "['key']": "capture.key"},
    "names": {"['h']": "there are reason"},
}  # fmt: skip


@functools.cache
def read(name):
    return READ[name]()


@pytest.mark.parametrize(("name", "asked"), [(n, a) for n in READ for a in ASKED[n]])
def test_a_field_that_is_called_otherwise_is_answered_by_the_one_to_write(name, asked):
    answer = ASKED[name][asked]
    with pytest.raises((AttributeError, TypeError), match=re.escape(answer)):
        eval(f"value{asked if asked.startswith('[') else '.' + asked}", {"value": read(name)})


@pytest.mark.parametrize("name", READ)
def test_results_pickle_copy_and_have_no_fields_but_theirs(name):
    value = read(name)
    assert not hasattr(value, "shape") and not hasattr(value, "__jax_array__")
    assert jax.tree.structure(copy.deepcopy(value)) == jax.tree.structure(value)


def test_every_word_for_a_field_is_for_one_that_there_is():
    fields = {field for name in READ for field in dir(read(name))} | {"record", "directory"}
    metrics = {"clips"}
    there = fields | metrics | {*cg.types.GradCheckReport.__annotations__, "captures"}
    assert there >= set(FIELDS_ELSEWHERE)


@pytest.mark.parametrize("name", ["diagnosis", "comparison", "report"])
def test_the_first_finding_of_none_is_answered_by_the_message(name):
    findings = read(name).failures if name == "report" else read(name).findings
    assert findings == () and not findings and findings[:1] == ()
    with pytest.raises(IndexError, match=r"write \.message .* or ask \.ok$"):
        findings[0]


def test_an_error_inside_of_a_property_stays_as_it_is():
    class Result:
        norm = property(lambda self: (3).dtype)

    with pytest.raises(AttributeError, match="'int' object has no attribute 'dtype'$"):
        _ = answers_lookups("result")(Result)().norm


METRICS_ELSEWHERE = {
    "gradnorm": "write metrics\\['grad_norm'\\]", "skipped": r"comes from skip_spikes\(optimizer\)",
    "updates": r"from watch_updates\(optimizer\)", "aux": "has_aux=True", "values": "watch_values=",
    "clips": "stats=True", "leaves": 'stats="per_leaf"', "error_clip": "error_clip=rules",
    "zzz": "there are grad_norm, loss, nonfinite",
}  # fmt: skip


def test_a_metric_that_is_not_there_says_what_it_comes_from():
    step = cg.train_step(loss, SGD)
    _, metrics = step(step.init(W), X)
    assert "skipped" not in metrics and metrics.get("skipped") is None
    for name, match in METRICS_ELSEWHERE.items():
        with pytest.raises(KeyError, match=match):
            metrics[name]
    for name in METRICS_ELSEWHERE.keys() - set(dir(dict)):
        with pytest.raises(AttributeError, match=METRICS_ELSEWHERE[name]):
            getattr(metrics, name)
    with pytest.raises(AttributeError, match=r"write metrics\['loss'\]"):
        _ = metrics.loss


# ---- in the wrong place, or of the wrong kind ----------------------------------------------------


def where(selection):
    return cg.clip_grads(GRADS, NORM, where=selection)


def chained():
    return optax.chain(cg.ClipByGlobalNorm, SGD).init(GRADS)


def of_three(params, x, y):
    return jnp.sum(params * x * y)


RECORDER = object.__new__(cg.FlightRecorder)

PLACES = {
    "rule before value": (lambda: cg.clip_cotangent(SMALL, X), r"write clip_cotangent\(x, rule\)"),
    "rule before grads": (lambda: cg.clip_grads(NORM, GRADS), r"write clip_grads\(grads, rule\)"),
    "rule after grads": (
        lambda: cg.clip_grads(GRADS, GRADS, NORM),
        r"write clip_grads\(grads, rule, params\)",
    ),
    "arguments before function": (lambda: cg.diagnose((W, X), loss), r"write \(fun, args\)"),
    "class of a rule": (
        lambda: cg.clip_grads(GRADS, cg.ClipByNorm),
        r"mean .*ClipByNorm\(\.\.\.\)",
    ),
    "class in a chain": (
        chained,
        r"the class of a rule .*write optax\.chain\(clipgrad\.ClipByGlobalNorm",
    ),
    "class of a threshold": (
        lambda: cg.clip_by_global_norm(cg.PercentileThreshold),
        r"mean an object, PercentileThreshold\(",
    ),
    "maker of an optimizer": (lambda: cg.train_step(loss, optax.adam), r"call it, as in adam\("),
    "maker of an optimizer, skipping": (lambda: cg.skip_spikes(optax.sgd), r"as in sgd\("),
    "maker of a clip": (
        lambda: cg.clip_grads(GRADS, cg.clip_by_global_norm),
        r"write clip_grads\(",
    ),
    "gradients for a limit": (lambda: cg.clip_by_norm(GRADS, 1.0), r"got dict.*write clip_grads\("),
    "gradients for a rule": (lambda: cg.gradient_clip(GRADS), r"got dict.*write clip_grads\("),
    "function for gradients": (lambda: cg.clip_grads(loss, NORM), r"write clip_grads\(jax.grad\("),
    "function for a value": (lambda: cg.clip_cotangent(loss, SMALL), r"write error_clip\(rule\)\("),
    "function for a tree": (lambda: cg.global_norm(loss), r"write global_norm\(jax.grad\(loss\)"),
    "arrays one by one": (lambda: cg.global_norm(W, X), r"got float32\[3\].*write a tree"),
    "names for rules": (lambda: cg.error_clip(["h"]), r'write a dictionary: \{"name": rule\}'),
    "rules for a rule": (
        lambda: cg.error_clip_everywhere(loss, {"h": SMALL}),
        r"write error_clip_by_name\(fun, rules\)",
    ),
    "rule as a keyword": (lambda: cg.error_clip_by_name(loss, h=SMALL), r'expected rules=\{"h": '),
    "names for positions": (
        lambda: cg.value_and_grad_with_stats(loss, ["h"]),
        r"write watch=\['h'\]",
    ),
    "arguments for positions": (
        lambda: cg.value_and_grad_with_stats(loss, (W, X)),
        r"got tuple.*write value_and_grad_with_stats\(fun\)\(params, x\)",
    ),
    "a parameter by name": (
        lambda: cg.error_clip_by_name(lambda p, x: loss(p["w"], x), {"w": SMALL})({"w": W}, X),
        r"write clip_by_norm\(max_norm, where='w'\)",
    ),
    "loss of x and y": (
        lambda: cg.clip_per_example(of_three, NORM),
        r"params, example: loss_fn\(params, \*example\), where the example is \(x, y\)",
    ),
    "loss of x and y, norms": (lambda: cg.per_example_norms(of_three), r"the example is \(x, y\)"),
    "loss of x and y, step": (
        lambda: cg.train_step(of_three, SGD),
        r"params, batch: loss_fn\(params, \*batch\), where the batch is \(x, y\)",
    ),
    "noise": (lambda: cg.clip_per_example(loss, NORM, noise_multiplier=1.0), r'reduce="sum"'),
    "a prefix": (lambda: cg.scalars({}, prefix="train"), r'write scalars\(\{"train": tree\}\)'),
    "by type": (
        lambda: cg.published.apply_gradient_clipping(GRADS, "norm", 0.1),
        r'clipping_type="norm", clipping_threshold=0.1',
    ),
    "a limit twice": (lambda: cg.clip_by_norm(1.0, max_norm=1.0), "by position and by name"),
    "a policy as a flag": (
        lambda: cg.clip_grads(GRADS, NORM, error_if_nonfinite=True),
        'expected nonfinite="error"',
    ),
    "all but, by an expression": (lambda: where("^(?!head)"), '"!head" for all but head'),
    "all but, in words": (lambda: where("not head"), 'all but head write "!head"'),
    "all but, as a keyword": (
        lambda: cg.clip_grads(GRADS, NORM, exclude="head"),
        "expected where='!head'",
    ),
    "function of a path": (lambda: where(lambda path: "b" not in path), r"gets the whole tree"),
    "function of a path, text": (lambda: where(lambda path: path.endswith("w")), "the whole tree"),
    "all but, several": (
        lambda: cg.clip_grads(GRADS, NORM, ignore=["head", "w"]),
        r"expected where=\('!head', '!w'\)",
    ),
    "several in one text": (lambda: where("head, x"), r"for several write \('head', 'x'\)"),
    "a set of patterns": (lambda: where({"head"}), r'write patterns such as "head" or \("head"'),
    "a position": (lambda: where(0), r'write patterns such as "head"'),
    "a rule of a loss": (lambda: NORM(loss), r"write clip_grads\(jax.grad\(loss\)"),
    "a value rule of a loss": (lambda: SMALL(loss), r"write clip_grads\(jax.grad\(loss\)"),
    "order before gradients": (
        lambda: cg.global_norm(2, GRADS),
        "ord: got dict, expected a number",
    ),
    "threshold before type": (
        lambda: cg.published.gradient_clipping(1.0, "norm"),
        "clipping_type: got 1.0, expected one of norm, value, adaptive",
    ),
    "maker in a chain": (
        lambda: optax.chain(cg.clip_by_global_norm, SGD).init(GRADS),
        r"call it first, as in clip_by_global_norm\(\.\.\.\)",
    ),
    "maker of a step": (lambda: cg.train_step.init(W), r"call it first, as in train_step\("),
    "class of a recorder": (
        lambda: cg.FlightRecorder.record(W, X),
        r"write the class with its arguments, such as FlightRecorder\(",
    ),
    "parameters for a state": (
        lambda: cg.clip_by_norm(1.0).update(GRADS, GRADS, GRADS),
        r"got dict with arrays, expected the state of init.*write update\(grads, state, params\)",
    ),
    "parameters for a state, skipping": (
        lambda: cg.skip_spikes(SGD).update(GRADS, GRADS, GRADS),
        r"got dict, expected the SkipSpikesState.*write update\(grads, state, params\)",
    ),
    "state and metrics for a state": (
        lambda: cg.train_step(loss, SGD)((cg.types.TrainState(W, ()), {}), X),
        r"a step returns it with its metrics, state, metrics = step\(state, batch\)",
    ),
    "state for arguments": (
        lambda: cg.diagnose(loss, cg.types.TrainState(W, ())),
        r"got the state TrainState, .*; write \(state\.params, batch\)",
    ),
    "loss for parameters": (
        lambda: cg.train_step(loss, SGD).init(loss),
        r"write step\.init\(params",
    ),
    "optimizer's option": (lambda: cg.train_step(loss, SGD, lr=0.1), r"optax\.adam\(lr\)"),
    "function of path and leaf, groups": (
        lambda: cg.watch_updates(SGD, by=lambda path, leaf: path),
        r"by: got a function of \(path, leaf\), expected one of \(path\)",
    ),
    "batch before parameters": (
        lambda: cg.clip_per_example(loss, NORM)(BATCH, {"w": W, "b": W[:2]}),
        r"write \(params, batch\), in this order",
    ),
    "x and y of a batch": (
        lambda: cg.clip_per_example(loss, NORM)(W, X, X),
        r"write \(params, \(x, y\)\)",
    ),
    "x and y of norms": (lambda: cg.per_example_norms(loss)(W, X, X), r"\(params, \(x, y\)\)"),
    "value to decorate": (lambda: cg.error_clip(SMALL)(X), r"or for a value clip_cotangent\(x, "),
    "dtype first": (
        lambda: cg.compare("float32", loss, (W, X)),
        r'write compare\(fun, "float32", args\)',
    ),
    "dtype by name": (
        lambda: cg.compare(loss, loss, (W, X), dtype="float32"),
        r'write compare\(fun, "float32", args\)',
    ),
    "arguments between versions": (
        lambda: cg.compare(loss, (W, X), loss),
        r"write compare\(fun, other, args\)",
    ),
    "arguments before versions": (
        lambda: cg.compare((W, X), loss, loss),
        r"write compare\(fun, other, args\)",
    ),
    "path first": (
        lambda: cg.save_run("a.npz", loss, (W, X)),
        r"write save_run\(fun, args, path\)",
    ),
    "path behind arguments": (
        lambda: cg.save_run(loss, W, X, "a.npz"),
        r"write save_run\(fun, \(w, x\), path\)",
    ),
    "a capture": (
        lambda: cg.diagnose(loss, read("capture")),
        r"write its arguments, capture\.args",
    ),
    "an array to select": (
        lambda: cg.check_grads(loss, (W, X), wrt=W),
        r"wrt: got float32\[\], expected a position",
    ),
    "a tree for a path": (lambda: cg.load_capture(GRADS), "path: got dict, expected the path"),
    "a step in a compiled function": (
        lambda: jax.jit(lambda x: RECORDER.record(x, x))(W),
        r"call this outside of jax\.jit and jax\.lax\.scan, after the step",
    ),
    "function of path and leaf": (lambda: where(lambda path, leaf: True), "gets the whole tree"),
}


@pytest.mark.parametrize("name", PLACES)
def test_what_is_in_the_wrong_place_is_answered_by_what_to_write(name):
    call, match = PLACES[name]
    with pytest.raises((TypeError, ValueError), match=match) as raised:
        call()
    assert "Array(" not in str(raised.value)


def test_the_pattern_for_all_but_the_head_selects_all_but_the_head():
    grads = {"params": {"head": {"kernel": array([9.0] * 3)}, "w": array([9.0] * 3)}}
    clipped = jax.jit(lambda grads: cg.clip_grads(grads, NORM, where="!head")[0])(grads)
    clipped = jax.device_get(clipped)
    assert clipped["params"]["head"]["kernel"][0] == 9 and clipped["params"]["w"][0] < 1


def test_the_first_line_of_clip_cotangent_says_to_use_the_result():
    assert "use the result" in (cg.clip_cotangent.__doc__ or "").splitlines()[0]


# ---- functions and their arguments ---------------------------------------------------------------

# What takes the arguments of a function as one tuple.
READERS = {
    "list_names": cg.list_names,
    "diagnose": cg.diagnose,
    "check_grads": cg.check_grads,
    "compare": lambda fun, *call: cg.compare(fun, fun, *call),
}
CALLERS = READERS | {"numerical_grad": cg.numerical_grad, "save_run": cg.save_run}


def of_batch(params, batch):
    return jnp.sum(params["w"] * batch["x"])


PARAMS, DATA = {"w": W}, {"x": X}


@pytest.mark.parametrize("name", [name for name in CALLERS if name != "numerical_grad"])
def test_a_dictionary_is_the_batch(name):
    with pytest.raises(TypeError, match=r"^args: got .* one by one.*; write \(params, batch\)$"):
        CALLERS[name](of_batch, PARAMS, DATA)


@pytest.mark.parametrize("name", READERS)
def test_a_dictionary_of_parameters_of_the_function_is_not_the_batch(name):
    with pytest.raises(TypeError, match=r"for one argument write \(w,\), .* needs \(w, x\)$"):
        READERS[name](loss, W, {"x": X})
    with pytest.raises(TypeError, match=r"kwargs: got 'x'.*; .* batch, write \(params, batch\)"):
        READERS[name](of_batch, (PARAMS,), DATA)


MISFITS = {
    "too few": ((W,), r"^args: got 1 argument, expected those of fun, \(w, x\); write \(w, x\)"),
    "too many": ((W, X, X), r"^args: got 3 arguments, .*; write \(w, \(x0, x1\)\)"),
}


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize("arguments", MISFITS)
def test_arguments_that_do_not_fit_the_function_are_said(name, arguments, tmp_path):
    args, match = MISFITS[arguments]
    more = (tmp_path / "run.npz",) if name == "save_run" else ()
    with pytest.raises(TypeError, match=match):
        CALLERS[name](loss, args, *more)


def test_a_wrapper_that_adds_an_argument_is_called_as_it_is():
    def outer(*args):
        return loss(*args, X)

    outer.__wrapped__ = loss
    assert cg.list_names(outer, (W,))


TAKERS = CALLERS | {
    "error_clip_by_name": lambda fun, *_: cg.error_clip_by_name(fun, {"h": SMALL}),
    "error_clip_everywhere": lambda fun, *_: cg.error_clip_everywhere(fun, SMALL),
    "value_and_grad_with_stats": lambda fun, *_: cg.value_and_grad_with_stats(fun),
    "with_value_stats": lambda fun, *_: cg.with_value_stats(fun),
    "train_step": lambda fun, *_: cg.train_step(fun, SGD),
    "clip_per_example": lambda fun, *_: cg.clip_per_example(fun, NORM),
    "per_example_norms": lambda fun, *_: cg.per_example_norms(fun),
}
NO_FUNCTIONS = {
    "a module of Linen": (nn.Dense(3), r"write lambda params, x: model\.apply\(params, x\)$"),
    "the class of one": (nn.Dense, r"got the class Dense.*; write an object of it, Dense\("),
    "the class of an NNX model": (nnx.Linear, r"got the class Linear.*Linear\(\.\.\.\)"),
    "the class of an Equinox model": (eqx.nn.Linear, r"got the class Linear.*Linear\(\.\.\.\)"),
}


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("kind", NO_FUNCTIONS)
def test_what_is_no_function_of_arrays_is_answered_by_one(name, kind):
    fun, match = NO_FUNCTIONS[kind]
    with pytest.raises(TypeError, match=match):
        TAKERS[name](fun, (X,), *["run.npz"] * (name == "save_run"))


@pytest.mark.parametrize("name", CALLERS)
def test_a_loss_that_was_called_is_answered_by_the_call(name):
    if name == "compare":
        with pytest.raises(TypeError, match="the function itself.*or for a value lambda: value"):
            cg.compare(GRADS, GRADS)
        return
    with pytest.raises(TypeError, match=rf"write {name}\(loss, \(params, x\)"):
        CALLERS[name](loss(W, X))
    with pytest.raises(TypeError, match=r"expected it in the tuple of arguments; write .*\(w, x\)"):
        CALLERS[name](loss, w=W, x=X)


@pytest.mark.parametrize("text", ["f32[3]", "float32[3, 4]", "bf16[]"])
def test_shapes_of_the_command_line_are_answered_by_arrays(text):
    with pytest.raises(TypeError, match=r"write \(jnp\.ones\(\([\d, ]*\)\),\), .* command line"):
        cg.check_grads(jnp.sin, text)


ARGUMENTS = {
    "one by one": ((W, X), r"^args: got the arguments of fun one by one.*; write \(w, x\)"),
    "in a list": (([W, X],), r"^args: got list, expected a tuple; write \(w, x\)"),
    "alone": ((W,), r"^args: got float32\[3\], expected a tuple; for one argument write \(w,\)"),
    "a path": (("run.npz",), "^args: got 'run.npz', expected the tuple of arguments, before a"),
    "an option": (((W, X), 2), "^kwargs: got 2, expected a mapping.*; write an option by its name"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_that_are_no_tuple_are_answered_by_the_tuple(reader, arguments):
    args, match = ARGUMENTS[arguments]
    with pytest.raises(TypeError, match=match):
        READERS[reader](loss, *args)


@pytest.mark.parametrize("reader", READERS)
def test_a_result_in_place_of_a_function_is_refused(reader):
    with pytest.raises(TypeError, match="^fun: got 3, expected a function"):
        READERS[reader](3, (W, X))
    with pytest.raises(TypeError, match=r"^fun: got float32\[\], expected a function; write the f"):
        READERS[reader](loss(W, X), (W, X))


MANY = {f"layer_{i}": array(np.ones((8, 8))) for i in range(61)}
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


@pytest.mark.parametrize(
    "arguments", [2, True, np.arange(3), array(np.arange(3), np.int32)], ids=str
)
def test_an_integer_to_differentiate_by_is_refused_with_what_to_write(arguments):
    run = cg.value_and_grad_with_stats(loss)
    with pytest.raises(TypeError, match=r"^args: got \w+.* at position 0, .*; write 1.0 for 1"):
        run(arguments, 2.0)


THRESHOLDS = [array(1.0), array(np.ones(2)), np.ones(2)]


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=str)
def test_a_rule_with_an_array_is_compiled_as_an_argument(threshold):
    makers = (cg.ClipByNorm, cg.ClipByValue, cg.ClipByGlobalNorm, cg.AutoNorm, cg.ClipByBlockRMS)
    for make in makers:
        rule = make(threshold)
        with pytest.raises(TypeError, match=r"^\w+: got an array .*; or write jax.jit\(lambda rul"):
            jax.jit(rule)({"a": array(np.ones((3, 2)))})
    rule = cg.ClipByNorm(jnp.array(1.0))
    clipped = jax.jit(lambda rule, grads: rule(grads))(rule, {"a": array([3.0, 4.0])})
    np.testing.assert_allclose(clipped["a"], [0.6, 0.8], rtol=1e-6)


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


@first_row
@pytest.mark.parametrize("name", BATCH_LOSSES)
def test_a_loss_of_a_batch_says_how_to_write_that_of_one_example(name):
    w, batch = array(np.ones((3, 1))), (array(np.ones((4, 3))), array(np.ones(4)))
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
        cg.clip_per_example(broken, cg.ClipByGlobalNorm(1.0))(W, array(np.ones((4, 3))))


# ---- what is called, watched or logged that has nothing to say ----------------------------------

CLIPS = {
    "clip_by_norm": lambda: cg.clip_by_norm(1.0),
    "clip_by_global_norm": lambda: cg.clip_by_global_norm(1.0),
    "clip_by_value": lambda: cg.clip_by_value(1.0),
    "clip_by_block_rms": lambda: cg.clip_by_block_rms(1.0),
    "adaptive_grad_clip": lambda: cg.adaptive_grad_clip(0.1),
    "gradient_clip": lambda: cg.gradient_clip(cg.ClipByNorm(1.0)),
}


@pytest.mark.parametrize("clip", CLIPS)
def test_a_transformation_that_is_called_says_what_clips_gradients_once(clip):
    for more in ((), (W,)):
        with pytest.raises(TypeError, match=r"got a call .* write clip_grads\(grads, ClipByNorm"):
            CLIPS[clip]()({"w": W}, *more)
    with pytest.raises(TypeError, match=r"rule: got an optax.GradientTransformation"):
        cg.clip_cotangent(X, CLIPS[clip]())


def test_a_gradient_of_values_without_has_aux_is_refused_by_jax_in_the_words_of_the_docstring():
    """JAX speaks before anything of this library can: what it says must lead to `has_aux=True`."""
    said = "Gradient only defined for scalar-output functions"
    watched = cg.with_value_stats(loss)
    for gradient in (jax.grad, jax.value_and_grad):
        with pytest.raises(TypeError, match=said):
            gradient(watched)(W, X)
        assert gradient(watched, has_aux=True)(W, X)
    text = " ".join(inspect.getdoc(cg.with_value_stats).split())
    assert f'write ``has_aux=True``, as above; without it JAX raises "{said}"' in text
    assert search(said)[0].page == "names"


@pytest.mark.parametrize("names", ["w", "w b", "dense/w dense/b", "0 1"])
def test_scalars_of_parameters_or_gradients_says_what_to_write(names):
    arrays = {
        name: W if name.endswith(("b", "1")) else array(np.ones((3, 2))) for name in names.split()
    }
    for layers in (False, True):
        with pytest.raises(ValueError, match=r"global_norm\(grads\).*watch_updates\(optimizer\)"):
            cg.scalars(arrays, layers=layers)
    assert "loss" in cg.scalars({"loss": 1.0, **arrays})
