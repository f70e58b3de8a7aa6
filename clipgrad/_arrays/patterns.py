"""The one language of patterns, for leaves of trees and for names inside of functions.

A path is segments joined by "/". In a pattern ``*`` stands for any text within a segment, and
``**`` for any number of segments, also for none.

  * A **name**, of a module or a tag, matches as a whole: ``"block_*/attn"``, ``"**/attn"``.
  * A **leaf** is selected if it is at or below a path that matches, and the pattern may begin at
    any segment: ``"head"`` means ``"**/head/**"``.
  * ``"!head"`` leaves out. Of several patterns the last that matches decides; if the first one
    leaves out, all others are in.
  * A compiled `re.Pattern` is searched in the path. A text that looks like one is refused.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

Pattern = str | re.Pattern
Patterns = Pattern | Sequence[Pattern]
_OF_EXPRESSIONS = frozenset("^$()[]{}+?\\|")
_LOOKAHEAD = re.compile(r"\^?\(\?!(?:\.\*|\^|/)*(?P<word>[\w/.*-]+?)(?:\.\*|\$|/)*\)(?:\.\*|\$)*")
_EXCLUSION = re.compile(r"(?:[~-]|(?:not|no|except|exclude|all but) )\s*(?P<word>.+)")
Chooser = TypeVar("Chooser")


def are_patterns(value: Any) -> TypeGuard[Patterns]:
    """Whether a value is a pattern, or a sequence of patterns, and no mask."""
    if isinstance(value, Pattern):
        return True
    return isinstance(value, tuple | list) and bool(value) and all(map(are_patterns, value))


def leaves_out(pattern: Any) -> bool:
    """Whether a pattern leaves out what it matches."""
    return isinstance(pattern, str) and pattern.startswith("!")


def without_sign(pattern: Pattern) -> Pattern:
    """A pattern without the ``!`` that says that it leaves out."""
    return pattern[1:] if isinstance(pattern, str) and pattern.startswith("!") else pattern


def is_pattern(text: Pattern) -> bool:
    """Whether a text stands for others than itself."""
    return not isinstance(text, str) or "*" in text or leaves_out(text)


def decided(
    patterns: Sequence[Chooser], flags_of: Callable[[Chooser], Sequence[bool]], count: int
) -> list[bool]:
    """For each of several things whether it is chosen: the last pattern that matches decides."""
    chosen = [bool(patterns) and leaves_out(patterns[0])] * count
    for pattern in patterns:
        is_in = not leaves_out(pattern)
        flags = flags_of(pattern)
        chosen = [is_in if flag else old for flag, old in zip(flags, chosen, strict=True)]
    return chosen


def matches(pattern: Pattern, name: str) -> bool:
    """Whether a pattern matches a name as a whole; of a `re.Pattern`, whether it is found."""
    if not isinstance(pattern, str):
        return bool(pattern.search(name))
    return _segments_match(tuple(pattern.split("/")), tuple(name.split("/")))


def selects(pattern: Pattern, path: str) -> bool:
    """Whether a pattern selects the leaf at a path."""
    if not isinstance(pattern, str):
        return bool(pattern.search(path))
    segments = (pattern.strip("/") or pattern).split("/")
    return _segments_match(("**", *segments, "**"), tuple(path.split("/")))


def prefix_of(pattern: str, name: str) -> re.Match | None:
    """The first segments of a name that a pattern matches, with the text of each of its stars."""
    parts = re.split(r"(\*\*|\*)", pattern)
    expression = "".join(
        "(.*)" if part == "**" else "([^/]*)" if part == "*" else re.escape(part) for part in parts
    )
    return re.match(f"{expression}(?=/|$)", name)


def check_pattern(pattern: Any, name: str) -> None:
    """Refuses what is no pattern; ``name`` is the argument's.

    Raises:
      TypeError: it is neither text nor a `re.Pattern`.
      ValueError: it is the text of a regular expression, or empty.
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"{name}: got {pattern!r:.60} of type {type(pattern).__name__}, expected a pattern "
            'such as "kernel", "blocks/*/kernel" or "!head", or a re.Pattern'
        )
    if isinstance(pattern, str) and _OF_EXPRESSIONS.intersection(pattern):
        raise ValueError(f"{name}: got {pattern!r}, {_instead_of(pattern)}")


def _instead_of(text: str) -> str:
    excluded = _LOOKAHEAD.fullmatch(text)
    instead = f'"!{excluded["word"]}" for all but {excluded["word"]}, or ' if excluded else ""
    return (
        "expected a pattern, in which * stands for any text within a segment, ** for any number of "
        f"segments, and ! leaves out; write {instead}re.compile({text!r})"
    )


def advice(pattern: Pattern) -> str:
    """A hint for a pattern that matches nothing; "" if none is known."""
    if not isinstance(pattern, str):
        return ""
    excluded = _EXCLUSION.fullmatch(pattern)
    if excluded is None:
        several = tuple(re.split(r"[,;]\s*|\s+", pattern.strip()))
        return f"; for several write {several}" if len(several) > 1 else ""
    word = excluded["word"]
    return f'; for all but {word} write "!{word}", or re.compile("^(?!.*{word})")'


def pattern_text(pattern: Pattern) -> str:
    """The text of a pattern."""
    return pattern if isinstance(pattern, str) else pattern.pattern


def _segments_match(pattern: tuple[str, ...], name: tuple[str, ...]) -> bool:
    if not pattern or not name:
        return not name and set(pattern) <= {"**"}
    first, *others = pattern
    if first == "**":
        return _segments_match(tuple(others), name) or _segments_match(pattern, name[1:])
    return bool(_within(first).fullmatch(name[0])) and _segments_match(tuple(others), name[1:])


@functools.lru_cache(maxsize=256)
def _within(segment: str) -> re.Pattern:
    return re.compile(".*".join(map(re.escape, re.split(r"\*+", segment))), re.DOTALL)
