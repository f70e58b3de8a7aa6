"""Programs for GPUs and TPUs: compiled, and read, on a machine that has none.

Nothing runs here. Each program is compiled for an H200, for eight of them and for 256 TPU chips.
"""

import functools
import importlib.util
import itertools
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
from tests.helpers import CASES, PLACES
from tests.rows import in_turn

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
    """What a compiled program does."""

    collectives: int
    temporaries: int

    @classmethod
    def of(cls, program: Any, *args: Any) -> "Facts":
        """Compiles; a program that talks to the host is refused."""
        lowered = (
            program.lower(*args) if hasattr(program, "lower") else jax.jit(program).lower(*args)
        )
        compiled = lowered.compile()
        text = re.sub(r"metadata={[^}]*}", "", compiled.as_text())
        assert not host_transfers(text), host_transfers(text)[:3]
        joined = r"(?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
        return cls(
            len(re.findall(rf" {joined}(?:-start)?[(]", text)),
            compiled.memory_analysis().temp_size_in_bytes,
        )


def update_of(tx: Any) -> Any:
    return lambda grads, params: tx.update(grads, tx.init(params), params)


def facts_of_update(tx: Any, kind: str, dtype: Any = jnp.float32) -> Facts:
    tree = abstract(SHAPES, mesh_of(kind), dtype=dtype)
    return Facts.of(update_of(tx), tree, tree)


# Rules


# No row is slow: they run where the compilers are, with the newest JAX alone.
@in_turn
@pytest.mark.parametrize(
    ("case", "place"),
    itertools.product(CASES, PLACES),
    ids=lambda value: getattr(value, "name", value),
)
@every_kind
def test_every_rule_compiles_in_both_places_with_one_collective_at_most(kind, place, case):
    """Two for norms of other orders, whose elements are divided by their maximum first."""
    tree = abstract(SHAPES, mesh_of(kind))
    rule = case.make(0.3)
    facts = Facts.of(lambda grads, params: PLACES[place](rule, grads, params), tree, tree)
    most = 0 if case.name == "ClipByValue" else 2 if case.name[-6:-1] in ("ord=1", "ord=3") else 1
    assert facts.collectives <= (0 if kind == "H200" else most)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_rule_has_a_branch_at_which_a_gpu_waits_for_the_host(case):
    """XLA decides a `conditional` on the host, which waits for the flag."""
    tree = abstract(SHAPES, mesh_of("H200"))
    text = (
        jax.jit(update_of(cg.gradient_clip(case.make(0.3)))).lower(tree, tree).compile().as_text()
    )
    assert " fusion(" in text
    assert not re.findall(r"%\S+ = .* conditional\(", text)


@pytest.mark.parametrize("make", [cg.clip_by_global_norm, cg.clip_by_block_rms])
@every_kind
def test_a_clip_of_whole_leaves_has_the_collectives_and_about_the_temporaries_of_optax(kind, make):
    theirs = getattr(optax, make.__name__)
    ours, theirs = (facts_of_update(clip(0.1), kind) for clip in (make, theirs))
    assert ours.collectives <= theirs.collectives
    assert ours.temporaries <= theirs.temporaries + 2**21


@pytest.mark.parametrize("kind", ["TPU", "8 H200"])
@pytest.mark.parametrize("make", [cg.clip_by_norm, cg.clip_by_value])
def test_statistics_need_no_temporaries_of_the_size_of_a_leaf(kind, make):
    tree = abstract({"bias": (4096,), "kernel": (4096, 4096)}, mesh_of(kind))
    plain, stats = (Facts.of(update_of(make(0.1, stats=s)), tree, tree) for s in (False, True))
    assert stats.temporaries <= plain.temporaries + 2**22
    assert stats.collectives <= plain.collectives + 2


@every_kind
def test_adaptive_thresholds_are_one_collective_and_skipping_two_at_most(kind):
    follow = cg.clip_by_global_norm(cg.HistoryThreshold(window=4))
    skip = cg.skip_spikes(optax.sgd(0.1), window=4)
    # Of the gradient the norm, and of the update, which comes after, whether it is finite.
    for tx, most in ((follow, 1), (skip, 2)):
        assert facts_of_update(tx, kind).collectives <= most * (kind != "H200")


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
def test_an_error_clip_by_value_adds_no_collective_and_no_memory(kind):
    def clip(h):
        return cg.clip_cotangent(h, cg.ErrorClipByValue(0.5))

    params, x = model_arguments(kind)
    plain, clipped = (
        Facts.of(jax.grad(functools.partial(mlp, **option)), params, x)
        for option in ({}, {"clip": clip})
    )
    assert clipped.temporaries <= plain.temporaries
    assert clipped.collectives == plain.collectives


@every_kind
def test_an_error_clip_by_name_compiles_in_scan_and_remat_at_no_cost(kind):
    mesh = mesh_of(kind)
    layers = jax.tree.map(lambda s: (4, *s), LAYER, is_leaf=lambda s: isinstance(s, tuple))
    args = abstract(layers, mesh, P()), abstract((8 * WIDTH, WIDTH), mesh)
    clipped = cg.error_clip_by_name(scanned, {"h": cg.ErrorClipByValue(0.5)})
    assert Facts.of(jax.grad(clipped), *args) == Facts.of(jax.grad(scanned), *args)


# Training


@pytest.mark.parametrize(
    ("kind", "axis_type"), [("TPU", AxisType.Auto), ("8 H200", AxisType.Explicit)], ids=str
)
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
