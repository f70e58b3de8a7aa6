"""Which leaves a position, a name, a path or a pattern means."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._arrays import leaf_names, leaf_paths, parameter_names
from clipgrad._check.selection import select
from tests.helpers import array

pytestmark = pytest.mark.slow

PATHS = ["params|0/w", "params/w|0/w", "params/b|0/b", "x|1", "10"]
NAMED = ["params/layer1/w|0/layer1/w", "params/layer10/w|0/layer10/w", "x|1"]


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        (0, {0, 1}),
        ("params", {0, 1}),
        ("0", {0, 1}),
        ("params/layer1", {0}),
        ("0/layer1/w", {0}),
        ("args[0]['layer1']['w']", {0}),
        ("[0]['layer10']", {1}),
        ("params/layer*/w", {0, 1}),
        (re.compile(r"params/layer\d+/w"), {0, 1}),
        (re.compile("w$"), {0, 1}),
        ("layer1", {0}),
        ("w", {0, 1}),
        ("layer*", {0, 1}),
        ("x", {2}),
        ("!w", {2}),
        ("!params", {2}),
        (["params", "!layer1"], {1}),
        (["!params", "params/layer1"], {0, 2}),
        (["!args[0]['layer1']"], {1, 2}),
        ([0, "!layer10"], {0}),
        (1, {2}),
        (["x", "params/layer1"], {0, 2}),
        ([1, 0], {0, 1, 2}),
    ],
)
def test_an_expression_means_leaves_at_or_below_it_or_a_pattern(selector, chosen):
    assert select(selector, NAMED, "wrt") == chosen


@pytest.mark.parametrize("selector", ["layer2", "params/layer", 2, "kernel", "z", "!z", ("x", "z")])
def test_an_expression_that_means_nothing_lists_what_there_is(selector):
    with pytest.raises(ValueError, match=r"there are \[.*'params/layer1/w or 0/layer1/w'"):
        select(selector, NAMED, "wrt")


@pytest.mark.parametrize(
    "position",
    [np.int64(1), np.array(1), array(1, np.int32), (np.uint8(1),), np.array([1]), {1}],
    ids=repr,
)
def test_a_position_may_be_an_integer_of_any_kind(position):
    assert select(position, ["0", "1", "2"], "wrt") == {1}


@pytest.mark.parametrize("text", ["(", r"params/layer\d+/w", "^params", "x|w"])
def test_a_regular_expression_as_text_is_refused(text):
    with pytest.raises(
        ValueError, match=r"^wrt: got '.*', expected a pattern.* write re.compile\("
    ):
        select(text, NAMED, "wrt")


@pytest.mark.parametrize("selector", [[None], [1.5], [True], [("a",)]])
def test_an_expression_of_another_kind_is_refused(selector):
    expected = r"^wrt: got .*, expected a position \(int\), a name or a pattern \(str\)$"
    with pytest.raises(TypeError, match=expected):
        select(selector, NAMED, "wrt")


def test_the_error_names_the_parameter_and_stays_short():
    with pytest.raises(ValueError, match="^output: got 'z', expected one that") as caught:
        select("z", [f"leaf{k}" for k in range(1000)], "output")
    assert "leaf9" in str(caught.value) and "leaf10" not in str(caught.value)


def test_leaves_are_named_as_python_writes_them():
    tree = ({"w": jnp.ones(1), "b": [jnp.ones(1)]}, jnp.ones(1))
    assert leaf_names("args", tree) == ["args[0]['b'][0]", "args[0]['w']", "args[1]"]
    assert leaf_paths(tree) == ["0/b/0", "0/w", "1"]


def test_parameters_have_names_as_far_as_they_are_positional():
    assert parameter_names(lambda a, b, *rest, c=1: a, 4) == ["a", "b"]
    assert parameter_names(lambda a, b: a, 1) == ["a"]
    assert parameter_names(print, 2) == []
    assert parameter_names(3, 1) == []


@pytest.mark.parametrize(
    ("output", "ok"),
    [
        ("y", True),
        ("aux", False),
        ("loss/aux", False),
        ("l*/*x", False),
        ("!aux", True),
        ("!y", False),
        (0, True),
    ],
)
def test_output_selects_parts_of_a_tree_likewise(output, ok):
    wrong = jax.custom_vjp(lambda x: x * x)
    wrong.defvjp(lambda x: (x * x, x), lambda x, g: (g * x,))
    function = lambda x: {"loss": {"aux": wrong(x)}, "y": x}  # noqa: E731
    if output == 0:
        function = lambda x: (x, wrong(x))  # noqa: E731
    args = (jnp.asarray([2.0, 3.0]),)
    assert cg.check_grads(function, args, output=output, raise_on_failure=False).ok == ok


def test_a_leaf_is_selected_by_the_name_that_the_report_gives_it():
    Point = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("Point", [("at", dict), ("time", object)])
    )
    args = (Point({"x": jnp.ones(2)}, jnp.ones(3)), jnp.ones(4))
    names = leaf_names("args", args)
    assert names == ["args[0].at['x']", "args[0].time", "args[1]"]
    for k, name in enumerate(names):
        assert select(name, leaf_paths(args), "wrt") == {k}
    assert select("args[0]", leaf_paths(args), "wrt") == {0, 1}
