"""Links from every public name to its reference, and from docstrings to what Sphinx reads.

Docstrings are written for people who read them in a terminal or an editor: formulas between
dollar signs, names between backticks. This extension turns both into what Sphinx knows.
"""

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import clipgrad

# The place of each public name; `vars` lacks those that are loaded when they are used.
PUBLIC = {
    name: f"{module.__name__}.{name}"
    for module in (clipgrad, clipgrad.types, clipgrad.published)
    for name in module.__all__
}
# A call without prefix may be another library's function of the same name, unless it is a class.
_NAME = re.compile(
    r"(?:cg\.|clipgrad\.)(?:types\.|published\.)?(\w+)(?:\(.*\))?$|(\w+)$|([A-Z]\w+)\(.*\)$",
    re.DOTALL,
)
_QUOTED = re.compile(r"(?<!`)`(\w+)((?:\.\w+)*)(?:\(\))?`(?!`)")
_DISPLAY = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
_INLINE = re.compile(r"\$([^$]+?)\$")


class LinkPublicNames(SphinxTransform):
    """Makes a link of each inline literal that is a public name or a call of it."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        """Replaces the literals of this document."""
        for literal in list(self.document.findall(nodes.literal)):
            match = _NAME.match(literal.astext())
            name = match and match.group(match.lastindex)
            if name in PUBLIC and not _linked(literal):
                literal.replace_self(_link(literal, name, self.env.docname))


def _linked(literal: nodes.literal) -> bool:
    return isinstance(literal.parent, nodes.reference | addnodes.pending_xref | nodes.title)


def _link(literal: nodes.literal, name: str, page: str) -> addnodes.pending_xref:
    link = addnodes.pending_xref(
        "", refdomain="py", reftype="obj", reftarget=PUBLIC[name], refdoc=page
    )
    link += literal.deepcopy()
    return link


def mark_formulas(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list) -> None:
    """Turns formulas and names in a docstring into Sphinx's math and links."""
    text = _DISPLAY.sub(lambda match: f".. math:: {_one_line(match)}\n", "\n".join(lines))
    text = _INLINE.sub(lambda match: f":math:`{_one_line(match)}`", text)
    lines[:] = _QUOTED.sub(_placed, text).split("\n")


def _placed(match: re.Match) -> str:
    """A public name in backticks, or an attribute of one, as a link to its place."""
    text, name, rest = match.group(0, 1, 2)
    return f"`{text[1:-1]} <{PUBLIC[name]}{rest}>`" if name in PUBLIC else text


def _one_line(match: re.Match) -> str:
    return " ".join(match.group(1).split())


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers these with Sphinx."""
    app.add_transform(LinkPublicNames)
    app.connect("autodoc-process-docstring", mark_formulas)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
