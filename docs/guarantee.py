"""The directive ``guarantee``: a sentence, and the tests that hold it, to unfold below it."""

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


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive with Sphinx."""
    app.add_directive("guarantee", Guarantee)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
