"""A report on the words of pages and docstrings: ``pytest -k language -s`` prints it.

It is no gate for style. Where "it" and "of" are many, a noun is gone or nobody acts: read the page.
"""

import inspect
import pathlib
import re

import clipgrad as cg
from tests.helpers import NAMES

DOCS = pathlib.Path(__file__).parents[2] / "docs"
ROOT = DOCS.parent
GROUPS = {
    "it": "it its it's they them their itself themselves",
    "of": "of",
    "you": "you your yours yourself",
}
LINEAX = {"it": 11.0, "of": 15.3, "you": 9.2}  # its guides, counted in the same way on 2026-11-28


def prose(markdown):
    """The sentences of a page, without programs, tables, formulas and directives."""
    text = re.sub(r"^(```+|:::+|~~~+).*?^\1", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\|.*$|^:.*$|^<.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)|`[^`]*`|\$\$?[^$]*\$\$?", " ", text)
    return re.findall(r"[a-z']+", text.lower())


def rates(words):
    """How many of a thousand words are in each group."""
    return {
        name: 1000 * sum(map(words.count, group.split())) / max(len(words), 1)
        for name, group in GROUPS.items()
    }


def texts():
    """The words of each page and each docstring."""
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("[ac]*/*.md")]
    texts = {path.relative_to(ROOT).as_posix(): prose(path.read_text()) for path in sorted(pages)}
    for name in sorted(NAMES):
        texts[f"cg.{name}"] = prose(inspect.getdoc(getattr(cg, name, None)) or "")
    return {name: words for name, words in texts.items() if len(words) >= 100}


def report(counted):
    """A line for each text, those with most "it" and "of" first."""
    yield f"{'words of a thousand':40} words    it    of   you"
    for name, words in sorted(counted.items(), key=lambda item: -sum(rates(item[1]).values())):
        numbers = "".join(f"{rate:6.1f}" for rate in rates(words).values())
        yield f"{name:40} {len(words):5}{numbers}"


def test_the_words_of_all_pages_and_docstrings_are_counted():
    counted = texts()
    print(*report(counted), sep="\n")
    every = [word for words in counted.values() for word in words]
    print({name: round(rate, 1) for name, rate in rates(every).items()}, "lineax", LINEAX)
    assert {"README.md", "docs/nan.md", "cg.diagnose"} <= counted.keys()


def test_a_page_without_its_programs_and_tables_is_counted():
    page = "# You\n\nIt of `of` [of](it.md)\n\n| of |\n|---|\n\n```py\nits = of\n```\n"
    assert prose(page) == ["you", "it", "of", "of"]
    assert rates(prose(page)) == {"it": 250, "of": 500, "you": 250}
