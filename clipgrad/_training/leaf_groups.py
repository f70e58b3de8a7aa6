"""Leaves in groups: of a module, of a path, or of each layer of leaves that are stacked."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from clipgrad._arrays import (
    AxisName,
    Where,
    check_takes,
    group_norms,
    is_clippable,
    is_none,
    leaves_with_keys,
    path_string,
    selected,
)

By = Literal["module", "leaf"] | int | Callable[[str], str]


@dataclasses.dataclass(frozen=True)
class LeafGroups:
    """The groups of the leaves of a tree that are measured, in their order.

    Attributes:
      measured: for each leaf of the tree, ``None`` included, whether it is in a group.
      groups: for each leaf that is, the name of its group.
      layers: for each leaf that is, the length of its first axis if that is one of layers.
    """

    measured: tuple[bool, ...]
    groups: tuple[str, ...]
    layers: tuple[int | None, ...]

    @classmethod
    def of(cls, tree: Any, by: By, stacked: Where) -> "LeafGroups":
        """The groups of a tree of parameters; `ValueError` for one whose leaves don't fit."""
        entries = leaves_with_keys(tree, is_none)
        pairs = zip(selected(None, tree), entries, strict=True)
        measured = tuple(flag and is_clippable(leaf) for flag, (_, leaf) in pairs)
        flags = [False] * len(entries) if stacked is None else selected(stacked, tree, "stacked")
        rows = [
            (*entry, flag) for entry, flag, m in zip(entries, flags, measured, strict=True) if m
        ]
        paths = _path_texts([path for path, _, _ in rows])
        layers = tuple(_layers_of(p, x, flag) for p, (_, x, flag) in zip(paths, rows, strict=True))
        groups = tuple(_group_of(path, by) for path in paths)
        _check_layers(paths, groups, layers)
        return cls(measured, groups, layers)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of the norms of each group: none, or the number of layers."""
        pairs = zip(self.groups, self.layers, strict=True)
        return {group: () if n is None else (n,) for group, n in pairs}

    def norms(self, trees: Sequence[Sequence[jax.Array]], axis_name: AxisName) -> dict[str, Any]:
        """For each group its norms in each of some trees, whose measured leaves these are."""
        leaves = [leaf for tree in trees for leaf in tree]
        axes = [None if n is None else tuple(range(1, x.ndim)) for x, n in self._layered(trees)]
        each = len(self.groups)
        places = [
            [i + k * each for i, name in enumerate(self.groups) if name == group]
            for group in self.shapes
            for k in range(len(trees))
        ]
        every = group_norms(leaves, axes, places, axis_name)
        count = len(trees)
        return {name: every[i * count : (i + 1) * count] for i, name in enumerate(self.shapes)}

    def _layered(self, trees: Sequence[Sequence[jax.Array]]) -> list[tuple[jax.Array, int | None]]:
        return [pair for tree in trees for pair in zip(tree, self.layers, strict=True)]


def _path_texts(paths: Sequence[Any]) -> list[str]:
    """Paths as text, without the collection of flax around all."""
    shown = [path_string(path) for path in paths]
    inside = [path.removeprefix("params/") for path in shown]
    return inside if all(map(str.__ne__, shown, inside)) else shown


def _group_of(path: str, by: By) -> str:
    if by == "leaf":
        return path
    if by == "module":
        return path.rpartition("/")[0] or path
    if isinstance(by, int):
        return "/".join(path.split("/")[:by])
    name = by(path) if callable(by) else by
    if not isinstance(name, str):
        raise TypeError(f"by: got {name!r} from it for {path!r}, expected the name of a group")
    return name


def check_by(by: Any) -> None:
    """Raises `ValueError` for what does not make groups."""
    is_count = isinstance(by, int) and not isinstance(by, bool) and by > 0
    if by not in ("module", "leaf") and not is_count and not callable(by):
        raise ValueError(
            f'by: got {by!r}, expected "module", "leaf", a positive number of segments of a path, '
            "or a function from a path to the name of its group"
        )
    if callable(by):
        check_takes("by", by, "path")


def _layers_of(path: str, leaf: Any, is_stacked: bool) -> int | None:
    if not is_stacked:
        return None
    if not jnp.ndim(leaf):
        raise ValueError(
            f"stacked: got a leaf of shape () at {path!r}, expected a first axis of layers"
        )
    return jnp.shape(leaf)[0]


def _check_layers(paths: list[str], groups: Sequence[str], layers: Sequence[int | None]) -> None:
    """Raises `ValueError` for a group whose leaves don't have the same layers."""
    first: dict[str, int] = {}
    for i, group in enumerate(groups):
        j = first.setdefault(group, i)
        if layers[i] != layers[j]:
            shown = [
                f"{paths[k]!r} ({'not stacked' if layers[k] is None else f'{layers[k]} layers'})"
                for k in (j, i)
            ]
            raise ValueError(
                f"stacked: got the group {group!r} with {' and '.join(shown)}, expected the same "
                'layers in all leaves of a group; select all of them, or write by="leaf"'
            )
