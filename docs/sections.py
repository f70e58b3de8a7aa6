"""The search of the site: the index of `clipgrad help`, with the anchors of the sections."""

import json
import pathlib
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from clipgrad._commands.help_search import as_json, whole_index


def _plain(heading: str) -> str:
    """A heading without its marks."""
    return re.sub(r"\W", "", re.sub(r"\]\([^)]*\)", "", heading)).lower()


def anchors(env: BuildEnvironment) -> dict[tuple[str, str], str]:
    """The anchor of each section, by its page and heading."""
    places = {
        (page, _plain(section[0].astext())): section["ids"][0]
        for page in env.found_docs
        for section in reversed(list(env.get_doctree(page).findall(nodes.section)))
    }
    sections = whole_index().sections
    return {
        (each.page, each.heading): places.get((each.page, _plain(each.heading)), "")
        for each in sections
    }


def write_index(app: Sphinx, failure: Exception | None) -> None:
    """Writes the index as a script, which a page can load from a disk too."""
    if failure is None and app.builder.format == "html":
        index = json.dumps(as_json(whole_index(), anchors(app.env)), separators=(",", ":"))
        path = pathlib.Path(app.outdir) / "_static" / "search_sections.js"
        path.write_text(f"const SEARCH_SECTIONS = {index};\n", encoding="utf-8")


def add_scripts(app: Sphinx, page: str, template: str, context: dict, doctree: Any) -> None:
    """Loads index and search on the page of the search alone."""
    if page == "search":
        for name in ("search_sections.js", "search.js"):
            app.add_js_file(name, loading_method="defer")


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers these with Sphinx."""
    app.connect("html-page-context", add_scripts)
    app.connect("build-finished", write_index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
