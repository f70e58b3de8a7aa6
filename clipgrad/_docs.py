"""Addresses of the pages of the documentation, which an installed package does not contain."""

import functools
import importlib.metadata


@functools.cache
def docs_page(name: str) -> str:
    """The address of a page of the documentation, such as ``"nan"`` for ``docs/nan.md``.

    ``[project.urls]`` of ``pyproject.toml`` is the one place for the addresses of the project, and
    the metadata of the installed package have them.
    """
    entries = importlib.metadata.metadata("clipgrad").get_all("Project-URL", [])
    urls = dict(entry.split(", ", 1) for entry in entries)
    page = f"docs/{name}.md"
    return f"{urls['Source']}/blob/main/{page}" if "Source" in urls else page
