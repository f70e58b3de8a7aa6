"""A capture on the disk: arrays by orbax, all else as JSON; complete or not there."""

import contextlib
import functools
import json
import math
import os
import pathlib
import platform
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from clipgrad._recorder.structure import MOST_LEVELS, from_data, plain_data, plain_from, to_data

FORMAT = 2
MANIFEST = "capture.json"
_ARRAYS = "arrays"
_NUMPY = "numpy"
# In the names of what this machine is writing; another one may share the directory.
_PROCESS = re.sub(r"\W", "-", platform.node())


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


class Written(NamedTuple):
    """The arrays of a capture, by their names in the manifest."""

    arrays: dict[str, Any]  # by orbax
    files: dict[str, np.ndarray]  # arrays of NumPy that orbax does not take, such as text


def write(
    paths: Sequence[pathlib.Path], content: Mapping[str, Any], meta: Mapping[str, Any]
) -> pathlib.Path:
    """Writes a capture, and returns its path, the first of some that is free.

    It has its name only once it is complete. Until then its folder has a name of its own, so that
    the recorders of several runs may share a directory. All processes of a run take part.
    """
    path, several = paths[0], jax.process_count() > 1
    own = "" if several else f".{_PROCESS}.{os.getpid()}.{secrets.token_hex(4)}"
    partial = path.with_name(f".{path.name}{own}.partial")
    _remove_left_over(path.parent)
    written = Written({}, {})
    leaf = functools.partial(_leaf_data, written=written)
    # What `record` has taken is a level deeper in a list of microbatches, and in a tree of extras.
    encode = functools.partial(to_data, leaf=leaf, most=MOST_LEVELS + 1)
    data = {"dict": [[name, encode(name, tree)] for name, tree in sorted(content.items())]}
    first = jax.process_index() == 0
    try:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / _NUMPY).mkdir(parents=True)
        _synchronize(f"{path.name} begins")
        if written.arrays:
            ocp = orbax()
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(partial / _ARRAYS, args=ocp.args.PyTreeSave(written.arrays))
        if first:
            for name, array in written.files.items():
                np.save(partial / _NUMPY / f"{name}.npy", array, allow_pickle=False)
            text = json.dumps({"format": FORMAT, "meta": dict(meta), "content": data}, indent=1)
            (partial / MANIFEST).write_text(text, encoding="utf-8")
            path = _with_name(partial, paths[:1] if several else paths)
        _synchronize(f"{path.name} is written")
    except BaseException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return path


