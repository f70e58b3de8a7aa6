"""The pages of the documentation, which messages name and `clipgrad help` prints."""

import functools
import pathlib

_HERE = pathlib.Path(__file__).parent


@functools.cache
def docs_pages() -> dict[str, pathlib.Path]:
    """The files of the pages that have a title, by name.

    They are inside of an installed package, and beside it in a clone.
    """
    installed = _HERE / "_pages"
    folder = installed if installed.exists() else _HERE.parent / "docs"
    return {path.stem: path for path in sorted(folder.glob("*.md")) if _first_heading(path)}


def docs_title(name: str) -> str:
    """The title of a page, such as ``"nan"`` for ``docs/nan.md``."""
    return _first_heading(docs_pages()[name])


def docs_page(name: str) -> str:
    """The title of a page and the command that prints it, as messages name the page."""
    return f'"{docs_title(name)}": clipgrad help {name}'


def _first_heading(path: pathlib.Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# ") if first.startswith("# ") else ""
