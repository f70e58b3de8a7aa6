"""Hostile and odd input: at every public function it works, or the error says what to write."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import sparse

import clipgrad as cg
from tests.helpers import PLACES, array, assert_close, assert_same, key_of
from tests.rows import first_row

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
    "the batch of a step": lambda tree: step_of(array(np.ones(2)), tree),
    "the batch of clip_per_example": lambda tree: cg.clip_per_example(loss, None)(
        array(np.ones(2)), tree
    ),
    "the parameters of clip_per_example": lambda tree: cg.clip_per_example(loss, None)(
        tree, array(np.ones(2))
    ),
    "value_and_grad_with_stats": lambda tree: cg.value_and_grad_with_stats(loss)(tree),
    "scalars": cg.scalars,
}
EVERY = GRADIENTS | MEASURES | PARAMETERS | ANYTHING | OTHERS


# What is no tree


def own_list() -> Any:
    tree = [array(np.ones(2))]
    tree.append(tree)
    return tree


def own_dictionary() -> Any:
    tree = {"a": array(np.ones(2))}
    tree["b"] = {"c": tree}
    return tree


def levels(number: int, leaf: Any) -> Any:
    return functools.reduce(lambda tree, _: [tree], range(number), leaf)


ENDLESS = {"a list": own_list, "a dictionary": own_dictionary, "levels": lambda: levels(2000, 1.0)}


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
    for mixed in ({"a": array(np.ones(2)), 1: array(np.ones(2))}, {"a": {"b": 1.0, 1: 2.0}}):
        with pytest.raises(ValueError, match="got a dictionary whose keys can't be sorted, expect"):
            EVERY[name](mixed)
    assert room() == before  # what is refused leaves all of the stack


@pytest.mark.parametrize("name", ["clip_grads, norm", "clip_cotangent", "list_names"])
def test_trees_may_have_three_hundred_levels_and_not_a_thousand(name):
    tree = levels(300, array([3.0, 4.0]))
    result = EVERY[name](tree)
    if name == "list_names":
        assert [n.name for n in result] == ["h", "m"]
    else:
        assert jax.tree.structure(result) == jax.tree.structure(tree)
    with pytest.raises(ValueError, match="or has more than 500 levels, expected fewer"):
        EVERY[name](levels(1000, 1.0))


class Model:
    """Holds a gradient, and is no pytree."""

    def __init__(self):
        self.w = array(np.ones(2))


NO_LEAVES = {
    "object": (Model, "type Model at 'a', expected arrays or numbers; make Model a pytree"),
    "set": (lambda: {1.0, 2.0}, "type set at 'a'.* or replace it with None"),
    "reference": (
        lambda: jax.new_ref(array(np.ones(2))),
        r"type Ref at 'a'.*or ref\[\.\.\.\] for a ref",
    ),
    "shape": (lambda: jax.ShapeDtypeStruct((2,), jnp.float32), "at 'a'.*write jax.eval_shape"),
    "objects": (lambda: np.array([1.0, None]), "ndarray at 'a'.*object is not a dtype of JAX"),
    "text": (lambda: np.array(["x"]), r"<U1 is not a dtype of JAX; write x.astype\("),
    "wide number": (lambda: np.longdouble(1), "longdouble at 'a'.* is not a dtype of JAX"),
    "other byte order": (lambda: np.ones(2, ">f4"), ">f4 is not a dtype of JAX"),
}


@pytest.mark.parametrize("name", GRADIENTS | MEASURES | PARAMETERS)
def test_what_may_hold_a_gradient_is_refused_and_not_passed_by(name):
    for make, match in NO_LEAVES.values():
        with pytest.raises(TypeError, match=match):
            EVERY[name]({"a": make(), "b": array(np.ones(2))})
    with pytest.raises(TypeError, match=": got a leaf of type Model, expected arrays or numbers"):
        EVERY[name](Model())


# Leaves that no clip acts on, and what a function that is differentiated may be given besides.
PASSENGERS = {
    "none": None, "text": "text", "function": jax.nn.relu, "int": 3, "bool": np.array([True]),
    "int4": array([1] * 3, jnp.int4), "uint2": array([1] * 3, jnp.uint2), "key": key_of(0),
    "float0": np.zeros(2, jax.dtypes.float0),
}  # fmt: skip
MORE = {"object": Model(), "objects of NumPy": np.array([None]), "text of NumPy": np.array(["x"])}


@pytest.mark.parametrize("name", ANYTHING)
def test_a_function_that_is_clipped_may_be_given_anything(name):
    tree = PASSENGERS | MORE | {"w": array([3.0, 4.0]), "empty": array(np.ones((0, 3)))}
    result = ANYTHING[name](tree)
    if name == "clip_cotangent":
        assert all(result[k] is tree[k] for k in (*PASSENGERS, *MORE))
    elif name == "diagnose":
        assert result.ok
    elif name == "list_names":
        assert [n.name for n in result] == ["h", "m"]
    else:
        assert_same(result, loss(tree))


# Sparse arrays: pytrees of numbers and of indices


def sparse_loss(w: sparse.BCOO, x: Any) -> Any:
    return jnp.sum((w @ x) ** 2)


@pytest.mark.slow
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
    state = step.init({"w": array(np.ones(3))})
    after, _ = step(state, 1.0)
    with pytest.raises(ValueError, match="state: got a buffer that another step has overwritten"):
        step(state, 1.0)
    assert np.isfinite(step(after, 1.0)[1]["loss"])


def test_what_where_leaves_out_may_be_anything():
    tree = {"a": Model(), "b": array([3.0, 4.0])}
    clipped, _ = cg.clip_grads(tree, cg.ClipByNorm(1.0), where="b")
    assert clipped["a"] is tree["a"]
    np.testing.assert_allclose(clipped["b"], [0.6, 0.8], rtol=1e-6)


# NumPy's float64, which JAX computes in float32: a warning would be an error here. It would come
# while JAX traces, so these programs are not compiled.

NUMPY = {"b": np.float64(2.0), "v": np.ones(3), "w": np.ones((3, 4))}
THREE = np.float64(3.0)
WITH_OPTIONS: dict[str, Callable[[Any], Any]] = {
    **{
        f"apply_gradient_clipping, {kind}": (
            lambda tree, kind=kind: cg.published.apply_gradient_clipping(
                tree, tree, clipping_type=kind, clipping_threshold=0.1 * THREE
            )
        )
        for kind in ("norm", "value", "adaptive")
    },
    "max_norm": lambda tree: updated(
        cg.skip_spikes(optax.sgd(0.1, 0.9), max_norm=THREE, sigma=None), tree
    ),
    "microbatch": lambda tree: cg.clip_per_example(loss, RULES["norm"], microbatch=2)(
        tree, np.ones((4, 3))
    ),
    "accumulate": lambda tree: step_of(
        tree, np.ones((4, 3)), accumulate=2, error_clip={"h": RULES["norm"]}
    ),
}
NO_TREES = {"diagnose", "list_names", "the batch of clip_per_example"}


@first_row
@pytest.mark.parametrize("name", [name for name in EVERY | WITH_OPTIONS if name not in NO_TREES])
def test_nothing_warns_of_numpy_numbers(name):
    for leaf in jax.tree.leaves(jax.eval_shape(lambda: (EVERY | WITH_OPTIONS)[name](NUMPY))):
        assert leaf.dtype in (jnp.float32, jnp.int32, bool)


# Scales of a microscaling format are no gradients: they have no zero and no sign.

SCALES = array(np.ones((2, 2)), jnp.float8_e8m0fnu)
WITH_COTANGENTS: dict[str, Callable[[Any], Any]] = {
    "no rule": lambda tree: cg.clip_grads(tree, None),
    "error_clip_by_name": lambda tree: jax.vjp(
        cg.error_clip_by_name(scaled, {"h": RULES["norm"]}), tree
    ),
    "error_clip_everywhere": lambda tree: jax.vjp(
        cg.error_clip_everywhere(lambda x: scaled(x.astype(tree.dtype)), RULES["norm"]),
        array(np.ones(2)),
    ),
    "value_and_grad_with_stats": lambda tree: cg.value_and_grad_with_stats(scaled)(tree),
}


def scaled(params):
    return jnp.sum(checkpoint_name(params, "h").astype(jnp.float32))


# Among parameters it is a scale that is frozen, like an integer.
OF_PARAMETERS = ("microbatch", "accumulate")
REFUSING = GRADIENTS | MEASURES | WITH_OPTIONS | WITH_COTANGENTS
REFUSING |= {name: EVERY[name] for name in ("clip_cotangent", "error_clip")}


@pytest.mark.parametrize("name", [name for name in REFUSING if name not in OF_PARAMETERS])
def test_a_dtype_without_zero_and_sign_is_refused(name):
    text = "(grads|tree|before|x): got a leaf of dtype float8_e8m0fnu.*such as float32"
    with pytest.raises(TypeError, match=text):
        REFUSING[name](SCALES)


FROZEN = {
    "train_step": lambda tree: step_of(tree, np.ones((4, 3)))[0].params,
    "accumulate": lambda tree: step_of(tree, np.ones((4, 3)), accumulate=2)[0].params,
    "error_clip": lambda tree: (
        step_of(tree, np.ones((4, 3)), error_clip={"h": RULES["norm"]}, watch_values=["h"])[
            0
        ].params
    ),
    "clip_per_example": lambda tree: jax.jit(cg.clip_per_example(loss, None))(
        tree, np.ones((4, 3))
    )[1],
    "per_example_norms": lambda tree: jax.jit(cg.per_example_norms(loss, per_leaf=True))(
        tree, np.ones((4, 3))
    ),
    "AdaptiveClip": lambda tree: updated(
        cg.adaptive_grad_clip(0.1), {"w": array(np.ones(3)), "scale": None}, tree
    ),
}


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_scale_of_such_a_dtype_passes(name):
    clipped = FROZEN[name]({"w": array(np.ones(3)), "scale": SCALES})
    np.testing.assert_array_less(clipped["w"], 4)
    scale = clipped.get("scale")
    assert scale is None or scale.dtype == SCALES.dtype and np.all(np.asarray(scale) == 1)


# Schedules and arrays that are no thresholds.


@pytest.mark.parametrize("value", [None, "0.5", 1j], ids=repr)
@pytest.mark.parametrize(
    "make, field", [(cg.ClipByNorm, "max_norm"), (lambda t: cg.ClipByValue(1.0, min=t), "min")]
)
def test_a_schedule_that_returns_no_number_is_refused_under_its_name(make, field, value):
    early = cg.gradient_clip(make(lambda step: value))
    with pytest.raises(TypeError, match=f"^{field}: got .* from the schedule, expected a number"):
        early.init(array(np.ones(2)))
    later = {"value": 0.5}
    late = cg.gradient_clip(make(lambda step: later["value"]))
    state = late.init(array(np.ones(2)))
    later["value"] = value
    with pytest.raises(TypeError, match=f"^{field}: got .* from the schedule, expected a number"):
        late.update(array(np.ones(2)), state, array(np.ones(2)))


@dataclasses.dataclass(frozen=True)
class Both:
    first: object
    second: object

    def __call__(self, grads, params=None):
        return self.second(self.first(grads))


def test_a_dataclass_of_ones_own_that_holds_rules_is_a_rule():
    rule = Both(cg.ClipByValue(4.0), cg.ClipByNorm(1.0))
    grads = array([3.0, 9.0])
    np.testing.assert_allclose(cg.clip_grads(grads, rule)[0], [0.6, 0.8], rtol=1e-6)
    tx = cg.gradient_clip(rule, stats=True)
    updates, state = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(updates, [0.6, 0.8], rtol=1e-6)
    assert state.threshold is None


@pytest.mark.parametrize("rule", [cg.ClipByValue(1.0), cg.ClipByGlobalNorm(1.0)], ids=range(2))
def test_export_with_a_symbolic_shape(rule):
    (n,) = jax.export.symbolic_shape("n")
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(3 * cg.clip_cotangent(x, rule))))
    exported = jax.export.export(gradient)(jax.ShapeDtypeStruct((n, 3), jnp.float32))
    np.testing.assert_allclose(
        exported.call(array(np.ones((2, 3)))), gradient(array(np.ones((2, 3))))
    )


def test_a_signature_that_lies_is_refused_and_not_passed_over():
    def shifted(f):
        @functools.wraps(f)
        def inner(rng, *args):
            return f(*args)

        return inner

    clipped = cg.error_clip(cg.ClipByValue(0.1))(shifted(lambda x: 5 * x))
    with pytest.raises(TypeError, match="got a call that does not fit the signature"):
        jax.grad(lambda x: clipped(None, x))(1.0)


def test_generators_are_refused():
    def generate(x):
        yield x

    with pytest.raises(TypeError, match="expected a function that returns a result"):
        cg.error_clip(outputs=cg.ClipByValue(1.0))(generate)


def test_parameters_that_are_python_or_numpy_numbers_train_without_a_retrace():
    traces = []

    def loss(p, b):
        traces.append(1)
        return jnp.sum((p["w"] * b + p["b"]) ** 2)

    step = cg.train_step(loss, optax.sgd(0.1))
    state = step.init({"w": np.ones(3), "b": 2.0})
    for _ in range(3):
        state, _ = step(state, array(np.ones(3)))
    assert len(traces) == 1


def test_a_schedule_that_falls_below_zero_acts_as_zero():
    tx = cg.clip_by_global_norm(optax.linear_schedule(1.0, -1.0, 2))
    state = tx.init(array(np.ones(2)))
    for limit in (1.0, 0.0, 0.0):
        updates, state = tx.update(array([3.0, 4.0]), state)
        np.testing.assert_allclose(np.linalg.norm(updates), limit, atol=1e-7)
    negative = jax.tree.map(lambda c: -c, cg.ClipByNorm(1.0))
    np.testing.assert_array_equal(negative(array(np.ones(3))), 0)


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


@pytest.mark.slow
@pytest.mark.parametrize("rule", OWN)
def test_arrays_of_numpy_count_by_their_numbers(rule):
    x = jnp.asarray(arrays()["by columns"])
    expected = cg.clip_grads(x, RULES[rule], x)
    for given in arrays().values():
        before = given.copy()
        assert_same(cg.clip_grads(given, RULES[rule], given), expected)
        assert_same(updated(cg.gradient_clip(RULES[rule]), given), expected[0])
        np.testing.assert_array_equal(given, before)


@pytest.mark.parametrize(
    "wrong", [array(np.ones(3)), array(np.ones((2, 2))), np.ones((1, 1, 1))], ids=str
)
def test_a_limit_of_units_of_another_shape_is_refused(wrong):
    x = {"w": array(np.ones((2, 2)))}
    match = r"got an array of shape \(.*\), expected one that broadcasts to the norms, of shape"
    for rule in (cg.AdaptiveClip(wrong), cg.AdaptiveClip(0.1, eps=wrong)):
        for clip in PLACES.values():
            with pytest.raises(ValueError, match=match):
                clip(rule, x, x)
    with pytest.raises(ValueError, match=match):
        cg.published.apply_gradient_clipping(
            x, x, clipping_type="adaptive", clipping_threshold=wrong
        )


def test_a_state_that_was_made_eagerly_can_be_donated():
    tx = cg.clip_by_global_norm(optax.linear_schedule(1.0, 0.5, 10), stats=True)
    params = {"w": array(np.ones(3))}
    step = jax.jit(lambda state, grads: tx.update(grads, state)[1], donate_argnums=0)
    assert step(tx.init(params), params).count == 1


@pytest.mark.slow
def test_masks_of_trees_with_none():
    grads = {"a": None, "b": jnp.full((2, 2), 9.0), "c": jnp.full(2, 9.0)}
    where = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)  # noqa: E731
    for mask in (where, where(grads)):
        clipped, _ = cg.clip_grads(grads, cg.ClipByNorm(1.0), where=mask)
        assert clipped["c"] is grads["c"] and clipped["b"][0, 0] == 0.5
    with pytest.raises(ValueError, match="where: got None in the mask where the tree has leaves"):
        cg.clip_grads(grads, cg.ClipByNorm(1.0), where={"a": None, "b": True, "c": None})
