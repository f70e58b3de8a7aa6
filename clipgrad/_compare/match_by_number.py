"""Rows of equal numbers, in a record of another framework or of other trees."""

from collections.abc import Sequence

import numpy as np

from clipgrad._compare.equal_rows import (
    FLOORS,
    EqualRows,
    judged,
    numbers_at,
    sketches_in_orders,
)
from clipgrad._compare.judge import judge, judge_rows
from clipgrad._compare.matching import MOST_NAMES, Matching, alone
from clipgrad._compare.moved_leaves import NONE_MOVED, MovedLeaves
from clipgrad._compare.pairs import Pair, cotangent_pairs, in_time
from clipgrad._compare.record import ENTERS, PART, Graph, Record
from clipgrad._compare.result import ComparisonFinding
from clipgrad._compare.sketches import NORM_AT
from clipgrad._compare.slices import descends, made_from
from clipgrad._errors import first_few

MOST_SHOWN = 12


def match_by_number(
    a: Record, b: Record, rtol: float | None = None, moved: MovedLeaves = NONE_MOVED
) -> Matching:
    """Match and judge the rows of a loss in JAX and of one whose rows have other names.

    The first value without an equal is beside the value of the other that stands in its place.
    """
    leaves, values = _Arguments(a, b, moved), EqualRows(a, b, "value", rtol)
    (loss,), (other,) = a.of("output"), b.of("output")
    judgment = judge_rows(a.rows[loss], b.rows[other], (), (), rtol, floors=FLOORS)
    assert judgment is not None  # of two scalars
    output = Pair("output", (loss, ()), (other, ()), judgment)
    matched, gradients = _equal_pairs(values), leaves.gradients(rtol)
    differs = judgment.differs or any(p.judgment.differs for p in gradients)
    unequal = _first_unequal(values, matched) if differs else None
    pairs = in_time(a, [*matched, *([unequal] if unequal else [])])
    pairs += [output, *_equal_cotangents(values, matched), *gradients]
    explained = unequal or (output if judgment.differs else None)
    arguments = _other_arguments(explained, matched, leaves) if explained else []
    texts = _texts_alone(values, leaves)
    return Matching(pairs, leaves.alone(gradients), texts, arguments=tuple(arguments))


class _Arguments(EqualRows):
    """The arguments of a record, and for each those of another that are equal.

    Attributes:
      numbers: the number of each argument among them, by its row.
      names: what the records are called in messages.
    """

    def __init__(self, a: Record, b: Record, moved: MovedLeaves) -> None:
        super().__init__(a, b, "argument", None)
        self.names = ("JAX", b.framework) if a.framework != b.framework else ("fun", "other")
        self._permuted = [self.permuted(i) for i in range(len(self.instances))]
        self.numbers = {row: i for i, (row, _) in enumerate(self.instances)}
        equal = {self.others[j][0] for j in (*self.covered, *sum(self._permuted, []))}
        arguments = {row for row, _ in self.others}
        self._wholes: dict[int, set[int]] = {}  # of stacks, sums and parts of other arguments
        for source, target, *_ in b.edges:
            if target in arguments:
                self._wholes.setdefault(target, set()).add(source)
        self._covered = {whole for row in equal for whole in self._wholes.get(row, {row})}
        self._unequal = arguments - equal
        self._moved = [
            {r.rows[i].node for i in moved.covered[side]} for side, r in enumerate((a, b))
        ]

    def is_known(self, i: int) -> bool:
        """Whether an argument is equal to one, or has its numbers in another order."""
        return self.is_moved(i) or bool(self.equal[i] or self._permuted[i])

    def is_moved(self, i: int) -> bool:
        """Whether an argument is in other leaves of the second record, or a part that is."""
        return self.row(i).view == PART or self.instances[i][0] in self._moved[0]

    def gradients(self, rtol: float | None) -> list[Pair]:
        """Each gradient beside that of an equal parameter, in the same order of axes.

        Of several equal parameters, such as biases of zeros, it is the one with the nearest
        gradient. Where a parameter is permuted, the norms of the gradients are compared.
        """
        grads = {self.b.rows[j].node: j for j in self.b.of("gradient")}
        nearest = []
        for i in self.a.of("gradient"):
            at = self.numbers[self.a.rows[i].node]
            places = [(each.at, each.order) for each in self.equal[at]]
            places += [(j, None) for j in self._permuted[at]]
            of = ((grads.get(self.others[j][0]), order) for j, order in places)
            pairs = [self._gradient(i, j, order, rtol) for j, order in of if j is not None]
            key = lambda p: (p.judgment.differs, p.judgment.difference)  # noqa: E731
            nearest += [min(pairs, key=key)] if pairs else []
        return nearest

    def _gradient(self, i: int, j: int, order: int | None, rtol: float | None) -> Pair:
        row, other = self.a.rows[i], self.b.rows[j]
        known, sketches = numbers_at(row), sketches_in_orders(other)
        assert known is not None  # a gradient is one array
        if order is None:
            norm, other_norm = (x[NORM_AT : NORM_AT + 1] for x in (known[0], sketches[0]))
            moved = FLOORS * np.array([np.linalg.norm(known[1][:NORM_AT])])
            judgment = judge(norm, other_norm, moved, max(row.eps, other.eps), rtol)
        else:
            judgment = judged(row, known, other, sketches[order], rtol)
        return Pair("gradient", (i, ()), (j, ()), judgment, order)

    def alone(self, gradients: Sequence[Pair]) -> list[ComparisonFinding]:
        """The gradients that were not compared; of a buffer of torch there is none to compare."""
        compared, rows = {p.a[0] for p in gradients}, self.a.rows
        only = [
            (self.names[0], rows[i].label, rows[i].name)
            for i in self.a.of("gradient")
            if i not in compared and not self.is_known(self.numbers[rows[i].node])
        ]
        left, others = self.left_whole(), (self.b.rows[j] for j in self.b.of("gradient"))
        only += [(self.names[1], row.name, row.name) for row in others if row.node in left]
        return [
            alone("gradient", path, f"gradient {name}, only in {where}")
            for where, name, path in only
        ]

    def left_whole(self) -> list[int]:
        """The rows of the other record's whole arguments that none is equal to."""
        rows = [row for row, _ in self.others]
        known = {*self._wholes, *self._covered, *self._moved[1]}
        return [row for row in rows if row not in known and self.b.rows[row].view != PART]

    def text(self, i: int) -> str:
        """The text of an argument without an equal, if the other record has one as large."""
        label, size = self.row(i).label, self.row(i).size
        if self._permuted[i]:
            name = self.other(self._permuted[i][0]).name
            return f"{label} is not {name}, but has the same numbers in another order"
        left = [*self.left_whole(), *filter(self._is_left, self._wholes)]
        same = [self.b.rows[row].name for row in left if self.b.rows[row].size == size]
        return f"{label} is not {' or '.join(same[:2])}" if same else ""

    def _is_left(self, row: int) -> bool:
        """Whether an array is left: a stack, or a part of one that has equal parts."""
        wholes, is_stack = self._wholes[row], self.b.rows[row].turned == "stack"
        return row in self._unequal and (is_stack or len(wholes) == 1 and wholes <= self._covered)


