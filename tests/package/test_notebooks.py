"""Each notebook runs, and what is stored in it is what it prints."""

import pathlib
import re
import runpy

import jax
import pytest

from tests.helpers import environment_of_users, quick_flags
from tests.pages import assert_printed

pytestmark = pytest.mark.slow

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
TITLES = [
    "autograd", "error_clip", "gradient_clipping", "checking_gradients", "many_devices",
    "seeing_inside", "per_example",
]  # fmt: skip
every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


# It computes more than it compiles, and some of its trainings depend on how sums are rounded.
FOR_USERS = "3_gradient_clipping"


def execute(path):
    """The notebook on one device, compiled quickly like the tests; one as it is for a user."""
    run = runpy.run_path(str(FOLDER / "execute.py"))["execute"]
    flags = {} if path.stem == FOR_USERS else {"XLA_FLAGS": quick_flags()}
    env = environment_of_users() | flags
    return run(path, env=env | {"JAX_PLATFORMS": "cpu"})


def read(path):
    return pytest.importorskip("nbformat").read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    texts = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
    ]
    return "".join(text for text in texts if "<Figure" not in text)


def pictures(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def stored_with(notebook):
    """The version of JAX that the first code cell shows."""
    return printed(code_cells(notebook)[0]).strip("'\n")


@pytest.mark.slow(first=True)
@every_notebook
def test_it_runs_and_prints_what_is_stored(path):
    stored, executed = read(path), execute(path)
    assert pictures(executed) == pictures(stored) > 0
    if stored_with(stored) == jax.__version__:
        for before, after in zip(code_cells(stored), code_cells(executed), strict=True):
            assert_printed_alike(printed(after), printed(before))


# On another processor a training takes other steps: 0.87 beside 0.81 where it is farthest off.
ACCURACIES = re.compile(r"\b\d\.\d\d to \d\.\d\d right")


def assert_printed_alike(printed, shown):
    accuracies = [" ".join(ACCURACIES.findall(text)) for text in (printed, shown)]
    assert_printed(*accuracies, rtol=0, atol=0.1)
    rest = (ACCURACIES.sub("accuracies", text) for text in (printed, shown))
    assert_printed(*rest, rtol=0.05, atol=1e-6)


@every_notebook
def test_it_reads_well_unexecuted(path):
    notebook = read(path)
    assert notebook.cells[0].source.startswith(f"# {path.stem[0]}. ")
    assert re.fullmatch(r"\d+\.\d+\.\d+", stored_with(notebook))
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert not [cell for cell in notebook.cells if "execution" in cell.metadata]
    assert path.stat().st_size < 1_500_000


@every_notebook
def test_it_uses_public_names_only(path):
    source = "\n".join(cell.source for cell in code_cells(read(path)))
    assert not re.search(r"jax\._src|clipgrad\._|cg\._", source)


def test_they_are_the_seven_and_numbered():
    assert [path.stem for path in PATHS] == [f"{i}_{name}" for i, name in enumerate(TITLES, 1)]


@every_notebook
def test_pictures_are_described_and_nothing_of_this_machine_is_stored(path):
    cells = code_cells(read(path))
    for cell in cells:
        text = "".join(output.get("text", "") for output in cell.outputs) + printed(cell)
        assert not re.search(r"0x[0-9a-f]{6}|/home/|/root/|/tmp/", text), text
    seen = [c for c in cells if any("image/png" in o.get("data", {}) for o in c.outputs)]
    assert len(seen) >= 3
    assert all(len(cell.metadata["mystnb"]["image"]["alt"]) > 60 for cell in seen)
