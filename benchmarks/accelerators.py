"""Compiles clips for GPUs and TPUs on a machine that has none, and reads the programs.

Prints a line of JSON for each: kernels in the entry computation, and in the bodies of loops,
collectives, bytes of temporaries, CPU seconds of tracing and of compilation. A program that talks
to the host is refused. Needs the extra ``accelerators``; nothing runs. All is stored in
benchmarks/compiled.json, for benchmarks/RESULTS.md.

    JAX_PLATFORMS=cpu python -m benchmarks.accelerators [--rows "8 H200, adaptive" ...]
    JAX_PLATFORMS=cpu python -m benchmarks.accelerators --per-example [--rows TEXT ...]
    JAX_PLATFORMS=cpu python -m benchmarks.accelerators --values [--rows TEXT ...]
    JAX_PLATFORMS=cpu python -m benchmarks.accelerators --value-sizes [--rows TEXT ...]
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from benchmarks import compiled
from benchmarks.flax_models import Transformer
from benchmarks.peers import by_leaf
from benchmarks.rows import Scale
from benchmarks.subjects import per_example as subject
from benchmarks.subjects import values as of_values

WIDTH = 1024
VECTORS = {"bias": (WIDTH,), "scale": (WIDTH,)}
SQUARES = {name: (WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
LAYER = SQUARES | {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
LAYER = LAYER | {"norm1": VECTORS, "norm2": VECTORS}
H200 = pathlib.Path(__file__).parents[1] / "tests" / "h200.txtpb"
KINDS = {
    "H200": ("cuda", "1x1x1", 1),
    "8 H200": ("cuda", "1x1x8", 8),
    "1 TPU": ("tpu", "v5e:2x2", 1),
    "256 TPU": ("tpu", "v5e:16x16", 256),
}
ONE_DEVICE = ("H200", "1 TPU")
# The models of `python -m benchmarks --only per_example`, each with its largest batch.
EXAMPLES = {
    f"{name}, batch {sizes[-1]}": (make, sizes[-1]) for name, make, sizes, _ in subject.WORK
}
# A CPU is beside them for its temporaries, with the rows of the batch that each compiles for.
VALUES = {"CPU": 8, "H200": 8, "1 TPU": 64}
MODELS = {compiled.UNROLLED: (False, 4, 256), "scanned": (True, 4, 256)}
# By layers and width, unrolled, beside the model above. A TPU's compiler takes minutes for each.
SIZES = {
    f"{layers} layers, width {width}": (False, layers, width)
    for layers in (4, 8, 12)
    for width in (256, 512, 768)
}
SIZES_FOR = {
    "CPU": [size for size in list(SIZES)[1:] if not size.startswith("8")],
    "H200": ["12 layers, width 256"],
    "1 TPU": ["8 layers, width 256"],
}
KERNEL = re.compile(r"= [^=]*? (?:fusion|custom-call)[(]")
# The compiler numbers the parts of a long tuple: (f32[2], /*index=5*/f32[2]).
COMMENT = re.compile(r"/[*].*?[*]/")

CLIPS = {
    "global norm": (optax.clip_by_global_norm, cg.clip_by_global_norm, 1.0),
    "norm of each leaf": (by_leaf, cg.clip_by_norm, 1.0),
    "block RMS": (optax.clip_by_block_rms, cg.clip_by_block_rms, 1.0),
    "adaptive": (optax.adaptive_grad_clip, cg.adaptive_grad_clip, 0.01),
    "value": (optax.clip, cg.clip_by_value, 1.0),
}


def devices(kind):
    if kind == "CPU":
        return np.array(jax.devices("cpu")[:1])
    platform, topology, count = KINDS[kind]
    if platform == "tpu":
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    else:
        found = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=H200.read_text(), topology=topology
        )
    return np.array(found.devices[:count])


def placed(tree, kind):
    """The types of arrays, whole on each device, which need not be there."""
    sharding = NamedSharding(Mesh(devices(kind), ("data",)), P())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def gradients(kind):
    sharding = NamedSharding(Mesh(devices(kind), ("data",)), P("data"))

    def array(shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    layer = jax.tree.map(array, LAYER, is_leaf=lambda shape: isinstance(shape, tuple))
    return {f"layer{i}": layer for i in range(12)}


def update_of(tx):
    return lambda g, w: tx.update(g, tx.init(g), w)


def kernel_counts(text):
    """Kernels in the entry computation of a program, and in the bodies of its loops, once each."""
    parts = re.split(r"\n(?=(?:ENTRY )?%\S+ [(])", COMMENT.sub("", text))
    bodies = set(re.findall(r"\bbody=(%[\w.-]+)", text))
    entry = next(part for part in parts if part.startswith("ENTRY"))
    loops = [part for part in parts if part.partition(" ")[0] in bodies]
    return len(KERNEL.findall(entry)), sum(len(KERNEL.findall(part)) for part in loops)


def facts(fun, *args):
    """What a compiled function does, and what it took to compile it."""
    start = time.process_time()
    lowered = jax.jit(fun).lower(*args)
    traced = time.process_time()
    program = lowered.compile()
    text = program.as_text()
    if found := compiled.host_transfers(text):
        raise RuntimeError(f"the program talks to the host: {found[0]}")
    kernels, in_loops = kernel_counts(text)
    joined = (
        r" (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?[(]"
    )
    return {
        "kernels": kernels,
        "in loops": in_loops,
        "collectives": len(re.findall(joined, text)),
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "trace": round(traced - start, 2),
        "compile": round(time.process_time() - traced, 2),
    }


def origin():
    return {"jax": jax.__version__, "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"}


def keep(part, row, works, fun, args):
    """Compiles a function, prints what it does, and stores it."""
    found = row | facts(fun, *args) | origin()
    print(json.dumps(found), flush=True)
    compiled.keep(part, found, ["CPU", *KINDS], list(works))


def per_example(texts):
    """Clips of each example's gradient beside the plain gradient, on one device."""
    for kind in ONE_DEVICE:
        sharding = NamedSharding(Mesh(devices(kind), ("data",)), P())
        for work, (make, size) in EXAMPLES.items():
            if not any(text in f"{kind}, {work}" for text in texts):
                continue
            model = make(Scale(1))
            args = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),  # noqa: B023
                (model.params, model.batch(size)),
            )
            programs = {"no clip": subject.unclipped(model), "optax": subject.optax_sum(model)}
            programs |= {m: subject.clipped(model, m) for m in ("one pass", "two passes")}
            for who, fun in programs.items():
                row = {"for": kind, "work": work, "who": who}
                keep(compiled.EXAMPLES, row, EXAMPLES, fun, args)


