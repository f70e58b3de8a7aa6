"""Pieces of leaves that two versions hold in other leaves, found by their numbers.

``qkv`` of one version may be made of ``wq``, ``wk`` and ``wv`` of the other, along any axis and in
any order, a stack of its layers, or a leaf may have another name. Then the lines of one leaf along
an axis, such as the columns of a kernel, are lines of the other: the longest lines that both have
tell which elements are the same. What is equal in many places, such as biases of zeros, has the
places of another leaf's lines, or is a slice; of several, gradients tell which.
"""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

# Numbers that are whole-number multiples of 2**29 in 64 bits, as of float32, are mixed first.
_MIX, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)
MOST_SLICES = 64  # of a leaf along an axis
MOST_SINGLE = 2**22  # the elements of leaves that are looked for one by one


class Lines(NamedTuple):
    """Lines of a leaf along an axis.

    Attributes:
      leaf: the number of the leaf.
      numbers: those of the lines, shape (k,).
      of_leaf: how many lines the leaf has.
      elements: the positions of their elements in the flat leaf, shape (length, k).
    """

    leaf: int
    numbers: np.ndarray
    of_leaf: int
    elements: np.ndarray


class Piece(NamedTuple):
    """Elements of a leaf of each version that are the same, in the same order.

    Attributes:
      leaves: the numbers of both leaves.
      elements: their positions in each flat leaf.
      lines: the lines of each leaf that they are.
    """

    leaves: tuple[int, int]
    elements: tuple[np.ndarray, np.ndarray]
    lines: tuple[Lines, Lines] | None = None


class Leaf(NamedTuple):
    """A parameter and its gradient, in float64."""

    values: np.ndarray
    gradient: np.ndarray

    @property
    def bits(self) -> np.ndarray:
        """The parameter's numbers as integers; zeros have no sign."""
        return np.ascontiguousarray(self.values + 0.0).view(np.uint64).reshape(self.values.shape)


Leaves = Mapping[int, Leaf]


def common_pieces(a: Leaves, b: Leaves) -> list[Piece]:
    """The pieces of leaves in two versions, so that at least one leaf of each piece is in pieces.

    Args:
      a: the leaves of the first version that have no partner, by numbers of rows.
      b: those of the second.
    """
    search = _Search(a, b)
    leaves = (*a.values(), *b.values())
    lengths = {n for leaf in leaves for n in leaf.values.shape if n > 1}
    for with_ends in (False, True):
        for length in sorted(lengths, reverse=True):
            search.accept(_with_equal_lines(search, length, with_ends))
            search.accept(list(_between_equal_lines(search, length)))
    search.accept(_with_equal_lines(search, 1))
    search.accept(list(_equal_elsewhere(search)))
    return search.whole_pieces()


class _Search:
    """The pieces that were found, and which elements of each leaf are in none yet."""

    def __init__(self, a: Leaves, b: Leaves) -> None:
        self.sides = a, b
        self.free = [{i: np.ones(x.values.size, bool) for i, x in side.items()} for side in (a, b)]
        self.pieces: list[Piece] = []

    def left(self, side: int) -> list[int]:
        """The leaves of a side of which an element is in no piece."""
        return [i for i, free in self.free[side].items() if free.any()]

    def accept(self, pieces: Sequence[Piece]) -> None:
        """Add the pieces whose elements are in none: large ones first, then of near gradients."""
        order = lambda piece: (-piece.elements[0].size, self._distance(piece))  # noqa: E731
        for piece in sorted(pieces, key=order):
            free = [self.free[side][piece.leaves[side]] for side in range(2)]
            if all(free[side][piece.elements[side]].all() for side in range(2)):
                self.pieces.append(piece)
                for side in range(2):
                    free[side][piece.elements[side]] = False

    def whole_pieces(self) -> list[Piece]:
        """The pieces that are not equal by chance: of leaves that are all in pieces."""
        left = [{*self.left(side)} for side in range(2)]
        return [p for p in self.pieces if any(p.leaves[s] not in left[s] for s in range(2))]

    def _distance(self, piece: Piece) -> float:
        x, y = (
            np.ravel(self.sides[side][piece.leaves[side]].gradient)[piece.elements[side]]
            for side in range(2)
        )
        size = max(float(np.linalg.norm(x)), float(np.linalg.norm(y)))
        return float(np.linalg.norm(x - y)) / size if size else 0.0


