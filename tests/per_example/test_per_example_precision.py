"""Products of each example's clip, where a backend rounds the factors of a product by default."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._per_example import products
from clipgrad._per_example.products import product
from clipgrad._programs import Hook, bind, equations, evaluate
from tests.helpers import array, generator, operations
from tests.rows import crossed, first_row

# Bits behind the leading one of a float32 factor at the default precision of a backend.
GPU, TPU = 10, 7  # TF32, and one pass of bfloat16
SIX = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6
LIMIT = 1e-3


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch):
    """Programs for accelerators, which run here."""
    choice = lambda *args, default, **forms: forms.get("cuda", default)(*args)  # noqa: E731
    monkeypatch.setattr(products, "platform_dependent", choice)


def pairs_of_halves(x, y):
    """The six largest pairs of the bfloat16 numbers whose sums two arrays are."""

    def halves(x):
        rest = x
        for _ in range(3):
            half = jax.lax.reduce_precision(rest, 8, 7)
            yield half
            rest = rest - half

    first, second = list(halves(x)), list(halves(y))
    return [(first[i], second[j]) for i in range(3) for j in range(3 - i)]


class DefaultPrecision(Hook):
    """Rounds float32 factors of products that do not ask for a precision."""

    def __init__(self, bits):
        self.bits = bits

    def __call__(self, equation, inputs):
        if equation.primitive.name not in ("dot_general", "conv_general_dilated"):
            return None
        asked = equation.params["precision"]
        if asked == SIX:
            return [sum(bind(equation, pair)[0] for pair in pairs_of_halves(*inputs))]
        if asked is not None and set(asked) != {jax.lax.Precision.DEFAULT}:
            return None
        rounded = [
            jax.lax.reduce_precision(x, 8, self.bits) if x.dtype == jnp.float32 else x
            for x in inputs
        ]
        return bind(equation, rounded)


def on_backend(fun, bits, *args):
    """The results of a function on a backend whose products have so many bits."""
    program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    run = lambda *leaves: evaluate(program, leaves, DefaultPrecision(bits))  # noqa: E731
    results = jax.jit(run)(*jax.tree.leaves(args))
    return jax.tree.structure(shapes).unflatten(results)


def model(dtype, remat, params, x):
    """Layers over rows, as of a sequence, in a scan, and a convolution, computed in a dtype."""
    p = jax.tree.map(lambda w: w.astype(dtype), params)
    h = jnp.tanh(x.astype(dtype) @ p["in"])

    def layer(h, w):
        kernel, bias = w
        return h + jnp.tanh(h @ kernel + bias[None]), None

    layer = jax.checkpoint(layer) if remat else layer
    h = jax.lax.scan(layer, h, (p["layers"], p["biases"]))[0]
    h = jax.lax.conv_general_dilated(
        h[None], p["kernel"], (1,), "SAME", None, None, ("NWC", "WIO", "NWC")
    )
    return jnp.sum((h[0] @ p["out"]).astype(jnp.float32) ** 2)


def arguments(key, examples):
    shapes = {"in": (24, 32), "layers": (3, 32, 32), "kernel": (3, 32, 8)}
    shapes |= {"out": (8, 20), "biases": (3, 32)}
    rng = generator(key)
    params = {name: array(rng.normal(size=s) / 5) for name, s in shapes.items()}
    return params, array(rng.normal(size=(examples, 6, 24)))


def norm(tree):
    return np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree)))


every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
every_method = pytest.mark.parametrize("method", ["auto", "direct"])


@pytest.mark.slow
@every_dtype
@every_method
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
@pytest.mark.usefixtures("users_promotion")
def test_the_share_of_one_example_is_at_most_the_limit(key, remat, method, dtype, monkeypatch):
    """With layers in a scan, of each of many examples; as this backend compiles it."""
    monkeypatch.undo()
    params, batch = arguments(key, 24)
    rule, loss = cg.ClipByGlobalNorm(LIMIT), functools.partial(model, dtype, remat)
    clip = cg.clip_per_example(loss, rule, reduce="sum", method=method)
    alone = jax.jit(lambda params, x: clip(params, x[None])[1])
    # As one of a batch, in which the others are 0 times their loss.
    among = cg.clip_per_example(
        lambda p, e: e[1] * loss(p, e[0]), rule, reduce="sum", method=method
    )
    first = jax.jit(lambda params, x: among(params, (x, jnp.arange(24) == 0.0))[1])
    for i, x in enumerate(batch):
        shares = [alone(params, x)]
        shares += [first(params, batch.at[0].set(x))] if i < 8 else []
        for share in map(norm, shares):
            assert LIMIT * (1 - 1e-5) < share <= LIMIT * (1 + 4e-7)


@first_row
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("float32", GPU), ("float32", TPU), ("bfloat16", TPU), ("float16", TPU)],
)
@every_method
@pytest.mark.usefixtures("users_promotion")
def test_no_example_adds_more_than_the_limit_whatever_a_backend_rounds(key, bits, method, dtype):
    """Each of two examples alone: what it adds is a promise of privacy."""
    params, batch = arguments(key, 2)
    loss = functools.partial(model, dtype, False)
    clip = cg.clip_per_example(loss, cg.ClipByGlobalNorm(LIMIT), reduce="sum", method=method)
    clipped = on_backend(jax.vmap(lambda x: clip(params, x[None])[1]), bits, batch)
    clipped = jax.device_get(clipped)
    for i in range(2):
        size = norm(jax.tree.map(lambda x, i=i: x[i], clipped))
        assert LIMIT * (1 - 1e-3) < size <= LIMIT * (1 + 4e-7)


@first_row
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_coefficient_meets_products_and_no_cotangent(dtype):
    """Of an example that is predicted well a cotangent is what is left of 1 - p.

    A coefficient as the cotangent of the loss, one VJP of all losses, would be rounded before that
    difference: then what is left is another number than the one whose norm was measured.
    """

    def loss(w, example):
        x, margin = example
        logits = (x.astype(dtype) @ w.astype(dtype)).astype("float32") / 4
        return -jax.nn.log_softmax(logits + margin * jnp.array([1.0, 0.0, 0.0]))[0]

    def by_one_vjp(w, batch):
        weights = jnp.minimum(1.0, 1e-6 / cg.per_example_norms(loss)(w, batch))
        return jax.vjp(lambda w: jax.vmap(loss, (None, 0))(w, batch), w)[1](weights)[0]

    rng = np.random.default_rng(0)
    w, margins = array(rng.normal(size=(16, 3))), array(np.repeat([1.0, 4.0, 8.0], 32))
    batch = array(rng.normal(size=(len(margins), 16))), margins
    ways = {"one VJP": by_one_vjp}
    for method in ("auto", "direct"):
        clip = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1e-6), reduce="sum", method=method)
        ways[method] = lambda w, batch, clip=clip: clip(w, batch)[1]

    @jax.jit
    def alone(w, batch):
        one = jax.tree.map(lambda x: x[:, None], batch)
        return {way: jax.vmap(run, (None, 0))(w, one) for way, run in ways.items()}

    of_each = {way: np.asarray(grads) for way, grads in alone(w, batch).items()}
    sizes = {way: np.array([norm(g) for g in grads]) for way, grads in of_each.items()}
    for method in ("auto", "direct"):
        assert np.all(sizes[method] <= 1e-6 * (1 + 4e-7))
        assert np.all(sizes[method] >= 1e-6 * (1 - 2e-6))
    assert sizes["one VJP"].max() > 1e-6 * (1 + 1e-5)


def forward(params, x, wrapped):
    def step(x, w):
        return jnp.tanh(x @ w), None

    for w in params["apart"]:
        x = wrapped(step)(x, w)[0]
    return jnp.sum(jax.lax.scan(wrapped(step), x, params["scanned"])[0])


def count_of(program, name):
    """How often a primitive is in a program, and in those inside."""
    return sum(e.primitive.name == name for e in equations(program))


@pytest.mark.parametrize(
    ("wrapped", "again"),
    [(lambda f: f, 0), (jax.jit, 0), (jax.checkpoint, 1)],
    ids=["plain", "jit", "remat"],
)
def test_there_is_one_forward_and_one_backward_pass(wrapped, again):
    """A value that is made again in the backward pass, as by remat, is made in it once."""
    params = {"apart": [array(np.ones((24, 24)))] * 2, "scanned": array(np.ones((3, 24, 24)))}
    loss = functools.partial(forward, wrapped=wrapped)
    clip = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0))
    program = jax.make_jaxpr(clip)(params, array(np.ones((4, 6, 24))))
    assert count_of(program, "tanh") == 3 + 3 * again
    assert count_of(program, "scan") == 2


def test_no_product_that_the_bound_rests_on_has_the_default_precision():
    """Of norms and sums, for float32 and narrow factors; those of the loss are its own."""

    def loss(p, x):
        h = jax.lax.dot(x, p["w"], precision="high")
        return jnp.sum(jax.lax.dot(h, p["v"], precision="high"))

    params = {"w": array(np.ones((24, 40))), "v": array(np.ones((40, 32)))}
    program = jax.make_jaxpr(cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0)))(
        params, array(np.ones((4, 6, 24)))
    )
    asked = [e.params["precision"] for e in equations(program) if e.primitive.name == "dot_general"]
    precisions = [p for p in asked if p != (jax.lax.Precision.HIGH,) * 2]
    assert precisions and set(precisions) <= {SIX, (jax.lax.Precision.HIGHEST,) * 2}


@pytest.mark.parametrize("rows", [1, 6])
def test_one_more_dense_layer_is_few_operations(rows):
    """Its kernel, bias and the plain gradient's equations, each function once."""

    def loss(params, x):
        for w, b in params:
            x = jnp.tanh(x @ w + b[None])
        return jnp.mean(x**2)

    def count(layers):
        params = [(array(np.ones((48, 48))), array(np.ones(48))) for _ in range(layers)]
        clip = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0))
        return operations(jax.make_jaxpr(clip)(params, array(np.ones((4, rows, 48)))), [])

    assert count(5) - count(2) <= 3 * 130


