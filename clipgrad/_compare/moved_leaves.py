"""Leaves of a loss whose numbers the other version holds in other leaves, as rows of both records.

A piece that two leaves have in common is a row of each version, and these rows are a pair: a leaf,
or the part of it that is in a leaf of the other version; see `common_pieces`.
"""

import collections
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from clipgrad._arrays import widened_leaf
from clipgrad._compare.common_pieces import Leaf, Piece, common_pieces
from clipgrad._compare.leaf_pairs import Names, leaf_pairs
from clipgrad._compare.pairs import Pair
from clipgrad._compare.record import Record
from clipgrad._compare.recording import Recording
from clipgrad._compare.row_numbers import host_array

Left = tuple[Collection[int], Collection[int]]  # rows of gradients in each record


class MovedLeaves(NamedTuple):
    """Rows of gradients that are the same, though their leaves are not.

    Attributes:
      rows: the rows of gradients in the first record and the second.
      covered: the gradients of each record all of whose elements are in these rows.
    """

    rows: list[tuple[int, int]]
    covered: tuple[set[int], set[int]]

    def with_pairs(self, a: Record, kind: str, pairs: list[Pair]) -> list[Pair]:
        """The pairs of leaves of a kind, and these, which replace those of other sizes."""
        if kind != "gradient" or not self.rows:
            return pairs
        kept = [p for p in pairs if p.a[0] not in self.covered[0] and p.b[0] not in self.covered[1]]
        moved = [Pair(kind, (i, ()), (j, ())) for i, j in self.rows]
        return sorted([*kept, *moved], key=lambda p: a.rows[p.a[0]].time())


NONE_MOVED = MovedLeaves([], (set(), set()))


def left_by_name(a: Record, b: Record, names: Names) -> Left:
    """The gradients of two records without a partner of their size."""
    pairs = leaf_pairs(a, b, "gradient", names)
    same = [p for p in pairs if a.rows[p.a[0]].size == b.rows[p.b[0]].size]
    known = [{p.at(side)[0] for p in same} for side in range(2)]
    return _without(a, known[0]), _without(b, known[1])


def _without(record: Record, known: Collection[int]) -> list[int]:
    return [i for i in record.of("gradient") if i not in known]


def left_by_number(a: Record, b: Record) -> Left:
    """The gradients of parameters of which one record has more than the other: by their sizes."""
    groups = [_by_sizes(record) for record in (a, b)]
    left: tuple[list[int], list[int]] = ([], [])
    for sizes in {*groups[0], *groups[1]}:
        both = [group.get(sizes, []) for group in groups]
        if len(both[0]) != len(both[1]):
            for side in range(2):
                left[side].extend(both[side])
    return left


def _by_sizes(record: Record) -> dict[tuple, list[int]]:
    groups = collections.defaultdict(list)
    for i in record.of("gradient"):
        x = host_array(record.rows[record.rows[i].node].numbers.whole)
        groups[x.size, float(np.max(np.abs(widened_leaf(x)), initial=0))].append(i)
    return groups


def moved_leaves(
    versions: Sequence[Recording], records: Sequence[Record], left: Left
) -> MovedLeaves:
    """The rows of leaves that both versions have in other leaves, which are added to records."""
    leaves = [
        {i: leaf for i in rows if (leaf := _leaf(record, i)) is not None}
        for record, rows in zip(records, left, strict=True)
    ]
    if not all(leaves):
        return NONE_MOVED
    rows, sizes = [], (collections.Counter(), collections.Counter())
    for piece in common_pieces(*leaves):
        rows.append(_rows_of(piece, versions, records))
        for side in range(2):
            sizes[side][piece.leaves[side]] += piece.elements[side].size
    covered = [
        {i for i, size in counts.items() if size == records[side].rows[i].size}
        for side, counts in enumerate(sizes)
    ]
    return MovedLeaves(rows, (covered[0], covered[1]))


def _leaf(record: Record, i: int) -> Leaf | None:
    """A parameter and its gradient; None where these are not known, or are no real numbers."""
    wholes = [record.rows[at].numbers.whole for at in (record.rows[i].node, i)]
    if any(x is None for x in wholes) or record.rows[i].turned:
        return None
    values, gradient = (widened_leaf(host_array(x)) for x in wholes)
    return None if np.iscomplexobj(values) else Leaf(values, gradient)


def _rows_of(
    piece: Piece, versions: Sequence[Recording], records: Sequence[Record]
) -> tuple[int, int]:
    """The rows of a piece in both records, in the order and the shape of a leaf that is whole."""
    rows = [record.rows[i] for record, i in zip(records, piece.leaves, strict=True)]
    first = next((side for side in range(2) if rows[side].size == piece.elements[side].size), None)
    order = np.argsort(piece.elements[first or 0])
    shape = (len(order),) if first is None else rows[first].shape
    numbers = []
    for side, (row, other) in enumerate((rows, rows[::-1])):
        elements = piece.elements[side][order]
        if side == first or (row.shape == shape and np.array_equal(elements, np.arange(row.size))):
            numbers.append(piece.leaves[side])
            continue
        words = f"{row.label}, where it is {other.label} in {('other', 'fun')[side]},"
        more = records[side], piece.leaves[side], elements, shape, words
        numbers.append(versions[side].add_part(*more))
    return numbers[0], numbers[1]
