"""The first place where a record differs from one of another framework, or of other trees."""

import dataclasses
import os
import re
from collections.abc import Sequence

import numpy as np

from clipgrad._compare.by_numbers import (
    FLOORS,
    Candidates,
    Equal,
    EqualValues,
    numbers_at,
    sketches_in_orders,
)
from clipgrad._compare.compare_records import result
from clipgrad._compare.findings import MOST_NAMES, Sides, first
from clipgrad._compare.judge import judge, judge_rows
from clipgrad._compare.match import Alone, Matching, Pair
from clipgrad._compare.record import ENTERS, TORCH, Graph, Record, Row
from clipgrad._compare.result import ComparisonFinding, GradientComparison
from clipgrad._compare.sketches import NORM_AT
from clipgrad._compare.slices import descends, made_from
from clipgrad._errors import first_few

MOST_SHOWN = 12


def compare_by_numbers(a: Record, b: Record, rtol: float | None) -> GradientComparison:
    """Compare a loss in JAX with one whose rows have other names."""
    leaves = _PortLeaves(a, b, rtol)
    values = EqualValues(a, b, rtol)
    (loss,), (its,) = a.of("output"), b.of("output")
    judgment = judge_rows(a.rows[loss], b.rows[its], (), (), rtol, floors=FLOORS)
    assert judgment is not None  # of two scalars
    output = Pair("output", (loss, ()), (its, ()), judgment)
    matched = _equal_pairs(values)
    gradients = leaves.gradients()
    differs = judgment.differs or any(p.judgment.differs for p in gradients)
    found = _first_unequal(values, matched) if differs else None
    bad = [found] if found else []
    pairs = sorted([*matched, *bad], key=lambda p: a.rows[p.own[0]].time(p.own[1]))
    pairs += [output, *_equal_cotangents(values, matched), *gradients]
    sides = Sides(a, b, Matching(pairs, leaves.alone(), _texts_alone(values, leaves)))
    findings = first(sides, with_arguments=False)
    if found:
        findings = _with_other(findings, found, values)
    if found or judgment.differs:
        findings = [*_other_arguments(found or output, matched, leaves), *findings]
    return result(sides, findings, with_arguments=False)


