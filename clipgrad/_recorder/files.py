"""The files of a capture: arrays by orbax, all else as JSON; complete or not there.

A capture is a folder with ``capture.json``, which has the format, the circumstances and one entry
for each leaf with its path, and with ``arrays``, where orbax keeps the arrays by their numbers.
"""

import contextlib
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from clipgrad._errors import first_few
from clipgrad._recorder.paths import Path, is_value, leaves_by_path, nested

FORMAT = 3
MANIFEST = "capture.json"
CAPTURE_PARTS = ("state", "params", "batch", "key", "extra")
_ARRAYS = "arrays"
# Types that orbax does not write, as of 0.11.
_ODD = ("uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3")
_WIDE = ("float64", "int64", "uint64", "complex128")
_SHOWN = 5
LeafEntry = dict[str, Any]


def orbax() -> Any:
    """The module ``orbax.checkpoint``, or an error that says how to install it."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "FlightRecorder and load_capture need orbax-checkpoint; install it with: "
            'pip install "clipgrad[recorder]"'
        ) from error
    return orbax.checkpoint


def is_writable(dtype: Any) -> bool:
    """Whether orbax restores this type bit by bit: numbers, in this machine's byte order."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    is_extended = dtype.kind == "V" and dtype.type.__module__ == "ml_dtypes"
    is_number = dtype.kind in "biufc" and dtype.isnative and dtype.char not in "gG"
    return str(dtype) not in _ODD and (is_extended or is_number)


def write(
    paths: Sequence[pathlib.Path], content: Mapping[str, Any], meta: Mapping[str, Any]
) -> pathlib.Path:
    """Writes a capture to the first of these paths that is free, and returns the path.

    A capture gets its name when it is complete. Until then the folder has a unique name, so that
    several runs may share a directory. All processes of a run take part.
    """
    path, first, several = paths[0], jax.process_index() == 0, jax.process_count() > 1
    partial = path.with_name(f".{path.name}{'' if several else secrets.token_hex(4)}.partial")
    arrays: dict[str, Any] = {}
    leaves = [
        {"path": [part, *place]} | _entry_of(leaf, arrays)
        for part, tree in sorted(content.items())
        for place, leaf in leaves_by_path(part, tree).items()
    ]
    try:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _synchronize(f"{path.name} begins")
        if arrays:
            with orbax().Checkpointer(orbax().PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(partial / _ARRAYS, args=orbax().args.PyTreeSave(arrays))
        if first:
            text = json.dumps({"format": FORMAT, "meta": dict(meta), "leaves": leaves}, indent=1)
            (partial / MANIFEST).write_text(text, encoding="utf-8")
            path = _with_name(partial, paths[:1] if several else paths)
        _synchronize(f"{path.name} is written")
    finally:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
    return path


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


def captures_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """The complete captures in a folder, by their names."""
    return sorted(path.parent for path in folder.glob(f"[!.]*/{MANIFEST}"))


def _entry_of(leaf: Any, arrays: dict[str, Any]) -> LeafEntry:
    """The entry of a leaf; an array is added to ``arrays``."""
    if not is_value(leaf):
        is_sequence = isinstance(leaf, tuple | list) and not hasattr(leaf, "_fields")
        return {"value": None if leaf is None else [] if is_sequence else {}}
    if type(leaf) in (bool, int, float, str):
        return {"value": leaf}
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | complex):
        return {"left_out": f"{type(leaf).__module__}.{type(leaf).__qualname__}"}
    entry, array = {"kind": "numpy"}, cast(Any, leaf)
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            return {"left_out": "an array that was donated to a later step"}
        entry["kind"] = "jax"
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            entry["key"], array = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
    # Of what each of several processes has for itself the first one's is written.
    if entry["kind"] == "numpy" or jax.process_count() > 1 and array.is_fully_addressable:
        array = np.asarray(array)
    if array.size:  # orbax does not save arrays without elements
        entry["array"] = f"{len(arrays)}"
        arrays[entry["array"]] = array
    return entry | {"dtype": str(array.dtype), "shape": list(array.shape)}


def read_manifest(folder: pathlib.Path) -> tuple[dict[str, Any], dict[Path, LeafEntry]]:
    """The circumstances of a bad step, and the entry of each leaf by its path."""
    file = folder / MANIFEST
    if folder.name.startswith(".") or not file.is_file():
        known = captures_in(folder) or captures_in(folder.parent)
        verb = "is" if len(known) == 1 else "are"
        hint = f"; there {verb} {first_few([*map(str, known)], _SHOWN)}" if known else ""
        raise FileNotFoundError(f"path: got {str(folder)!r}, expected a capture{hint}")
    with _readable(file):
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version = int(manifest["format"])
    if version != FORMAT:
        age = "a later" if version > FORMAT else "an earlier"
        raise ValueError(
            f"path: got a capture of format {version}, written by {age} version of clipgrad, "
            f"expected format {FORMAT}; install that version"
        )
    with _readable(file):
        meta = {"step": None, "nonfinite": None} | manifest["meta"]
        entries = {tuple(e["path"]): e for e in manifest["leaves"]}
        for path, entry in entries.items():
            if path[0] not in CAPTURE_PARTS or not entry.keys() & {"value", "left_out", "dtype"}:
                raise KeyError(f"no leaf at {path}")
    return meta, entries


def read(
    folder: pathlib.Path, entries: Mapping[Path, LeafEntry], like: Mapping[Path, Any]
) -> dict[str, Any]:
    """The content of a capture; arrays have the shardings of those that they are like."""
    ours = [e for e in entries.values() if e.get("kind") != "numpy"]
    wide = [e["dtype"] for e in ours if e.get("dtype") in _WIDE]
    if wide and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"path: got a capture with arrays of dtype {wide[0]}, which needs 64-bit types; write "
            'jax.config.update("jax_enable_x64", True) first'
        )
    with _readable(folder / _ARRAYS):
        wanted = {
            e["array"]: _restore_args(e, like.get(p)) for p, e in entries.items() if "array" in e
        }
        arrays: dict[str, Any] = {}
        if wanted:
            with orbax().Checkpointer(orbax().PyTreeCheckpointHandler()) as checkpointer:
                args = orbax().args.PyTreeRestore(restore_args=wanted)
                arrays = checkpointer.restore(folder / _ARRAYS, args=args)
        return nested({path: _leaf_of(entry, arrays) for path, entry in entries.items()})


def _restore_args(entry: LeafEntry, like: Any) -> Any:
    sharding = getattr(like, "sharding", None)
    if sharding is None or [*like.shape] != entry["shape"]:  # which `restored` refuses
        return orbax().RestoreArgs(restore_type=np.ndarray)
    return orbax().ArrayRestoreArgs(sharding=sharding)


def _leaf_of(entry: LeafEntry, arrays: dict[str, Any]) -> Any:
    if "dtype" not in entry:
        return entry.get("value")
    shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
    array = arrays[entry["array"]] if "array" in entry else np.empty(shape, dtype)
    if (array.shape, array.dtype) != (shape, dtype) or array.size and "array" not in entry:
        raise ValueError(f"got {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}")
    if entry["kind"] == "numpy":
        return array
    array = jnp.asarray(array)  # on no device in particular, so that it goes with others
    return jax.random.wrap_key_data(array, impl=entry["key"]) if "key" in entry else array


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    """Raises `ValueError` for a part of a capture that is damaged."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"path: got {str(path.parent)!r} whose {path.name} can't be read: "
            f"{type(error).__name__}: {str(error)[:200]}"
        ) from None
