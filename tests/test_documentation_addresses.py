"""The pages of the documentation that messages name, for people who installed the package."""

import pathlib
import re
import tomllib

from clipgrad._docs import docs_page, docs_pages, docs_title

ROOT = pathlib.Path(__file__).parents[1]


def test_a_message_names_the_title_of_a_page_and_the_command_that_prints_it():
    assert docs_page("nan") == '"Why is my gradient NaN?": clipgrad help nan'


def test_a_wheel_contains_every_page_that_has_a_title():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = wheel["targets"]["wheel"]["force-include"]
    expected = {f"docs/{name}.md": f"clipgrad/_pages/{name}.md" for name in docs_pages()}
    assert included == expected and len(expected) > 10


def test_every_page_that_a_message_names_is_there():
    sources = (path.read_text() for path in (ROOT / "clipgrad").rglob("*.py"))
    named = {name for text in sources for name in re.findall(r"docs_page\(\"(\w+)\"\)", text)}
    sources = (path.read_text() for path in (ROOT / "clipgrad").rglob("*.py"))
    named |= {name for text in sources for name in re.findall(r"docs_page\('(\w+)'\)", text)}
    assert named and all(docs_title(name) for name in named)
