"""What a page shows is what its programs print, and its costs are those stored."""

import concurrent.futures
import json
import multiprocessing
import pathlib
import re

import pytest

from benchmarks import report
from tests import helpers
from tests.package import page_programs
from tests.pages import assert_printed

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*DOCS.glob("*.md"), *DOCS.glob("coming_from/*.md")]  # README's are in test_readme.py
PROGRAMS = {page.stem: text for page in PAGES if page_programs.cells(text := page.read_text())}
# What differs from run to run; lines of JAX differ from version to version.
VARYING = re.compile(r"\d+ evaluations, [\d.]+ s|\+- \S+|0x[0-9a-f]+|(?<=\.py:)\d+(?=\)[;,])")


def words(text):
    return VARYING.sub("", " ".join(text.split()))


@pytest.fixture(scope="module")
def processes():
    """Processes for one page each, forked where the libraries are imported and no array is made."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*page_programs.LIBRARIES, page_programs.__name__])
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=context, max_tasks_per_child=1
    ) as pool:
        yield pool


# On one device, and every third page on eight as well: others with another seed.
ROWS = [(page, 1) for page in sorted(PROGRAMS)]
ROWS += [(page, 8) for page in sorted(PROGRAMS)[helpers.SEED % 3 :: 3]]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "devices"), ROWS)
def test_the_programs_of_a_page_print_what_it_shows(page, devices, processes, tmp_path):
    run = processes.submit(page_programs.printed, PROGRAMS[page], devices, str(tmp_path))
    printed = ""
    cells = page_programs.cells(PROGRAMS[page])
    for (_, shown), output in zip(cells, run.result(), strict=True):
        printed += output
        if shown is not None:
            assert_printed(words(printed), words(shown))
            printed = ""
    assert not printed, "the page does not show it"


STORED = {
    path.stem: json.loads(path.read_text()) for path in ROOT.glob("benchmarks/results/*.json")
}


def stored(subject, work, *theirs):
    """The ratios of a row to other programs, as the page writes them."""
    outputs = {
        each["theirs"]: each["ratio"]
        for each in report.comparisons({subject: STORED[subject]})
        if f"{each['work']},".startswith(f"{work},")
        and each["ours"] in ("clipgrad", "clipped", "recorded")
    }
    return [outputs[name] for name in theirs]


COSTS = {
    "clip by global norm, 128 MB": [("norm", "128 MB in 20 leaves", "optax", "torch")],
    "clip by global norm, 10M": [("norm", "10M elements in one leaf", "torch")],
    "error clip by value, LSTM": [("error_clip", "LSTM, scan of 256", "plain")],
    "error clip by value, unrolled": [("names", "unrolled transformer, all modules", "plain")],
    "step with `watch_updates`": [
        ("updates", "scanned transformer, donated", "not watched"),
        ("updates", "unrolled transformer, donated", "not watched"),
    ],
    "flight recorder": [
        ("recorder", "six layers", "not recorded"),
        ("recorder", "two layers", "not recorded"),
    ],
    "clip of each example's gradient, MLP": [
        ("per_example", "MLP of 0.67M, batch 64", "optax, all at once", "jax-privacy")
    ],
    "the same in a transformer": [
        (
            "per_example",
            "transformer of 0.8M, scan + remat, batch 16",
            "optax, all at once",
            "jax-privacy",
        )
    ],
    "the same in a language model": [
        (
            "per_example",
            "language model, 32k tokens, tied, batch 16",
            "optax, all at once",
            "jax-privacy",
        )
    ],
    "check of the gradient": [
        ("checker", "MLP of 5k", "jax.test_util.check_grads", "torch gradcheck, slow")
    ],
}
CELL = re.compile(r"([\d.]+)(?: \[([\d.]+), ([\d.]+)\])?")


@pytest.mark.parametrize("start", COSTS)
def test_a_cost_on_the_page_is_the_one_that_was_stored(start):
    lines = (DOCS / "costs.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {start}")]
    expected = [ratio for each in COSTS[start] for ratio in stored(*each)]
    for shown, ratio in zip(row.split("|")[3].split(";"), expected, strict=True):
        median, *quartiles = CELL.fullmatch(shown.strip()).groups()
        assert float(median) == pytest.approx(ratio["median"], rel=0.03)
        if quartiles[0]:
            ends = ratio["low"], ratio["high"]
            assert list(map(float, quartiles)) == pytest.approx(ends, abs=0.006)


EACH_EXAMPLE = {
    "MLP": "MLP of 0.67M, batch 64",
    "CNN": "CNN of 56k, batch 16",
    "transformer": "transformer of 0.8M, scan + remat, batch 16",
    "LSTM": "LSTM of 0.13M, scan of 64, batch 16",
    "language model": "language model, 32k tokens, tied, batch 16",
}


@pytest.mark.parametrize("start", EACH_EXAMPLE)
def test_the_time_and_memory_of_each_example_are_those_that_were_stored(start):
    (row,) = [r for r in STORED["per_example"]["rows"] if r["name"] == EACH_EXAMPLE[start]]
    sides = {side["name"]: side for side in row["sides"]}

    def measured(name):
        return sides[name]["seconds"]["run"]["median"], sides[name]["facts"]["temporaries"]

    plain = measured("no clip")
    lines = (DOCS / "per_example.md").read_text().splitlines()
    (cells,) = [line.split(" | ")[1:] for line in lines if line.startswith(f"| {start} of ")]
    names = "clipgrad", "clipgrad, norms", "optax, all at once"
    for cell, name in zip(cells, names, strict=True):
        shown = [float(number) for number in cell.strip(" |").split(", ")]
        ratios = [value / one for value, one in zip(measured(name), plain, strict=True)]
        assert shown == pytest.approx(ratios, rel=0.05), name


def test_the_readme_has_the_ratio_and_its_quartiles():
    text = " ".join((ROOT / "README.md").read_text().split())
    (ratio,) = stored("norm", "128 MB in 20 leaves", "optax")
    median, low, high = (f"{ratio[key]:.2f}" for key in ("median", "low", "high"))
    assert f"({median}; quartiles {low} to {high})" in text
