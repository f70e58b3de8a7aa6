"""The directive ``suggested-thresholds``: the published thresholds as a table."""

import re

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import clipgrad

_LINKED = re.compile(r"(.+), (https://\S+)")


def cell(content: object) -> str:
    """What a field says, as reStructuredText: a text with an address behind it is a link."""
    return _LINKED.sub(r"`\1 <\2>`__", str(content))


def table() -> list[str]:
    """The lines of the table, as reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in (clipgrad.SuggestedThreshold._fields, *clipgrad.SUGGESTED_THRESHOLDS):
        marks = ["   * - ", *["     - "] * (len(row) - 1)]
        lines += [f"{mark}{cell(field)}" for mark, field in zip(marks, row, strict=True)]
    return lines


class SuggestedThresholds(SphinxDirective):
    """It has neither arguments nor content."""

    def run(self) -> list[nodes.Node]:
        """The table, made from the tuple itself."""
        container = nodes.container()
        text = StringList(table(), "clipgrad.SUGGESTED_THRESHOLDS")
        self.state.nested_parse(text, self.content_offset, container)
        return container.children


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive with Sphinx."""
    app.add_directive("suggested-thresholds", SuggestedThresholds)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
