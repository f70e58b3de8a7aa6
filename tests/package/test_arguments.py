"""Each argument of each public function changes its result, in a call of its own."""

import functools
import inspect
import pathlib
import re
from itertools import starmap

import jax
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._clip import RULES
from tests.helpers import HOMES, public
from tests.registry import ROWS, WITHOUT
from tests.registry.clips import OF_CLIPS


def calls():
    for name, (_, _, *rows) in ROWS.items():
        for row in rows:
            each = [row] if row is not OF_CLIPS else row.values()
            yield from ((name, next(iter(call)), call) for call in each)


CALLS = list(calls())
# What compiles more than .3 CPU seconds; the tests of their rooms call these by default.
COSTLY = {
    "check_grads", "numerical_grad", "compare", "save_run",
    "FlightRecorder", "FlightRecorder.record", "load_capture", "Capture.restore",
}  # fmt: skip


# Arguments that a test of their own shows.
ELSEWHERE = {("FlightRecorder", "keep"): "test_no_more_batches_are_kept_than_said"}
# Classes that users read and do not make, and protocols.
READ = {
    "AdaptiveThreshold", "Capture", "ClipRule", "ClipStats", "GradCheckError", "GradCheckReport",
    "GradientClipState", "GradientComparison", "GradientDiagnosis", "HaltedError",
    "SkipSpikesState", "SuggestedThreshold", "Threshold", "TrainState", "TrainStep", "UpdateNorms",
    "ValueStats", "WatchUpdatesState",
}  # fmt: skip
VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def function(name):
    """A public function, or the method of a public class: `"Capture.restore"`."""
    home, *method = name.split(".")
    return functools.reduce(getattr, method, public(home))


@pytest.mark.parametrize("name", ROWS)
def test_each_argument_has_a_row(name):
    parameters = inspect.signature(function(name)).parameters.values()
    arguments = {p.name for p in parameters if p.kind not in VARIADIC} - {"self"}
    rows = {argument for row, argument, _ in CALLS if row == name}
    assert rows | {argument for row, argument in ELSEWHERE if row == name} >= arguments


def test_each_public_function_has_rows():
    assert {name for name in HOMES if callable(public(name))} - READ - {"ErrorClipByValue"} == {
        name for name in ROWS if name.isidentifier()
    }
    assert cg.ErrorClipByValue is cg.ClipByValue


def equal(a, b):
    a, b = (jax.tree.flatten(tree) for tree in (a, b))
    return a[1] == b[1] and all(map(same, a[0], b[0]))


def same(x, y):
    if isinstance(x, str) or isinstance(y, str):
        return x == y
    x, y = np.asarray(data(x)), np.asarray(data(y))
    return x.shape == y.shape and bool(np.all((x == y) | ((x != x) & (y != y))))


def data(x):
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def called(name, changes):
    call, arguments, *_ = ROWS[name]
    arguments = arguments | changes
    return arguments.pop("call", call)(function(name), **arguments)


@functools.cache
def without(name, argument):
    """The result of the call without the argument, or the message that it is needed."""
    change = next(change for row, first, change in CALLS if (row, first) == (name, argument))
    others = {key: value for key, value in change.items() if key != argument}
    others |= WITHOUT.get((name, argument), {})
    return result_or_message(name, others) if others else plain(name)


def result_or_message(name, changes):
    try:
        return called(name, changes)
    except (TypeError, ValueError, UserWarning) as error:
        return str(error)


@functools.cache
def plain(name):
    """The call that most arguments of a function are left out of, once for all of them."""
    return result_or_message(name, {})


def marked(name, argument, change):
    return pytest.param(name, argument, change, marks=[pytest.mark.slow] * (name in COSTLY))


@pytest.mark.parametrize(
    ("name", "argument", "change"), list(starmap(marked, CALLS)), ids=lambda x: str(x)[:24]
)
def test_each_argument_changes_the_result(name, argument, change):
    assert not equal(without(name, argument), called(name, change))


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
    page = pathlib.Path(__file__).parents[2] / "docs" / "rules.md"
    table = page.read_text().split("| spelling |")[1].split("\n\n")[0].splitlines()[2:]
    written = [re.findall(r"`(\w+)`", row.rsplit("|", 2)[1]) for row in table]
    options = [name for name in arguments(cg.gradient_clip) if name != "rule"]
    assert written == [[], options, [*arguments(cg.gradient_clip)], [*arguments(cg.clip_grads)]]
