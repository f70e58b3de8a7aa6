"""What each page is found by: a description for search engines, words for the site's own search.

A word is an entry of the index, which the search of the site ranks above all text. The pages
themselves have none of it, since they are read in the repository too.
"""

import json
import pathlib

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

# `clipgrad help` reads the same file, which is in the wheel.
FOUND_BY = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


class AddKeywords(SphinxTransform):
    """Puts the words of this page into its head and into the index."""

    default_priority = 6

    def apply(self) -> None:
        """Adds to this document."""
        page = FOUND_BY.get(self.env.docname, {})
        if "words" not in page:
            return
        keywords = page["words"]
        section = next(self.document.findall(nodes.section))
        entries = [("single", word, section["ids"][0], "main", None) for word in keywords]
        section.insert(1, addnodes.index(entries=entries))
        for name, content in (
            ("description", page["description"]),
            ("keywords", ", ".join(keywords)),
        ):
            self.document.insert(0, nodes.meta("", name=name, content=content))


def warn_of_unknown_pages(app: Sphinx, env: BuildEnvironment) -> None:
    """A page that is not there can't be found."""
    for page in sorted(set(FOUND_BY) - env.found_docs):
        logging.getLogger(__name__).warning("keywords.json names %s, which is no page", page)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers this with Sphinx."""
    app.add_transform(AddKeywords)
    app.connect("env-check-consistency", warn_of_unknown_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