class _PortLeaves:
    """The arguments of a record, and for each those of another that are equal."""

    def __init__(self, a: Record, b: Record, rtol: float | None) -> None:
        self.a, self.b, self._rtol = a, b, rtol
        self._others = b.of("argument")
        rows = [b.rows[j] for j in self._others]
        candidates = Candidates(rows, [sketches_in_orders(row) for row in rows])
        self.equal: dict[int, list[Equal]] = {}
        self.permuted: dict[int, list[int]] = {}
        for i in a.of("argument"):
            self.equal[i], self.permuted[i] = [], []
            if known := numbers_at(a.rows[i], ()):
                self.equal[i] = candidates.equal(a.rows[i], *known, None)
                self.permuted[i] = [] if self.equal[i] else candidates.permuted(a.rows[i], known[0])
        found = {each.at for every in self.equal.values() for each in every}
        found |= {at for every in self.permuted.values() for at in every}
        self._names = names = [row.name for row in rows]
        self.covered = {name for at in found for name in _covers(rows[at].name, names)}
        self._unequal = [row for at, row in enumerate(rows) if at not in found]

    def gradients(self) -> list[Pair]:
        """Each gradient beside that of an equal parameter, in the same order of axes.

        Of several equal parameters, such as biases of zeros, it is the one with the nearest. Where
        a parameter is permuted, the norms of the gradients are compared.
        """
        grads = {self.b.rows[i].node: i for i in self.b.of("gradient")}
        found = []
        for i in self.a.of("gradient"):
            node = self.a.rows[i].node
            places = [(each.at, each.order) for each in self.equal[node]]
            places += [(at, None) for at in self.permuted[node]]
            of = ((grads.get(self._others[at]), order) for at, order in places)
            pairs = [self._gradient(i, j, order) for j, order in of if j is not None]
            key = lambda p: (p.judgment.differs, p.judgment.difference)  # noqa: E731
            found += [min(pairs, key=key)] if pairs else []
        return found

    def _gradient(self, i: int, j: int, order: int | None) -> Pair:
        row, its = self.a.rows[i], self.b.rows[j]
        known = numbers_at(row, ())
        assert known is not None  # a gradient is one array
        candidates = Candidates([its], [sketches_in_orders(its)])
        if order is None:
            own, other = (x[NORM_AT : NORM_AT + 1] for x in (known[0], candidates.sketches[0][0]))
            moved = FLOORS * np.array([np.linalg.norm(known[1][:NORM_AT])])
            judgment = judge(own, other, moved, max(row.eps, its.eps), self._rtol)
        else:
            judgment = candidates.judged(row, *known, 0, order, self._rtol)
        return Pair("gradient", (i, ()), (j, ()), judgment, order)

    def alone(self) -> list[Alone]:
        """The gradients that were not compared; of a buffer of torch there is none to compare."""
        compared = {p.own[0] for p in self.gradients()}
        found = []
        for i in self.a.of("gradient"):
            row = self.a.rows[i]
            is_known = self.equal[row.node] or self.permuted[row.node]
            if i not in compared and not is_known:
                found.append(Alone("gradient", row.name, f"gradient {row.label}, only in JAX"))
        where = "torch" if self.b.framework == TORCH else "other"
        for i in self.b.of("gradient"):
            name = self.b.rows[i].name
            if self._is_whole(name) and name not in self.covered:
                found.append(Alone("gradient", name, f"gradient {name}, only in {where}"))
        return found

    def left(self) -> list[Row]:
        """The whole arguments of the other record that none is equal to."""
        rows = [self.b.rows[j] for j in self._others]
        return [r for r in rows if self._is_whole(r.name) and r.name not in self.covered]

    def text(self, i: int) -> str:
        """The text of an argument without an equal, if the other record has one as large."""
        row = self.a.rows[i]
        if self.permuted[i]:
            its = self.b.rows[self._others[self.permuted[i][0]]]
            return f"{row.label} is not {its.name}, but has the same numbers in another order"
        left = [*self.left(), *(its for its in self._unequal if self._is_left(its.name))]
        same = [its.name for its in left if its.size == row.size]
        return f"{row.label} is not {' or '.join(same[:2])}" if same else ""

    def _is_left(self, name: str) -> bool:
        """Whether an array of parts is left: a part of one with equal parts, or a whole stack."""
        is_covered = self.covered.issuperset(_covers(name, self._names))
        is_part = re.fullmatch(r"[^*+]*\[[^*+]*", name) and not name.startswith("args[")
        return bool(is_part and is_covered or re.fullmatch(r"[^\[+]*\*[^\[+]*", name))

    def _is_whole(self, name: str) -> bool:
        return (
            self.b.framework != TORCH or name.startswith("args[") or not re.search(r"[*\[+]", name)
        )


def _covers(name: str, every: Sequence[str]) -> list[str]:
    """The names of the whole parameters that an array is, stacks, sums or is a part of."""
    if name.startswith("args["):
        return [name]
    module = name.split("+")[0].rpartition(".")[0]
    found = []
    for i, own in enumerate(name.split("[")[0].split("+")):
        whole = f"{module}.{own}" if i and module else own
        pattern = re.compile(re.escape(whole).replace(r"\*", r"\d+"))
        found += [other for other in every if pattern.fullmatch(other)]
    return found


def _equal_pairs(values: EqualValues) -> list[Pair]:
    found = []
    for i, own in enumerate(values.own):
        if (equal := values.partner(i)) is not None:
            other = values.instance(equal.at)
            found.append(Pair("value", own, other, equal.judgment, equal.order))
    return found


def _equal_cotangents(values: EqualValues, matched: Sequence[Pair]) -> list[Pair]:
    """The cotangents of values that agree; of what enters it depends on what else uses it."""
    a, b = values.a, values.b
    own, theirs = ({r.rows[i].node: i for i in r.of("cotangent")} for r in (a, b))
    found = []
    for p in matched:
        i, j = own.get(p.own[0]), theirs.get(p.other[0])
        views = a.rows[p.own[0]].view, b.rows[p.other[0]].view
        if i is None or j is None or ENTERS in views:
            continue
        known = numbers_at(a.rows[i], p.own[1])
        its = Candidates([b.rows[j]], [sketches_in_orders(b.rows[j], p.other[1])])
        if known and p.order is not None and p.order < len(its.sketches[0]):
            judgment = its.judged(a.rows[i], *known, 0, p.order, values.rtol)
            found.append(Pair("cotangent", (i, p.own[1]), (j, p.other[1]), judgment, p.order))
    return found


