"""Executes notebooks and stores their outputs: python notebooks/execute.py [NAME ...]."""

import pathlib
import sys

import nbformat
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parent


def execute(path: pathlib.Path) -> None:
    """Runs one notebook in its folder and writes it back, without the times of the cells."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False)
    client.resources = {"metadata": {"path": str(FOLDER)}}
    client.execute()
    nbformat.write(notebook, path)


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in names:
        execute(FOLDER / f"{name}.ipynb")
        print(name)
