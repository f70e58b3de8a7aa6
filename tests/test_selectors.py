"""The one language for leaves of trees, and what is said of an expression that selects none."""

import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._arrays.selectors import nearest, selects, unboxed

PATHS = [
    "params/Dense_0/kernel",
    "params/Dense_0/bias",
    "params/attention/out_kernel",
    "params/attention/query/kernel",
    "params/layers/1/w",
    "params/layers/10/w",
]


def selected(expression, paths=PATHS):
    flags = selects(expression, paths, "where")
    return {path for path, flag in zip(paths, flags, strict=True) if flag}


@pytest.mark.parametrize(
    "expression, expected",
    [
        ("kernel", {0, 3}),
        ("params", {0, 1, 2, 3, 4, 5}),
        ("attention", {2, 3}),
        ("query/kernel", {3}),
        ("params/layers/1", {4}),
        ("1", {4}),
        (PATHS[2], {2}),
    ],
    ids=str,
)
def test_whole_segments_select_what_is_at_or_below_them(expression, expected):
    assert selected(expression) == {PATHS[i] for i in expected}


@pytest.mark.parametrize(
    "expression, expected",
    [
        ("kern", {0, 2, 3}),
        ("kernel$", {0, 2, 3}),
        ("^params/layers", {4, 5}),
        ("^layers", set()),
        (r"layers/\d/", {4}),
        ("bias|w$", {1, 4, 5}),
        (".*", {0, 1, 2, 3, 4, 5}),
        ("Kernel", set()),
    ],
    ids=str,
)
def test_any_other_expression_is_searched_in_the_paths(expression, expected):
    assert selected(expression) == {PATHS[i] for i in expected}


def test_whole_segments_come_first():
    """A segment that is there decides, though a search would find more."""
    assert selected("w", ["w", "layers/w", "shadow"]) == {"w", "layers/w"}
    assert selected("w", ["layers/weight", "shadow"]) == {"layers/weight", "shadow"}
    assert selected("a.b", ["a.b", "axb"]) == {"a.b"}
    assert selected("a.b", ["axb"]) == {"axb"}


def test_variables_of_flax_are_selected_with_and_without_their_box():
    paths = ["dense/kernel/value", "dense/bias/value", "value"]
    assert selected("kernel", paths) == selected("kernel$", paths) == {paths[0]}
    assert selected("dense/kernel/value", paths) == {paths[0]}
    assert selected("el/value$", paths) == {paths[0]}
    assert [unboxed(path) for path in paths] == ["dense/kernel", "dense/bias", "value"]


def test_a_tree_that_is_one_leaf_has_an_empty_path():
    assert selected("", [""]) == selected(".*", [""]) == {""}
    assert selected("w", [""]) == set()


def test_no_paths_are_no_error_and_the_expression_is_checked_all_the_same():
    assert selects("kernel", [], "where") == [] and selects("*", ["*"], "where") == [True]
    with pytest.raises(ValueError, match=r"^axis: got '\(', expected a path or a regular expr"):
        selects("(", [], "axis")


def test_the_nearest_words_come_first():
    words = [f"layer_{i}" for i in range(20)] + ["kernel", "out_kernel"]
    text = nearest("kernle", words)
    assert text.startswith("the nearest are ['kernel', 'out_kernel', ") and text.count("'") == 20
    assert nearest("kernle", words, most=1) == "the nearest are ['kernel']"


def test_few_words_are_all_there_are_and_each_is_said_once():
    assert nearest("b", ["a", "b", "a"]) == "there are ['b', 'a']"
    assert nearest("b", []) == "there are none"
    assert nearest("w", [""]) == "there are ['(the whole tree is one leaf)']"


# Each place that takes an expression or a name.

TREE = {f"layer_{i}": jnp.ones((2, 2)) for i in range(12)} | {"kernel": jnp.ones((2, 2))}
BY_NORM, WRONG = cg.ClipByGlobalNorm(1.0), "kernle"


def tagged(tree):
    return sum(jnp.sum(checkpoint_name(leaf, name)) for name, leaf in tree.items())


def loss(params, example):
    return example * tagged(params)


def init_of(tx):
    return tx.init(TREE)


NOTHING = {
    "where of clip_grads": ("where", lambda: cg.clip_grads(TREE, BY_NORM, where=WRONG)),
    "where of init": ("where", lambda: init_of(cg.clip_by_value(1.0, where=WRONG))),
    "where of skip_spikes": ("where", lambda: init_of(cg.skip_spikes(optax.sgd(1), where=WRONG))),
    "where of clip_per_example": (
        "where",
        lambda: cg.clip_per_example(loss, BY_NORM, where=WRONG)(TREE, jnp.ones(2)),
    ),
    "names of error_clip_by_name": (
        "error_clip_by_name",
        lambda: cg.error_clip_by_name(tagged, {WRONG: BY_NORM})(TREE),
    ),
    "watch of value_and_grad_with_stats": (
        "value_and_grad_with_stats",
        lambda: cg.value_and_grad_with_stats(tagged, watch=[WRONG])(TREE),
    ),
}


@pytest.mark.parametrize("name, run", NOTHING.values(), ids=NOTHING)
def test_what_selects_nothing_is_refused_with_the_nearest_that_there_is(name, run):
    with pytest.raises(ValueError, match=rf"^{name}: got 'kernle'.*the nearest are \['kernel', "):
        run()


def test_a_mask_that_selects_nothing_lists_what_there_is():
    mask = dict.fromkeys(TREE, False)
    with pytest.raises(ValueError, match="^where: got a mask, expected .*the nearest are"):
        cg.clip_grads(TREE, BY_NORM, where=mask)
