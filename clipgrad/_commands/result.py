"""The result of a command that looks for faults: printed, written, and as an exit code."""

import argparse
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clipgrad._commands.function import FAILED, PASSED, complain
from clipgrad._folders import mounted_folder


def show_result(
    options: argparse.Namespace, name: str, find: Callable[[], Any], fields: Sequence[str]
) -> int:
    """Print a result, and write it into the folder `--out`, if given; return the exit code.

    Args:
      options: those of the command.
      name: the files without their suffixes.
      find: makes the result, which has ``ok`` and ``plot``.
      fields: its fields that are written.
    """
    folder = mounted_folder("--out", options.out) if options.out else None
    found = find()
    print(found)
    try:
        if folder:
            content = {field: getattr(found, field) for field in fields}
            write_result(folder / name, content, found.plot)
    except Exception as error:
        if found.ok:
            raise
        complain(options, error)  # it does not hide the findings
    return PASSED if found.ok else FAILED


def write_result(
    path: pathlib.Path, content: Any, plot: Callable[[], Any]
) -> tuple[pathlib.Path, pathlib.Path]:
    """Write a picture and plain data, the data first; numbers that are not finite are null."""
    picture, data = path.with_suffix(".png"), path.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_jsonable(content), indent=2, allow_nan=False)
    data.write_text(text, encoding="utf-8")
    plot().savefig(picture, dpi=120)
    return picture, data


def plain_fields(record: Any, fields: Sequence[str]) -> dict[str, Any]:
    """Some fields of a record as plain data; numbers that are not finite are null."""
    return {name: _jsonable(getattr(record, name)) for name in fields}


def _jsonable(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, dict):
        return {name: _jsonable(item) for name, item in value.items()}
    if hasattr(value, "__dict__"):
        return plain_fields(value, list(vars(value)))
    return None if isinstance(value, float) and not np.isfinite(value) else value
