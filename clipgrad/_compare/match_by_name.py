"""Rows that are the same in two records: by kind, name, shape, and order in time."""

import collections
import functools
from collections.abc import Mapping, Sequence

from clipgrad._compare.equal_rows import turned_gradients
from clipgrad._compare.judge import judge_rows
from clipgrad._compare.leaf_pairs import RESULTS, ends_of_leaves, leaf_pairs, same_rows
from clipgrad._compare.line_pairs import (
    check_lines,
    copied_lines,
    equal_lines,
    line_pairs,
    named_lines,
)
from clipgrad._compare.matching import MOST_NAMES, Matching, alone
from clipgrad._compare.moved_leaves import NONE_MOVED, MovedLeaves
from clipgrad._compare.pairs import Pair, cotangent_pairs, in_time, instances_of
from clipgrad._compare.record import ENTERS, Graph, Instance, Record
from clipgrad._compare.renamed import Renamed
from clipgrad._compare.result import ComparisonFinding
from clipgrad._compare.slices import next_of
from clipgrad._compare.starts import Starts

Group = tuple[str, str, tuple[int, ...]]


def check_names(a: Record, b: Record, names: Mapping[str, str] | None) -> None:
    """Raise `ValueError` for a name that fits nothing of ``a``, or leads to nothing in ``b``.

    Names are of values, and of leaves from some segment of their paths on.

    The records may be without numbers.
    """
    if names:
        ours, theirs = _renamed(names)
        there = [theirs(name) for name in [*_value_names(b), *ends_of_leaves(b)]]
        ours.check([*_value_names(a), *ends_of_leaves(a)], there)
        check_lines(a, b, names)


def have_values_in_common(a: Record, b: Record, names: Mapping[str, str]) -> bool:
    """Whether names lead from values of one record to those of another, or one has no names."""
    ours, theirs = _renamed(names)
    here, there = {ours(name) for name in _value_names(a)}, {theirs(x) for x in _value_names(b)}
    return bool(here & there) or not (here and there) or bool(named_lines(names))


def check_common(a: Record, b: Record) -> None:
    """Raise `ValueError` if two records have no output and no gradient in common."""
    if not any(same_rows(a, b, kind) for kind in RESULTS):
        ours, theirs = (
            [r.rows[i].name for kind in RESULTS for i in r.of(kind)][:MOST_NAMES] for r in (a, b)
        )
        raise ValueError(
            f"other: got outputs {theirs}, expected the outputs of fun, {ours}; return trees with "
            "the same paths, and write argnums=None for both or for none"
        )


def match_by_name(
    a: Record,
    b: Record,
    names: Mapping[str, str] | None = None,
    rtol: float | None = None,
    with_arguments: bool = False,
    moved: MovedLeaves = NONE_MOVED,
) -> Matching:
    """Match and judge the rows of two records; arguments if they should be equal.

    As many values of the second record as of the first are matched one by one, in the order of
    time: n calls of a module with n steps of a scan. Of other counts the last ones are, see
    `_without_others`. Lines are matched by their statements, and those left by their numbers.
    """
    values, last, unmatched = _named_values(a, b, names)
    have_lines = a.has_lines and b.has_lines
    values = in_time(a, [*values, *last, *(line_pairs(a, b, names) if have_lines else ())])
    pairs, findings = [*values, *cotangent_pairs(a, b, values)], []
    for kind in ("argument", *RESULTS)[not with_arguments :]:
        same = moved.with_pairs(a, kind, leaf_pairs(a, b, kind, names))
        pairs += same
        known = [{p.at(side)[0] for p in same} | moved.covered[side] for side in range(2)]
        only = [(i, a, "fun") for i in a.of(kind) if i not in known[0]]
        only += [(j, b, "other") for j in b.of(kind) if j not in known[1]]
        for i, record, where in only if kind != "argument" else ():
            name, path = record.rows[i].label, record.rows[i].name
            findings.append(alone(kind, path, f"{kind} {name}, only in {where}"))
    judged, others, texts = _judged(a, b, pairs, rtol)
    judged = _without_others(a, judged, last)
    if have_lines:
        judged = in_time(a, [*judged, *equal_lines(a, b, judged, rtol)])
    copies = copied_lines(a), copied_lines(b)
    return Matching(judged, [*findings, *others], [*unmatched, *texts], copies)


