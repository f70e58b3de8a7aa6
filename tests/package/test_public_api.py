"""Public names, the index of the reference, docstrings and their examples, all in step."""

import doctest
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import types
import typing

import jax
import pytest

import clipgrad as cg
from clipgrad._lazily import PUBLIC
from tests.helpers import NAMES, public

ROOT = pathlib.Path(__file__).parents[2]
# Examples that compile for longer than .3 seconds.
DEAR = """_check.check_grads _check.report _clip.clip_grads _clip.composer _clip.gradient_clip
_clip.rules.adaptive _clip.skip_spikes _clip.thresholds.ema _clip.thresholds.history
_clip.thresholds.percentile _clip.thresholds.z_score _clip.transformations _compare.compare
_compare.save_run _per_example.clip_per_example _per_example.per_example_norms
_recorder.capture _recorder.recorder _values.with_value_stats""".split()
EXAMPLES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name.removeprefix("clipgrad.") in DEAR))
    for path in sorted((ROOT / "clipgrad").rglob("*.py"))
    if ">>> " in path.read_text() and path.name != "torch.py"  # which needs torch
    for name in [".".join(path.relative_to(ROOT).with_suffix("").parts)]
]
EXPORT = re.compile(r"^    from clipgrad\.([\w.]+) import (\w+) as \2$", re.MULTILINE)


@pytest.mark.parametrize("module", PUBLIC)
def test_each_module_has_the_names_of_the_table_and_type_checkers_see_them(module):
    rooms, source = PUBLIC[module], pathlib.Path(sys.modules[module].__file__).read_text()
    names = [name for names in rooms.values() for name in names]
    assert sys.modules[module].__all__ == sorted(names) and len({*names}) == len(names)
    assert set(names) <= set(dir(sys.modules[module]))
    assert all(list(names) == sorted(names) for names in rooms.values())
    typed = {name: place for place, name in EXPORT.findall(source)}
    # mypy takes a function for the file of its name, unless that file is written.
    files = {path.relative_to(ROOT / "clipgrad") for path in (ROOT / "clipgrad").glob("*/*.py")}
    file_of = lambda room, name: f".{name}" * (pathlib.Path(room, f"{name}.py") in files)  # noqa: E731
    assert typed == {n: room + file_of(room, n) for room, names in rooms.items() for n in names}


def test_only_the_table_and_the_modules_that_it_makes_are_public():
    files = {path.stem for path in (ROOT / "clipgrad").glob("[!_]*.py")} - {"torch"}
    assert {name.partition(".")[2] for name in PUBLIC} - {""} == files
    public = {name for name in vars(cg) if not name.startswith("_")} - {"typing", "importlib"}
    assert public <= {*cg.__all__, *files, "torch"}


@pytest.mark.slow
def test_rooms_that_a_training_does_not_need_are_loaded_when_they_are_used():
    program = """
import sys, clipgrad
from clipgrad._lazily import LATER
loaded = lambda: [room for room in LATER if f"clipgrad.{room}" in sys.modules]
assert loaded() == [] and {"check_grads", "diagnose", "clip_grads"} <= set(dir(clipgrad))
assert clipgrad.check_grads is clipgrad.check_grads and loaded() == ["_check"]
from clipgrad import *
assert issubclass(GradCheckError, AssertionError) and callable(diagnose), loaded()
assert sorted(loaded()) == sorted(LATER)
clipgrad.chek_grads
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    last = result.stderr.splitlines()[-1]
    hint = "write clipgrad.check_grads. Did you mean: 'check_grads'?"
    expected = f"module 'clipgrad' has no attribute 'chek_grads'; {hint}"
    assert last == f"AttributeError: {expected}", result.stderr


@pytest.mark.slow
def test_every_module_can_be_reloaded_and_works_with_what_was_made_before():
    """As notebooks with autoreload do."""
    program = """
