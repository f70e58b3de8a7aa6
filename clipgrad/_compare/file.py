"""The file of a record: its table in a header of JSON, its numbers in arrays, in one `.npz`."""

import dataclasses
import json
import math
import os
import tempfile
import zipfile
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from clipgrad._compare.record import Edge, Record, Row
from clipgrad._compare.sketches import LENGTH, orders_of

RECORD_FORMAT = 3
_NUMBERS_OF_ROWS = ("sketch", "moved")


def check_path(path: Any) -> None:
    """Raise an error for what is no path, or one in a folder that is not there."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: got {path!r}, expected the path of a file, such as 'before.npz'")
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise ValueError(f"path: got {os.fspath(path)!r}, expected one in a folder that exists")


def save_record(record: Record, path: str | os.PathLike) -> None:
    """Write a record; of several processes, which all call this, the first does."""
    try:
        if jax.process_index() == 0:
            _write_file(path, *_packed(record))
    finally:
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("clipgrad run")


def load_record(path: str | os.PathLike) -> Record:
    """Read a record.

    Raises:
      ValueError: there is no such file, or it holds no record that can be read.
    """
    if not os.path.isfile(path):
        raise ValueError(_sentence(path, "a folder" if os.path.isdir(path) else "no such file"))
    try:
        with zipfile.ZipFile(path) as parts:
            names = {name.removesuffix(".npy") for name in parts.namelist()}
    except Exception as error:  # of a damaged archive zipfile raises any
        why = "an empty file" if not os.path.getsize(path) else f"no whole .npz file ({error})"
        raise ValueError(_sentence(path, why)) from error
    if "header" not in names:
        raise ValueError(_sentence(path, "an archive of something else"))
    try:
        with np.load(path, allow_pickle=False) as found:
            header = json.loads(found["header"].tobytes())
            version = header["format"]
            if version == RECORD_FORMAT:
                return _unpacked(header, *(found[name] for name in _NUMBERS_OF_ROWS))
    except Exception as error:
        what = f"a damaged file ({type(error).__name__}: {error})"
        raise ValueError(_sentence(path, what)) from error
    raise ValueError(
        f"run: got {os.fspath(path)!r}, of format {version!r}, expected format {RECORD_FORMAT}, "
        "which this version of clipgrad reads; write it again, or read it with the version that "
        "wrote it"
    )


def _packed(record: Record) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The table as plain data, and its numbers, equal ones once."""
    known: dict[bytes, int] = {}
    parts: dict[str, list[np.ndarray]] = {
        name: [np.zeros((0, LENGTH))] for name in _NUMBERS_OF_ROWS
    }
    rows, count = [], 0
    for row in record.rows:
        plain = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
        for name in (*_NUMBERS_OF_ROWS, "whole"):
            del plain[name]
        if row.sketch is not None:
            moved = np.zeros_like(row.sketch) if row.moved is None else row.moved
            key = row.sketch.tobytes() + moved.tobytes()
            if key not in known:
                known[key] = count
                for name, x in zip(_NUMBERS_OF_ROWS, (row.sketch, moved), strict=True):
                    parts[name].append(x.reshape(-1, LENGTH))
                count += len(parts["sketch"][-1])
            plain["numbers"] = known[key], row.sketch.shape[:-1], row.moved is not None
        rows.append(plain)
    wide = any("64" in row.dtype or row.dtype == "complex128" for row in record.rows)
    dtype = np.float64 if wide else np.float32
    with np.errstate(over="ignore"):
        arrays = {name: np.concatenate(x).astype(dtype) for name, x in parts.items()}
    header = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return header | {"format": RECORD_FORMAT, "rows": rows}, arrays


def _unpacked(header: dict[str, Any], sketch: np.ndarray, moved: np.ndarray) -> Record:
    for x in (sketch, moved):
        if x.ndim != 2 or x.shape != (len(sketch), LENGTH) or x.dtype.kind != "f":
            raise ValueError(f"an array of {x.dtype} and shape {x.shape}")
    rows = []
    for plain in header["rows"]:
        at, shape, is_measured = plain.pop("numbers", (0, None, False))
        known = {key: tuple(x) for key, x in plain.items() if isinstance(x, list)}
        row = Row(**plain | known)
        if shape is not None:
            own = slice(at, at + math.prod(shape))
            row.sketch = sketch[own].astype(np.float64).reshape(*shape, LENGTH)
            row.moved = (
                moved[own].astype(np.float64).reshape(*shape, LENGTH) if is_measured else None
            )
            if (*row.steps,) != tuple(shape[:-1]) or not 0 <= row.node < len(header["rows"]):
                raise ValueError(f"a row of shape {shape} with steps {row.steps}")
            if row.turned and shape[-1] != len(orders_of(row.shape, row.turned)):
                raise ValueError(f"a row with {shape[-1]} orders of axes")
        rows.append(row)
    edges = [
        Edge(source, target, tuple((what, d) for what, d in when), tuple(scopes))
        for source, target, when, scopes in header["edges"]
    ]
    rest = {name: header[name] for name in ("scopes", "framework", "circumstances", "notes")}
    return Record(rows, edges, devices=tuple(header["devices"]), **rest)


def _write_file(path: str | os.PathLike, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Write a file; one of this name stays as it is until the new one is whole."""
    path = os.path.abspath(path)
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    number, part = tempfile.mkstemp(suffix=".part", dir=os.path.dirname(path))
    try:
        with os.fdopen(number, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, header=text, **arrays)
        os.umask(mask := os.umask(0))
        os.chmod(part, 0o666 & ~mask)  # that of a temporary file is for its owner alone
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def _sentence(path: str | os.PathLike, what: str) -> str:
    return (
        f"run: got {os.fspath(path)!r}, {what}, expected a file that save_run wrote; write "
        "save_run(fun, args, path)"
    )
