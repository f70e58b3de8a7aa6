"""Where a line of code in a table may break, on a screen that is too narrow for it."""

import re
from typing import Any

from sphinx.application import Sphinx

_TABLE = re.compile(r"<table.*?</table>", re.DOTALL)
_WORD = re.compile(r'(?<=<span class="pre">)[^<]+(?=</span>)')
_BREAK = re.compile(r"(?<=[_(\[=,/])(?=\w)|(?<=\.)(?=[A-Za-z])")


def with_breaks(html: str) -> str:
    """The page with places to break, which are not copied with the code."""
    in_word = lambda word: _BREAK.sub("<wbr>", word[0])  # noqa: E731
    return _TABLE.sub(lambda table: _WORD.sub(in_word, table[0]), html)


def add_breaks(app: Sphinx, page: str, template: str, context: dict, doctree: Any) -> None:
    """Changes the page before it is written."""
    if "body" in context:
        context["body"] = with_breaks(context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers this with Sphinx."""
    app.connect("html-page-context", add_breaks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