@crossed(1)
@pytest.mark.parametrize("bits", [GPU, TPU])
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_products_of_narrow_and_wide_factors_are_as_in_float32(key, scale, bits):
    shapes = {"rows": ([(0, 1), (0, 2)], (1, 2)), "batched": ([(3, 0, 1), (3, 0, 2)], (3, 1, 2))}
    sizes = {0: 96, 1: 5, 2: 7, 3: 4}
    kinds = [(a, b) for a in ("bfloat16", "float32") for b in ("bfloat16", "float32", "float16")]
    rng = generator(key)

    def arrays(labels, dtypes):
        made = [rng.normal(size=[sizes[k] for k in axes]) for axes in labels]
        made[0] *= scale
        return [array(x, d) for x, d in zip(made, dtypes, strict=True)]

    cases = [(labels, out, arrays(labels, d)) for labels, out in shapes.values() for d in kinds]

    def run(values):
        return [product(x, labels, out) for x, (labels, out, _) in zip(values, cases, strict=True)]

    for total, (labels, out, values) in zip(
        on_backend(run, bits, [values for *_, values in cases]), cases, strict=True
    ):
        wide = [np.asarray(x, np.float64) for x in values]
        exact = np.einsum(wide[0], labels[0], wide[1], labels[1], out)
        size = np.einsum(np.abs(wide[0]), labels[0], np.abs(wide[1]), labels[1], out)
        assert total.dtype == jnp.float32
        assert np.all(np.abs(np.asarray(total, np.float64) - exact) <= 1e-6 * size)


