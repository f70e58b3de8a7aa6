"""Messages: texts of other errors, lists of names, pages, and warnings at the user's line."""

import inspect
import json
import pathlib
import re
import sys
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

# With the kind of the error before it, a line of a terminal.
LINE = 90
PAGE = 100
LONG_CALL = 60  # seconds after which a call says what it took, and how it takes less
_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)  # in a page: what is for tests alone


def folded(text: str, indent: str = "") -> str:
    """A text in lines of a report, each with this indent; words with a hyphen stay whole."""
    return textwrap.fill(
        text, PAGE, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def note_of_time(what: str, seconds: float, advice: str) -> list[str]:
    """The note of a call that took long; none of another one."""
    return [f"the {what} took {seconds:.0f} s; {advice}"] if seconds > LONG_CALL else []


def first_few(names: Sequence[str], most: int) -> str:
    """The first of some names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text, shortened at a word."""
    kind, text = type(error).__name__, str(error).strip()
    lines = textwrap.wrap(
        text.partition("\n")[0], LINE, break_long_words=False, break_on_hyphens=False
    )
    return f"{kind}: {lines[0]}{' ...' * (len(lines) > 1)}" if lines else kind


# What stands between the user's line and a warning of this library: its own code, JAX, and what
# calls functions of the user or of this library for them.
_BETWEEN = sys.stdlib_module_names | {
    *("clipgrad", "jax", "jaxlib", "optax", "flax"),
    *("equinox", "haiku", "keras", "orbax"),
}  # fmt: skip


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line that is not of this library, JAX, optax or a framework.

    Without such a line, as in a thread that runs a clipgrad function, warns at the outermost line.
    """
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "<unknown>")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, category, frame.f_code.co_filename, frame.f_lineno, module, registry
    )


_HERE = pathlib.Path(__file__).parent


def docs_pages() -> dict[str, pathlib.Path]:
    """The files of the pages that have a title, by name: `nan`, `coming_from/paddle`."""
    pages = {}
    for folder, patterns in _folders().items():
        files = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
        pages |= {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}
    return {name: file for name, file in pages.items() if _first_heading(docs_text(file))}


def docs_found_by() -> dict[str, list[str]]:
    """The names and the users' words that a page is to be found by, besides its own."""
    return {
        page: entry.get("words", []) + entry.get("asked", [])
        for page, entry in _docs_json("keywords").items()
    }


def docs_sections_found_by() -> dict[tuple[str, str], list[str]]:
    """The users' words that a section is to be found by, by page and heading."""
    return {
        (page, heading): words
        for page, entry in _docs_json("keywords").items()
        for heading, words in entry.get("sections", {}).items()
    }


def docs_synonyms() -> list[str]:
    """Groups of words of the same meaning, each in one line."""
    return _docs_json("synonyms")


def _docs_json(name: str) -> Any:
    return json.loads((next(iter(_folders())) / f"{name}.json").read_text(encoding="utf-8"))


def _folders() -> dict[pathlib.Path, tuple[str, ...]]:
    """The folders of pages, the first with those that have no folder in their names.

    A wheel has one folder with all pages; in a clone, notebooks and results are in folders beside
    it.
    """
    installed = _HERE / "_pages"
    if installed.exists():
        return {installed: ("**/*.md", "notebooks/*.ipynb")}
    root = _HERE.parent
    return {root / "docs": ("**/*.md",), root: ("notebooks/*.ipynb", "benchmarks/RESULTS.md")}


def docs_text(path: pathlib.Path) -> str:
    """The text of a page without comments; of a notebook its cells, programs between fences."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        included = re.match(r"```\{include\} (\S+)\n(?::relative-docs:.*\n)?```", text)
        text = (path.parent / included[1]).read_text(encoding="utf-8") if included else text
        return _COMMENT.sub("", text)
    cells = [(c["cell_type"], "".join(c["source"]).strip()) for c in json.loads(text)["cells"]]
    return "\n\n".join(
        source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells
    )


def docs_title(name: str) -> str:
    """The title of a page, such as ``"nan"`` for ``docs/nan.md``."""
    return _first_heading(docs_text(next(iter(_folders())) / f"{name}.md"))


def docs_page(name: str) -> str:
    """The title of a page and the command that prints it, as messages name the page."""
    return f'"{docs_title(name)}": clipgrad help {name}'


def _first_heading(text: str) -> str:
    first = text.partition("\n")[0]
    return first.removeprefix("# ") if first.startswith("# ") else ""
