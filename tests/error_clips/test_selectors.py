"""The one language of patterns, and what is said of one that selects nothing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._arrays.patterns import decided, matches
from clipgrad._arrays.selectors import leaves_selected, nearest, unboxed
from tests.helpers import array
from tests.rows import each_value

PATHS = [
    "params/Dense_0/kernel",
    "params/Dense_0/bias",
    "params/attention/out_kernel",
    "params/attention/query/kernel",
    "params/layers/1/w",
    "params/layers/10/w",
]
ALL = set(range(len(PATHS)))


def selected(patterns, paths=PATHS):
    flags = leaves_selected(patterns, [(path, unboxed(path)) for path in paths], paths, "where")
    return {i for i, flag in enumerate(flags) if flag}


SELECTED = {
    "kernel": {0, 3},
    "params": ALL,
    "attention": {2, 3},
    "query/kernel": {3},
    "params/layers/1": {4},
    "1": {4},
    PATHS[2]: {2},
    "Dense_*": {0, 1},
    "*kernel": {0, 2, 3},
    "layers/*/w": {4, 5},
    "layers/1*": {4, 5},
    "params/**/kernel": {0, 3},
    "**/kernel": {0, 3},
    "attention/**": {2, 3},
    "params/*/kernel": {0},
    "*": ALL,
    "**": ALL,
    "/attention/": {2, 3},
    "!attention": {0, 1, 4, 5},
    "!params/layers": {0, 1, 2, 3},
    "!**/kernel": {1, 2, 4, 5},
    "!*kernel*": {1, 4, 5},
    ("kernel", "bias"): {0, 1, 3},
    ("params", "!attention"): {0, 1, 4, 5},
    ("!attention", "query"): {0, 1, 3, 4, 5},
    ("!attention", "!layers/10"): {0, 1, 4},
    ("attention", "!attention", "attention/query"): {3},
    ("layers", "!layers/1", "layers/*"): {4, 5},
    re.compile("kern"): {0, 2, 3},
    re.compile("kernel$"): {0, 2, 3},
    re.compile("^params/layers"): {4, 5},
    re.compile(r"layers/\d/"): {4},
    re.compile("^(?!.*attention)"): {0, 1, 4, 5},
    ("!attention", re.compile("query")): {0, 1, 3, 4, 5},
}  # fmt: skip


@pytest.mark.parametrize("patterns", SELECTED, ids=str)
def test_patterns_select_what_is_at_or_below_them(patterns):
    assert selected(patterns) == SELECTED[patterns]
    if isinstance(patterns, tuple):
        assert selected(list(patterns)) == SELECTED[patterns]


@pytest.mark.parametrize("pattern", ["kern", "Kernel", "layers/w", "params/kernel", "y", "*/w/*"])
@pytest.mark.parametrize("around", ["{}", "!{}", "kernel {}", "{} kernel", "!kernel !{}"])
def test_a_pattern_that_matches_nothing_is_refused_wherever_it_stands(pattern, around):
    patterns = tuple(around.format(pattern).split())
    with pytest.raises(ValueError, match=rf"where: got '!?{re.escape(pattern)}'.* there are \["):
        selected(patterns[0] if len(patterns) == 1 else patterns)


LOOKS_LIKE = {
    "^params": "", "kernel$": "", "(a|b)": "", "[0-3]": "", "layers/{1}": "", "k+": "", "w?": "",
    r"\d": "", "bias|w": "", "layers/.+": "", "^(?!head)": '"!head"', "^(?!.*head)": '"!head"',
    "^(?!.*head).*$": '"!head"', "(?!bias)": '"!bias"', "^(?!.*params/head/)": '"!params/head"',
}  # fmt: skip


@pytest.mark.parametrize("text", LOOKS_LIKE)
def test_a_regular_expression_as_text_is_refused_with_what_to_write(text):
    instead = f"write {LOOKS_LIKE[text]}.* or " if LOOKS_LIKE[text] else "write "
    expected = (
        f"^where: got {re.escape(repr(text))}, .*{instead}{re.escape(f're.compile({text!r})')}"
    )
    for patterns in (text, ("kernel", text), f"!{text}"):
        with pytest.raises(ValueError, match=expected if patterns != f"!{text}" else "write "):
            selected(patterns)


@pytest.mark.parametrize("text", ["not head", "~head", "-head", "except head", "all but head"])
def test_other_ways_to_leave_out_are_answered_with_the_pattern(text):
    with pytest.raises(
        ValueError, match=r'for all but head write "!head", or re.compile\("\^\(\?!'
    ):
        selected(text)


def test_the_last_that_matches_decides():
    flags = {"a": [True, True, False], "!b": [False, True, False], "c": [False, True, True]}
    assert decided(["a"], flags.__getitem__, 3) == [True, True, False]
    assert decided(["a", "!b"], flags.__getitem__, 3) == [True, False, False]
    assert decided(["!b", "a"], flags.__getitem__, 3) == [True, True, True]
    assert decided(["!b", "c"], flags.__getitem__, 3) == [True, True, True]
    assert decided([], flags.__getitem__, 3) == [False, False, False]


def test_variables_of_flax_are_selected_with_and_without_their_box():
    paths = ["dense/kernel/value", "dense/bias/value", "value"]
    assert selected("kernel", paths) == selected(re.compile("kernel$"), paths) == {0}
    assert selected("dense/kernel/value", paths) == {0}
    assert selected(re.compile("el/value$"), paths) == {0}
    assert [unboxed(path) for path in paths] == ["dense/kernel", "dense/bias", "value"]


def test_a_tree_that_is_one_leaf_has_an_empty_path():
    assert selected("**", [""]) == selected("*", [""]) == {0}
    with pytest.raises(ValueError, match="the whole tree is one leaf"):
        selected("w", [""])


def test_without_paths_a_pattern_is_checked_all_the_same():
    assert selected("kernel", []) == set()
    with pytest.raises(ValueError, match=r"^where: got '\(', expected a pattern"):
        selected("(", [])
    with pytest.raises(TypeError, match="^where: got 3 of type int, expected a pattern"):
        selected(("kernel", 3), [])


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("attn", {"attn"}),
        ("*/attn", {"block_0/attn", "block_1/attn"}),
        ("**/attn", {"attn", "block_0/attn", "block_1/attn"}),
        ("block_*", {"block_0"}),
        ("block_*/*", {"block_0/attn", "block_1/attn"}),
        (re.compile("_0"), {"block_0", "block_0/attn"}),
    ],
    ids=lambda value: None if isinstance(value, set) else str(value),
)
def test_a_name_matches_as_a_whole(pattern, names):
    there = ["attn", "block_0", "block_0/attn", "block_1/attn"]
    assert {name for name in there if matches(pattern, name)} == names


# "all but the head" in trees of every framework


def tree_of(framework):
    if framework == "plain":
        return {"head": array([9.0, 9.0]), "body": {"head_norm": array([9.0, 9.0])}}
    if framework == "linen":
        return {"params": tree_of("plain")}
    if framework == "boxed":
        return jax.tree.map(lambda x: nn.Partitioned(x, names=(None,)), tree_of("linen"))
    if framework == "list":
        return [tree_of("plain"), tree_of("plain")]
    return {"a/b": tree_of("plain")}


CALLS = {
    "clip_grads": lambda tree, where: jax.jit(
        lambda tree: cg.clip_grads(tree, cg.ClipByNorm(1.0), where=where)[0]
    )(tree),
    "gradient_clip": lambda tree, where: update(cg.clip_by_norm(1.0, where=where), tree),
    "skip_spikes": lambda tree, where: update(
        cg.skip_spikes(cg.clip_by_norm(1.0, where=where), where=where), tree
    ),
    "clip_per_example": lambda tree, where: jax.jit(cg.clip_per_example(
        lambda p, x: x * sum(9 * jnp.sum(leaf) for leaf in jax.tree.leaves(p)),
        cg.ClipByNorm(1.0), reduce="sum", where=where,
    ))(tree, array(np.ones(1)))[1],
}  # fmt: skip


def update(tx, tree):
    return jax.jit(lambda tree: tx.update(tree, tx.init(tree), tree)[0])(tree)


ALL_BUT_THE_HEAD = "!head", ("**", "!head"), re.compile("^(?!.*head(/|$))")


@each_value
@pytest.mark.parametrize(
    "where", ["!head", ("**", "!head"), re.compile("^(?!.*head(/|$))")], ids=str
)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("framework", ["plain", "linen", "boxed", "list", "a key with a slash"])
def test_all_but_the_head(framework, call, where):
    got = CALLS[call](tree_of(framework), where)
    for path, leaf in jax.tree_util.tree_flatten_with_path(got)[0]:
        is_head = "'head'" in jax.tree_util.keystr(path)
        np.testing.assert_allclose(leaf, 9.0 if is_head else 0.5**0.5, rtol=1e-6)


def test_a_function_of_the_tree_returns_a_mask():
    tree = tree_of("linen")

    def mask(tree):
        return jax.tree_util.tree_map_with_path(lambda path, _: "'head'" not in str(path), tree)

    got = jax.device_get(CALLS["clip_grads"](tree, mask)["params"])
    assert got["head"][0] == 9 and got["body"]["head_norm"][0] < 1
    assert np.all(CALLS["clip_grads"](array([9.0, 9.0]), lambda x: True) < 1)


@pytest.mark.parametrize(
    "where",
    [
        lambda path: "head" not in path,
        lambda path: path.startswith("head"),
        lambda path, leaf: True,
        lambda path: np.bool_(False),
    ],
)
def test_a_function_of_a_path_is_refused_with_what_to_write(where):
    with pytest.raises(TypeError, match="^where: got .*for each path write a pattern"):
        cg.clip_grads(tree_of("linen"), cg.ClipByNorm(1.0), where=where)


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

TREE = {f"layer_{i}": array(np.ones((2, 2))) for i in range(12)} | {
    "kernel": array(np.ones((2, 2)))
}
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
        lambda: cg.clip_per_example(loss, BY_NORM, where=WRONG)(TREE, array(np.ones(2))),
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


# names


def three_names(tree):
    return sum(jnp.sum(checkpoint_name(tree[k], k)) for k in ("a", "b", "head"))


WATCHED = {
    ("!head",): {"a", "b"},
    ("**", "!head"): {"a", "b"},
    ("**", "!head", "!a"): {"b"},
    ("**", "!*", "b"): {"b"},
    ("!head", "!a"): {"b"},
    ("!a", "head"): {"b", "head"},
    ("**", "a", "!a"): {"a", "b", "head"},  # what is written out overrides a pattern
    (re.compile("[ab]$"),): {"a", "b"},
    ("**", "!h*"): {"a", "b"},
}


@pytest.mark.parametrize("watch", WATCHED, ids=str)
def test_names_are_left_out_likewise(watch):
    tree = {k: array(np.ones(2)) for k in ("a", "b", "head")}
    clipped_names = cg.value_and_grad_with_stats(three_names, watch=watch)(tree)[2]
    assert set(clipped_names) == WATCHED[watch]
    assert set(cg.with_value_stats(three_names, watch=watch)(tree)[1]) == WATCHED[watch]


def test_rules_of_all_names_but_one():
    tree = {k: array(np.ones(2)) for k in ("a", "b", "head")}
    rule = cg.ErrorClipByValue(0.25)
    for rules in ({"!head": rule}, {"**": rule, "!head": None}, {re.compile("^[ab]$"): rule}):
        grads = jax.grad(cg.error_clip_by_name(three_names, rules))(tree)
        assert [float(g[0]) for g in grads.values()] == [0.25, 0.25, 1.0]
    grads = jax.grad(cg.error_clip_by_name(three_names, {"!ad": rule}, prefix="he"))(tree)
    assert [float(g[0]) for g in grads.values()] == [0.25, 0.25, 1.0]


@pytest.mark.parametrize(("name", "said"), [("!haed", "there are "), ("h(a|e)d", r"re\.compile\(")])
def test_names_that_are_not_there_are_refused(name, said):
    tree = {k: array(np.ones(2)) for k in ("a", "b", "head")}
    for call in (
        lambda: jax.grad(cg.error_clip_by_name(three_names, {name: cg.ErrorClipByValue(1.0)}))(
            tree
        ),
        lambda: cg.with_value_stats(three_names, watch=["a", name])(tree),
    ):
        with pytest.raises(ValueError, match=f"got '{re.escape(name)}'.*{said}"):
            call()
    with pytest.raises(ValueError, match="prefix: got 'x' with re.compile"):
        cg.error_clip_by_name(three_names, {re.compile("a"): None}, prefix="x")
    with pytest.raises(ValueError, match="got '!b' after names alone, expected it after a pattern"):
        cg.with_value_stats(three_names, watch=["a", "!b"])(tree)
