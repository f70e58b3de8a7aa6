"""The shape of the package: imports go one way, and functions are short."""

import ast
import collections
import functools
import graphlib
import pathlib
import re
import sys

import pytest

from clipgrad._lazily import PUBLIC

PACKAGE = pathlib.Path(__file__).parents[2] / "clipgrad"
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((PACKAGE.parent / "tests").rglob("test_*.py"))

# Each room (a folder, or a file beside them) may import the ones before it.
ROOMS = [
    "_compat", "_sharding", "_devices", "_lazily", "_errors", "_chart", "_flax",
    "_arrays", "_programs", "_names", "_frameworks", "_clip",
    "_error_clip", "_values", "_training", "_losses", "_per_example", "_check",
    "_diagnose", "_recorder", "_compare", "torch", "published", "types", "__init__", "_demo",
    "_commands", "__main__",
]  # fmt: skip
FOLDERS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
# With the folders inside of rooms.
EACH_FOLDER = sorted(p.parent.relative_to(PACKAGE).parts for p in PACKAGE.glob("*/**/__init__.py"))


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


@functools.cache
def nodes(path):
    return list(ast.walk(parsed(path)))


@functools.cache
def imports(path):
    modules = [n.module for n in nodes(path) if isinstance(n, ast.ImportFrom) and n.module]
    plain = [n for n in nodes(path) if isinstance(n, ast.Import)]
    return modules + [alias.name for node in plain for alias in node.names]


def test_no_file_of_tests_imports_another():
    """What several need stands in a module whose name does not begin with `test_`."""
    imported = re.compile(r"^ *(?:from|import) tests[\w.]*\.test_.*", re.MULTILINE)
    for path in (PACKAGE.parent / "tests").rglob("*.py"):
        taken = set(imported.findall(path.read_text()))
        # The program of a test may be in the file that the test is in.
        assert all(f".{path.stem} import" in line for line in taken), f"{path}: {taken}"


def test_nothing_is_compiled_while_tests_are_imported(compiled_at_import):
    """Each process would compile it; `helpers.array` makes arrays of NumPy's."""
    assert not compiled_at_import


def test_each_room_has_its_place():
    assert sorted({room(path) for path in FILES}) == sorted(ROOMS)


def imports_of_files():
    return [(path, module) for path in FILES for module in imports(path)]


def test_imports_go_one_way_and_not_past_the_door_of_a_room():
    for path, module in imports_of_files():
        parts = module.split(".")
        if parts[0] != "clipgrad":
            continue
        imported = parts[1] if len(parts) > 1 else "__init__"
        inside = imported == room(path)
        # The door of the package loads the later rooms when they are used.
        before = room(path) == "__init__" or ROOMS.index(imported) < ROOMS.index(room(path))
        assert inside or before, f"{path} imports {module}"
        # For type checkers it names files, see there.
        assert inside or len(parts) <= 2 or room(path) == "__init__", (
            f"{path} reaches past {imported} to {module}"
        )


def test_clips_know_no_names_and_no_frameworks():
    used = {m for path in (PACKAGE / "_clip").rglob("*.py") for m in imports(path)}
    assert {m.split(".")[1] for m in used if m.startswith("clipgrad.")} & {*FOLDERS} <= {
        "_arrays", "_clip",
    }  # fmt: skip


def test_the_checker_knows_no_clip_whose_mistake_it_could_share():
    imported = {module for path in (PACKAGE / "_check").glob("*.py") for module in imports(path)}
    rooms = {module.split(".")[1] for module in imported if module.startswith("clipgrad.")}
    assert {name for name in rooms if ROOMS.index(name) > ROOMS.index("_names")} == {"_check"}


DESIGN = (PACKAGE.parent / "DESIGN.md").read_text()


@pytest.mark.parametrize("module", PUBLIC)
def test_the_table_of_public_names_is_in_the_order_of_the_rooms(module):
    assert list(PUBLIC[module]) == sorted(PUBLIC[module], key=ROOMS.index)


def test_the_table_of_the_design_is_in_the_order_of_the_rooms():
    table = DESIGN.split("| room | its idea |\n|---|---|\n")[1].split("\n\n")[0]
    named = [re.match(r"\| `(\w+)`", row)[1] for row in table.splitlines()]
    assert named == [name for name in ROOMS if name in FOLDERS]