def _with_equal_lines(search: _Search, length: int, with_ends: bool = False) -> list[Piece]:
    """The pieces of equal lines of a length, of which each leaf has one alone.

    With the ends of longer lines, too: those of a weight of an input and of a state have both.
    """
    ours, theirs = (
        [
            lines
            for i in search.left(side)
            for lines in _lines(search.sides[side][i], i, length, with_ends)
        ]
        for side in range(2)
    )
    if not (ours and theirs):
        return []
    hashes = np.concatenate([h for h, _ in theirs])
    owner = np.repeat(np.arange(len(theirs)), [len(h) for h, _ in theirs])
    line = np.concatenate([lines.numbers for _, lines in theirs])
    order = np.argsort(hashes, kind="stable")
    hashes, owner, line = hashes[order], owner[order], line[order]
    return [
        piece
        for known, lines in ours
        for j, at, to in _matches(known, lines.numbers, hashes, owner, line)
        if (piece := _piece(search, lines, at, theirs[j][1], to))
    ]


def _between_equal_lines(search: _Search, length: int) -> Iterator[Piece]:
    """The pieces of lines that are equal to others, as of zeros, beside lines that are not.

    They are as far from the nearest line of a piece, in both leaves.
    """
    for _, _, lines in search.pieces:
        if not lines or len(lines[0].elements) != length:
            continue
        ours, theirs = lines
        order = np.argsort(ours.numbers)
        known, partners = ours.numbers[order], theirs.numbers[order]
        every = np.setdiff1d(np.arange(ours.of_leaf), known)
        middles = (known[1:] + known[:-1]) / 2
        nearest = np.searchsorted(middles, every)
        to = partners[nearest] + every - known[nearest]
        inside = (to >= 0) & (to < theirs.of_leaf)
        at, to = every[inside], to[inside]
        bits = [
            search.sides[side][each.leaf].bits.ravel()[each.elements[:, k]]
            for side, (each, k) in enumerate(zip(lines, (at, to), strict=True))
        ]
        same = np.all(bits[0] == bits[1], axis=0)
        if piece := _piece(search, ours, at[same], theirs, to[same]):
            yield piece


