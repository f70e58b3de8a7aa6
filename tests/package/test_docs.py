"""The site: its tables are true, and it holds every public name."""

import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from clipgrad._commands.cli import main
from clipgrad._errors import docs_page, docs_title
from tests.helpers import NAMES, array
from tests.pages import ALL_PAGES, DOCS, NOTEBOOKS, ROOT, anchors, prose, rows
from tests.rows import first_row

pytestmark = pytest.mark.usefixtures("users_promotion")


def test_no_address_of_a_link_is_broken_over_two_lines():
    texts = {page: re.sub(r"```.*?```", "", page.read_text(), flags=re.S) for page in ALL_PAGES}
    assert not [page for page, text in texts.items() if re.search(r"\]\([^)\s]*\n", text)]


@pytest.mark.parametrize("page", [*ALL_PAGES, *ROOT.glob("[AC]*.md")], ids=lambda page: page.stem)
def test_the_site_shows_each_line_of_code_without_scrolling(page):
    blocks = re.findall(r"^```(?:py|python|sh)\n(.*?)^```", page.read_text(), re.M | re.S)
    assert not [line for block in blocks for line in block.splitlines() if len(line) > 92]


def test_every_public_name_has_one_place_in_the_reference():
    reference = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = re.findall(r"\.\. auto\w+:: (?:clipgrad\.\w+\.)?(\w+)", reference)
    assert sorted(documented) == sorted([*NAMES, "save_run"])  # also of clipgrad.torch


PROMISES = re.findall(r"\{guarantee\} (.+)", (DOCS / "guarantees.md").read_text())


def test_every_guarantee_names_tests_that_there_are():
    assert PROMISES
    for proof in " ".join(PROMISES).split():
        file, test = proof.split("::")
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), proof


@pytest.fixture
def default_rows(request):
    """The tests of which README's command runs a row, as pytest collects them."""
    items = request.session.items
    rooms = {item.path.parent.name for item in items}
    if rooms >= {promise.partition("/")[0] for promise in " ".join(PROMISES).split()}:
        ids = [item.nodeid for item in items if not item.get_closest_marker("slow")]
    else:  # a part of the tests was asked for
        files = {f"tests/{proof.split('::')[0]}" for proof in " ".join(PROMISES).split()}
        words = ["-m", "pytest", "--collect-only", "-q", *sorted(files)]
        shown = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        ids = [line for line in shown.stdout.splitlines() if "::" in line]
    return {item.partition("[")[0].removeprefix("tests/") for item in ids}


def test_every_guarantee_is_tested_by_default(default_rows):
    assert not [promise for promise in PROMISES if default_rows.isdisjoint(promise.split())]


# Links and pictures


