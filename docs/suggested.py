"""The published thresholds as a table, which is what the reference says about them."""

import re
from typing import Any

from sphinx.application import Sphinx

import clipgrad

_NAME = "clipgrad.published.SUGGESTED_THRESHOLDS"
_LINKED = re.compile(r"(.+), (https://\S+)")


def cell(content: Any) -> str:
    """What a field says, as reStructuredText: a text with an address behind it is a link."""
    return _LINKED.sub(r"`\1 <\2>`__", str(content))


def table() -> list[str]:
    """The lines of the table, as reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in (
        clipgrad.published.SuggestedThreshold._fields,
        *clipgrad.published.SUGGESTED_THRESHOLDS,
    ):
        marks = ["   * - ", *["     - "] * (len(row) - 1)]
        lines += [f"{mark}{cell(field)}" for mark, field in zip(marks, row, strict=True)]
    return lines


def describe(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list) -> None:
    """Puts the table where autodoc would describe tuples."""
    if name == _NAME:
        lines[:] = ["Published thresholds, a tuple of `SuggestedThreshold`:", "", *table(), ""]


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the table with Sphinx."""
    app.connect("autodoc-process-docstring", describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
