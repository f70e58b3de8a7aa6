"""The bibliography has every source that docstrings, presets and notebooks link to."""

import pathlib
import re

import pytest

from tests.helpers import NAMES, public

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "bibliography.md").read_text()
LINK = re.compile(r"https?://[^\s)\];:,]*[^\s)\];:,.]")


def links(text):
    return set(LINK.findall(text))


def references(name):
    _, _, section = (public(name).__doc__ or "").partition("References:")
    return section


CITED = [name for name in NAMES if links(references(name))]


def test_the_rules_thresholds_and_clips_name_their_papers():
    assert {
        "AdaptiveClip", "ClipByBlockRMS", "ClipByGlobalNorm", "ClipByNorm", "ClipByValue",
        "EMAThreshold", "HistoryThreshold", "PercentileThreshold", "ZScoreThreshold",
        "apply_gradient_clipping", "check_grads", "clip_per_example",
        "error_clip", "error_clip_everywhere", "numerical_grad", "skip_spikes",
        "suggest_threshold",
    } <= set(CITED)  # fmt: skip


@pytest.mark.parametrize("name", CITED)
def test_a_source_of_a_docstring_is_in_the_bibliography(name):
    assert links(references(name)) <= links(PAGE)


@pytest.mark.parametrize("name", ["3_gradient_clipping", "4_checking_gradients", "7_per_example"])
def test_the_papers_of_a_notebook_are_in_the_bibliography(name):
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert links(text) and links(text) <= links(PAGE)


def test_every_row_has_a_link_and_says_what_this_library_does():
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "| source"]
    assert rows and all(links(row[0]) and len(row[-1]) > 5 for row in rows)


def test_the_names_on_the_page_are_public():
    known = {*NAMES, "delta", "max_relative_error", "min", "-max", "where", "nan", "adding"}
    used = {re.split(r"[(= ]", code)[0] for code in re.findall(r"`([^`]+)`", PAGE)}
    assert used - known <= {"clipgrad", "get_numerical_gradient", "check_grad"}
