"""Programs for GPUs and TPUs: compiled, and read, on a machine that has none.

Nothing runs here. Each program is compiled for an H200, for eight of them and for 256 TPU chips.
"""

import functools
import importlib.util
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from benchmarks.compiled import host_transfers
from benchmarks.roofline import BANDWIDTH, LAUNCH, Estimate
from tests.helpers import CASES, PLACES

_COMPILERS = ("libtpu", "jax_cuda12_plugin")
_MISSING = [name for name in _COMPILERS if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(
        bool(_MISSING), reason=f"no {' and no '.join(_MISSING)}: see `accelerators` in pyproject"
    ),
    pytest.mark.skipif(
        jax.config.jax_platforms != "cpu",
        reason="set JAX_PLATFORMS=cpu: there is no machine to start",
    ),
    pytest.mark.usefixtures("users_promotion"),
]
# Without these libtpu asks the network what machine it is on, and only one process may load it.
_NO_MACHINE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@pytest.fixture(autouse=True, scope="module")
def compilers_of_users():
    """Each compiler reads the flags when it is loaded; those of tests/conftest.py are a CPU's."""
    jax.devices("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS", raising=False)
        for name, value in _NO_MACHINE.items():
            patch.setenv(name, value)
        yield


@functools.cache
def devices_of(kind: str) -> np.ndarray:
    if kind.endswith("TPU"):
        name, count = ("v5e:16x16", 256) if kind == "256 TPU" else ("v5e:2x2", 1)
        found = topologies.get_topology_desc(platform="tpu", topology_name=name)
        return np.array(found.devices[:count])
    found = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=pathlib.Path(__file__).with_name("h200.txtpb").read_text(),
        topology=f"1x1x{8 if kind == '8 H200' else 1}",
    )
    return np.array(found.devices)


KINDS = ["H200", "8 H200", "256 TPU"]
every_kind = pytest.mark.parametrize("kind", KINDS)
WIDTH = 256
ROWS = P("data")
LAYER = {"bias": (WIDTH,), "in": (WIDTH, 4 * WIDTH), "out": (4 * WIDTH, WIDTH), "scale": (WIDTH,)}
SHAPES = {"embedding": (16 * WIDTH, WIDTH)} | {f"layer{i}": LAYER for i in range(3)}


def mesh_of(kind: str, axis_type: Any = AxisType.Auto) -> Any:
    return jax.sharding.Mesh(devices_of(kind), ("data",), axis_types=(axis_type,))