def _remove_left_over(directory: pathlib.Path) -> None:
    """Removes what processes of this machine left that died while they were writing."""
    for partial in directory.glob(f".*.{_PROCESS}.*.partial"):
        process = partial.name.split(".")[-3]
        if process.isdecimal() and not _is_running(int(process)):
            shutil.rmtree(partial, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _with_name(partial: pathlib.Path, paths: Sequence[pathlib.Path]) -> pathlib.Path:
    """Gives a complete capture its name, which another run may have taken meanwhile."""
    for path in paths:
        try:
            os.rename(partial, path)
            return path
        except OSError:
            if not path.exists():
                raise
    raise FileExistsError(f"{paths[-1]} exists already")


def _synchronize(what: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"clipgrad capture {what}")


def _leaf_data(leaf: Any, written: Written) -> dict[str, Any]:
    """The manifest's entry for a leaf; the arrays themselves are collected."""
    if isinstance(leaf, np.ndarray | np.generic):
        return _numpy_data(np.asarray(leaf), written)
    if isinstance(leaf, bool | int | float | complex | str | bytes):
        return plain_data(leaf)
    if not isinstance(leaf, jax.Array):
        return {"left_out": f"{type(leaf).__module__}.{type(leaf).__qualname__}"}
    if leaf.is_deleted():
        return {"left_out": "an array that was donated to a later step"}
    return _array_data(leaf, written)


def _numpy_data(leaf: np.ndarray, written: Written) -> dict[str, Any]:
    """The manifest's entry for an array of NumPy."""
    if leaf.dtype.hasobject:
        return {"left_out": f"an array of dtype {leaf.dtype}"}
    data: dict[str, Any] = {"sharding": "numpy", "dtype": str(leaf.dtype)}
    data["shape"] = list(leaf.shape)
    if not _is_for_orbax(leaf.dtype):
        data["file"] = f"{len(written.files)}"
        written.files[data["file"]] = leaf
    elif leaf.size:  # orbax does not save arrays without elements
        data["array"] = f"{len(written.arrays)}"
        written.arrays[data["array"]] = leaf.view(np.uint8) if _is_odd(leaf.dtype) else leaf
    return data


def _is_odd(dtype: Any) -> bool:
    """Whether orbax does not take a type of JAX; its bits go as bytes."""
    return str(dtype) in ("uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3")


def _as_bytes(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(leaf, jnp.uint8)


def _from_bytes(array: Any, dtype: np.dtype) -> Any:
    if isinstance(array, np.ndarray):
        return array.view(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return array.astype(dtype)
    return jax.lax.bitcast_convert_type(array, dtype)


def _is_for_orbax(dtype: np.dtype) -> bool:
    """Whether orbax gives back the same bits: of numbers in this machine's order of bytes."""
    is_extended = dtype.kind == "V" and dtype.type.__module__ == "ml_dtypes"
    is_number = dtype.kind in "biufc" and dtype not in (np.longdouble, np.clongdouble)
    return is_extended or is_number and dtype.isnative


def _array_data(leaf: Any, written: Written) -> dict[str, Any]:
    data: dict[str, Any] = {"sharding": _sharding_data(leaf.sharding)}
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data["key"] = str(jax.random.key_impl(leaf))
        leaf = jax.random.key_data(leaf)
    data |= {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}
    if leaf.size:
        data["array"] = f"{len(written.arrays)}"
        # Of what each of several processes has for itself the first one's is written.
        own = leaf.is_fully_addressable and jax.process_count() > 1
        leaf = _as_bytes(leaf) if _is_odd(leaf.dtype) else leaf
        written.arrays[data["array"]] = np.asarray(leaf) if own else leaf
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
    """The manifest of a capture.

    Raises:
      FileNotFoundError: there is none, or none that is complete.
      ValueError: it was written by a later version, or is damaged.
    """
    if path.name.startswith(".") or not (path / MANIFEST).is_file():
        inside = sorted(str(p.parent) for p in path.glob(f"[!.]*/{MANIFEST}"))
        hint = f"; there are {', '.join(inside)}" if inside else ""
        raise FileNotFoundError(f"path: got {str(path)!r}, expected a capture{hint}")
    with readable(path, MANIFEST):
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = int(manifest["format"])
    if version > FORMAT:
        raise ValueError(
            f"path: got a capture of format {version}, written by a later version of clipgrad, "
            f"expected format {FORMAT} or an earlier one; install that version"
        )
    with readable(path, MANIFEST):  # so that what is damaged is said here
        meta = manifest["meta"]
        wanted = {"statistics", "versions", "step", "halted_at", "devices", "device_kind"}
        missing = wanted - set(meta) or {"jax"} - set(meta["versions"])
        if missing or not isinstance(meta["statistics"], dict):
            raise KeyError(f"meta without {sorted(missing)}")
    return manifest


@contextlib.contextmanager
def readable(path: pathlib.Path, part: str) -> Iterator[None]:
    """Raises `ValueError` for a part of a capture that is damaged."""
    try:
        yield
    except Exception as error:
        if str(error).startswith(("path: ", "mesh: ")):  # said already
            raise
        raise ValueError(
            f"path: got {str(path)!r} whose {part} can't be read: {type(error).__name__}: "
            f"{str(error)[:200]}"
        ) from None


def read(path: pathlib.Path, data: Any, mesh: Any) -> Any:
    """The content of a capture, placed on a mesh, on one like the run's, or on one device.

    Raises:
      ValueError: it does not fit the mesh or the types that JAX has here.
    """
    leaves: list[dict[str, Any]] = []
    # Whatever the leaves become, the structure keeps them apart.
    from_data(data, leaves.append)
    placements, wanted = {}, {}
    for leaf in leaves:
        if "dtype" in leaf and "file" not in leaf:
            _check_width(leaf)
            is_numpy = leaf["sharding"] == "numpy"
            placement = placements[id(leaf)] = None if is_numpy else _placement(leaf, mesh)
            if "array" in leaf:
                wanted[leaf["array"]] = placement
    with readable(path, "arrays"):
        arrays = _restored(path / _ARRAYS, wanted) if wanted else {}

    def value(leaf: dict[str, Any]) -> Any:
        if "left_out" in leaf:
            return None
        if "dtype" not in leaf:
            return plain_from(leaf)
        if "file" in leaf:
            file = f"{_NUMPY}/{int(leaf['file'])}.npy"
            with readable(path, file):
                return np.load(path / file, allow_pickle=False)
        dtype, place = jnp.dtype(leaf["dtype"]), placements[id(leaf)]
        if "array" in leaf:
            array: Any = arrays[leaf["array"]]
            if _is_odd(dtype) and array.dtype == np.uint8:
                array = _from_bytes(array, dtype)
        else:  # one without elements
            empty = np.empty(leaf["shape"], dtype)
            array = empty if place is None else jax.device_put(empty, place)
        _check_array(path, array, leaf)
        return jax.random.wrap_key_data(array, impl=leaf["key"]) if "key" in leaf else array

    return from_data(data, value)


def _check_array(path: pathlib.Path, array: Any, leaf: dict[str, Any]) -> None:
    found, expected = (str(array.dtype), [*array.shape]), (leaf["dtype"], leaf["shape"])
    if found != expected:
        raise ValueError(
            f"path: got {str(path)!r} with an array of {found}, expected {expected} as in "
            f"{MANIFEST}"
        )


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


def _check_width(leaf: dict[str, Any]) -> None:
    wide = leaf["dtype"] in ("float64", "int64", "uint64", "complex128")
    if wide and leaf["sharding"] != "numpy" and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"path: got a capture with arrays of dtype {leaf['dtype']}, which needs 64-bit "
            'types; write jax.config.update("jax_enable_x64", True) first'
        )


def _placement(leaf: dict[str, Any], mesh: Any) -> Any:
    """The sharding of an array: as in the run, if there are that many devices."""
    data = leaf["sharding"]
    if data is None or data["spec"] is None:
        return SingleDeviceSharding(jax.devices()[0]) if mesh is None else _named_sharding(mesh, [])
    if mesh is not None:
        sharding = _named_sharding(mesh, data["spec"])
        try:
            sharding.shard_shape(tuple(leaf["shape"]))
        except ValueError:
            raise ValueError(
                f"mesh: got {dict(mesh.shape)}, expected sizes that divide the array of the shape "
                f"{tuple(leaf['shape'])}, sharded as {sharding.spec}"
            ) from None
        return sharding
    if math.prod(data["sizes"]) > jax.device_count():
        return SingleDeviceSharding(jax.devices()[0])
    like = (tuple(data[name]) for name in ("sizes", "axes", "types"))
    return _named_sharding(_mesh_like(*like), data["spec"])


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
