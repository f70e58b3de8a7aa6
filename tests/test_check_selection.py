"""Which leaves a position, a name, a path or a pattern means."""

import jax.numpy as jnp
import pytest

from clipgrad._check.selection import leaf_names, parameter_names, select, simple_paths

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
        (r"params/layer\d+/w", {0, 1}),
        (r".*w", {0, 1}),
        ("layer1", {0}),
        ("w", {0, 1}),
        ("layer", {0, 1}),
        ("x", {2}),
        (1, {2}),
        (["x", "params/layer1"], {0, 2}),
        ([1, 0], {0, 1, 2}),
    ],
)
def test_an_expression_means_leaves_at_or_below_it_or_a_pattern(selector, chosen):
    assert select(selector, NAMED, "wrt") == chosen


@pytest.mark.parametrize("selector", ["layer2", "params/layer$", 2, "kernel", "z"])
def test_an_expression_that_means_nothing_lists_what_there_is(selector):
    with pytest.raises(ValueError, match=r"there are \[.*'params/layer1/w or 0/layer1/w'"):
        select(selector, NAMED, "wrt")


def test_an_expression_that_does_not_compile_is_refused():
    with pytest.raises(ValueError, match=r"wrt: got '\(', expected a path or a regular expression"):
        select("(", NAMED, "wrt")


@pytest.mark.parametrize("selector", [[None], [1.5], [True], [("a",)]])
def test_an_expression_of_another_kind_is_refused(selector):
    with pytest.raises(TypeError, match=r"expected a position \(int\), a name or a path \(str\)"):
        select(selector, NAMED, "wrt")


def test_the_error_names_the_parameter_and_stays_short():
    with pytest.raises(ValueError, match="^output='z' means no") as caught:
        select("z", [f"leaf{k}" for k in range(1000)], "output")
    assert "leaf19" in str(caught.value) and "leaf20" not in str(caught.value)


def test_leaves_are_named_as_python_writes_them():
    tree = ({"w": jnp.ones(1), "b": [jnp.ones(1)]}, jnp.ones(1))
    assert leaf_names(tree, "args") == ["args[0]['b'][0]", "args[0]['w']", "args[1]"]
    assert simple_paths(tree) == ["0/b/0", "0/w", "1"]


def test_parameters_have_names_as_far_as_they_are_positional():
    assert parameter_names(lambda a, b, *rest, c=1: a, 4) == ["a", "b"]
    assert parameter_names(lambda a, b: a, 1) == ["a"]
    assert parameter_names(print, 2) == []
    assert parameter_names(3, 1) == []
