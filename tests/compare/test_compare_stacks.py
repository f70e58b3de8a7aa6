"""Layers one by one beside the stack of a scan, and leaves that have another name in a module."""

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