def place(page, target):
    """The file that a link leads to; the site has notebooks and results among its pages."""
    path = (page.parent / target).resolve()
    inside = path.relative_to(DOCS) if path.is_relative_to(DOCS) else path
    return ROOT / inside if str(inside).startswith(("notebooks/", "benchmarks/")) else path


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *ALL_PAGES, *NOTEBOOKS], ids=lambda page: page.stem
)
def test_every_link_leads_to_a_file_and_a_heading_and_every_picture_is_one(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = place(page, name) if name else page
        assert path.is_file(), target
        assert not anchor or anchor in anchors(path), target
        assert path.suffix != ".png" or path.read_bytes().startswith(b"\x89PNG"), target


# Pages that messages name, for people who installed the package


def test_a_message_names_the_title_of_a_page_and_the_command_that_prints_it():
    assert docs_page("nan") == '"Why is my gradient NaN?": clipgrad help nan'
    sources = "".join(path.read_text() for path in (ROOT / "clipgrad").rglob("*.py"))
    named = set(re.findall(r"docs_page\([\"'](\w+)[\"']\)", sources))
    assert named and all(map(docs_title, named))


# The measured tasks of which_clip.md

MEASURED = json.loads((DOCS / "which_clip.json").read_text())["tasks"]
# The columns of its two tables, as the file has them.
WAYS = ["no clip", "norm", "error clip", "error clip + norm", "auto norm", "fixed"]
CLIPS_OF_CONVOLUTIONS = ["no clip", "norm", "value", "adaptive", "adaptive, not the last layer"]


def measured(way, metric):
    """The median of a way to train, where NaN is worst; a star if all have reached the goal."""
    worst = -np.inf if metric == "accuracy" else np.inf
    middle = np.median([worst if value is None else value for value in way["metrics"][metric]])
    shown = f"{middle:.3g}" if np.isfinite(middle) else "NaN"
    return shown + " *" * all(way["metrics"]["reached"])


def test_the_tables_of_measured_tasks_are_those_of_the_file():
    shown = {row[0].split(":")[0]: row[1:] for row in rows("which_clip.md", "task")}
    assert len(shown) == 10
    for name, cells in shown.items():
        task = MEASURED[name]
        ways = [task["ways"].get(way) for way in WAYS]
        ways[-1] = ways[-1] or task["ways"].get("truncated plus norm")
        assert cells == [measured(way, task["metric"]) if way else "" for way in ways], name


def test_the_picture_of_clips_has_the_counts_of_the_file():
    shown = [task["ways"] for task in MEASURED.values() if "error clip + norm" in task["ways"]]
    assert len(shown) == 10

    def all_five(way):
        return sum(all(ways[way]["metrics"]["reached"]) for ways in shown)

    counted = {4: "four", 7: "seven", 9: "nine"}
    text = (DOCS / "which_clip.md").read_text()
    (description,) = re.findall(r"!\[([^\]]+)\]\(which_clip.png\)", text)
    assert [counted[all_five(way)] for way in ("norm", "error clip + norm", "no clip")] == [
        word for word in re.findall(r"\w+", description) if word in counted.values()
    ]


def test_the_error_of_the_clipped_arccos_is_the_one_on_the_page():
    text = (DOCS / "nan.md").read_text()
    shown = re.search(r"by up to (\S+) in float32, (\S+) in float16 and (\S+) in b", text)
    for text, dtype in zip(shown.groups(), (jnp.float32, jnp.float16, jnp.bfloat16), strict=True):
        assert float(text) == pytest.approx(np.arccos(1 - float(jnp.finfo(dtype).eps)), rel=0.05)


def test_the_table_of_convolutions_is_that_of_the_file():
    for size, *cells in rows("which_clip.md", "batches"):
        ways = MEASURED[f"convolutions, {size.split()[0]} batches"]["ways"]
        assert cells == [measured(ways[way], "accuracy") for way in CLIPS_OF_CONVOLUTIONS]


NEEDS = {"loss": lambda w: w, "h": array(np.ones(2)), "rule": cg.ClipByValue(1.0)}
CHOICES = [row[2] for row in rows("which_clip.md", "what you see")]


@pytest.mark.parametrize("code", CHOICES)
def test_each_choice_of_a_clip_is_code_that_runs(code):
    names = {"cg": cg, "jax": jax, "optax": optax, "optimizer": optax.sgd(1.0)} | NEEDS
    names |= {"loss_of_one": lambda w, x: w @ x}
    exec(code.lstrip("@"), names)


@first_row
@pytest.mark.parametrize("row", rows("nan.md", "operation"), ids=lambda row: row[0])
def test_each_suspect_has_no_finite_derivative_and_its_cure_has(row):
    suspect, point, _, cure = row

    def slope(code):
        names = {"jnp": jnp, "jax": jax}
        fun = lambda x: eval(code, names | {"x": x}).astype(jnp.float32)  # noqa: E731
        return jax.grad(fun)(jnp.float32(point))

    assert not jnp.isfinite(slope(suspect))
    code = cure.split("`")[0]
    if "(" in code:
        assert jnp.isfinite(slope(code))


@pytest.mark.parametrize("command", ["demo", "check", "diagnose", "selftest"])
def test_the_page_on_the_command_line_has_every_option(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out)) - {"--help", "--traceback"}
    text = (DOCS / "api" / "command_line.md").read_text().split(f"## `clipgrad {command}`")[1]
    documented = re.findall(r"`(--[a-z][\w-]+)", text.split("\n## ")[0])
    assert options and set(documented) == options
