"""A capture on the disk: arrays by orbax, all else as JSON; complete or not there."""

import functools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from clipgrad._recorder.structure import from_data, to_data

FORMAT = 1
MANIFEST = "capture.json"
_ARRAYS = "arrays"


def orbax() -> Any:
    """The module ``orbax.checkpoint``.

    Raises:
      ImportError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "FlightRecorder and load_capture need orbax-checkpoint; install it with: "
            'pip install "clipgrad[recorder]"'
        ) from error
    return orbax.checkpoint


def write(path: pathlib.Path, content: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Write a capture; it has its name only once it is complete. All processes take part."""
    partial = path.with_name(f".{path.name}.partial")
    arrays: dict[str, Any] = {}
    data = to_data(dict(content), lambda leaf: _leaf_data(leaf, arrays))
    first = jax.process_index() == 0
    try:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _synchronize(f"{path.name} begins")
        if arrays:
            ocp = orbax()
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(partial / _ARRAYS, args=ocp.args.PyTreeSave(arrays))
        if first:
            text = json.dumps({"format": FORMAT, "meta": dict(meta), "content": data}, indent=1)
            (partial / MANIFEST).write_text(text, encoding="utf-8")
            os.rename(partial, path)
        _synchronize(f"{path.name} is written")
    except BaseException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _synchronize(what: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"clipgrad capture {what}")


def _leaf_data(leaf: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """What the manifest says of a leaf; the arrays themselves are collected."""
    if isinstance(leaf, bool | int | float | str):
        return {"value": leaf}
    if isinstance(leaf, bytes):
        return {"bytes": leaf.hex()}
    if isinstance(leaf, complex):
        return {"complex": [leaf.real, leaf.imag]}
    is_array = isinstance(leaf, jax.Array)
    if not (is_array or isinstance(leaf, np.ndarray | np.generic)) or leaf.dtype == object:
        return {"left_out": f"{type(leaf).__module__}.{type(leaf).__qualname__}"}
    return _array_data(leaf, is_array, arrays)


def _array_data(leaf: Any, is_array: bool, arrays: dict[str, Any]) -> dict[str, Any]:
    if is_array and leaf.is_deleted():
        return {"left_out": "an array that was donated to a later step"}
    data: dict[str, Any] = {"sharding": _sharding_data(leaf.sharding) if is_array else "numpy"}
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data["key"] = str(jax.random.key_impl(leaf))
        leaf = jax.random.key_data(leaf)
    data |= {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}
    # Orbax does not save arrays without elements.
    if leaf.size:
        data["array"] = f"{len(arrays)}"
        # Of what each of several processes has for itself the first one's is written.
        own = is_array and leaf.is_fully_addressable and jax.process_count() > 1
        arrays[data["array"]] = leaf if is_array and not own else np.asarray(leaf)
    return data


def _sharding_data(sharding: Any) -> Any:
    """A mesh and the axes of it that an array is spread over; None for all else."""
    if not isinstance(sharding, NamedSharding):
        return None
    mesh, spec = sharding.mesh, [list(a) if isinstance(a, tuple) else a for a in sharding.spec]
    types = [kind.name for kind in mesh.axis_types]
    return {"axes": list(mesh.axis_names), "sizes": list(mesh.axis_sizes), "types": types} | {
        "spec": [axis if axis is None or isinstance(axis, str | list) else None for axis in spec]
    }


def read_manifest(path: pathlib.Path) -> dict[str, Any]:
    """What a capture says of itself.

    Raises:
      FileNotFoundError: there is none, or none that is complete.
      ValueError: it was written by a later version.
    """
    if path.name.startswith(".") or not (path / MANIFEST).is_file():
        inside = sorted(str(p.parent) for p in path.glob(f"[!.]*/{MANIFEST}"))
        hint = f"; there are {', '.join(inside)}" if inside else ""
        raise FileNotFoundError(f"path: got {str(path)!r}, expected a capture{hint}")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = int(manifest["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"path: got {str(path)!r} whose {MANIFEST} can't be read: {error}"
        ) from None
    if version > FORMAT:
        raise ValueError(
            f"path: got a capture of format {version}, written by clipgrad "
            f"{manifest['meta']['versions']['clipgrad']}, expected format {FORMAT}; install that "
            "version or a later one"
        )
    return manifest


def read(path: pathlib.Path, data: Any, mesh: Any) -> Any:
    """The content of a capture, placed on a mesh, on one like that of the run, or on one device."""
    leaves: list[dict[str, Any]] = []
    # Whatever the leaves become, the structure keeps them apart.
    from_data(data, leaves.append)
    placements, wanted = {}, {}
    for leaf in leaves:
        if "dtype" in leaf:
            _check_width(leaf)
            placement = None if leaf["sharding"] == "numpy" else _placement(leaf, mesh)
            placements[id(leaf)] = placement
            if "array" in leaf:
                wanted[leaf["array"]] = placement
    arrays = _restored(path / _ARRAYS, wanted) if wanted else {}

    def value(leaf: dict[str, Any]) -> Any:
        if "value" in leaf:
            return leaf["value"]
        if "bytes" in leaf:
            return bytes.fromhex(leaf["bytes"])
        if "complex" in leaf:
            return complex(*leaf["complex"])
        if "dtype" not in leaf:
            return None
        array = arrays[leaf["array"]] if "array" in leaf else _empty(leaf, placements[id(leaf)])
        return jax.random.wrap_key_data(array, impl=leaf["key"]) if "key" in leaf else array

    return from_data(data, value)


def _restored(path: pathlib.Path, wanted: dict[str, Any]) -> dict[str, Any]:
    ocp = orbax()
    arguments = {
        name: ocp.RestoreArgs(restore_type=np.ndarray)
        if placement is None
        else ocp.ArrayRestoreArgs(sharding=placement)
        for name, placement in wanted.items()
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=arguments))


def _empty(leaf: dict[str, Any], placement: Any) -> Any:
    array = np.empty(leaf["shape"], jnp.dtype(leaf["dtype"]))
    return array if placement is None else jax.device_put(array, placement)


def _check_width(leaf: dict[str, Any]) -> None:
    wide = leaf["dtype"] in ("float64", "int64", "uint64", "complex128")
    if wide and leaf["sharding"] != "numpy" and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"path: got a capture with arrays of dtype {leaf['dtype']}, which needs 64-bit "
            'types; write jax.config.update("jax_enable_x64", True) first'
        )


