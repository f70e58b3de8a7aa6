"""The file of a run: one header of JSON and arrays, in one `.npz` without pickled objects."""

import json
import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

RUN_FORMAT = 2
_HEADER = "header"


class RunFile(NamedTuple):
    """The contents of a file: plain data, and arrays by name."""

    header: dict[str, Any]
    arrays: dict[str, np.ndarray]


def write_run(path: str | os.PathLike, header: Mapping[str, Any], arrays: Mapping) -> None:
    """Write a run; a file of this name stays as it is until the new one is whole."""
    path = os.path.abspath(path)
    text = json.dumps({"format": RUN_FORMAT, **header}, allow_nan=True)
    encoded = np.frombuffer(text.encode(), np.uint8)
    number, part = tempfile.mkstemp(suffix=".part", dir=os.path.dirname(path))
    try:
        with os.fdopen(number, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **{_HEADER: encoded}, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.umask(mask := os.umask(0))
        os.chmod(part, 0o666 & ~mask)  # that of a temporary file is for its owner alone
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def read_run(path: str | os.PathLike) -> RunFile:
    """Read a run.

    Raises:
      ValueError: there is no such file, or it holds no run that can be read.
    """
    if not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "no such file"
        raise ValueError(_sentence(path, what))
    try:
        with zipfile.ZipFile(path) as parts:
            names = {name.removesuffix(".npy") for name in parts.namelist()}
    except Exception as error:  # of a damaged archive zipfile raises any
        why = "an empty file" if not os.path.getsize(path) else f"no whole .npz file ({error})"
        raise ValueError(_sentence(path, why)) from error
    if _HEADER not in names:
        raise ValueError(_sentence(path, "an archive of something else"))
    try:
        with np.load(path, allow_pickle=False) as found:
            header = json.loads(found[_HEADER].tobytes())
            version, arrays = header["format"], {name: found[name] for name in names - {_HEADER}}
            if version == RUN_FORMAT:
                return RunFile(header, arrays)
    except Exception as error:
        raise damaged(path, error) from error
    raise ValueError(
        f"run: got {os.fspath(path)!r}, of format {version!r}, expected format {RUN_FORMAT}, which "
        "this version of clipgrad reads; read it with the version that wrote it, or with a newer "
        "one"
    )


def checked(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """An array of numbers of the shape that it should have; or else `ValueError`."""
    if array.shape != tuple(shape) or array.dtype.kind not in "fc":
        raise ValueError(f"an array of {array.dtype} and shape {array.shape}, not {tuple(shape)}")
    return array


def damaged(path: str | os.PathLike, error: Exception) -> ValueError:
    return ValueError(_sentence(path, f"a damaged file ({type(error).__name__}: {error})"))


def _sentence(path: str | os.PathLike, what: str) -> str:
    return (
        f"run: got {os.fspath(path)!r}, {what}, expected a file that save_run wrote; write "
        "save_run(fun, args, path)"
    )
