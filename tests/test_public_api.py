"""Public names, the index of the reference, docstrings and their examples, all in step."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re

import jax
import pytest

import clipgrad as cg
from tests.helpers import NAMES

ROOT = pathlib.Path(__file__).parents[1]
MODULES = [
    module.name
    for module in pkgutil.walk_packages(cg.__path__, "clipgrad.")
    if not module.name.endswith("__main__")
]
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(cg, name))]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(cg, name))]


def test_exports_are_sorted_and_explicit():
    lines = (ROOT / "clipgrad" / "__init__.py").read_text().splitlines()
    imports = [line for line in lines if line.startswith("from clipgrad")]
    pattern = re.compile(r"from (clipgrad\.[\w.]+) import (\w+) as \2$")
    assert all(pattern.match(line) for line in imports)
    modules = [pattern.match(line).group(1) for line in imports]
    assert modules == sorted(modules)
    assert sorted(pattern.match(line).group(2) for line in imports) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_index_of_the_reference_names_everything_public(name):
    assert f"`{name}`" in (ROOT / "docs" / "api" / "index.md").read_text()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_documented_with_arguments_results_and_an_example(name):
    doc = inspect.getdoc(getattr(cg, name))
    assert doc.split("\n")[0].endswith(".")
    for section in ("Args:", "Returns:", "Raises:", "Example:", ">>> "):
        assert section in doc, section
    for parameter in inspect.signature(getattr(cg, name)).parameters:
        assert re.search(rf"^\s+{parameter}: ", doc, re.MULTILINE), parameter


@pytest.mark.parametrize("name", CLASSES)
def test_classes_are_documented(name):
    doc = inspect.getdoc(getattr(cg, name))
    assert doc and ("Args:" in doc or "Attributes:" in doc or name == "TrainState")


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name):
    with jax.numpy_dtype_promotion("standard"):
        result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_there_are_examples_to_run():
    finder = doctest.DocTestFinder()
    modules = map(importlib.import_module, MODULES)
    assert any(test.examples for module in modules for test in finder.find(module))


def test_types_are_shipped():
    assert (ROOT / "clipgrad" / "py.typed").exists()


def test_the_version_is_the_newest_of_the_changelog_and_that_of_the_citation():
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert cg.__version__ == released[0]
    assert f"\nversion: {cg.__version__}\n" in (ROOT / "CITATION.cff").read_text()