def _placement(leaf: dict[str, Any], mesh: Any) -> Any:
    """Where an array goes: as in the run, if there are that many devices."""
    data = leaf["sharding"]
    if data is None or data["spec"] is None:
        return SingleDeviceSharding(jax.devices()[0]) if mesh is None else _named_sharding(mesh, [])
    if mesh is not None:
        return _divided_sharding(_named_sharding(mesh, data["spec"]), leaf["shape"])
    if math.prod(data["sizes"]) > jax.device_count():
        return SingleDeviceSharding(jax.devices()[0])
    like = (tuple(data[name]) for name in ("sizes", "axes", "types"))
    return _named_sharding(_mesh_like(*like), data["spec"])


def _divided_sharding(sharding: NamedSharding, shape: list[int]) -> NamedSharding:
    try:
        sharding.shard_shape(tuple(shape))
    except ValueError:
        raise ValueError(
            f"mesh: got {dict(sharding.mesh.shape)}, expected sizes that divide the array of the "
            f"shape {tuple(shape)}, sharded as {sharding.spec}"
        ) from None
    return sharding


@functools.cache
def _mesh_like(sizes: tuple[int, ...], axes: tuple[str, ...], types: tuple[str, ...]) -> Any:
    kinds = tuple(AxisType[name] for name in types)
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, axes, axis_types=kinds, devices=devices)


def _named_sharding(mesh: Any, spec: list[Any]) -> NamedSharding:
    named = [name for part in spec for name in (part if isinstance(part, list) else [part])]
    missing = sorted({name for name in named if name is not None} - set(mesh.axis_names))
    if missing:
        raise ValueError(
            f"mesh: got axes {tuple(mesh.axis_names)}, expected those of the run, whose arrays are "
            f"sharded over {missing}"
        )
    parts = [tuple(part) if isinstance(part, list) else part for part in spec]
    return NamedSharding(mesh, PartitionSpec(*parts))
