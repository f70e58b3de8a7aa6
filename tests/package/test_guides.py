"""The pages on how to do something: programs, links, and how they are found."""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._commands.cli import main
from tests.pages import DOCS, NOTEBOOKS, ROOT

TOCTREE = re.compile(r"```\{toctree\}\n(.*?)```", re.DOTALL)

pytestmark = pytest.mark.usefixtures("users_promotion")


def text_of(page):
    return (DOCS / f"{page}.md").read_text()


@pytest.mark.parametrize(
    ("page", "question", "most"),
    [
        ("port", "# Port a model", 12),
        ("two_versions", "A version in a file", 12),
        ("two_versions", "Is the resumed run", 20),  # with the training step that it compares
        ("two_versions", "Does an example depend", 12),
    ],
)
def test_an_answer_is_a_short_program(page, question, most):
    assert page == "two_versions" or f"]({page}.md)" in text_of("two_versions")
    (section,) = (s for s in text_of(page).split("\n## ") if s.startswith(question))
    program = "".join(re.findall(r"```py(?:thon)?\n(.*?)```", section, re.DOTALL))
    assert program
    assert sum(bool(line.strip()) for line in program.splitlines()) <= most


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")
def test_the_step_in_keras_trains():
    """In a process of its own, since Keras takes its backend from the environment."""
    text = text_of("frameworks")
    shared = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    (program,) = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    program += "\nassert (net.non_trainable_variables[0].value != 0).any()\n"
    command = [sys.executable, "-c", shared + program]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=DOCS.parent, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]


class Sink:
    """Stands for a run of wandb and for the writers of TensorBoard and clu."""

    def __init__(self):
        self.seen = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.seen.append((name, *args, *kwargs.values()))


def loggers():
    """The functions of the page that log, without its training."""
    tree = ast.parse("\n".join(re.findall(r"```python\n(.*?)```", text_of("logging"), re.DOTALL)))
    wanted = {"numbers", "arrays", "log_to_wandb", "log_to_tensorboard", "log_to_clu"}
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    assert {node.name for node in functions} == wanted
    names = {"np": np}
    exec(compile(ast.Module(functions, []), "logging.md", "exec"), names)
    return names


def test_each_logger_gets_numbers_as_numbers_and_arrays_as_histograms(monkeypatch):
    fake = types.SimpleNamespace(Histogram=lambda value: ("histogram", value.tolist()))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    numbers = {"loss": np.float32(2), "h/norm": np.array([1, np.nan, 3], np.float32)}
    names, run, board, clu = loggers(), Sink(), Sink(), Sink()
    names["log_to_wandb"](run, numbers, 7)
    assert run.seen == [("log", {"loss": 2.0, "h/norm": ("histogram", [1.0, 3.0])}, 7)]
    names["log_to_tensorboard"](board, numbers, 7)
    (scalar, histogram) = board.seen
    assert scalar == ("add_scalar", "loss", 2.0, 7)
    assert histogram[:2] == ("add_histogram", "h/norm") and histogram[2].tolist() == [1, 3]
    names["log_to_clu"](clu, numbers, 7)
    assert [call[:2] for call in clu.seen] == [("write_scalars", 7), ("write_histograms", 7)]


@pytest.mark.slow
def test_a_tensorboard_writer_takes_what_the_page_gives_it(tmp_path):
    tensorboard = pytest.importorskip("tensorboardX")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        numbers = {"loss": jnp.float32(2), "h/norm": np.array([1, np.nan])}
        loggers()["log_to_tensorboard"](writer, numbers, 7)
    assert list(tmp_path.iterdir())


def test_every_page_is_in_the_tree():
    trees = [tree for page in DOCS.glob("*.md") for tree in TOCTREE.findall(page.read_text())]
    entries = "\n".join(trees).split("\n")
    listed = {re.sub(r".*<(.+)>", r"\1", entry) for entry in entries}
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    assert pages <= listed


def test_the_sidebar_begins_with_the_start_and_is_short():
    trees = TOCTREE.findall((DOCS / "index.md").read_text())
    entries = [line for line in "\n".join(trees).split("\n") if line and line[0] != ":"]
    assert entries[0] == "Start <self>" and len(entries) <= 30
    assert any("<agents>" in tree for tree in TOCTREE.findall(text_of("contributing")))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_notebook_has_its_download_on_its_page(path):
    files = {"__name__": "copies", "__file__": str(DOCS / "copies.py")}
    exec((DOCS / "copies.py").read_text(), files)
    page = json.loads(files["notebook_page"](path.name, path.read_text()))
    first = page["cells"][0]["source"]
    for name in re.findall(r"\{download\}`\S+ <(\S+)>`", first):
        assert (DOCS / "notebooks" / name).resolve().is_file() or (DOCS / name[3:]).is_file()
    assert f"<../../notebooks/{path.name}>" in first and "](../docs/" not in json.dumps(page)


