"""Notebooks 3 and 4: assertions are folded away, pictures have a text, cells print."""

import ast
import pathlib

import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
NAMES = "3_gradient_clipping", "4_checking_gradients"

pytestmark = pytest.mark.parametrize("name", NAMES)


def code_cells(name):
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def hidden(cell):
    return "hide-cell" in cell.metadata.get("tags", [])


def asserts(cell):
    return any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cell.source)))


def test_assertions_are_in_collapsed_cells_and_nothing_else_is(name):
    for cell in code_cells(name):
        assert asserts(cell) == hidden(cell), cell.source
        assert not (hidden(cell) and cell.outputs)


def test_pictures_have_a_text_in_their_place_and_other_cells_have_none(name):
    for cell in code_cells(name):
        drawn = any("image/png" in output.get("data", {}) for output in cell.outputs)
        text = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
        assert drawn == (len(text) > 40), cell.source


def test_a_cell_that_calculates_prints(name):
    """Silent are imports and cells that only define functions, data and what is trained on."""
    silent = [c for c in code_cells(name) if not c.outputs and not hidden(c)]
    assert len(silent) <= 12 and not any("print(" in cell.source for cell in silent)
