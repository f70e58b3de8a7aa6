"""Leaves of two records that are the same: arguments, gradients, and outputs of steps.

By their paths; under the new names of their modules; and layers beside the stack of a scan.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence

from clipgrad._compare.pairs import Pair
from clipgrad._compare.record import LAYERS, PART, Record
from clipgrad._compare.recording import Recording
from clipgrad._compare.renamed import same_leaves, stacked_leaves

RESULTS = "output", "gradient"
Names = Mapping[str, str] | None
ByPath = dict[str, int]  # the numbers of rows


def leaf_pairs(a: Record, b: Record, kind: str, names: Names = None) -> list[Pair]:
    """The leaves of a kind that are the same, in the order of time; they are not judged."""
    pairs = [Pair(kind, (i, ()), (j, ())) for i, j in same_rows(a, b, kind, names).items()]
    for side, stack, parts in _stacks(a, b, kind, names):
        if (a, b)[side].rows[stack].turned != LAYERS:
            continue
        for layer, part in enumerate(parts):
            alone, stacked = (part, ()), (stack, (layer,))
            pairs.append(Pair(kind, alone, stacked) if side else Pair(kind, stacked, alone))
    return sorted(pairs, key=lambda p: a.rows[p.a[0]].time())


def same_rows(a: Record, b: Record, kind: str, names: Names = None) -> dict[int, int]:
    """The row in ``b`` of each row of a kind in ``a``: in the same argument, of the same path.

    Or of the path that it has where modules are renamed by ``names``; there it may also have
    another name in its module.

    If each record has one argument, these are the same. If an argument behind the first has a
    single leaf in both records, these are the same, whatever their paths.
    """
    partners: dict[int, int] = {}
    for number, (ours, theirs) in enumerate(_by_argument(a, b, kind)):
        same = same_leaves([*ours], [*theirs], names)
        if number and len(ours) == len(theirs) == 1:
            same = {0: 0}
        rows = [*ours.values()], [*theirs.values()]
        known = {rows[0][i]: rows[1][j] for i, j in same.items()}
        partners |= known | (_same_in_modules(a, b, ours, theirs, known, names) if names else {})
    return partners


def _same_in_modules(
    a: Record, b: Record, ours: ByPath, theirs: ByPath, same: Mapping[int, int], names: Names
) -> dict[int, int]:
    """The partners of leaves that have another name in their module, such as kernel and weight.

    There each is the only one left of its size.
    """
    left = _by_size(a, ours, {*same}), _by_size(b, theirs, {*same.values()})
    numbers = [*left[0].values()], [*left[1].values()]
    of_modules = same_leaves([*left[0]], [*left[1]], names)
    return {numbers[0][i]: numbers[1][j] for i, j in of_modules.items()}


def _by_size(record: Record, by_path: ByPath, known: set[int]) -> ByPath:
    """The rows that are not known, by the path of their module and their size, if it is unique."""
    groups = collections.defaultdict(list)
    for path, i in by_path.items():
        if i not in known:
            groups["/".join([*path.split("/")[:-1], str(record.rows[i].size)])].append(i)
    return {path: group[0] for path, group in groups.items() if len(group) == 1}


def ends_of_leaves(record: Record) -> list[str]:
    """The paths of the leaves, from each of their segments on, by which `names=` may call them."""
    groups = _paths_by_argument(record, "gradient" if record.is_loss else "output").values()
    parts = [path.split("/") for by_path in groups for path in by_path if path]
    return list(dict.fromkeys("/".join(p[i:]) for p in parts for i in range(len(p))))


def have_leaves_in_common(a: Record, b: Record, names: Names = None) -> bool:
    """Whether two losses have a leaf of the first argument in common."""
    common = {*same_rows(a, b, "gradient", names)}
    for side, stack, parts in _stacks(a, b, "gradient", names):
        common |= {*parts} if side else {stack}
    first = next(a.rows[i].leaf[0] for i in a.of("gradient"))
    return any(a.rows[i].leaf[0] == first for i in common)


def mark_stacks(versions: Sequence[Record | Recording], names: Names) -> None:
    """Mark the rows that are stacks of layers of the other version: each layer has its numbers.

    Those of a file have their numbers, and stay as they are.
    """
    a, b = records = [x if isinstance(x, Record) else x.record for x in versions]
    for kind in RESULTS:
        for side, stack, parts in _stacks(a, b, kind, names):
            row, layers = records[side].rows[stack], [records[1 - side].rows[i] for i in parts]
            fit = all(row.shape == (len(layers), *layer.shape) for layer in layers)
            if fit and row.eps and isinstance(versions[side], Recording):
                row.turned, row.shape = LAYERS, row.shape[1:]


def _stacks(a: Record, b: Record, kind: str, names: Names) -> Iterator[tuple[int, int, list[int]]]:
    """Of what may be a stack the record, 0 or 1, its row, and the layers in the other record."""
    ours, theirs = dict(names or {}), {new: name for name, new in (names or {}).items()}
    for side, layers, stacked, renaming in ((1, a, b, ours), (0, b, a, theirs)):
        for alone, stacks in _by_argument(layers, stacked, kind) if names else ():
            rows = [*alone.values()], [*stacks.values()]
            for j, group in stacked_leaves([*alone], [*stacks], renaming).items():
                yield side, rows[1][j], [rows[0][i] for i in group]


def _by_argument(a: Record, b: Record, kind: str) -> Iterator[tuple[ByPath, ByPath]]:
    """The rows of a kind in both records by their paths, for each argument of the first one."""
    rows = [_paths_by_argument(record, kind) for record in (a, b)]
    if all(len(by_argument) == 1 for by_argument in rows):
        rows[1] = dict(zip(rows[0], rows[1].values(), strict=True))
    yield from ((paths, rows[1].get(argument, {})) for argument, paths in rows[0].items())


def _paths_by_argument(record: Record, kind: str) -> dict[str, ByPath]:
    numbers: dict[str, ByPath] = collections.defaultdict(dict)
    for i in record.of(kind):
        row = record.rows[i]
        if row.view == PART:
            continue
        argument, path = row.leaf if row.leaf[0] else ("", row.name)
        numbers[argument][path if path not in numbers[argument] else row.name] = i
    return numbers
