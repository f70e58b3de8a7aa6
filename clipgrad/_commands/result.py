"""The result of a command that looks for faults: printed, written, and as an exit code."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from clipgrad._commands.function import FAILED, PASSED, complain
from clipgrad._folders import mounted_folder


def show_result(
    command: str, name: str, find: Callable[[], Any], as_json: Callable[[Any], Any], out: str | None
) -> int:
    """Print a result, and write it into the folder ``out``, if given; return the exit code.

    Args:
      command: the command, for the line that says why it could not run.
      name: the files without their suffixes.
      find: makes the result, which has ``ok`` and ``plot``.
      as_json: makes plain data of it.
      out: the folder.
    """
    try:
        folder = mounted_folder("--out", out) if out else None
        found = find()
        print(found)
    except Exception as error:
        return complain(command, error)
    try:
        if folder:
            _write_result(name, as_json(found), found, folder)
    except Exception as error:
        unwritten = complain(command, error)
        return unwritten if found.ok else FAILED
    return PASSED if found.ok else FAILED


def plain_records(records: Any) -> list[dict[str, Any]]:
    """The fields of records as plain data; numbers that are not finite are null."""
    return [{name: plain_json(value) for name, value in vars(x).items()} for x in records]


def _write_result(name: str, data: Any, found: Any, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=2, allow_nan=False)
    (folder / f"{name}.json").write_text(text, encoding="utf-8")
    found.plot().savefig(folder / f"{name}.png", dpi=120)


def plain_json(value: Any) -> Any:
    """A value as plain data; numbers that are not finite are null."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
