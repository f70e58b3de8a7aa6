"""Each argument of each public clip function changes its result, in a call of its own."""

import functools
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._clip import RULES
from tests.helpers import HOMES, public

A, B = np.float32([3, 4]), np.float32([[6, 8], [0.3, 0.4]])
GRADS = {"a": A, "b": B}
WITH_NAN = {"a": np.float32([3, np.nan]), "b": B}
PARAMS = {"a": np.float32([1, 1]), "b": np.float32([[1, 2], [3, 4]])}
NORMS = np.float32([2, 3, 2.5, 1.5, 40, 2, 3, 2.2, 2.8, 30, 2.6, 2.4])
RULE, OTHER = cg.ClipByGlobalNorm(1.0), cg.ClipByNorm(1.0)


def updated(make, grads=GRADS, **arguments):
    """The updates and the state of a transformation; for an axis name one of several devices."""
    tx = make(**arguments)

    def run(grads):
        return tx.update(grads, tx.init(PARAMS), PARAMS)

    return on_devices(run, grads)


def on_devices(run, grads):
    return jax.jit(jax.vmap(run, axis_name="x"))(
        jax.tree.map(lambda g: np.stack([g, 2 * g]), grads)
    )


def ruled(make, grads=GRADS, **arguments):
    rule = make(**arguments)
    return on_devices(lambda g: rule(g, PARAMS), grads)


def thresholds(make, **arguments):
    """The thresholds of a history of norms of two leaves."""
    threshold = make(**arguments)
    norms = jnp.stack([NORMS, np.roll(NORMS, 1)], 1)
    step = lambda state, norms: threshold.update(state, norms)[::-1]  # noqa: E731
    return jax.jit(lambda n: jax.lax.scan(step, threshold.init(n[0]), n)[1])(norms)


def gradients(wrapped, *args):
    return jax.jit(jax.grad(lambda *args: jnp.sum(wrapped(*args)), tuple(range(len(args)))))(*args)


def named(x):
    with jax.named_scope("net/h"):
        h = jnp.sin(x)
    return jnp.sum(h * h * h)


def other(x):
    with jax.named_scope("net/h"):
        h = jnp.cos(x)
    return jnp.sum(h * h * h)


def scale(w, x):
    return {"y": 3 * w * x, "z": w + x}


def cotangents(make, x=A, probe=False, **arguments):
    """The cotangent of the value, and that of the probe."""
    probe = cg.types.ClipStats.zero() if probe else None
    clip = lambda x, probe: jnp.sum(make(x, probe=probe, **arguments) ** 2)  # noqa: E731
    return clip(x, None), jax.jit(jax.grad(clip, (0, 1)))(x, probe)


def decorated(make, **arguments):
    def total(w, x):
        found = make(**arguments)(scale)(w, x)
        return jnp.sum(found["y"]) + 5 * jnp.sum(found["z"])

    return jax.jit(jax.grad(total, (0, 1)))(A, 2 * A)


def transformed(make, fun=named, **arguments):
    return gradients(make(fun, **arguments), A)


def suggested(make, **arguments):
    return make(**arguments)


def compared(make, grads=GRADS, **arguments):
    return jax.jit(functools.partial(make, **arguments))(grads)


def with_rule(make, grads=GRADS, **arguments):
    return on_devices(lambda grads: make(grads, **arguments), grads)


def measured(make, tree=GRADS, **arguments):
    return on_devices(lambda tree: make(tree, **arguments), tree)


