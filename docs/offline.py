"""A page that loads something from a network is a warning: the site is read offline too."""

import pathlib
import re

from sphinx.application import Sphinx
from sphinx.util import logging

_LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"((?:https?:)?//[^\"]+)\"")


def warn_of_networks(app: Sphinx, failure: Exception | None) -> None:
    """Reads the pages that were built."""
    for page in sorted(pathlib.Path(app.outdir).rglob("*.html")):
        for address in _LOADED.findall(page.read_text()):
            logging.getLogger(__name__).warning("%s loads %s", page.name, address)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers this with Sphinx."""
    app.connect("build-finished", warn_of_networks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
