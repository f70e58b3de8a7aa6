"""`clipgrad help page`: the pages of the documentation, on the command line."""

import argparse
import re
from typing import Any

from clipgrad._arrays import nearest
from clipgrad._commands.function import PASSED, UsageError, add_command
from clipgrad._errors import docs_pages, docs_title


def add_help_parser(subparsers: Any) -> None:
    about = "Print a page of the documentation, or list those with a word; without one, list all."
    parser = add_command(subparsers, "help", about, run_help, ["nan"], ["printed"])
    parser.add_argument("page", nargs="?", help="the name of a page, or a word to search for")


def run_help(options: argparse.Namespace) -> int:
    pages = docs_pages()
    if options.page in pages:
        print(pages[options.page].read_text(encoding="utf-8"))
        return PASSED
    listed = list(pages) if options.page is None else _pages_with(options.page)
    if not listed:
        raise UsageError(
            f"page: got {options.page!r}, which is not a page; {nearest(str(options.page), pages)}"
        )
    width = max(map(len, listed))
    print("\n".join(f"{name:{width}}  {docs_title(name)}" for name in listed))
    return PASSED


def _pages_with(word: str) -> list[str]:
    """The pages that have this word, those that have it most often first."""
    whole = re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE)
    uses = {n: len(whole.findall(p.read_text(encoding="utf-8"))) for n, p in docs_pages().items()}
    return sorted((n for n in uses if uses[n]), key=lambda n: -uses[n])
