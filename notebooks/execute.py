"""Executes notebooks and stores their outputs: python notebooks/execute.py [NAME ...]."""

import pathlib
import sys
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parent


def execute(path: pathlib.Path, **kernel: Any) -> nbformat.NotebookNode:
    """The notebook, run in its folder, without the times of the cells.

    Args:
      path: where it is stored.
      kernel: how to start its kernel, such as ``env``.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
    )
    client.resources = {"metadata": {"path": str(FOLDER)}}
    return client.execute(**kernel)


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in names:
        path = FOLDER / f"{name}.ipynb"
        nbformat.write(execute(path), path)
        print(name)
