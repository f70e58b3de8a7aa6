"""The file of a record: its table in a header of JSON, its numbers in arrays, in one `.npz`."""

import dataclasses
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from clipgrad._compare.record import Edge, Numbers, Record, Row
from clipgrad._compare.sketches import LENGTH, orders_of

# A new field of `Row`, `Record` or `Edge` needs a new number, because older versions can't read it.
# If the field has a default, files of the number before can be read, too: keep that number here. A
# new field of `Numbers` that is an array goes into `_NUMBERS_OF_ROWS`.
RECORD_FORMAT = 4
READABLE_FORMATS = (RECORD_FORMAT,)
_NUMBERS_OF_ROWS = ("sketch", "moved")
_READ_BY_ROW = {"rows", "edges"}  # the fields of a record that `_unpacked` reads one by one
_ADDED_LATER = {"rules", "argnums"}  # files from before 28 November 2026 lack these


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
        with np.load(path, allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            version = header["format"]
            if version in READABLE_FORMATS:
                return _unpacked(header, arrays)
    except Exception as error:
        what = f"a damaged file ({type(error).__name__}: {error})"
        raise ValueError(_sentence(path, what)) from error
    readable = " or ".join(map(str, READABLE_FORMATS))
    raise ValueError(
        f"run: got {os.fspath(path)!r}, of format {version!r}, expected format {readable}, which "
        "this version of clipgrad reads; write it again, or read it with the version that wrote it"
    )


def _packed(record: Record) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The table as plain data, and its numbers, equal ones once."""
    names: dict[tuple, str] = {}
    rows, arrays = [], {}
    wide = any("64" in row.dtype or row.dtype == "complex128" for row in record.rows)
    for row in record.rows:
        plain = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
        plain |= plain.pop("numbers")._asdict()
        del plain["whole"]
        orders = len(orders_of(row.shape, row.turned))
        for kind in _NUMBERS_OF_ROWS:
            if plain[kind] is not None and plain[kind].shape[-2] != orders:  # of several devices
                plain[kind] = None
            if (x := plain[kind]) is not None:
                plain[kind] = names.setdefault((x.shape, x.tobytes()), f"numbers{len(names)}")
                with np.errstate(over="ignore"):
                    arrays[plain[kind]] = x.astype(np.float64 if wide else np.float32)
        rows.append(plain)
    header = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return header | {"format": RECORD_FORMAT, "rows": rows}, arrays


def _unpacked(header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Record:
    absent = _READ_BY_ROW | (_ADDED_LATER - header.keys())
    fields = [f for f in dataclasses.fields(Record) if f.name not in absent]
    record = Record(**{f.name: _restored(f, header[f.name]) for f in fields})
    for plain in header["rows"]:
        known: dict[str, Any] = {
            k: tuple(x) if isinstance(x, list) else x for k, x in plain.items()
        }
        seen = {kind: known.pop(kind) for kind in ("exact", *_NUMBERS_OF_ROWS)}
        row = Row(**known)
        orders = len(orders_of(row.shape, row.turned))
        for kind in _NUMBERS_OF_ROWS:
            if seen[kind]:
                seen[kind] = x = arrays[seen[kind]].astype(np.float64)
                if x.shape != (*row.steps, orders, LENGTH):
                    raise ValueError(f"{kind} of shape {x.shape} for {orders} orders of axes")
        row.numbers = Numbers(**seen)
        record.add(row, range(len(header["rows"]))[row.node])
    for edge in header["edges"]:
        parts: Any = (tuple(x) if isinstance(x, list) else x for x in edge)
        record.edges.append(Edge(*parts))
    return record


def _restored(field: dataclasses.Field, x: Any) -> Any:
    """A field of a record; JSON has lists for its tuples."""
    return tuple(x) if isinstance(field.default, tuple) else x


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