def test_what_is_not_finite_stays_as_it_is_in_products_with_narrow_factors():
    wide = array([[1.0, jnp.inf], [2.0, -jnp.inf], [jnp.nan, 1.0]])
    multiplied = jax.jit(lambda x, y: product([x, y], [(0, 1), (1,)], (0,)))(
        wide, array(np.ones(2), jnp.bfloat16)
    )
    np.testing.assert_array_equal(multiplied, [np.inf, -np.inf, np.nan])


@pytest.mark.parametrize(("capability", "algorithm"), [(None, True), ("9.0", True), ("7.5", False)])
def test_a_gpu_that_lacks_products_of_halves_multiplies_float32(monkeypatch, capability, algorithm):
    """XLA refuses them for a T4."""

    def gpus(backend):
        if capability is None:
            raise RuntimeError("Unknown backend cuda")
        return [types.SimpleNamespace(compute_capability=capability)]

    monkeypatch.setattr(jax, "local_devices", gpus)
    monkeypatch.setattr(products, "platform_dependent", jax.lax.platform_dependent)
    x = jax.ShapeDtypeStruct((4, 4), "float32")
    run = jax.jit(lambda x, y: product([x, y], [(0, 1), (1, 2)], (0, 2)))
    text = run.trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert ("algorithm" in text) is algorithm and ("HIGHEST" in text) is not algorithm
    assert "HIGHEST" in run.trace(x, x).lower(lowering_platforms=("tpu",)).as_text()
