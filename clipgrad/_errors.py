"""Messages: texts of other errors, lists of names, pages, and warnings at the user's line."""

import inspect
import pathlib
import sys
import textwrap
import warnings
from collections.abc import Sequence

# With the kind of the error before it, a line of a terminal.
LINE = 90
PAGE = 100


def folded(text: str, indent: str = "") -> str:
    """A text in lines of a report, each with this indent; words with a hyphen stay whole."""
    return textwrap.fill(
        text, PAGE, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def first_few(names: Sequence[str], most: int) -> str:
    """The first of some names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


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

    If there is none, as in a thread that runs a function of this library, at the outermost line.
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