import importlib, sys, jax, jax.numpy as jnp, optax, clipgrad as cg
cg.check_grads, cg.diagnose
tx = optax.chain(cg.clip_by_global_norm(1.0, stats=True), optax.sgd(1.0))
step = cg.train_step(lambda p, x: (p * x).sum(), cg.skip_spikes(tx))
state = step.init(jnp.ones(2))
for name in sorted(name for name in sys.modules if name.split(".")[0] == "clipgrad"):
    importlib.reload(sys.modules[name])
    clipped = cg.clip_grads(jnp.array([3.0, 4.0]), cg.ClipByNorm(1.0))[0]
    assert bool(jnp.isfinite(clipped).all()), name
state, metrics = step(state, jnp.array([3.0, 4.0]))
assert cg.scalars(metrics)["clip/norm"] == 5 and cg.scalars(state)["clip/norm"] == 5
assert isinstance(metrics["clips"][0], cg.types.ClipStats)
assert isinstance(state, cg.types.TrainState)
exported = jax.export.export(jax.jit(lambda: cg.types.ClipStats.zero()))().serialize()
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr


def test_the_index_of_the_reference_names_everything_public():
    index = (ROOT / "docs" / "api" / "index.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in index] == []


@pytest.mark.parametrize("name", NAMES)
def test_what_is_public_is_documented_functions_with_arguments_results_and_an_example(name):
    value, doc = public(name), inspect.getdoc(public(name))
    if inspect.isclass(value):
        assert doc and ("Args:" in doc or "Attributes:" in doc or name == "TrainState")
    if inspect.isfunction(value):
        assert doc.split("\n")[0].endswith(".")
        for section in ("Args:", "Returns:", "Raises:", "Example:", ">>> "):
            assert section in doc, section
        for parameter in inspect.signature(value).parameters:
            assert re.search(rf"^\s+{parameter}: ", doc, re.MULTILINE), parameter


SECTIONS = ["Example", "Attributes", "Args", "Returns", "Raises", "Guarantees", "References"]


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_is_in_the_order_of_use(name):
    """A sentence, an example, arguments, result, errors; what is for the second reading is last."""
    doc = inspect.getdoc(public(name)) or ""
    title, *sections = re.split(r"^(\w+):$", doc, flags=re.MULTILINE)
    heads, texts = sections[::2], dict(zip(sections[::2], sections[1::2], strict=True))
    assert heads == sorted(heads, key=SECTIONS.index)
    assert len(title.split()) <= 150
    # Arguments are explained in place.
    assert not re.search(r"\bsee\s+`\w", texts.get("Args", ""))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_in_docstrings_run(name):
    with jax.numpy_dtype_promotion("standard"):
        result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and result.failed == 0


def kinds_of(annotation):
    """The kinds of a union."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


@pytest.mark.parametrize("name", [*cg.__all__, *cg.published.__all__])
def test_a_word_of_several_is_a_literal_and_a_selection_of_leaves_has_its_type(name):
    """So that a type checker sees a misspelt one."""
    if not inspect.isfunction(public(name)) and not hasattr(public(name), "__dataclass_fields__"):
        return
    for parameter in inspect.signature(public(name)).parameters.values():
        kinds = kinds_of(parameter.annotation)
        if isinstance(parameter.default, str) and parameter.name != "prefix":
            assert str not in kinds and typing.Literal in map(typing.get_origin, kinds)
        if parameter.name in ("where", "stacked"):
            assert parameter.annotation == cg.types.Where


def test_types_are_shipped():
    assert (ROOT / "clipgrad" / "py.typed").exists()


def test_the_version_is_the_newest_of_the_changelog_and_that_of_the_citation():
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert cg.__version__ == released[0]
    assert f"\nversion: {cg.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.slow
def test_an_import_and_a_clip_need_no_form_of_name_stacks():
    """JAX may store the scopes around an operation otherwise; names alone depend on it."""
    program = (
        "from jax.extend import source_info_util as s; s.current_name_stack = lambda: ('scope',); "
        "import clipgrad as cg, jax, jax.numpy as jnp; tx = cg.clip_by_global_norm(1.0); "
        "print(tx.update(jnp.array([3.0, 4.0]), tx.init(None))[0]); "
        "f = cg.error_clip(cg.ErrorClipByValue(0.5))(lambda x: 3 * x); print(jax.grad(f)(1.0))"
    )
    run = [sys.executable, "-c", program]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == (
        "[0.6 0.8]\n0.5\n"
    )
