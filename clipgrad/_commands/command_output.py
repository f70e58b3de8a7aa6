"""The result of a command that looks for faults: printed, written, and as an exit code."""

import argparse
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clipgrad._commands.function import FAILED, PASSED, complain
from clipgrad._recorder import mounted_folder


def show_result(
    options: argparse.Namespace, name: str, find: Callable[[Any], Any], fields: Sequence[str]
) -> int:
    """Print a result, write it into the folder `--out` and the file `--json`; return the exit code.

    Args:
      options: the command's options.
      name: the files without their suffixes.
      find: makes the result, which has ``ok`` and ``plot``, from the options.
      fields: the fields of the result to write.
    """
    folder = mounted_folder("--out", options.out) if options.out else None
    require_folder(options.json)
    result = find(options)
    print(result)
    content = {field: getattr(result, field) for field in fields}
    try:
        write_json(options.json, content)
        if folder:
            write_result(folder / name, content, result.plot)
    except Exception as error:
        if result.ok:
            raise
        complain(options, error)  # it does not hide the findings
    return PASSED if result.ok else FAILED


def write_result(
    path: pathlib.Path, content: Any, plot: Callable[[], Any]
) -> tuple[pathlib.Path, pathlib.Path]:
    """Write a picture and plain data, the data first."""
    picture, data = path.with_suffix(".png"), path.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(data, content)
    plot().savefig(picture, dpi=120)
    return picture, data


def require_folder(file: str | None) -> None:
    """Raise at once if the folder of the file of ``--json`` is missing."""
    if file:
        os.stat(os.path.dirname(os.path.abspath(file)))


def write_json(file: str | os.PathLike | None, content: Any) -> None:
    """Write plain data into a file, if there is one."""
    if file:
        text = json.dumps(plain(content), indent=2, allow_nan=False)
        pathlib.Path(file).write_text(text, encoding="utf-8")


def plain(value: Any) -> Any:
    """Records and arrays as plain data; numbers that are not finite are null."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "__dict__"):
        value = vars(value)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value
