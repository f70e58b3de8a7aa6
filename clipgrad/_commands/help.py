"""`clipgrad help page`: the pages of the documentation, on the command line."""

import argparse
from typing import Any

from clipgrad._commands.function import PASSED, UsageError, add_command
from clipgrad._docs import docs_pages, docs_title
from clipgrad._trees import nearest


def add_help_parser(subparsers: Any) -> None:
    about = "Print a page of the documentation; without a name, list the pages."
    parser = add_command(subparsers, "help", about, run_help, ["nan"], ["printed"])
    parser.add_argument("page", nargs="?", help="the name of a page, such as nan")


def run_help(options: argparse.Namespace) -> int:
    pages = docs_pages()
    if options.page is None:
        width = max(map(len, pages))
        print("\n".join(f"{name:{width}}  {docs_title(name)}" for name in pages))
    elif options.page in pages:
        print(pages[options.page].read_text(encoding="utf-8"))
    else:
        raise UsageError(
            f"page: got {options.page!r}, which is not a page; {nearest(options.page, pages)}"
        )
    return PASSED