OF_CLIPS = {
    "where": dict(where="a"),
    "nonfinite": dict(nonfinite="zero", grads=WITH_NAN),
    "stats": dict(stats=True),
}
SPREAD = jax.P("x")
# For each function how it is called, with which arguments, and for each argument another value; a
# row with several is beside a row with all but the first.
ROWS = {
    "clip_by_value": (updated, dict(max=2.0), dict(max=1.0),
                      dict(min=-0.5, grads={"a": -A, "b": B}), dict(nan=0.0, grads=WITH_NAN),
                      OF_CLIPS),
    "clip_by_norm": (updated, dict(max_norm=2.0), dict(max_norm=1.0), dict(ord=1), dict(axis=-1),
                     dict(axis_name=SPREAD), OF_CLIPS),
    "clip_by_global_norm": (updated, dict(max_norm=2.0), dict(max_norm=1.0), dict(ord=jnp.inf),
                            dict(axis_name=SPREAD), OF_CLIPS),
    "clip_by_block_rms": (updated, dict(threshold=2.0), dict(threshold=1.0), dict(axis_name=SPREAD),
                          OF_CLIPS),
    "adaptive_grad_clip": (updated, dict(clipping=0.1), dict(clipping=0.2), dict(eps=9.0),
                           dict(axis=-1), dict(axis_name=SPREAD), OF_CLIPS),
    "gradient_clip": (updated, dict(rule=RULE), dict(rule=OTHER), OF_CLIPS),
    "clip_grads": (with_rule, dict(rule=RULE), dict(grads={"a": B, "b": A}), dict(rule=OTHER),
                   dict(params=jax.tree.map(lambda w: 2 * w, PARAMS), rule=cg.AdaptiveClip(0.1)),
                   dict(where="a"), dict(nonfinite="zero", grads=WITH_NAN)),
    "global_norm": (measured, {}, dict(tree={"a": A}), dict(ord=1), dict(axis_name=SPREAD)),
    "ClipByValue": (ruled, dict(max=2.0), dict(max=1.0), dict(min=-0.5, grads={"a": -A}),
                    dict(nan=0.0, grads=WITH_NAN)),
    "ClipByNorm": (ruled, dict(max_norm=2.0), dict(max_norm=1.0), dict(ord=1), dict(axis=-1),
                   dict(axis_name=SPREAD)),
    "ClipByGlobalNorm": (ruled, dict(max_norm=2.0), dict(max_norm=1.0), dict(ord=3),
                         dict(axis_name=SPREAD)),
    "ClipByBlockRMS": (ruled, dict(threshold=2.0), dict(threshold=1.0), dict(axis_name=SPREAD)),
    "AdaptiveClip": (ruled, dict(clipping=0.1), dict(clipping=0.2), dict(eps=9.0), dict(axis=-1),
                     dict(axis_name=SPREAD)),
    "AutoNorm": (ruled, {}, dict(max_norm=2.0), dict(gamma=1.0), dict(axis_name=SPREAD)),
    "PercentileThreshold": (thresholds, dict(percentile=90.0, window=8), dict(percentile=50.0),
                            dict(window=4), dict(feed="clipped")),
    "ZScoreThreshold": (thresholds, dict(warmup=4), dict(z=1.0), dict(decay=0.5), dict(warmup=2),
                        dict(eps=1.0), dict(max_norm=2.0), dict(feed="raw")),
    "EMAThreshold": (thresholds, dict(warmup=3), dict(decay=0.5), dict(relative=2.0),
                     dict(absolute=2.0), dict(warmup=5), dict(feed="raw")),
    "HistoryThreshold": (thresholds, dict(window=4), dict(window=8), dict(sigma=1.0),
                         dict(min_history=1), dict(feed="clipped")),
    "clip_cotangent": (cotangents, dict(rule=RULE), dict(x=2 * A), dict(rule=cg.ClipByValue(0.1)),
                       dict(probe=True)),
    "error_clip": (decorated, {}, dict(inputs=RULE), dict(outputs=RULE)),
    "error_clip_by_name": (transformed, dict(rules={"net/h": RULE}), dict(fun=other),
                           dict(rules={"net/h": cg.ClipByValue(0.1)}),
                           dict(prefix="net/", rules={"h": RULE})),
    "error_clip_everywhere": (transformed, dict(rule=RULE), dict(fun=other), dict(rule=OTHER)),
    "apply_gradient_clipping": (
        compared, dict(clipping_type="norm", clipping_threshold=1.0), dict(grads={"a": A}),
        dict(clipping_type="value"), dict(clipping_threshold=2.0),
        dict(params=jax.tree.map(lambda w: 2 * w, PARAMS), clipping_type="adaptive"),
        dict(axis=-1, params=PARAMS, clipping_type="adaptive"),
    ),
    "gradient_clipping": (updated, dict(clipping_type="norm", clipping_threshold=1.0),
                          dict(clipping_type="value"), dict(clipping_threshold=2.0),
                          dict(axis=-1, clipping_type="adaptive")),
    "suggest_threshold": (suggested, dict(norms=NORMS), dict(norms=2 * NORMS),
                          dict(percentile=10.0)),
}  # fmt: skip
# What a row needs in the call without its first argument, instead of leaving it out.
WITHOUT = {
    ("clip_grads", "params"): dict(params=PARAMS),
    ("error_clip_by_name", "prefix"): dict(rules={"net/h": None}),
    ("apply_gradient_clipping", "params"): dict(params=PARAMS),
    # One norm of the tree, and one of each value.
    ("error_clip_everywhere", "rule"): dict(rule=cg.ClipByValue(0.1)),
}
# Functions of a clip whose arguments are crossed elsewhere.
ELSEWHERE = {
    "resume": "test_skip_spikes", "skip_spikes": "test_skip_spikes", "list_names": "test_names",
    "value_and_grad_with_stats": "test_watch", "watch_updates": "test_watch_updates",
}  # fmt: skip