def test_the_files_that_contributors_are_told_of_exist():
    text = DESIGN + (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"(?<![\w/.])(?:\w+/)*\w+\.py\b", text))
    there = [
        f"/{p.relative_to(PACKAGE.parent)}"
        for p in [
            *FILES,
            *(PACKAGE.parent / "tests").rglob("*"),
            *PACKAGE.parent.glob("benchmarks/*.py"),
        ]
    ]
    there += ["/notebooks/execute.py"]
    assert len(named) > 10
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in there)] == []


@pytest.mark.parametrize("folder", EACH_FOLDER, ids="/".join)
def test_imports_inside_of_a_room_go_one_way_too(folder):
    depth, graph = len(folder), {}
    for path in PACKAGE.joinpath(*folder).rglob("*.py"):
        place = path.relative_to(PACKAGE).with_suffix("").parts
        used = {tuple(m.split(".")[1:]) for m in imports(path) if m.startswith("clipgrad.")}
        if place[depth] != "__init__":
            part = graph.setdefault(place[depth], set())
            part |= {m[depth] for m in used if len(m) > depth and m[:depth] == folder}
    for name, part in graph.items():
        part -= {name} if PACKAGE.joinpath(*folder, name).is_dir() else set()
    assert set(graphlib.TopologicalSorter(graph).static_order()) <= set(graph)


@pytest.mark.parametrize("folder", [parts for parts in EACH_FOLDER if len(parts) > 1], ids="/".join)
def test_a_folder_inside_of_a_room_has_a_door_too(folder):
    for path in FILES:
        if path.relative_to(PACKAGE).parts[: len(folder)] != folder:
            past = [m for m in imports(path) if m.startswith(".".join(["clipgrad", *folder, ""]))]
            assert not past, f"{path} reaches past {folder} to {past}"


def test_no_two_files_have_the_same_name():
    names = collections.Counter(path.name for path in FILES if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_only_public_jax_and_runtime_dependencies_are_imported():
    extras = {"matplotlib", "sklearn", "tqdm", "orbax", "torch"}
    allowed = {"clipgrad", "jax", "numpy", "optax", *extras}
    for path, module in imports_of_files():
        top = module.split(".")[0]
        assert "_src" not in module.split("."), path
        assert top in allowed or top in sys.stdlib_module_names, path
        if top in extras:
            assert room(path) in ("_demo", "_check", "_commands", "_chart", "_recorder", "torch")


def test_one_file_names_what_flax_has():
    """The others have texts for users, and in tables where its files and classes are."""
    tables = {"user_functions.py", "places.py"}
    for path in FILES:
        if path.name in {"_flax.py", *tables}:
            continue
        words = {n.id for n in nodes(path) if isinstance(n, ast.Name)}
        words |= {n.attr for n in nodes(path) if isinstance(n, ast.Attribute)}
        texts = {n.value for n in nodes(path) if isinstance(n, ast.Constant)}
        modules = {x for x in texts if isinstance(x, str) and re.fullmatch(r"flax(\.\w+)+", x)}
        assert not modules and not words & {"nnx", "linen", "flax_nnx", *FLAX}, path


# Names of flax that nothing else here has.
FLAX = {"NodeStates", "DiffState", "RngState", "to_predicate", "to_flat_state", "TraceContextError"}


def test_no_local_has_a_word_for_a_noun():
    """A name says what a value is: not that it was found, nor whose it is."""
    words = {"found", "own", "its", "given", "told"}
    for path in FILES:
        names = {n.id for n in nodes(path) if isinstance(n, ast.Name)}
        names |= {n.attr for n in nodes(path) if isinstance(n, ast.Attribute)}
        names |= {n.arg for n in nodes(path) if isinstance(n, ast.arg | ast.keyword)}
        assert not names & words, f"{path}: {names & words}"


def test_functions_are_short():
    functions = [(p, n) for p in FILES for n in nodes(p) if isinstance(n, ast.FunctionDef)]
    for path, node in functions:
        body = node.body[1:] if ast.get_docstring(node) else node.body
        lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
        assert lines <= 40, f"{node.name} of {path}"


def test_the_tests_that_comments_name_as_reasons_exist():
    tests = " ".join(path.read_text() for path in (PACKAGE.parent / "tests").rglob("*.py"))
    defined = set(re.findall(r"def (test_\w+)", tests))
    for path in FILES:
        comments = [line.partition("#")[2] for line in path.read_text().splitlines()]
        assert set(re.findall(r"(?<![.\w])test_\w+", " ".join(comments))) <= defined, path
