"""Cells of the notebooks: they print what they prove, and pictures are described."""

import pathlib
import re

import nbformat
import pytest

pytestmark = pytest.mark.exhaustive

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
CHECK = re.compile(r"^\s*(assert |np\.testing\.)", re.MULTILINE)

every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def code_cells(path):
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def is_collapsed(cell):
    tagged = cell.metadata.get("tags") == ["hide-cell"]
    return tagged and cell.metadata.get("jupyter") == {"source_hidden": True}


def has_picture(cell):
    return any("image/png" in output.get("data", {}) for output in cell.outputs)


@every_notebook
def test_checks_stand_in_collapsed_cells_of_their_own(path):
    cells = code_cells(path)
    assert any(map(is_collapsed, cells))
    for cell in cells:
        assert bool(CHECK.search(cell.source)) == is_collapsed(cell), cell.source
        assert not (is_collapsed(cell) and cell.outputs), cell.source


DEFINES = re.compile(r"[ )}]|[\w., ]+ = |\w+\.defvjp\(")


@every_notebook
def test_a_cell_that_prints_nothing_ends_with_a_definition(path):
    for cell in code_cells(path):
        if not cell.outputs and not is_collapsed(cell):
            assert DEFINES.match(cell.source.splitlines()[-1]), cell.source


@every_notebook
def test_pictures_have_alt_texts_that_say_what_is_seen(path):
    pictures = [cell for cell in code_cells(path) if has_picture(cell)]
    assert len(pictures) >= 3
    for cell in pictures:
        assert len(cell.metadata["mystnb"]["image"]["alt"]) > 60


@every_notebook
def test_nothing_of_this_machine_is_stored(path):
    for cell in code_cells(path):
        for output in cell.outputs:
            text = output.get("text", "") + output.get("data", {}).get("text/plain", "")
            assert not re.search(r"0x[0-9a-f]{6}|/home/|/root/|/tmp/", text), text