def calls():
    for name, (_, _, *rows) in ROWS.items():
        for row in rows:
            each = [row] if row is not OF_CLIPS else row.values()
            yield from ((name, next(iter(call)), call) for call in each)


CALLS = list(calls())


@pytest.mark.parametrize("name", ROWS)
def test_each_argument_has_a_row(name):
    function = public(name)
    arguments = set(inspect.signature(function).parameters) - {"args", "kwargs"}
    assert {argument for own, argument, _ in CALLS if own == name} == arguments


def test_each_public_function_of_a_clip_has_rows():
    rooms = ("clipgrad._clip.", "clipgrad._error_clip.", "clipgrad._arrays.")
    ours = {name for name in HOMES if getattr(public(name), "__module__", "").startswith(rooms)}
    kinds = {"ClipStats", "GradientClipState", "SkipSpikesState", "SuggestedThreshold"}
    kinds |= {"ClipRule", "AdaptiveThreshold", "WatchUpdatesState", "UpdateNorms"}
    assert ours - kinds - set(ELSEWHERE) - {"ErrorClipByValue"} == set(ROWS) & ours
    assert cg.ErrorClipByValue is cg.ClipByValue


def equal(a, b):
    a, b = (jax.tree.flatten(tree) for tree in (a, b))
    if a[1] != b[1]:
        return False
    pairs = [tuple(map(np.asarray, pair)) for pair in zip(a[0], b[0], strict=True)]
    return all(x.shape == y.shape and np.array_equal(x, y, equal_nan=True) for x, y in pairs)


@functools.cache
def without(name, argument):
    call, defaults, *_ = ROWS[name]
    row = next(row for own, first, row in CALLS if (own, first) == (name, argument))
    others = {key: value for key, value in row.items() if key != argument}
    others |= WITHOUT.get((name, argument), {})
    return call(public(name), **{**defaults, **others})


@pytest.mark.parametrize(("name", "argument", "row"), CALLS, ids=lambda x: str(x)[:24])
def test_each_argument_changes_the_result(name, argument, row):
    call, defaults, *_ = ROWS[name]
    assert not equal(without(name, argument), call(public(name), **{**defaults, **row}))


# The functions of the classes of rules; the others are written with `gradient_clip`.
FUNCTIONS = {
    cg.ClipByValue: cg.clip_by_value, cg.ClipByNorm: cg.clip_by_norm,
    cg.ClipByGlobalNorm: cg.clip_by_global_norm, cg.ClipByBlockRMS: cg.clip_by_block_rms,
    cg.AdaptiveClip: cg.adaptive_grad_clip,
}  # fmt: skip
WITHOUT_FUNCTION = {cg.AutoNorm}


def arguments(function):
    return dict(inspect.signature(function).parameters)


def test_each_rule_has_a_function_or_is_one_of_those_without():
    assert set(RULES) == {*FUNCTIONS, *WITHOUT_FUNCTION}


@pytest.mark.parametrize("rule", FUNCTIONS, ids=lambda rule: rule.__name__)
def test_a_function_has_the_arguments_of_its_class_and_of_gradient_clip(rule):
    written, options = arguments(FUNCTIONS[rule]), arguments(cg.gradient_clip)
    options.pop("rule")
    # In the order of the class, so that positions mean the same.
    assert [*written] == [*arguments(rule), *options]
    for name, parameter in (arguments(rule) | options).items():
        # optax.inject_hyperparams would trace a number, which an order can't be.
        default = None if name == "ord" else parameter.default
        assert written[name].default == default, name
        assert written[name].kind == parameter.kind or name in ("ord", "axis", "axis_name")


def test_what_clips_once_has_the_options_of_gradient_clip_but_statistics():
    once, clip = arguments(cg.clip_grads), arguments(cg.gradient_clip)
    assert set(clip) - set(once) == {"stats"}
    assert set(once) - set(clip) == {"grads", "params"}
    for name in ("where", "nonfinite"):
        assert once[name].default == clip[name].default and once[name].kind == clip[name].kind


def test_the_page_says_who_writes_which_spelling_with_which_arguments():
    page = pathlib.Path(__file__).parents[1] / "docs" / "rules.md"
    table = page.read_text().split("| spelling |")[1].split("\n\n")[0].splitlines()[2:]
    written = [re.findall(r"`(\w+)`", row.rsplit("|", 2)[1]) for row in table]
    options = [name for name in arguments(cg.gradient_clip) if name != "rule"]
    assert written == [[], options, [*arguments(cg.gradient_clip)], [*arguments(cg.clip_grads)]]