def _judged(
    a: Record, b: Record, pairs: list[Pair], rtol: float | None
) -> tuple[list[Pair], list[ComparisonFinding], list[str]]:
    """The judged pairs, findings of gradients of other shapes, texts of values without numbers."""
    judged, others, texts, starts = [], [], {}, Starts(a)
    for p in pairs:
        row, other = a.rows[p.a[0]], b.rows[p.b[0]]
        if p.kind == "gradient" and (turned := turned_gradients(a, b, p, rtol)):
            judged.append(turned)
            continue
        if p.kind == "gradient" and row.shape != other.shape:
            shapes = f"{list(row.shape)} in fun, {list(other.shape)} in other"
            text = f"gradient {row.label}, of another shape: {shapes}"
            others.append(alone(p.kind, row.name, text))
            continue
        judge = functools.partial(judge_rows, row, other, p.a[1], p.b[1], rtol)
        judgment = judge()
        if judgment is not None and p.kind == "output" and starts.may_matter(judgment, row):
            judgment = judge(start=starts.of(row))
        if judgment is not None:
            judged.append(p._replace(judgment=judgment))
        elif p.kind == "value":
            texts[f"{row.view} {row.name}: not the same on each device, in one version"] = None
    return judged, others, list(texts)


def _without_others(a: Record, judged: list[Pair], last: Sequence[Pair]) -> list[Pair]:
    """The judged pairs without those of last calls that compute something else in each version.

    A module may leave a scan as its last step, or contain a scan of its own: then its last value is
    the same. It is not if it differs, and of the values computed from it the next ones agree.
    """
    ends = {p.a: p.judgment for p in judged if p.kind in ("value", "output")}
    doubtful = {p.a for p in last if p.a in ends and ends[p.a].differs}
    if not doubtful:
        return judged
    graph, known = Graph(a), {*ends} - doubtful
    others = {
        at for at in doubtful if not any(ends[to].differs for to in next_of(graph, at, known))
    }
    return [p for p in judged if (a.rows[p.a[0]].node, p.a[1]) not in others]


def _named_values(
    a: Record, b: Record, names: Mapping[str, str] | None
) -> tuple[list[Pair], list[Pair], list[str]]:
    """The values of equal names: of equal counts, the last ones of other counts, and texts."""
    groups = [_groups(r, renamed) for r, renamed in zip((a, b), _renamed(names), strict=True)]
    are_losses = a.is_loss and b.is_loss
    pairs, last, unmatched = [], [], []
    for group, instances in groups[0].items():
        same = groups[1].get(group, [])
        if len(same) == len(instances):
            both = zip(instances, same, strict=True)
            pairs += [Pair("value", x, y) for x, y in both]
        elif group[0]:  # what a scan outside of modules carries has no name
            if same and are_losses and group[1] != ENTERS:
                last.append(Pair("value", instances[-1], same[-1]))
            unmatched.append(_unmatched(a, group, instances, same, "fun", "other"))
    for group, instances in groups[1].items():
        if group not in groups[0] and group[0]:
            unmatched.append(_unmatched(b, group, instances, [], "other", "fun"))
    return pairs, last, unmatched


def _renamed(names: Mapping[str, str] | None) -> tuple[Renamed, Renamed]:
    """The names under which the values of each version are matched."""
    of_lines = named_lines(names)
    ours = Renamed({name: other for name, other in (names or {}).items() if name not in of_lines})
    theirs = Renamed({})
    theirs.patterns = [y for x, y in ours.rules if "*" in y and "*" not in x]
    return ours, theirs


def _value_names(record: Record) -> list[str]:
    rows = (record.rows[i] for i in record.of("value"))
    return list(dict.fromkeys(row.name for row in rows if not row.is_line))


def _groups(record: Record, renamed: Renamed) -> dict[Group, list[Instance]]:
    groups: dict[Group, list[Instance]] = collections.defaultdict(list)
    name = functools.cache(renamed)
    for at in instances_of(record):
        row = record.rows[at[0]]
        if row.is_line:
            continue
        groups[name(row.name), row.view, row.shape].append(at)
    return groups


def _unmatched(
    record: Record, group: Group, instances: list, same: list, here: str, there: str
) -> str:
    (name, view, shape), row_name = group, record.rows[instances[0][0]].name
    what = f"{view} {row_name}" + (f" (as {name})" if name != row_name else "")
    return f"{what} {list(shape)}: {len(instances)} in {here}, {len(same)} in {there}"
