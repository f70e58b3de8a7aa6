"""The pages of the documentation, which messages name and `clipgrad help` prints."""

import pathlib

_HERE = pathlib.Path(__file__).parent


def docs_pages() -> dict[str, pathlib.Path]:
    """The files of the pages that have a title, by name."""
    return {path.stem: path for path in sorted(_folder().glob("*.md")) if _first_heading(path)}


def docs_title(name: str) -> str:
    """The title of a page, such as ``"nan"`` for ``docs/nan.md``."""
    return _first_heading(_folder() / f"{name}.md")


def docs_page(name: str) -> str:
    """The title of a page and the command that prints it, as messages name the page."""
    return f'"{docs_title(name)}": clipgrad help {name}'


def _folder() -> pathlib.Path:
    installed = _HERE / "_pages"  # in a clone the pages are beside the package
    return installed if installed.exists() else _HERE.parent / "docs"


def _first_heading(path: pathlib.Path) -> str:
    with path.open(encoding="utf-8") as page:
        first = page.readline().rstrip("\n")
    return first.removeprefix("# ") if first.startswith("# ") else ""
