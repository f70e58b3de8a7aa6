"""Guarantees: on their page with the tests that hold them, in the reference folded.

The directive ``guarantee`` is a sentence, and the tests, to unfold below it. A docstring is in the
order of use; what comes after the errors is for the second reading, and to unfold.
"""

import re
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_PROOF = """
````{{dropdown}} {tests}
:class-container: proof
{sources}
````
"""
_SOURCE = """
```{{literalinclude}} ../tests/{file}
:language: python
:pyobject: {test}
:caption: tests/{file}
```
"""


class Guarantee(SphinxDirective):
    """Its arguments are tests, ``test_file.py::test_name``; its content is the sentence."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        """The sentence, and the source of each test; a test that is not there is a warning."""
        tests = [test.split("::") for test in self.arguments[0].split()]
        sources = "".join(_SOURCE.format(file=file, test=test) for file, test in tests)
        names = [test.removeprefix("test_").replace("_", " ") for _, test in tests]
        title = ", ".join(dict.fromkeys(names))  # tests of one name may be in several files
        text = [*self.content, *_PROOF.format(tests=title, sources=sources).split("\n")]
        container = nodes.container(classes=["guarantee"])
        self.state.nested_parse(StringList(text, self.env.docname), self.content_offset, container)
        return [container]


# A field of a docstring as napoleon has written it, and what belongs to it.
_FIELD = re.compile(r":(param|type|returns?|rtype|raises|ivar|vartype)\b")
_UNFOLD = "Details, guarantees and sources"


def fold(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Folds what comes after arguments, result and errors."""
    fields = [i for i, line in enumerate(lines) if _FIELD.match(line)]
    if what not in ("class", "function", "exception") or not fields:
        return
    after = [i for i in range(fields[-1] + 1, len(lines)) if lines[i] and lines[i][0] != " "]
    if after:
        folded = [f"   {line}" if line else "" for line in lines[after[0] :]]
        lines[after[0] :] = [f".. dropdown:: {_UNFOLD}", "", *folded, ""]


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive, and what folds docstrings, with Sphinx."""
    app.add_directive("guarantee", Guarantee)
    # After napoleon, which has the priority 500, has made fields of the sections.
    app.connect("autodoc-process-docstring", fold, priority=700)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