def test_every_setting_of_a_language_model_has_a_source_and_a_value():
    table = text_of("published_clips").split("|---|---|---|---|\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.split("\n")]
    assert len(rows) >= 15
    for model, threshold, source, *_ in rows:
        assert re.search(r", 20\d\d( to 20\d\d)?$", model) and "https://" in source, model
        assert re.match(r"\d\.\d|not stated|none", threshold), model


def found_by():
    """Of each page the words that its author wants it found by."""
    table = json.loads((DOCS / "keywords.json").read_text())
    return {page: entry["words"] for page, entry in table.items() if "words" in entry}


def test_the_words_of_the_index_lead_to_one_page_each():
    words = found_by()
    places = {page: DOCS / f"{page}.md" for page in words if not page.startswith("benchmarks/")}
    assert all(path.is_file() for path in places.values())
    every = [word.lower() for page in words.values() for word in page]
    assert len(every) == len(set(every))
    assert "NaN" in words["nan"] and "wandb" in words["logging"]


SOUGHT = {
    "bf16": "bfloat16",
    "MLA": "recipes",
    "epsilon": "privacy",
    "GCS": "my_run_blew_up",
    "checkpoint": "my_run_blew_up",
    "clip by norm": "api/gradient_clip",
}


@pytest.mark.parametrize("word", SOUGHT)
def test_what_people_search_for_leads_to_the_page_with_the_answer(word):
    assert word in found_by()[SOUGHT[word]]


PAGES_OF_THE_API = ["by_name", "gradient_clip", "rules", "thresholds"]


@pytest.mark.parametrize("page", PAGES_OF_THE_API)
def test_a_long_page_of_the_reference_begins_with_its_names(page):
    head, _, rest = text_of(f"api/{page}").partition("```{eval-rst}")
    documented = re.findall(r"\.\. auto\w+:: (?:clipgrad\.\w+\.)?(\w+)", rest)
    assert set(documented) == set(re.findall(r"`(\w+)`", head))


# -- The page for coding agents: its names are public, and its commands run and write what it says.


TEXT = (ROOT / "AGENTS.md").read_text()
MODELS = """
import jax.numpy as jnp

def loss(w, x):
    return jnp.sum(jnp.log(x @ w))

def other_loss(w, x):
    return jnp.sum(jnp.log(x @ w + 1))

def make_args():
    return jnp.ones(2), jnp.array([[1.0, 2.0], [0.0, 0.0]])
"""


def rows():
    table = TEXT.split("|---|---|---|---|\n")[1].split("\n\n")[0]
    return [re.split(r" ?\| ?", line.strip("|").strip()) for line in table.splitlines()]


def test_it_is_short_and_each_row_is_a_call_with_its_limits():
    assert len(TEXT.split()) <= 400
    assert all(len(row) == 4 and "cg." in row[1] and row[3].startswith("that ") for row in rows())


@pytest.mark.slow
def test_its_names_are_public_and_its_fields_exist():
    assert set(re.findall(r"cg\.(\w+)", TEXT)) <= set(cg.__all__)
    healthy = lambda w: (w**2).sum()  # noqa: E731
    args = (cg.types.ClipStats.zero().norm + 1.0,)
    results = {
        "cg.diagnose": cg.diagnose(healthy, args),
        "cg.compare": cg.compare(healthy, healthy, args),
        "cg.check_grads": cg.check_grads(healthy, args, raise_on_failure=False),
    }
    finding = cg.diagnose(lambda w: cg.global_norm(w * 0) + (w * 0) ** 0.5, args).findings[0]
    for _, call, fields, limits in rows():
        for name, result in results.items():
            if name in call:
                for field in re.findall(r"`\.(\w+)", fields + limits):
                    assert hasattr(result, field) or hasattr(finding, field), field


@pytest.mark.slow
def test_its_commands_run_and_write_json(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    (commands,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    codes = {}
    for command in commands.splitlines():
        name, *words = shlex.split(command)
        assert name == "clipgrad"
        codes[words[0]] = main(words)
        assert capsys.readouterr().err == ""
    assert codes == {"diagnose": 1, "compare": 1, "check": 1, "help": 0}
    for path in tmp_path.glob("*.json"):
        data = json.loads(path.read_text(), parse_constant=pytest.fail)
        assert data["ok"] is False
    assert len([*tmp_path.glob("*.json")]) == 3