def _equal_pairs(values: EqualRows) -> list[Pair]:
    partners = [(values.partner(i), at) for i, at in enumerate(values.instances)]
    return [
        Pair("value", at, values.others[equal.at], equal.judgment, equal.order)
        for equal, at in partners
        if equal is not None
    ]


def _equal_cotangents(values: EqualRows, matched: Sequence[Pair]) -> list[Pair]:
    """The cotangents of values that agree; of what enters it depends on what else uses it."""
    a, b = values.a, values.b
    leaving = [p for p in matched if ENTERS not in (a.rows[p.a[0]].view, b.rows[p.b[0]].view)]
    pairs = []
    for p in cotangent_pairs(a, b, leaving):
        row, other = a.rows[p.a[0]], b.rows[p.b[0]]
        known, sketches = numbers_at(row, p.a[1]), sketches_in_orders(other, p.b[1])
        if known and p.order is not None and p.order < len(sketches):
            judgment = judged(row, known, other, sketches[p.order], values.rtol)
            pairs.append(p._replace(judgment=judgment))
    return pairs


def _first_unequal(values: EqualRows, matched: Sequence[Pair]) -> Pair | None:
    """The first value without an equal from which the loss is computed, and no value that agrees.

    The other record must have a value as large without an equal. Where a value that agrees is
    computed from it, the versions do not differ there: the other framework has other modules.
    """
    graph, after = Graph(values.a), -1
    ends = {p.a for p in matched if p.judgment.difference <= p.judgment.tolerance / 2}
    (loss,) = values.a.of("output")
    for i, at in enumerate(values.instances):
        if equal := values.partner(i):
            after = equal.at
        elif values.row(i).view != ENTERS and (near := values.left(i, after)):
            if descends(graph, at, ends) or not descends(graph, at, {(loss, ())}):
                continue
            if near.judgment.differs:
                return Pair("value", at, values.others[near.at], near.judgment, near.order)
    return None


def _other_arguments(
    pair: Pair, agreeing: Sequence[Pair], leaves: _Arguments
) -> list[ComparisonFinding]:
    """The finding of arguments without an equal behind the first value that differs, at most one.

    An argument counts where the other record has an array as large without an equal.
    """
    (part,) = made_from(pair, agreeing, [Graph(leaves.a)], with_all=True)
    sources = dict.fromkeys(to[0] for _, _, to in part.steps)
    bad = [i for row in sources if (i := leaves.numbers.get(row)) is not None]
    bad = [i for i in bad if not leaves.equal[i] and not leaves.is_moved(i)]
    texts = {leaves.row(i).name: leaves.text(i) for i in bad if leaves.text(i)}
    if not texts:
        return []
    text = f"{len(texts)} of the arguments differ: {first_few([*texts.values()], MOST_NAMES)}"
    return [ComparisonFinding("argument", text, path=next(iter(texts)))]


def _texts_alone(values: EqualRows, leaves: _Arguments) -> list[str]:
    """Texts of the values and arrays that only one of the records has."""
    our_names = {values.row(i).name: None for i in range(len(values.instances))}
    their_names = {values.other(j).name: None for j in range(len(values.others))}
    equal = {values.row(i).name for i, partners in enumerate(values.equal) if partners}
    covered = {values.other(j).name for j in values.covered}
    notes = []
    ours, theirs = leaves.names
    for side, names, known in ((ours, our_names, equal), (theirs, their_names, covered)):
        if left := [name for name in names if name and name not in known]:
            notes.append(f"values only in {side}: {first_few(left, MOST_SHOWN)}")
    alone = [
        leaves.row(i)
        for i, equal in enumerate(leaves.equal)
        if not equal and not leaves.is_moved(i)
    ]
    others = [leaves.b.rows[row] for row in leaves.left_whole()]
    for side, rows in ((ours, alone), (theirs, others)):
        texts = [f"{row.label} {list(row.shape)}" for row in rows]
        notes += [f"arrays only in {side}: {', '.join(texts)}"] if texts else []
    return notes