def abstract(shapes: Any, mesh: Any, spec: Any = ROWS, dtype: Any = jnp.float32) -> Any:
    """A tree of this shape, spread over all devices by its first axis."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding),
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


class Facts(NamedTuple):
    """What a compiled program does, and how long that takes on an H200 by estimate."""

    seconds: float
    collectives: int
    temporaries: int
    moved: int  # of the collectives those that move what is not added up

    @classmethod
    def of(cls, program: Any, *args: Any) -> "Facts":
        """Compiles; a program that talks to the host is refused."""
        lowered = (
            program.lower(*args) if hasattr(program, "lower") else jax.jit(program).lower(*args)
        )
        compiled = lowered.compile()
        whole = compiled.as_text()
        text = re.sub(r"metadata={[^}]*}", "", whole)
        assert not host_transfers(text), host_transfers(text)[:3]
        joined = r"(?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
        return cls(
            Estimate(whole).seconds,
            len(re.findall(rf" {joined}(?:-start)?[(]", text)),
            compiled.memory_analysis().temp_size_in_bytes,
            len(re.findall(r" (?:all-gather|all-to-all|collective-permute)(?:-start)?[(]", text)),
        )


def update_of(tx: Any) -> Any:
    return lambda grads, params: tx.update(grads, tx.init(params), params)


def facts_of_update(tx: Any, kind: str, dtype: Any = jnp.float32) -> Facts:
    tree = abstract(SHAPES, mesh_of(kind), dtype=dtype)
    return Facts.of(update_of(tx), tree, tree)


# Rules


@pytest.mark.kinds("case place", "kind")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("place", PLACES)
@every_kind
def test_every_rule_compiles_in_both_places_with_one_collective_at_most(kind, place, case):
    """Two for norms of other orders, whose elements are divided by their maximum first."""
    tree = abstract(SHAPES, mesh_of(kind))
    rule = case.make(0.3)
    facts = Facts.of(lambda grads, params: PLACES[place](rule, grads, params), tree, tree)
    most = 0 if case.name == "ClipByValue" else 2 if case.name[-6:-1] in ("ord=1", "ord=3") else 1
    assert facts.collectives <= (0 if kind == "H200" else most)


# Seconds on GPUs by estimate as a multiple of optax's, nearly all of them launches of kernels and
# the wait for a branch, and bytes of temporaries above its. XLA stores the tall leaf of this tree
# before it reduces its columns in three ranges, which optax does in one.
CLIPS = {
    "global norm": (cg.clip_by_global_norm, optax.clip_by_global_norm, 1.05, 2**21),
    "value": (cg.clip_by_value, optax.clip, 1.0, 0),
    "block RMS": (cg.clip_by_block_rms, optax.clip_by_block_rms, 1.25, 2**21),
    "adaptive": (cg.adaptive_grad_clip, optax.adaptive_grad_clip, 1.25, 5 * 2**20),
}


@pytest.mark.parametrize("clip", CLIPS)
@every_kind
def test_a_clip_has_about_the_time_of_optax_its_collectives_and_its_memory(kind, clip):
    make, of_optax, seconds, temporaries = CLIPS[clip]
    ours, theirs = (facts_of_update(tx(0.1), kind) for tx in (make, of_optax))
    assert kind == "256 TPU" or ours.seconds <= seconds * theirs.seconds
    assert ours.collectives <= theirs.collectives
    assert ours.temporaries <= theirs.temporaries + temporaries


def rare(shape: tuple[int, ...]) -> Any:
    return pytest.param(shape, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "shape",
    [(1600, 1000), (3, 3, 64, 128)]
    + [rare(shape) for shape in ((768, 3072), (3072, 768), (2048, 2048), (12, 768, 768))],
)
def test_norms_of_units_take_about_the_time_of_optax_on_one_gpu_by_estimate(shape):
    """A sum over leading axes is dear there: one for each leaf, and a second only out of range."""
    tree = abstract([shape] * 20, mesh_of("H200"))
    ours, theirs = (
        Estimate(jax.jit(update_of(tx(0.01))).lower(tree, tree).compile().as_text())
        for tx in (cg.adaptive_grad_clip, optax.adaptive_grad_clip)
    )
    assert ours.kernels["wait"] > 0  # for the branch, which is one and not two computed always
    assert ours.seconds <= 1.1 * theirs.seconds


@pytest.mark.parametrize("kind", ["TPU", "8 H200"])
@pytest.mark.parametrize("make", [cg.clip_by_norm, cg.clip_by_value])
def test_statistics_need_no_temporaries_of_the_size_of_a_leaf(kind, make):
    tree = abstract({"bias": (4096,), "kernel": (4096, 4096)}, mesh_of(kind))
    plain, stats = (Facts.of(update_of(make(0.1, stats=s)), tree, tree) for s in (False, True))
    assert stats.temporaries <= plain.temporaries + 2**22
    assert stats.collectives <= plain.collectives + 2


@pytest.mark.parametrize("make", [cg.clip_by_global_norm, cg.clip_by_norm, cg.adaptive_grad_clip])
def test_statistics_of_a_norm_add_a_launch_for_each_leaf_at_most(make):
    """On eight GPUs: NaN and inf are counted where the clip scales, and then added up at once.

    Norms by leaf are one array, of which there is one kernel, not one for each leaf.
    """
    plain, stats = (facts_of_update(make(0.1, stats=s), "8 H200") for s in (False, True))
    assert stats.seconds <= plain.seconds + 13 * LAUNCH  # leaves
    assert stats.collectives <= 2


@every_kind
def test_adaptive_thresholds_and_skipping_are_one_collective_at_most(kind):
    follow = cg.clip_by_global_norm(cg.HistoryThreshold(window=4))
    skip = cg.skip_spikes(optax.sgd(0.1), window=4)
    for tx in (follow, skip):
        assert facts_of_update(tx, kind).collectives <= (kind != "H200")


# Error clips


def mlp(params, x, clip=lambda h: h):
    for name in ("layer0", "layer1", "layer2"):
        with jax.named_scope(name):
            layer = params[name]
            x = clip(jnp.tanh(x @ layer["in"] + 1) @ layer["out"] + layer["bias"] * layer["scale"])
    return jnp.mean(x**2)


def scanned(params, x):
    """The model with its layers in a scan, each computed again in the backward pass."""

    @jax.checkpoint
    def body(x, layer):
        h = checkpoint_name(jnp.tanh(x @ layer["in"]), "h")
        return jnp.tanh(h @ layer["out"] + layer["bias"]), None

    return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)


def model_arguments(kind: str) -> Any:
    """Parameters that are the same on each device, and a batch that is spread over them."""
    mesh = mesh_of(kind)
    return abstract(SHAPES, mesh, P()), abstract((8 * WIDTH, WIDTH), mesh)


@every_kind
def test_an_error_clip_by_value_adds_no_time_no_collective_and_no_memory(kind):
    def clip(h):
        return cg.clip_cotangent(h, cg.ErrorClipByValue(0.5))

    params, x = model_arguments(kind)
    plain, clipped = (
        Facts.of(jax.grad(functools.partial(mlp, **option)), params, x)
        for option in ({}, {"clip": clip})
    )
    assert clipped.seconds <= 1.01 * plain.seconds and clipped.temporaries <= plain.temporaries
    assert clipped.collectives == plain.collectives


@every_kind
def test_an_error_clip_by_name_compiles_in_scan_and_remat_at_no_cost(kind):
    mesh = mesh_of(kind)
    layers = jax.tree.map(lambda s: (4, *s), LAYER, is_leaf=lambda s: isinstance(s, tuple))
    args = abstract(layers, mesh, P()), abstract((8 * WIDTH, WIDTH), mesh)
    clipped = cg.error_clip_by_name(scanned, {"h": cg.ErrorClipByValue(0.5)})
    assert Facts.of(jax.grad(clipped), *args) == Facts.of(jax.grad(scanned), *args)


def attention(params, x):
    heads = {}
    for name in params:
        with jax.named_scope(name):
            heads[name] = jnp.einsum("bsd,dhk->bshk", x, params[name])
    with jax.named_scope("logits"):
        logits = jnp.einsum("bqhk,bshk->bhqs", heads["query"], heads["key"])
    return jnp.mean(jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(logits), heads["value"]) ** 2)


@pytest.mark.parametrize(
    "watched",
    [
        lambda f: cg.value_and_grad_with_stats(f),
        lambda f: jax.value_and_grad(cg.with_value_stats(f), has_aux=True),
    ],
    ids=["cotangents", "values"],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_statistics_read_a_value_once_on_one_gpu(dtype, watched):
    """The logits are the result of a matrix product, whose sums XLA does not join."""
    mesh = mesh_of("H200")
    params = abstract(dict.fromkeys(("query", "key", "value"), (WIDTH, 4, 64)), mesh, P(), dtype)
    args = params, abstract((16, 1024, WIDTH), mesh, dtype=dtype)
    plain, used = (Facts.of(f(attention), *args) for f in (jax.value_and_grad, watched))
    read = (16 * 4 * 1024**2 + 3 * 16 * 1024 * 4 * 64) * jnp.dtype(dtype).itemsize / BANDWIDTH
    # The value of a module within another one is seen in both. A stack of sums reads it 8 times.
    assert read < used.seconds - plain.seconds <= 2.5 * read + 40 * LAUNCH
    assert used.temporaries <= 1.01 * plain.temporaries


# Training


def layers_and_sequences(kind: str, rows: int) -> Any:
    """Scanned layers that are the same on each device, and eight sequences for each of them."""
    mesh = mesh_of(kind)
    layers = jax.tree.map(lambda s: (4, *s), LAYER, is_leaf=lambda s: isinstance(s, tuple))
    return abstract(layers, mesh, P()), abstract((8 * mesh.size, rows, WIDTH), mesh)


@functools.cache
def facts_of_plain_gradient(kind: str, rows: int) -> Facts:
    def mean(params, batch):
        return jnp.mean(jax.vmap(scanned, (None, 0))(params, batch))

    return Facts.of(jax.grad(mean), *layers_and_sequences(kind, rows))


def products_of_rounded_factors(text: str) -> list[str]:
    """The products of a compiled program whose float32 factors are rounded first."""
    types = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
    kind = r" (?:dot|convolution)\(([^)]*)\)(.*)"
    products = [found for line in text.splitlines() if (found := re.search(kind, line))]
    assert products
    return [
        found.group(0)
        for found in products
        if {types[name] for name in re.findall(r"%[\w.-]+", found.group(1))} != {"bf16"}
        and not re.search(r"operand_precision=\{highest,highest\}|bf16_f32_x6", found.group(2))
    ]


@pytest.mark.parametrize("method", ["auto", "direct"])
@pytest.mark.parametrize("kind", ["H200", "TPU"])
def test_no_product_of_an_examples_clip_rounds_its_factors(kind, method):
    """The layers compute in bfloat16, so that products of float32 are those of the clip."""

    def loss(params, x):
        narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        h = x.astype(jnp.bfloat16)
        for w in narrow:
            h = h + jnp.tanh(h @ w)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    mesh = mesh_of(kind)
    args = abstract([(WIDTH, WIDTH)] * 2, mesh, P()), abstract((8, 32, WIDTH), mesh, P())
    clip = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), method=method)
    assert not products_of_rounded_factors(jax.jit(clip).lower(*args).compile().as_text())


@every_kind
def test_clipping_per_example_has_about_the_temporaries_of_a_plain_gradient(kind):
    """Each device has the rows and Gram matrices of its own examples: only sums are exchanged."""
    rows, temporaries, seconds = 32, 1.75, 2.5  # multiples of the plain gradient's
    per_example = cg.clip_per_example(scanned, cg.ClipByGlobalNorm(1.0))
    facts = Facts.of(lambda *args: per_example(*args)[1], *layers_and_sequences(kind, rows))
    plain = facts_of_plain_gradient(kind, rows)
    # Of a program that fits into its fast memory the TPU's compiler counts no temporaries.
    assert facts.temporaries <= temporaries * max(plain.temporaries, 2**19)
    assert kind == "256 TPU" or facts.seconds <= seconds * plain.seconds
    assert facts.moved == 0 and facts.collectives <= plain.collectives
    assert facts.collectives == (kind != "H200")


@pytest.mark.kinds("kind", "axis_type")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@every_kind
def test_a_training_step_compiles_with_sharded_parameters(kind, axis_type):
    mesh = mesh_of(kind, axis_type)

    def loss(params, x):
        # Each device needs the whole of a layer while it works on its part of the batch.
        whole = params if axis_type is AxisType.Auto else jax.reshard(params, P())
        return mlp(whole, x)

    def facts(make):
        step = cg.train_step(loss, optax.chain(make(1.0), optax.adamw(1e-3)))
        params = abstract(SHAPES, mesh)
        state = jax.eval_shape(step.init, params)
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, ROWS if x.ndim else P())
            ),
            state,
        )
        return Facts.of(step.update, state, abstract((8 * WIDTH, WIDTH), mesh))

    with jax.set_mesh(mesh):
        ours, theirs = map(facts, (cg.clip_by_global_norm, optax.clip_by_global_norm))
    assert ours.collectives <= theirs.collectives + 1
