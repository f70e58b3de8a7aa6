"""One of several processes that clip together: started by test_processes.py."""

import functools
import os
import sys

os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import clipgrad as cg  # noqa: E402

SPECS = {"replicated": P(), "rows": P("x"), "stacked": P(None, "x")}
SHAPES = {"replicated": (5,), "rows": (16, 3), "stacked": (2, 8, 3)}
BATCH = P("x")


def numbers(shape, seed):
    """The same numbers in every process, of gradients whose norm is far above 1."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 30


def everything(mesh=None):
    """All results, over the devices of a mesh or on one."""
    grads = {n: placed(numbers(s, i), SPECS[n], mesh) for i, (n, s) in enumerate(SHAPES.items())}
    params = {"w": placed(numbers((4, 3), 9) / 30, P(), mesh)}
    batch = placed(numbers((16, 4), 10), BATCH, mesh)
    tx = cg.clip_by_global_norm(1.0, stats=True)
    clipped, state = jax.jit(lambda g: tx.update(g, tx.init(g)))(grads)
    mapped = jax.jit(in_shard_map(mesh) if mesh else cg.ClipByGlobalNorm(1.0))(grads)
    step = cg.train_step(loss, optax.chain(cg.clip_by_global_norm(0.1), optax.sgd(1.0)))
    trained, metrics = step(step.init(params), batch)
    each = functools.partial(cg.clip_per_example, loss, cg.ClipByGlobalNorm(0.5))
    per_example = jax.jit(each(microbatch=8))
    followed = {m: jax.jit(each(method=m))(params, batch)[1:] for m in ("auto", "direct")}
    return {
        "jit": clipped,
        "norm": state.stats.norm,
        "shard_map": mapped,
        "trained": trained.params,
        "grad_norm": metrics["grad_norm"],
        "per_example": per_example(params, batch)[1],
        **followed,
    }


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)  # tanh would cancel, by processor, where it is flat


def in_shard_map(mesh):
    rule = cg.ClipByGlobalNorm(1.0, axis_name="x")
    return jax.shard_map(rule, mesh=mesh, in_specs=(SPECS,), out_specs=SPECS)


def placed(array, spec, mesh):
    if mesh is None:
        return jnp.asarray(array)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def main(port, number, index, folder):
    """Joins the other processes and saves the parts of the results that this one holds."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # On a busy machine a process may not run for longer than the 100 s that are JAX's limit.
    jax.distributed.initialize(
        f"127.0.0.1:{port}", int(number), int(index), heartbeat_timeout_seconds=240
    )
    assert jax.process_count() == int(number) and jax.device_count() == 2 * int(number)
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    saved = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(everything(mesh))[0]:
        for i, shard in enumerate(leaf.addressable_shards):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            saved[f"{name}@{i}"] = np.asarray(shard.data)
            starts = [part.start or 0 for part in shard.index]
            saved[f"{name}@{i}@start"] = np.array(starts, np.int64)
    np.savez(f"{folder}/{index}.npz", **saved)
    compare(mesh, folder)
    halt(mesh, folder)


def compare(mesh, folder):
    """A step of one process beside right and wrong ones of all: each process finds the fault."""

    def step(average, params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads = jax.tree.map(average, grads)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return new, {"loss": value, "grad_norm": cg.global_norm(grads)}

    def mapped(average):
        def one(params, batch):
            new, metrics = step(average, params, batch)
            return new, metrics | {"loss": jax.lax.pmean(metrics["loss"], "x")}

        return jax.jit(
            jax.shard_map(one, mesh=mesh, in_specs=(P(), BATCH), out_specs=P(), check_vma=False)
        )

    arrays = {"w": numbers((4, 3), 9) / 30}, numbers((16, 4), 10) / 30
    alone = jax.tree.map(jnp.asarray, arrays)
    spread = jax.tree.map(lambda x, spec: placed(x, spec, mesh), arrays, ({"w": P()}, BATCH))
    plain = jax.jit(functools.partial(step, lambda g: g))
    against = functools.partial(cg.compare, plain, args=alone, other_args=spread, argnums=None)
    for right in plain, mapped(lambda g: jax.lax.pmean(g, "x")):
        comparison = against(right)
        assert comparison.ok and len(comparison.rows) == 3, comparison
    comparison = against(mapped(lambda g: jax.lax.psum(g, "x")))
    ratios = {finding.path: finding.ratio for finding in comparison.findings}
    assert set(ratios) == {"0/w", "1/grad_norm"}, comparison
    assert abs(ratios["1/grad_norm"] * jax.device_count() - 1) < 1e-4, comparison
    cg.save_run(loss, spread, f"{folder}/run")  # all processes together
    assert cg.compare(f"{folder}/run", loss, alone).ok


def halt(mesh, folder):
    """A training whose third step is bad, in one process only: all write the capture together."""
    step = cg.train_step(
        lambda params, batch: jnp.mean(jnp.log(batch @ params["w"])),
        cg.skip_spikes(optax.sgd(0.1), halt=True),
    )
    state = step.init({"w": placed(np.ones((4, 3), np.float32), P(), mesh)})
    recorder = cg.FlightRecorder(f"{folder}/captures", keep=3)
    try:
        for i in range(9):
            array = np.full((16, 4), i + 1, np.float32)
            array[-1] *= i != 2
            batch = placed(array, BATCH, mesh)
            state, _ = step(state, batch)
            recorder.record(state, batch, step=i, key=jax.random.key(i))
    except cg.HaltedError as error:
        capture = cg.load_capture(error.path, (state.params, batch))
        assert capture.batch.sharding.spec == BATCH and capture.key == jax.random.key(2)
        device = diagnosed(mesh, capture)
        np.savez(
            f"{folder}/captured_{jax.process_index()}.npz", seen=i, step=capture.step, device=device
        )
    try:
        recorder.record(state, np.ones((16, 4), np.float32))
    except ValueError as error:
        assert "batch: got ndarray of one process, expected arrays of all" in str(error), error


def diagnosed(mesh, capture):
    """The device of the bad example, as the findings and the examples name it."""

    def roots(params, batch):
        def part(w, x):
            return jax.lax.pmean(jnp.mean(jnp.sqrt(x @ w - 1e-3)), "x")

        specs = P(), BATCH
        return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P())(params["w"], batch)

    diagnosis = cg.diagnose(roots, capture.args, examples="batch")
    assert [f.kind for f in diagnosis.findings] == ["value"], diagnosis
    assert [example.index for example in diagnosis.examples] == [15], diagnosis
    device = diagnosis.findings[0].device
    assert device == diagnosis.examples[0].device, diagnosis
    return device


if __name__ == "__main__":
    main(*sys.argv[1:])
