"""Selections of leaves and of names: `where`, expressions, and what is said if they are empty."""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from clipgrad._arrays.overwritten import are_overwritten
from clipgrad._arrays.trees import check_tree, is_clippable, is_none, parts_below, with_paths

Where = Any | Callable[[Any], Any] | str | None


def selects(expression: str, paths: Sequence[str], name: str) -> list[bool]:
    """For each path, such as ``"layers/0/kernel"``, whether an expression selects it.

    This is the one language for leaves of trees. An expression that is whole segments of a path
    selects the leaves at or below it: ``"kernel"`` selects ``"layers/0/kernel"`` and not
    ``"layers/0/out_kernel"``. Any other is a regular expression that is searched in the paths, as
    ``"^params/"`` or ``"kernel$"``. ``name`` is the argument's, for errors.
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


def all_but(word: str) -> str:
    """The expression that selects the leaves whose paths do not have a text in them."""
    return f"^(?!.*{word})"


_EXCLUSION = re.compile(r"(?:[!~-]|(?:not|no|except|exclude|all but) )\s*(.+)")


def _how_to_exclude(expression: Any) -> str:
    """A hint for what somebody writes to leave leaves out, or a function of paths, not the tree."""
    if isinstance(expression, str) and (found := _EXCLUSION.fullmatch(expression)):
        return f'; for all but {found[1]} write "{all_but(found[1])}"'
    if callable(expression):
        return (
            "; a function gets the whole tree and returns a mask; by paths write an expression: "
            f'"kernel", or "{all_but("head")}" for all but head'
        )
    return ""


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


def selected(where: Where, tree: Any, name: str = "where") -> list[bool]:
    """For each leaf of ``tree`` (``None`` included) whether ``where`` selects it.

    ``where`` is ``None`` (all), a tree of booleans that is a prefix of ``tree``, a function from
    ``tree`` to one, or an expression on paths, see `selects`; ``name`` is the argument's.
    What a gradient overwrites is not selected by anything.
    """
    check_tree("tree", tree)
    trained = [not flag for flag in are_overwritten(tree)]
    if where is None:
        return trained
    entries = with_paths(tree)
    if isinstance(where, str):
        flags = selects(where, [path for path, _ in entries], name)
    else:
        flags = _flags(_mask_of(where, tree, name) if callable(where) else where, tree, name)
    flags = [flag and train for flag, train in zip(flags, trained, strict=True)]
    triples = zip(flags, trained, entries, strict=True)
    candidates = {path: f for f, train, (path, leaf) in triples if train and is_clippable(leaf)}
    if candidates and not any(candidates.values()):
        shown, wanted = (repr(where), where) if isinstance(where, str) else ("a mask", "")
        raise ValueError(
            f"{name}: got {shown}, expected one that selects a leaf; {nearest(wanted, candidates)}"
            f"{_how_to_exclude(where)}"
        )
    return flags


def _mask_of(function: Callable[[Any], Any], tree: Any, name: str) -> Any:
    """The mask that a function of the tree returns; `TypeError` for a function of paths."""
    try:
        mask = function(tree)
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{name}: got {type(error).__name__} from the function: {error}"
            f"{_how_to_exclude(function)}"
        ) from error
    if isinstance(mask, bool | np.bool_) and mask and not jax.tree_util.all_leaves([tree]):
        raise TypeError(
            f"{name}: got True from the function, expected a mask with True or False for each leaf"
            f"{_how_to_exclude(function)}"
        )
    return mask


def _flags(mask: Any, tree: Any, name: str) -> list[bool]:
    each, prefix = jax.tree.flatten(mask, is_leaf=is_none)
    for flag in each:
        if flag is not None and not isinstance(flag, (bool, np.bool_)):
            raise TypeError(
                f"{name}: got {flag!r} of type {type(flag).__name__} in the mask, expected True or "
                "False for each leaf or subtree"
            )
    parts = parts_below(name, "a mask", prefix, tree)
    if any(flag is None and jax.tree.leaves(part) for flag, part in zip(each, parts, strict=True)):
        raise ValueError(
            f"{name}: got None in the mask where the tree has leaves, expected True or False"
        )
    sizes = [len(jax.tree.leaves(part, is_leaf=is_none)) for part in parts]
    return [bool(flag) for flag, size in zip(each, sizes, strict=True) for _ in range(size)]