def transformer(kind, scanned, layers, width):
    """What programs compute for a transformer all of whose modules are watched; its arguments."""
    model = Transformer(scanned, layers)
    data = jax.ShapeDtypeStruct((VALUES[kind], 128, width), jnp.float32)
    args = placed((jax.eval_shape(model.init, jax.random.key(0), data), data), kind)
    loss = lambda p, x: jnp.mean(model.apply(p, x) ** 2)  # noqa: E731
    return of_values.programs(loss, model.apply, ["**"]), args


def values(texts):
    """Statistics of the values of all modules of a transformer, beside the plain gradient."""
    for kind in VALUES:
        for work, model in MODELS.items():
            if not any(text in f"{kind}, {work}" for text in texts):
                continue
            found, args = transformer(kind, *model)
            for who, fun in found.items():
                keep(compiled.VALUES, {"for": kind, "work": work, "who": who}, MODELS, fun, args)


def value_sizes(texts):
    """The same by layers and width."""
    for kind, sizes in SIZES_FOR.items():
        for work in sizes:
            if not any(text in f"{kind}, {work}" for text in texts):
                continue
            found, args = transformer(kind, *SIZES[work])
            for who in ("rms and max used", "all used", of_values.PLAIN):
                row = {"for": kind, "work": work, "who": who}
                keep(compiled.SIZES, row, SIZES, found[who], args)


def clips(texts):
    """Clips of finished gradients, beside optax's."""
    for kind in KINDS:
        tree = gradients(kind)
        for name, (theirs, ours, threshold) in CLIPS.items():
            if not any(text in f"{kind}, {name}" for text in texts):
                continue
            clips = {"optax": theirs(threshold), "clipgrad": ours(threshold)}
            for who, tx in (clips | {"with statistics": ours(threshold, stats=True)}).items():
                row = {"for": kind, "work": name, "who": who}
                keep(compiled.CLIPS, row, CLIPS, update_of(tx), (tree, tree))


def main(arguments):
    # Without these libtpu asks the network what machine it is on, and one process loads it alone.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ |= {"TPU_ACCELERATOR_TYPE": "v5e-4", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-example", action="store_true", help="clips of each example")
    parser.add_argument("--values", action="store_true", help="statistics of values by name")
    parser.add_argument("--value-sizes", action="store_true", help="the same by size of the model")
    parser.add_argument("--rows", nargs="+", default=[""], metavar="TEXT")
    options = parser.parse_args(arguments)
    parts = {per_example: options.per_example, values: options.values}
    parts |= {value_sizes: options.value_sizes}
    chosen = [part for part, asked in parts.items() if asked] or [clips]
    for part in chosen:
        part(options.rows)


if __name__ == "__main__":
    main(sys.argv[1:])
