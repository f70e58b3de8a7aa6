"""Layers and calls one by one beside a scan, and leaves that have another name in a module."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipgrad as cg
from clipgrad._compare.renamed import same_leaves, stacked_leaves

RNG = np.random.default_rng(0)
LAYERS = [{k: np.float32(RNG.normal(size=(n, 4))) for k, n in (("w", 4), ("b", 1))}
          for _ in range(2)]  # fmt: skip
HEAD, X = (np.float32(RNG.normal(size=shape)) for shape in ((4, 2), (3, 4)))
ALONE = {**{f"layer_{i}": layer for i, layer in enumerate(LAYERS)}, "head": HEAD}
STACKED = {"layers": jax.tree.map(lambda *x: np.stack(x), *LAYERS), "head": HEAD}


@jax.custom_vjp
def too_large(w):
    return w


too_large.defvjp(lambda w: (w, None), lambda _, g: (1.5 * g,))


def block(layer, x, scale=1.0):
    return x + jnp.tanh(x @ layer["w"] + layer["b"]) * scale


def one_by_one(params, x, scale=1.0):
    for i in range(len(LAYERS)):
        with jax.named_scope(f"layer_{i}"):
            x = block(params[f"layer_{i}"], x, scale)
    with jax.named_scope("head"):
        return jnp.mean((x @ params["head"]) ** 2)


def scanned(params, x, scale=1.0, wrong=None):
    """The same; the gradient of the weight of one layer may be wrong."""
    layers = params["layers"]
    if wrong is not None:
        layers = {**layers, "w": layers["w"].at[wrong].set(too_large(layers["w"][wrong]))}

    def step(x, layer):
        with jax.named_scope("layers"):
            return block(layer, x, scale), None

    x, _ = lax.scan(step, x, layers)
    with jax.named_scope("head"):
        return jnp.mean((x @ params["head"]) ** 2)


def stepped(loss):
    def step(params, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x))

    return step


def compared(scan, order, **options):
    """The comparison of single layers with a scan, or of the scan with these."""
    pair, names = [(one_by_one, ALONE), (scan, STACKED)], {"layer_*": "layers"}
    if options.get("argnums", 0) is None:
        pair = [(stepped(loss), params) for loss, params in pair]
    if order == "scan first":
        pair, names = pair[::-1], {"layers": "layer_*"}
    (fun, params), (other, others) = pair
    return cg.compare(fun, other, (params, X), other_args=(others, X), names=names, **options)


ORDERS = pytest.mark.parametrize("order", ["scan last", "scan first"])


@pytest.mark.parametrize(
    "order, argnums",
    [("scan last", "all"), *(pytest.param(*row, marks=pytest.mark.slow)
     for row in [("scan first", "all"), ("scan last", None), ("scan first", None)])],
)  # fmt: skip
def test_layers_are_compared_with_their_stack(order, argnums):
    comparison = compared(scanned, order, argnums=argnums)
    assert comparison.ok, comparison
    assert not [text for text in comparison.unmatched if "gradient" in text or "output" in text]


@pytest.mark.slow
@ORDERS
def test_a_value_of_the_scan_is_found_before_its_gradients(order):
    finding, *others = compared(functools.partial(scanned, scale=1.1), order).findings
    assert finding.kind == "value" and finding.module in ("layer_0", "layers") and not others


@pytest.mark.slow
@ORDERS
@pytest.mark.parametrize("argnums", ["all", None])
def test_a_wrong_gradient_of_one_layer_is_found_at_that_layer(order, argnums):
    comparison = compared(functools.partial(scanned, wrong=1), order, argnums=argnums)
    (finding,) = comparison.findings
    assert finding.kind == ("output" if argnums is None else "grads"), comparison
    of_layer = ("layer_1/w", None), ("layers/w", 1)
    assert (finding.path, finding.step) == of_layer[order == "scan first"]


@pytest.mark.slow
@ORDERS
def test_layers_in_a_file_are_compared_with_a_stack(order, tmp_path):
    cg.save_run(one_by_one, (ALONE, X), tmp_path / "run")
    versions, names = [tmp_path / "run", scanned], {"layer_*": "layers"}
    if order == "scan first":
        versions, names = versions[::-1], {"layers": "layer_*"}
    comparison = cg.compare(*versions, (STACKED, X), names=names)
    assert comparison.ok, comparison


@pytest.mark.slow
def test_a_stack_without_another_leaf_is_compared_too():
    alone, stacked = ({k: x for k, x in tree.items() if k != "head"} for tree in (ALONE, STACKED))
    losses = (lambda p, x, f=f: f({**p, "head": HEAD}, x) for f in (one_by_one, scanned))
    names = {"layer_*": "layers"}
    assert cg.compare(*losses, (alone, X), other_args=(stacked, X), names=names).ok


@pytest.mark.slow
def test_a_stack_of_fewer_layers_is_told():
    longer = {"layers": jax.tree.map(lambda x: np.concatenate([x, 0 * x[:1]]), STACKED["layers"])}
    comparison = cg.compare(one_by_one, scanned, (ALONE, X), names={"layer_*": "layers"},
                            other_args=({**STACKED, **longer}, X))  # fmt: skip
    assert not comparison.ok and "only in other" in str(comparison.unmatched)


PORTED = {"Net/layers_*": "blocks/*", "Net/head": "head"}
LINEN = [f"params/{name}/kernel" for name in ("head", "layers_0/up", "layers_1/up")]
NNX = [f"{name}/kernel" for name in ("blocks/0/up", "blocks/1/up", "head")]


@pytest.mark.parametrize(
    "paths, others, names, pairs",
    [
        (LINEN, NNX, PORTED, {0: 2, 1: 0, 2: 1}),
        (LINEN, ["params/" + path for path in NNX], PORTED, {0: 2, 1: 0, 2: 1}),
        (NNX, LINEN, {y: x for x, y in PORTED.items()}, {0: 1, 1: 2, 2: 0}),
        (["enc/D/k", "dec/D/k", "w"], ["a/k", "w"], {"enc/D": "a"}, {0: 0, 2: 1}),
        (["a/k", "b/k"], ["c/k", "b/k"], {"*": "c"}, {0: 0, 1: 1}),
    ],
)
def test_leaves_below_a_collection_have_the_new_names_of_their_modules(paths, others, names, pairs):
    assert same_leaves(paths, others, names) == pairs


@pytest.mark.parametrize("prefix", ["", "params/"])
@pytest.mark.parametrize("new_prefix", ["", "params/"])
def test_layers_are_in_the_order_of_their_numbers(prefix, new_prefix):
    paths = [f"{prefix}layers_{i}/w" for i in (10, 2, 0, 1)] + [f"{prefix}head/w"]
    others = [f"{new_prefix}{name}/w" for name in ("head", "layers")]
    for names in ({"layers_*": "layers"}, {"Net/layers_*": "Net/layers"}):
        assert stacked_leaves(paths, others, names) == {1: [2, 3, 1, 0]}
        assert same_leaves(paths, others, names) == {4: 0}


WEIGHTS = {"w": np.stack([layer["w"] for layer in LAYERS])}


def calls(params, x, scale=1.0, scan=False):
    """Layers of a stack, in modules of one name: one value leaves them, or one for each step."""

    def layer(x, w):
        with jax.named_scope("layer"):
            return x + jnp.tanh(x @ w) * scale, None

    if scan:
        x, _ = lax.scan(layer, x, params["w"])
    for w in () if scan else params["w"]:
        x, _ = layer(x, w)
    with jax.named_scope("head"):
        return jnp.mean(x**2)


def added_up(params, x, scale=1.0, scan=False, inside=True):
    """A module that adds up rows, also by a scan of its own; the scale may be behind it."""
    with jax.named_scope("sum"):
        rows = x @ params["w"][0]
        if scan:
            total, _ = lax.scan(lambda total, row: (total + row, None), 0 * rows[0], rows)
        else:
            total = rows.sum(0)
        total = total * scale if inside else total
    with jax.named_scope("head"):
        return jnp.mean((total if inside else total * scale) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1.1])
@pytest.mark.parametrize("loss, module", [(calls, "layer"), (added_up, "sum")])
@pytest.mark.parametrize("is_first", [False, True])
def test_the_last_of_more_values_of_a_module_is_compared(loss, module, scale, is_first):
    pair = loss, functools.partial(loss, scale=scale, scan=True)
    comparison = cg.compare(*(pair[::-1] if is_first else pair), (WEIGHTS, X))
    assert comparison.ok is (scale == 1) and module in {row.module for row in comparison.rows}
    if scale != 1:
        assert [(f.kind, f.module) for f in comparison.findings] == [("value", module)], comparison


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1.1])
def test_the_last_values_are_not_compared_if_they_are_something_else(scale):
    def loss(x, chunks, scale=1.0):
        with jax.named_scope("sum"):
            parts = [part.sum(0) for part in jnp.split(x, chunks)]
            total, _ = lax.scan(lambda total, part: (total + part, None), parts[0],
                                jnp.stack(parts[1:]))  # fmt: skip
            total = total if chunks > 3 else total / len(x)
        with jax.named_scope("mean"):
            mean = total / len(x) if chunks > 3 else total + 0
        with jax.named_scope("head"):
            return jnp.mean((mean * scale) ** 2)

    x = np.float32(RNG.normal(size=(12, 4)))
    fun, other = functools.partial(loss, chunks=3), functools.partial(loss, chunks=6, scale=scale)
    comparison = cg.compare(fun, other, (x,))
    assert comparison.ok is (scale == 1) and not [n for n in comparison.notes if "differ" in n]
    assert [f.module for f in comparison.findings] == ["head"][: scale != 1], comparison


def dense(names, kinds, scale=1.0):
    """A loss of layers whose modules and leaves have these names."""

    def loss(params, x):
        for name in names:
            weight, bias, factor = (params[name][kind] for kind in kinds)
            with jax.named_scope(name):
                x = scale * jnp.tanh(x @ weight + bias) * factor
        return jnp.mean(x**2)

    return loss


@pytest.mark.parametrize("scale", [1.0, pytest.param(1.1, marks=pytest.mark.slow)])
def test_leaves_with_another_name_in_their_module_are_matched(scale):
    """By their size there."""
    leaves = [(layer["w"], layer["b"], X[:, :1]) for layer in LAYERS]
    sides = [(("a", "b"), ("kernel", "bias", "factor")), (("c", "d"), ("weight", "bias", "by"))]
    trees = [{name: dict(zip(kinds, leaf, strict=True)) for name, leaf in zip(*of, strict=True)}
             for names, kinds in sides for of in [(names, leaves)]]  # fmt: skip
    one, two = dense(*sides[0]), dense(*sides[1], scale)
    names = {"a": "c", "b": "d"}
    comparison = cg.compare(one, two, (trees[0], X), other_args=(trees[1], X), names=names)
    assert comparison.ok is (scale == 1), comparison
    assert not [text for text in comparison.unmatched if "gradient" in text]
