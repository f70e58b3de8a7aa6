"""Selections of leaves: `where`, patterns, and what is said if they are empty."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import numpy as np

from clipgrad._arrays.overwritten import are_overwritten
from clipgrad._arrays.patterns import (
    Pattern,
    Patterns,
    advice,
    are_patterns,
    check_pattern,
    decided,
    pattern_text,
    selects,
    without_sign,
)
from clipgrad._arrays.trees import check_tree, is_clippable, is_none, parts_below, with_paths


class _Dataclass(Protocol):
    """A tree of booleans in the form of a model, such as an Equinox module."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


# A tree of booleans: a prefix of the tree whose leaves it selects.
Mask = bool | Mapping[Any, Any] | Sequence[Any] | _Dataclass
Where = Patterns | Mask | Callable[[Any], Any] | None


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


def leaves_selected(
    patterns: Patterns, leaves: Sequence[Sequence[str]], labels: Sequence[str], name: str
) -> list[bool]:
    """For each leaf, which may have a path in several spellings, whether patterns select it.

    ``labels`` are the leaves as an error lists them.

    Raises:
      TypeError: for what is no pattern; ``name`` is the argument's.
      ValueError: for the text of a regular expression, or a pattern that matches no leaf.
    """
    each = [patterns] if isinstance(patterns, Pattern) else patterns

    def flags_of(pattern: Pattern) -> list[bool]:
        check_pattern(pattern, name)
        selector = without_sign(pattern)
        flags = [any(selects(selector, path) for path in paths) for paths in leaves]
        if leaves and not any(flags):
            raise no_match(pattern, labels, name)
        return flags

    return decided(each, flags_of, len(leaves))


def no_match(pattern: Pattern, there: Sequence[str], name: str) -> ValueError:
    """The error for a pattern that selects no leaf."""
    return ValueError(
        f"{name}: got {pattern!r}, expected one that selects a leaf; "
        f"{nearest(pattern_text(pattern), there)}{advice(pattern)}"
    )


def selected(where: Where, tree: Any, name: str = "where") -> list[bool]:
    """For each leaf of ``tree`` (``None`` included) whether ``where`` selects it.

    ``where`` is ``None`` (all), a tree of booleans that is a prefix of ``tree``, a function from
    ``tree`` to one, or patterns of paths, see `clipgrad._arrays.patterns`; ``name`` is the
    argument's. What a gradient overwrites is not selected by anything.
    """
    check_tree("tree", tree)
    trained = [not flag for flag in are_overwritten(tree)]
    if where is None:
        return trained
    entries = with_paths(tree)
    if are_patterns(where):
        paths = [path for path, _ in entries]
        flags = leaves_selected(where, [(path, unboxed(path)) for path in paths], paths, name)
    else:
        flags = _flags(_mask_of(where, tree, name) if callable(where) else where, tree, name)
    flags = [flag and train for flag, train in zip(flags, trained, strict=True)]
    triples = zip(flags, trained, entries, strict=True)
    candidates = {path: f for f, train, (path, leaf) in triples if train and is_clippable(leaf)}
    if candidates and not any(candidates.values()):
        if isinstance(where, Pattern):
            raise no_match(where, list(candidates), name)
        got = repr(where) if are_patterns(where) else "a mask"
        raise ValueError(
            f"{name}: got {got}, expected one that selects a leaf; {nearest('', candidates)}"
        )
    return flags


_FOR_EACH_PATH = (
    '; a function gets the whole tree and returns a mask; for each path write a pattern, "head" or '
    '"!head", or lambda tree: jax.tree_util.tree_map_with_path(lambda path, leaf: ..., tree)'
)


def _mask_of(function: Callable[[Any], Any], tree: Any, name: str) -> Any:
    """The mask that a function of the tree returns; `TypeError` for a function of paths."""
    try:
        mask = function(tree)
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{name}: got {type(error).__name__} from the function: {error}{_FOR_EACH_PATH}"
        ) from error
    if isinstance(mask, bool | np.bool_) and not jax.tree_util.all_leaves([tree]):
        raise TypeError(
            f"{name}: got {mask} from the function, expected a mask with True or False for each "
            f"leaf or subtree{_FOR_EACH_PATH}"
        )
    return mask


def _flags(mask: Any, tree: Any, name: str) -> list[bool]:
    each, prefix = jax.tree.flatten(mask, is_leaf=is_none)
    for flag in each:
        if flag is not None and not isinstance(flag, (bool, np.bool_)):
            raise TypeError(
                f"{name}: got {flag!r} of type {type(flag).__name__} in the mask, expected True or "
                'False for each leaf or subtree; or write patterns such as "head" or ("head", "w")'
            )
    parts = parts_below(name, "a mask", prefix, tree)
    if any(flag is None and jax.tree.leaves(part) for flag, part in zip(each, parts, strict=True)):
        raise ValueError(
            f"{name}: got None in the mask where the tree has leaves, expected True or False"
        )
    sizes = [len(jax.tree.leaves(part, is_leaf=is_none)) for part in parts]
    return [bool(flag) for flag, size in zip(each, sizes, strict=True) for _ in range(size)]
