"""The pages for those who come from another library: programs, what they print, tables."""

import ast
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import array
from tests.pages import DOCS

PAGES = [DOCS / "coming_from.md", DOCS / "exploding.md"]
PAGES += sorted((DOCS / "coming_from").glob("*.md"))
ORIGINAL = re.compile(r"^```py\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WIDTH = 46  # of half a page, in characters

pytestmark = pytest.mark.usefixtures("users_promotion")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@every_page
def test_the_originals_are_python_and_fit_beside_ours(page):
    text = page.read_text()
    for program in ORIGINAL.findall(text):
        ast.parse(program)
    halves = re.findall(r"^:::\{grid-item\}\n(.*?)^:::$", text, re.DOTALL | re.MULTILINE)
    assert len(halves) == 2 * text.count("::::{grid} ")
    for half in halves:
        (program,) = re.findall(r"```py(?:thon)?\n(.*?)```", half, re.DOTALL)
        assert max(map(len, program.splitlines())) <= WIDTH


def rows(name, heading):
    """The rows of the tables on a page that have this heading, without backticks."""
    tables = (DOCS / "coming_from" / f"{name}.md").read_text().split(f"| {heading} |\n")[1:]
    lines = [line for table in tables for line in table.split("\n\n")[0].splitlines()[1:]]
    return [[c.strip().strip("`") for c in line.strip().strip("|").split(" | ")] for line in lines]


LINES = [
    pytest.param(name, *row, id=f"{name}: {row[0]}", marks=[pytest.mark.slow] * (i > 0))
    for name in [*sorted(path.stem for path in (DOCS / "coming_from").glob("*.md")), "../privacy"]
    for i, row in enumerate(rows(name, "you write | here"))
]


def run(line):
    """The names after a line, or the value of one that assigns nothing."""
    grads = {"w": array([[3.0, 4.0]])}
    names = {
        "cg": cg,
        "jax": jax,
        "jnp": jnp,
        "optax": optax,
        "grads": grads,
        "params": grads,
        "norm": 5.0,
    }
    names |= {"h": array(np.ones(2)), "loss": lambda w, x: w @ x}
    exec(line if re.match(r"[\w, ]+ = ", line) else f"result = {line}", names)
    return names


@pytest.mark.parametrize("name, theirs, ours", LINES)
def test_each_line_of_a_table_runs(name, theirs, ours):
    names = run(ours)
    if name == "optax" and theirs.startswith("optax."):
        results = names["result"], run(theirs)["result"]
        if hasattr(results[0], "update"):
            grads, params = names["grads"], names["params"]
            results = [tx.update(grads, tx.init(params), params)[0] for tx in results]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *results)


def outcome(library, grads, clip):
    names = {"jnp": jnp, "optax": optax}
    try:
        tx = eval(clip, names | vars(library))
        return tx.update(grads, tx.init(grads))[0]
    except (TypeError, ValueError) as error:
        return type(error).__name__


def assert_as_printed(result, printed):
    if isinstance(result, str) or not printed.startswith("["):
        assert result == printed
    else:
        expected = [float(number) for number in printed.strip("[]").split(",")]
        np.testing.assert_allclose(np.asarray(result, float), expected, rtol=4e-3, atol=1e-7)


OPTAX = rows("optax", "gradients | clip | optax 0.2.8 | here")


@pytest.mark.slow
@pytest.mark.parametrize("row", OPTAX, ids=lambda row: f"{row[0]} {row[1]}")
def test_the_differences_from_optax_are_as_printed(row):
    grads = eval(row[0], {"jnp": jnp})
    result = outcome(cg, grads, row[1])
    assert_as_printed(result, row[3])
    if not isinstance(result, str):
        assert result.dtype == grads.dtype
    if optax.__version__.startswith("0.2."):
        assert_as_printed(outcome(optax, grads, row[1]), row[2])


CHECKERS = {"check_grads", "assert_numerical_grads", "gradcheck"}


@pytest.mark.slow
@pytest.mark.parametrize("row", rows("../check", "from | you wrote | here"), ids=lambda row: row[1])
def test_a_call_of_another_checker_says_what_to_write_and_that_runs(row):
    _, before, after = row
    names = {"f": jnp.tanh, "x": jnp.asarray([0.5, -1.0])}
    assert eval(after, names | {"cg": cg}).ok
    if before.split("(")[0] in CHECKERS:
        with pytest.raises(TypeError, match=r"; .*(write|the) |, expected \w+="):
            eval(before, names | dict.fromkeys(CHECKERS, cg.check_grads))


def test_the_published_thresholds_are_those_of_the_library():
    table = rows("composer", "kind | threshold | for | in")
    for (kind, value, _, link), entry in zip(table, cg.published.SUGGESTED_THRESHOLDS, strict=True):
        author, year = re.match(r"\[(\w+)\b.*?(\d{4})\]\(https://", link).groups()
        assert (kind, float(value)) == (entry.kind, entry.value)
        assert entry.source.startswith(author) and year in entry.source
