"""Texts in messages: of other errors, and of lists of names."""

import textwrap
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
