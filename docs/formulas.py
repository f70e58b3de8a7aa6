"""Formulas as MathML, which browsers draw by themselves: no script, and no network."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

_FUNCTION = re.compile(r"<mo>([a-z]+)</mo>")
_BAR = re.compile(r"<mo(?: stretchy=\"false\")?>([|‖])</mo>")


def mathml(formula: str, **kind: Any) -> str:
    """What browsers draw well: no space behind functions and beside bars, bars of one size."""
    text = tex2mathml(formula, **kind)
    text = _FUNCTION.sub(r'<mspace width="0.16em"/><mi>\1</mi>', text)
    return _BAR.sub(r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', text)


def inline(writer: HTML5Translator, node: nodes.math) -> None:
    """Writes a formula within a line."""
    writer.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def block(writer: HTML5Translator, node: nodes.math_block) -> None:
    """Writes a formula on a line of its own, which scrolls where the page is narrower."""
    writer.body.append(f'<div class="formula">{mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the renderer with Sphinx."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
