"""Expressions that select leaves of trees and names of variables, and what is said if none is."""

import difflib
import re
from collections.abc import Iterable, Sequence


def selects(expression: str, paths: Sequence[str], name: str) -> list[bool]:
    """For each path, such as ``"layers/0/kernel"``, whether an expression selects it.

    This is the one language for leaves of trees, for ``where=``, ``measure=``, ``axis={...}``
    and for the checker's ``wrt=`` and ``no_grad=``: an expression that is whole segments of a path
    selects the leaves at or below it: ``"kernel"`` selects ``"layers/0/kernel"`` and not
    ``"layers/0/out_kernel"``. Any other is a regular expression that is searched in the paths, as
    ``"Dense"``, ``"^params/"`` or ``"kernel$"``. ``name`` is the argument's, for errors.
    """
    whole = [f"/{expression}/" in f"/{path}/" for path in paths]
    if any(whole):
        return whole
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise ValueError(
            f"{name}: got {expression!r}, expected a path or a regular expression: {error}"
        ) from None
    return [any(pattern.search(text) for text in (path, unboxed(path))) for path in paths]


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern, such as ``"model/block_*/attn"`` or ``"**/Dense_*"``, fits a name.

    This is the one language for names of variables inside of functions: ``*`` stands for any text
    within a segment, ``**`` for any number of segments, also for none.
    """
    return _segments_match(tuple(pattern.split("/")), tuple(name.split("/")))


def _segments_match(pattern: tuple[str, ...], name: tuple[str, ...]) -> bool:
    if not pattern or not name:
        return not name and set(pattern) <= {"**"}
    first, *rest = pattern
    if first == "**":
        return _segments_match(tuple(rest), name) or _segments_match(pattern, name[1:])
    within = ".*".join(map(re.escape, re.split(r"\*+", first)))
    return bool(re.fullmatch(within, name[0])) and _segments_match(tuple(rest), name[1:])


def unboxed(path: str) -> str:
    """The path without the ``/value`` at its end that flax variables have in some trees."""
    return path.removesuffix("/value")


def nearest(wanted: str, there: Iterable[str], most: int = 10) -> str:
    """The words most like the one that was wanted, as text for an error."""
    words = list(dict.fromkeys(word or "(the whole tree is one leaf)" for word in there))
    ranked = sorted(words, key=lambda w: -difflib.SequenceMatcher(None, wanted, w).ratio())
    if not words:
        return "there are none"
    return f"{'the nearest are' if len(words) > most else 'there are'} {ranked[:most]}"
