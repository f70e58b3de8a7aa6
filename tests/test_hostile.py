"""Hostile and odd input: at every public function it works, or the error says what to write."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import sparse

import clipgrad as cg
from clipgrad._trees.trees import check_tree
from tests.helpers import assert_close, assert_same

pytestmark = pytest.mark.usefixtures("users_promotion")

RULES = {
    "value": cg.ClipByValue(0.5),
    "norm": cg.ClipByNorm(0.5),
    "global norm": cg.ClipByGlobalNorm(0.5),
    "block RMS": cg.ClipByBlockRMS(0.5),
    "adaptive": cg.AdaptiveClip(0.5),
    "function": lambda tree: jax.tree.map(lambda g: 0.5 * g, tree),
}
OWN = [name for name in RULES if name != "function"]


def updated(tx: optax.GradientTransformation, tree: Any, init: Any = None) -> Any:
    return tx.update(tree, tx.init(tree if init is None else init), tree)[0]


def numbers_of(tree: Any) -> list[Any]:
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]


def loss(params: Any, batch: Any = 1.0) -> Any:
    """A loss of the floating leaves of any tree."""
    with jax.named_scope("m"):
        sums = [jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in numbers_of(params)]
        h = checkpoint_name(2.0 * sum(sums, start=jnp.float32(1)), "h")
    return h * jnp.mean(numbers_of(jax.tree.map(jnp.asarray, batch))[0])


def step_of(tree: Any, batch: Any = 1.0, **options: Any) -> Any:
    step = cg.train_step(loss, optax.chain(cg.clip_by_norm(1.0), optax.sgd(0.1)), **options)
    return step(step.init(tree), batch)


# Functions of a tree of gradients, and of trees that may hold anything.
GRADIENTS: dict[str, Callable[[Any], Any]] = {
    **{
        f"clip_grads, {n}": lambda tree, r=r: cg.clip_grads(tree, r, tree)[0]
        for n, r in RULES.items()
    },
    **{
        f"gradient_clip, {n}": lambda tree, r=r: updated(cg.gradient_clip(r), tree)
        for n, r in RULES.items()
    },
    **{f"the rule, {n}": lambda tree, n=n: RULES[n](tree, tree) for n in OWN},
    "an adaptive threshold": lambda tree: updated(cg.clip_by_norm(cg.EMAThreshold()), tree),
    "statistics by leaf": lambda tree: updated(cg.clip_by_value(1.0, stats="per_leaf"), tree),
    "skip_spikes": lambda tree: updated(cg.skip_spikes(optax.identity()), tree),
    "apply_gradient_clipping": lambda tree: cg.published.apply_gradient_clipping(
        tree, tree, clipping_type="adaptive", clipping_threshold=0.1
    ),
}
MEASURES = {
    "global_norm": cg.global_norm,
    "ClipStats.of": lambda tree: cg.types.ClipStats.of(tree, tree),
}
PARAMETERS = {"TrainStep.init": cg.train_step(loss, optax.sgd(0.1)).init}
ANYTHING = {
    "clip_cotangent": lambda tree: cg.clip_cotangent(tree, RULES["norm"]),
    "error_clip": lambda tree: cg.error_clip(RULES["norm"])(loss)(tree),
    "error_clip_by_name": lambda tree: cg.error_clip_by_name(loss, {"h": RULES["norm"]})(tree),
    "error_clip_everywhere": lambda tree: cg.error_clip_everywhere(loss, RULES["norm"])(tree),
    "diagnose": lambda tree: cg.diagnose(loss, (tree,)),
    "list_names": lambda tree: cg.list_names(loss, (tree,)),
}
OTHERS = {
    "the batch of a step": lambda tree: step_of(jnp.ones(2), tree),
    "the batch of clip_per_example": lambda tree: cg.clip_per_example(loss, None)(
        jnp.ones(2), tree
    ),
    "the parameters of clip_per_example": lambda tree: cg.clip_per_example(loss, None)(
        tree, jnp.ones(2)
    ),
    "value_and_grad_with_stats": lambda tree: cg.value_and_grad_with_stats(loss)(tree),
    "scalars": cg.scalars,
}
EVERY = GRADIENTS | MEASURES | PARAMETERS | ANYTHING | OTHERS


# What is no tree


def own() -> Any:
    tree = [jnp.ones(2)]
    tree.append(tree)
    return tree


def own_dictionary() -> Any:
    tree = {"a": jnp.ones(2)}
    tree["b"] = {"c": tree}
    return tree


def levels(number: int, leaf: Any) -> Any:
    return functools.reduce(lambda tree, _: [tree], range(number), leaf)


ENDLESS = {"a list": own, "a dictionary": own_dictionary, "levels": lambda: levels(2000, 1.0)}


def room(depth=0):
    """How deep functions can still call one another."""
    try:
        return room(depth + 1)
    except RecursionError:
        return depth


@pytest.mark.parametrize("name", EVERY)
def test_a_tree_that_contains_itself_or_has_keys_of_several_types_is_refused(name):
    before = room()
    for tree in ENDLESS.values():
        with pytest.raises(ValueError, match="got a tree that contains itself, or has more than"):
            EVERY[name](tree())
    for mixed in ({"a": jnp.ones(2), 1: jnp.ones(2)}, {"a": {"b": 1.0, 1: 2.0}}):
        with pytest.raises(ValueError, match="got a dictionary whose keys can't be sorted, expect"):
            EVERY[name](mixed)
    assert room() == before  # what is refused leaves all of the stack


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["error_clip_by_name", "error_clip_everywhere", "diagnose", "list_names"]
)
def test_a_tree_that_contains_itself_is_not_shown_to_nnx(name):
    import flax.nnx  # noqa: F401  # from then on models are looked for among the arguments

    for tree in (own(), own_dictionary()):
        with pytest.raises(ValueError, match="got a tree that contains itself, or has more than"):
            ANYTHING[name](tree)


@pytest.mark.parametrize("name", ["clip_grads, norm", "clip_cotangent", "list_names"])
def test_trees_may_have_three_hundred_levels_and_not_a_thousand(name):
    tree = levels(300, jnp.array([3.0, 4.0]))
    result = EVERY[name](tree)
    if name == "list_names":
        assert [n.name for n in result] == ["h", "m"]
    else:
        assert jax.tree.structure(result) == jax.tree.structure(tree)
    with pytest.raises(ValueError, match="or has more than 500 levels, expected fewer"):
        EVERY[name](levels(1000, 1.0))


def test_what_a_tree_has_in_many_places_is_not_what_contains_itself():
    tree = jnp.ones(2)
    for _ in range(12):
        tree = [tree, tree]
    check_tree("tree", tree)
    check_tree("tree", {"a": (shared := {"b": 1.0}), "c": [shared, shared]})


class Model:
    """Holds a gradient, and is no pytree."""

    def __init__(self):
        self.w = jnp.ones(2)


NO_LEAVES = {
    "object": (Model, "type Model at 'a', expected arrays or numbers; make Model a pytree"),
    "set": (lambda: {1.0, 2.0}, "type set at 'a'.* or replace it with None"),
    "reference": (lambda: jax.new_ref(jnp.ones(2)), r"type Ref at 'a'.*or ref\[\.\.\.\] for a ref"),
    "shape": (lambda: jax.ShapeDtypeStruct((2,), jnp.float32), "at 'a'.*write jax.eval_shape"),
    "objects of NumPy": (
        lambda: np.array([1.0, None]),
        "ndarray at 'a'.*object is not a dtype of JAX",
    ),
    "text of NumPy": (
        lambda: np.array(["x"]),
        r"<U1 is not a dtype of JAX; write x.astype\(\.\.\.\)",
    ),
    "wide": (lambda: np.ones(2, np.longdouble), "float.* is not a dtype of JAX"),
    "wide number": (lambda: np.longdouble(1), "longdouble at 'a'.* is not a dtype of JAX"),
    "other byte order": (lambda: np.ones(2, ">f4"), ">f4 is not a dtype of JAX"),
    "date": (lambda: np.array("2020", "datetime64[D]"), "is not a dtype of JAX"),
    "record": (lambda: np.zeros(2, [("x", "f4")]), "is not a dtype of JAX"),
}


@pytest.mark.parametrize("name", GRADIENTS | MEASURES | PARAMETERS)
def test_what_may_hold_a_gradient_is_refused_and_not_passed_by(name):
    for make, match in NO_LEAVES.values():
        with pytest.raises(TypeError, match=match):
            EVERY[name]({"a": make(), "b": jnp.ones(2)})
    with pytest.raises(TypeError, match=": got a leaf of type Model, expected arrays or numbers"):
        EVERY[name](Model())


# Leaves that no clip acts on, and what a function that is differentiated may be given besides.
PASSENGERS = {
    "none": None, "text": "text", "function": jax.nn.relu, "int": 3, "bool": np.array([True]),
    "int4": jnp.ones(3, jnp.int4), "uint2": jnp.ones(3, jnp.uint2), "key": jax.random.key(0),
    "float0": np.zeros(2, jax.dtypes.float0),
}  # fmt: skip
MORE = {"object": Model(), "objects of NumPy": np.array([None]), "text of NumPy": np.array(["x"])}


@pytest.mark.parametrize("name", ANYTHING)
def test_a_function_that_is_clipped_may_be_given_anything(name):
    tree = PASSENGERS | MORE | {"w": jnp.array([3.0, 4.0]), "empty": jnp.ones((0, 3))}
    result = ANYTHING[name](tree)
    if name == "clip_cotangent":
        assert all(result[k] is tree[k] for k in (*PASSENGERS, *MORE))
    elif name == "diagnose":
        assert result.ok
    elif name == "list_names":
        assert [n.name for n in result] == ["h", "m"]
    else:
        assert_same(result, loss(tree))


# Arrays of NumPy, as they come from files and slices


class Own(np.ndarray):
    """As those of units and labels."""


def arrays() -> dict[str, np.ndarray]:
    """The same numbers, stored in all ways."""
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    read_only = x.copy()
    read_only.flags.writeable = False
    wide = np.zeros((8, 18), np.float32)
    wide[::2, ::3] = x
    return {
        "read-only": read_only,
        "non-contiguous": wide[::2, ::3],
        "backwards": np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
        "by columns": np.asfortranarray(x),
        "transposed": np.ascontiguousarray(x.T).T,
        "a class of its own": x.view(Own),
        "unaligned": np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:]
        .view(np.float32)
        .reshape(4, 6),
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", OWN)
def test_arrays_of_numpy_count_by_their_numbers(rule):
    x = jnp.asarray(arrays()["by columns"])
    expected = cg.clip_grads(x, RULES[rule], x)
    for array in arrays().values():
        before = array.copy()
        assert_same(cg.clip_grads(array, RULES[rule], array), expected)
        assert_same(updated(cg.gradient_clip(RULES[rule]), array), expected[0])
        np.testing.assert_array_equal(array, before)


# Sparse arrays: pytrees of numbers and of indices


def sparse_loss(w: sparse.BCOO, x: Any) -> Any:
    return jnp.sum((w @ x) ** 2)


@pytest.mark.exhaustive
def test_the_gradient_of_a_sparse_matrix_is_clipped_as_a_dense_one():
    w, x = sparse.BCOO.fromdense(jnp.diag(jnp.array([3.0, 4.0]))), jnp.array([1.0, 2.0])
    grads = sparse.grad(sparse_loss)(w, x)
    for n in ("value", "global norm"):
        dense = RULES[n](grads.todense())
        assert_close(updated(cg.gradient_clip(RULES[n], stats=True), grads).todense(), dense)
        clipped = cg.error_clip({"w": RULES[n]})(sparse_loss)
        assert_close(sparse.grad(clipped)(w, x).todense(), dense)
    np.testing.assert_allclose(cg.global_norm(grads), jnp.linalg.norm(grads.todense()), rtol=1e-6)


# Buffers that are gone


def test_a_state_that_was_used_is_answered_by_what_to_write():
    step = cg.train_step(loss, optax.sgd(0.1))
    state = step.init({"w": jnp.ones(3)})
    after, _ = step(state, 1.0)
    with pytest.raises(ValueError, match="state: got buffers that another step has overwritten"):
        step(state, 1.0)
    assert np.isfinite(step(after, 1.0)[1]["loss"])


# Many leaves


def test_what_where_leaves_out_may_be_anything():
    tree = {"a": Model(), "b": jnp.array([3.0, 4.0])}
    clipped, _ = cg.clip_grads(tree, cg.ClipByNorm(1.0), where="b")
    assert clipped["a"] is tree["a"]
    np.testing.assert_allclose(clipped["b"], [0.6, 0.8], rtol=1e-6)
