"""`clipgrad help words`: the pages of the documentation, on the command line."""

import argparse
from typing import Any

from clipgrad._arrays import nearest
from clipgrad._commands.function import PASSED, UsageError, add_command
from clipgrad._commands.help_search import PageLine, search
from clipgrad._errors import docs_pages, docs_text

_MOST = 8  # places that are listed


def add_help_parser(subparsers: Any) -> None:
    about = "Print a page of the documentation, or find words in it; without words, list the pages."
    parser = add_command(
        subparsers,
        "help",
        about,
        run_help,
        ["nan", "loss is nan"],
        ["printed"],
    )
    parser.add_argument("words", nargs="*", help="the name of a page, or words to search for")


def run_help(options: argparse.Namespace) -> int:
    words, pages = " ".join(options.words), docs_pages()
    if page := _page_of(words, list(pages)):
        print(docs_text(pages[page]))
    elif words:
        _print_found(words, search(words)[:_MOST])
    else:
        width = max(map(len, pages))
        for name, path in pages.items():
            print(f"{name:{width}}  {docs_text(path).partition(chr(10))[0].lstrip('# ')}")
    return PASSED


def _page_of(name: str, pages: list[str]) -> str | None:
    """The page of this name, with its folder or without."""
    same = [page for page in pages if name in (page, page.rpartition("/")[2])]
    return min(same, key=lambda page: page.count("/"), default=None)


def _print_found(words: str, places: list[PageLine]) -> None:
    if not places:
        raise UsageError(
            f"page: got {words!r}, which is not a page; {nearest(words, docs_pages())}"
        )
    for place in places:
        print(f"{place.page}  {place.section}, line {place.line}\n    {place.text}")
    print(f"\nThe whole page: clipgrad help {places[0].page}")