def _matches(
    known: np.ndarray, numbers: np.ndarray, hashes: np.ndarray, owner: np.ndarray, line: np.ndarray
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """For each owner of equal lines the numbers of the lines, here and there."""
    first, last = (np.searchsorted(hashes, known, side) for side in ("left", "right"))
    counts = last - first
    at = np.repeat(numbers, counts)
    starts = np.repeat(first - np.cumsum(counts) + counts, counts)
    to = starts + np.arange(len(at))
    for j in np.unique(owner[to]):
        chosen = owner[to] == j
        yield int(j), at[chosen], line[to[chosen]]


def _lines(
    leaf: Leaf, number: int, length: int, with_ends: bool
) -> Iterator[tuple[np.ndarray, Lines]]:
    """The hashes and the lines of a leaf of a length that are in it once, along each axis.

    Without lines of one number.
    """
    bits, positions = leaf.bits, np.arange(leaf.values.size).reshape(leaf.values.shape)
    for axis, start in _starts(leaf.values.shape, length, with_ends):
        flat, place = (
            np.moveaxis(x, axis, 0)[start : start + length].reshape(length, -1)
            if length > 1
            else x.reshape(1, -1)
            for x in (bits, positions)
        )
        hashes = _hashes(flat)
        _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
        alone = np.sort(first[counts == 1])
        if length > 1:  # zeros and ones are equal to others by chance
            alone = alone[np.any(flat[:, alone] != flat[0, alone], axis=0)]
        yield hashes[alone], Lines(number, alone, flat.shape[1], place)


def _starts(shape: Sequence[int], length: int, with_ends: bool) -> Iterator[tuple[int, int]]:
    """The axes of an array along which there are lines of a length, and where these start."""
    if length == 1:
        yield from [(0, 0)][: math.prod(shape) <= MOST_SINGLE]
        return
    for axis, n in enumerate(shape):
        if n == length:
            yield axis, 0
        elif with_ends and n > length:
            yield from ((axis, start) for start in {0, n - length})


def _hashes(bits: np.ndarray) -> np.ndarray:
    """A number of 64 bits for each column."""
    mixed = (bits ^ bits >> _SHIFT) * _MIX
    mixed = (mixed ^ mixed >> _SHIFT) * _MIX
    turns = (np.arange(1, len(bits) + 1, dtype=np.uint64) * _MIX) | np.uint64(1)
    odd = (turns ^ turns >> _SHIFT) | np.uint64(1)
    return np.asarray(np.sum(mixed * odd[:, None], 0, dtype=np.uint64))


def _piece(
    search: _Search, lines: Lines, at: np.ndarray, others: Lines, to: np.ndarray
) -> Piece | None:
    """The piece of some lines of each leaf, where their elements are in no piece."""
    ours, theirs = lines.elements[:, at], others.elements[:, to]
    free = search.free[0][lines.leaf][ours] & search.free[1][others.leaf][theirs]
    kept = free.all(0)
    if not kept.any():
        return None
    both = ours[:, kept].ravel(), theirs[:, kept].ravel()
    of = lines._replace(numbers=at[kept]), others._replace(numbers=to[kept])
    return _equal_piece(search, lines.leaf, others.leaf, *both, of)


def _equal_piece(
    search: _Search,
    i: int,
    j: int,
    ours: np.ndarray,
    theirs: np.ndarray,
    lines: tuple[Lines, Lines] | None = None,
) -> Piece | None:
    """The piece of these elements, if they are equal in both leaves."""
    bits = search.sides[0][i].bits.ravel()[ours], search.sides[1][j].bits.ravel()[theirs]
    return Piece((i, j), (ours, theirs), lines) if np.array_equal(*bits) else None


def _equal_elsewhere(search: _Search) -> Iterator[Piece]:
    """The pieces that the left leaves may have, whose numbers are in many places."""
    places = [p.lines for p in search.pieces if p.lines and len(p.lines[0].elements) > 1]
    by_counts: dict[tuple[int, int], list] = collections.defaultdict(list)
    for lines, others in places:
        by_counts[lines.of_leaf, others.of_leaf].append((lines.numbers, others.numbers))
    for i in search.left(0):
        for j in search.left(1):
            x, y = search.sides[0][i].values, search.sides[1][j].values
            options = [*by_counts[x.size, y.size], *_slices(x.shape, y.shape)]
            options += [places[::-1] for places in _slices(y.shape, x.shape)]
            pieces = (_equal_piece(search, i, j, *elements) for elements in options)
            yield from (piece for piece in pieces if piece is not None)


def _slices(part: Sequence[int], whole: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The elements of a part, and those of a whole that has such parts along one axis.

    The part may lack this axis, as a layer beside a stack.
    """
    positions, size = np.arange(math.prod(whole)).reshape(whole), math.prod(part)
    shapes = {tuple(part)}
    if len(part) + 1 == len(whole):
        shapes = {(*part[:i], 1, *part[i:]) for i in range(len(whole))}
    for shape in shapes if len(part) <= len(whole) else ():
        axes = [i for i, (n, m) in enumerate(zip(shape, whole, strict=False)) if n != m]
        if len(shape) != len(whole) or len(axes) > 1:
            continue
        axis = axes[0] if axes else 0
        lengths = (shape[axis], whole[axis]) if whole else (1, 1)
        count = lengths[1] // max(1, lengths[0])
        fits = count * lengths[0] == lengths[1] and count <= MOST_SLICES
        for k in range(count if fits else 0):
            taken = range(k * lengths[0], (k + 1) * lengths[0])
            yield (
                np.arange(size),
                np.take(positions, taken, axis).ravel() if whole else np.zeros(1, int),
            )