def _first_unequal(values: EqualValues, matched: Sequence[Pair]) -> Pair | None:
    """The first value without an equal that the loss, and no value that agrees, is computed from.

    The other record must have a value as large that is left. What agrees is computed from another
    value only if the other framework cuts its modules otherwise.
    """
    graph = Graph(values.a)
    ends = {p.own for p in matched if p.judgment.difference <= p.judgment.tolerance / 2}
    (loss,) = values.a.of("output")
    partners, after = {p.own: p for p in matched}, -1
    for i, own in enumerate(values.own):
        if own in partners:
            after = values.partner(i).at  # pyright: ignore[reportOptionalMemberAccess]
        elif (known := values.known[i]) and values.a.rows[own[0]].view != ENTERS:
            j = values.left(i, after)
            if j is None or descends(graph, own, ends) or not descends(graph, own, {(loss, ())}):
                continue
            near = values.candidates.nearest(values.a.rows[own[0]], *known, j)
            if near.judgment.differs:
                return Pair("value", own, values.instance(j), near.judgment, near.order)
    return None


def _with_other(
    findings: list[ComparisonFinding], pair: Pair, values: EqualValues
) -> list[ComparisonFinding]:
    """The findings, of which the value has its place in the other record."""
    at = next((i for i, f in enumerate(findings) if f.kind == "value"), None)
    if at is None:
        return findings
    row, its = values.a.rows[pair.own[0]], values.b.rows[pair.other[0]]
    finding, text = findings[at], findings[at].message
    if values.b.framework == TORCH:
        verb = "enters" if its.view == ENTERS else "leaves"
        text += f"; in torch it {verb} {its.name or 'the model'} ({its.owner}"
        text += f", {os.path.basename(its.line)})" if its.line else ")"
    if row.shape != its.shape:
        text += f", of shape {list(its.shape)} beside {list(row.shape)}"
    findings[at] = dataclasses.replace(finding, message=text)
    return findings


def _other_arguments(
    pair: Pair, agreeing: Sequence[Pair], leaves: _PortLeaves
) -> list[ComparisonFinding]:
    """The finding of arguments without an equal that the first value that differs is made from.

    Where the other record has an array as large that is left.
    """
    a = leaves.a
    (own,) = made_from(pair, agreeing, [Graph(a)], with_all=True)
    sources = dict.fromkeys(to[0] for _, _, to in own.steps)
    bad = [i for i in sources if a.rows[i].kind == "argument" and not leaves.equal[i]]
    texts = {a.rows[i].name: leaves.text(i) for i in bad if leaves.text(i)}
    if not texts:
        return []
    text = f"{len(texts)} of the arguments differ: {first_few([*texts.values()], MOST_NAMES)}"
    return [ComparisonFinding("argument", text, path=next(iter(texts)))]


def _texts_alone(values: EqualValues, leaves: _PortLeaves) -> list[str]:
    """Texts of the values and arrays that only one of the records has."""
    a, b = values.a, values.b
    where = "torch" if b.framework == TORCH else "other"
    equal = {
        a.rows[i].name for (i, _), found in zip(values.own, values.equal, strict=True) if found
    }
    covered = {values.candidates.rows[j].name for j in values.covered}
    names = "JAX", [a.rows[i].name for i, _ in values.own], equal
    others = where, [row.name for row in values.candidates.rows], covered
    found = []
    for side, every, known in (names, others):
        if alone := [name for name in dict.fromkeys(every) if name and name not in known]:
            found.append(f"values only in {side}: {first_few(alone, MOST_SHOWN)}")
    ours = [f"{a.rows[i].label} {list(a.rows[i].shape)}" for i, e in leaves.equal.items() if not e]
    theirs = [f"{row.name} {list(row.shape)}" for row in leaves.left()]
    for side, alone in (("JAX", ours), (where, theirs)):
        found += [f"arrays only in {side}: {', '.join(alone)}"] if alone else []
    return found
