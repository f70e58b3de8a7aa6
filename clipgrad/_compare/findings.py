"""The first place where two records differ, as findings."""

import dataclasses
import functools
import math
from collections.abc import Sequence

from clipgrad._compare.judge import Judgment
from clipgrad._compare.line_findings import LinesAlone, lines_alone, lines_of_ends
from clipgrad._compare.match import Matching
from clipgrad._compare.pairs import Pair
from clipgrad._compare.ratios import factor_text, ratio
from clipgrad._compare.record import ENTERS, TEXT, Graph, Instance, Record, Row
from clipgrad._compare.result import ComparisonFinding
from clipgrad._compare.sketches import NUMBERS, scalar_of
from clipgrad._compare.slices import Slice, made_from, module_of, used_by
from clipgrad._errors import first_few
from clipgrad._names import Location

TELLING = 0.01  # sizes that are nearer say nothing of how two versions differ
MOST_NAMES = 5


@dataclasses.dataclass(frozen=True)
class Sides:
    """Two records, and how they were matched."""

    a: Record
    b: Record
    matching: Matching

    def of(self, kind: str) -> list[Pair]:
        return [p for p in self.matching.pairs if p.kind == kind]

    def rows(self, pair: Pair) -> tuple[Row, Row]:
        return self.a.rows[pair.own[0]], self.b.rows[pair.other[0]]

    def graphs(self, pair: Pair) -> list[Graph]:
        """The graphs that say what is behind a pair: if its names differ, that of the first."""
        row, its = self.rows(pair)
        return self.both if row.name == its.name else self.both[:1]

    @functools.cached_property
    def both(self) -> list[Graph]:
        return [Graph(self.a), Graph(self.b)]

    @property
    def has_lines(self) -> bool:
        """Whether the values of lines are in both records."""
        return self.a.has_lines and self.b.has_lines

    @property
    def agreeing(self) -> list[Pair]:
        """The values that agree."""
        return [p for p in self.of("value") if p.judgment.agrees]

    def module_behind(self, pair: Pair) -> str | None:
        """The common module of the operations between a pair and the values that agree."""
        return module_of(made_from(pair, self.agreeing, self.graphs(pair)))

    def at_line(
        self, kind: str, text: str, module: str | None, pair: Pair, before: Sequence[Pair] = ()
    ) -> ComparisonFinding:
        """A finding with the lines of both versions of a pair, see `at_line`."""
        row, its = self.rows(pair)
        if self.a.framework == self.b.framework and its.line not in ("", row.line):
            text += f"; in other at {_location(its)}"
        return at_line(kind, text, row, module, pair, before)

    @functools.cached_property
    def paired(self) -> list[set[Instance]]:
        """The values of each record that are in pairs, or have the numbers of an argument."""
        found = [{p.at(side) for p in self.of("value")} for side in range(2)]
        return [own | set(copies) for own, copies in zip(found, self.matching.copies, strict=True)]

    @functools.cached_property
    def shares_code(self) -> bool:
        """Whether both versions run one statement."""
        return not {row.statement for row in self.a.rows if row.is_line}.isdisjoint(
            row.statement for row in self.b.rows if row.is_line
        )

    def alone_behind(self, pair: Pair) -> LinesAlone:
        """The lines of one version alone between a pair and the values that agree."""
        return lines_alone(made_from(pair, self.agreeing, self.both), self.paired, self.shares_code)

    def told_at(self, finding: ComparisonFinding, row: Row | None) -> ComparisonFinding:
        """A finding that is told at the line of another row, if there is one."""
        if row is None or not (where := _location(row)).file:
            return finding
        text = finding.message
        if finding.file:
            text = text.removeprefix(f"{Location(finding.file, finding.line, None)}: ")
        text = f"{where}: {text}"
        return dataclasses.replace(finding, message=text, file=where.file, line=where.line)

    def rules_in(self, slices: Sequence[Slice]) -> str:
        """The text of the custom rules among some operations; "" if there are none."""
        versions: dict[str, list[str]] = {}
        for own in slices:
            where = "fun" if own.graph.record is self.a else "other"
            for rule in own.rules:
                versions.setdefault(rule, []).append(where)
        texts = [
            f"{rule} in {'both' if set(where) == {'fun', 'other'} else where[0]}"
            for rule, where in sorted(versions.items(), key=lambda item: len(item[1]))
        ]
        kind = "a custom rule" if len(texts) == 1 else "custom rules"
        return f"; {kind} there: {first_few(texts, MOST_NAMES)}" if texts else ""


def first(sides: Sides) -> list[ComparisonFinding]:
    """Arguments, the first value, outputs, or else the cotangent, or else gradients; then others.

    If all outputs and gradients were compared, are judged and agree, there are none.
    """
    bad = {k: [p for p in sides.of(k) if p.judgment.differs] for k in
           ("argument", "value", "output", "cotangent", "gradient")}  # fmt: skip
    rest = sides.matching.alone
    if not bad["output"] and not bad["gradient"]:
        return rest or not_judged(sides)
    found = argument_findings(sides, bad["argument"])
    is_loss = sides.a.is_loss and sides.b.is_loss
    if bad["value"]:
        found.append(first_value(sides, bad["value"][0]))
    if not is_loss:
        found += [_output_finding(sides, p) for p in bad["output"]]
    elif not bad["value"] and bad["output"]:
        found.append(loss_finding(sides, bad["output"][0]))
    elif not bad["value"] and bad["cotangent"]:
        found.append(_cotangent_finding(sides, bad["cotangent"][-1]))
    elif not bad["value"]:
        found += [_gradient_finding(sides, p) for p in bad["gradient"]]
    return [*found, *rest]


def argument_findings(sides: Sides, bad: Sequence[Pair]) -> list[ComparisonFinding]:
    """The finding of arguments whose numbers differ, at most one."""
    if not bad:
        return []
    texts = [f"{sides.rows(p)[0].label} ({p.judgment.difference:.2g})" for p in bad]
    count = f"{len(bad)} of {len(sides.of('argument'))} arguments"
    text = f"{count} differ: {first_few(texts, MOST_NAMES)}"
    return [ComparisonFinding("argument", text, path=sides.rows(bad[0])[0].name)]


def first_value(sides: Sides, pair: Pair) -> ComparisonFinding:
    """The first value that differs; its module is that of the operations behind it."""
    row, _ = sides.rows(pair)
    values, module = sides.of("value"), sides.module_behind(pair)
    before = [p for p in values[: values.index(pair)] if p.judgment.agrees]
    to = f"that enters {row.name}" if row.view == ENTERS else f"of {row.label}"
    text = f"the value {to} {difference_text(pair.judgment)}"
    alone = sides.alone_behind(pair)
    text += f"; {alone.text}" if alone.text else called_text(row)
    text += sides.rules_in(made_from(pair, sides.agreeing, sides.both))
    found = sides.at_line("value", text, row.name if module is None else module, pair, before)
    return sides.told_at(found, alone.row)


def loss_finding(sides: Sides, pair: Pair) -> ComparisonFinding:
    count = len(sides.agreeing)
    text = f"the loss {difference_text(pair.judgment)}; "
    agree = "the only named value agrees" if count == 1 else f"all {count} named values agree"
    if sides.has_lines:
        return _first_unknown_lines(sides, pair, text)
    text += agree if count else "no named value was matched"
    text += sides.rules_in(made_from(pair, sides.agreeing, sides.both))
    return sides.at_line("value", text, sides.module_behind(pair) or "", pair, sides.agreeing)


def _first_unknown_lines(sides: Sides, pair: Pair, text: str) -> ComparisonFinding:
    """Of versions that share no code: the lines up to which they are the same, and the next."""
    slices = made_from(pair, sides.agreeing, sides.both)
    alone, last = lines_alone(slices, sides.paired, sides.shares_code), _last_of(sides, slices)
    text += f"the same up to {last[0].words} and {last[1].words}" if last else "nothing is the same"
    text += f"; then {alone.text}" if alone.text else ""
    text += sides.rules_in(slices)
    found = sides.at_line("value", text, sides.module_behind(pair) or "", pair, sides.agreeing)
    return sides.told_at(found, alone.row)


def _last_of(sides: Sides, slices: Sequence[Slice]) -> tuple[Row, Row] | None:
    """The last lines that agree, of those that the slices end at."""
    ends = [{to for _, _, to in own.steps} for own in slices]
    agreeing = [p for p in sides.agreeing if p.own in ends[0] or p.other in ends[1]]
    rows = [sides.rows(p) for p in agreeing]
    return next((both for both in reversed(rows) if all(row.is_line for row in both)), None)


def called_text(row: Row) -> str:
    """The calls that led to a line, if there are several."""
    return f", as {' > '.join(row.calls)}" if len(row.calls) > 1 else ""


def _output_finding(sides: Sides, pair: Pair) -> ComparisonFinding:
    row, its = sides.rows(pair)
    text, factor = _output_text(sides, pair, row, its)
    found = sides.at_line("output", text, sides.module_behind(pair) or None, pair)
    return dataclasses.replace(found, path=row.name, ratio=factor)


def _output_text(sides: Sides, pair: Pair, row: Row, its: Row) -> tuple[str, float | None]:
    if row.shape != its.shape:
        shapes = f"{list(row.shape)} in fun, {list(its.shape)} in other"
        return f"{row.name}: the shape is {shapes}", None
    kinds = [own.dtype for own in (row, its)]
    if TEXT in kinds and kinds[0] != kinds[1]:
        return f"{row.name} is {kinds[0]} in fun, {kinds[1]} in other", None
    if kinds[0] == TEXT:
        return f"{row.name}: its text differs", None
    if row.exact and its.exact or row.sketch is None or its.sketch is None:
        return f"{row.name}: its numbers differ, which are compared exactly", None
    x, y = row.sketch, its.sketch
    judgment = pair.judgment._replace(sizes=()) if row.size == 1 else pair.judgment
    text = f"{row.name} {difference_text(judgment)}"
    if row.size == 1:
        text += f"; it is {scalar_of(x[0]):.6g} in fun, {scalar_of(y[0]):.6g} in other"
    x, y = (n[..., : 2 * NUMBERS] for n in (x, y))
    factor = ratio(x, y, pair.judgment.tolerance)
    devices = tuple(sorted({*sides.a.devices, *sides.b.devices}))
    return text + (factor_text(factor, devices) if factor is not None else ""), factor


def _cotangent_finding(sides: Sides, pair: Pair) -> ComparisonFinding:
    """The last cotangent, the first in backward order, that differs: its module uses the value."""
    row, _ = sides.rows(pair)
    cotangents = sides.of("cotangent")
    later = [p for p in cotangents[cotangents.index(pair) + 1 :] if p.judgment.is_judged]
    every = used_by(pair, later, sides.both)
    user, step = _user(every[0])
    every = _one_sided(sides, every)
    module = module_of(every[: len(sides.graphs(pair))])
    module = user if module is None else module
    to = f"what enters {row.name}" if row.view == ENTERS else row.label
    text = (
        f"the cotangent that {module} passes back to {to}" if module else f"the cotangent of {to}"
    )
    text += f" {difference_text(pair.judgment)}; all values agree"
    user_row = _line_of_user(sides, every)
    text += f"; {user_row.text}" if user_row.text else ""
    text += sides.rules_in(every)
    found = dataclasses.replace(sides.at_line("vjp", text, module, pair, later), step=step)
    return sides.told_at(found, user_row.row)


def _line_of_user(sides: Sides, slices: Sequence[Slice]) -> LinesAlone:
    """The line that uses a value: one that only one version has, or the first that both have."""
    if not sides.has_lines:
        return LinesAlone(None, None)
    alone = lines_alone(slices, sides.paired, sides.shares_code)
    if not sides.shares_code and alone.is_one:
        ends = [{p.at(side) for p in sides.of("value")} for side in range(2)]
        alone = lines_of_ends(slices, ends)
    if alone.row is not None:
        return alone
    rows = [[own.graph.record.rows[to[0]] for _, _, to in own.steps] for own in slices]
    return LinesAlone(*(next((row for row in own if row.is_line), None) for own in rows))


def _one_sided(sides: Sides, slices: list[Slice]) -> list[Slice]:
    """The slices to values that send a cotangent back in one version only, if there are any.

    The other version cuts the gradient behind such a value, or before it, by a `stop_gradient` say.
    """
    values = sides.of("value")
    rows = [{r.rows[i].node for i in r.of("cotangent")} for r in (sides.a, sides.b)]
    behind = [p for p in values if (p.own[0] in rows[0]) != (p.other[0] in rows[1])]
    moving = [own.differentiated for own in slices]
    before = [p for p in values if (p.own in moving[0]) != (p.other in moving[1])]
    for one in (behind, before):
        found = []
        for side, own in enumerate(slices):
            ends = {p.at(side) for p in one}
            found.append(own._replace(steps=[step for step in own.steps if step[2] in ends]))
        if any(own.steps for own in found):
            return found
    return slices


def _user(own: Slice) -> tuple[str, int | None]:
    """The name of the first user of a value, and its step in the scans around both."""
    if not own.steps:
        return "", None
    rows = own.graph.record.rows
    edge, at, to = own.steps[0]
    name = rows[to[0]].name if rows[to[0]].kind == "value" else ""
    return name, rows[at[0]].step(to[1][: own.graph.shared(edge)])


def _gradient_finding(sides: Sides, pair: Pair) -> ComparisonFinding:
    row, _ = sides.rows(pair)
    later = [p for p in sides.of("cotangent") if p.judgment.is_judged]
    every = used_by(pair, later, sides.both)
    text = f"the gradient of {row.label} {difference_text(pair.judgment)}"
    text += f"; values and cotangents agree{sides.rules_in(every)}"
    module = module_of(every[: len(sides.graphs(pair))])
    user = _line_of_user(sides, every)
    text += f"; {user.text}" if user.text else ""
    found = sides.told_at(sides.at_line("grads", text, module or "", pair), user.row)
    return dataclasses.replace(found, path=row.name)


def difference_text(own: Judgment) -> str:
    if math.isinf(own.difference):
        return "is NaN, inf, nothing or of another shape in one of the versions only"
    text = f"differs by {own.difference:.2g}, of which rounding explains {own.tolerance:.1g}"
    sizes = zip(("norm", "largest"), zip(*own.sizes, strict=True), strict=False)
    told = [
        f"{name} {x:.3g} beside {y:.3g}"
        for name, (x, y) in sizes
        if min(x, y) > 0 and abs(x - y) > TELLING * max(x, y)
    ]
    return f"{text} ({', '.join(told)})" if told else text


def at_line(
    kind: str, text: str, row: Row, module: str | None, pair: Pair, before: Sequence[Pair] = ()
) -> ComparisonFinding:
    """A finding at the line of a row, and how much its difference is above those before."""
    where = _location(row)
    text = f"{where}: {text}" if where.file else text
    largest = max((p.judgment.difference for p in before if p.judgment.is_judged), default=0.0)
    growth = pair.judgment.difference / largest if largest else math.inf
    known = growth if math.isfinite(growth) and math.isfinite(largest) else None
    step = row.step(pair.own[1])
    return ComparisonFinding(kind, text, module, step, where.file, where.line, known)


def _location(row: Row) -> Location:
    file, _, line = row.line.rpartition(":")
    return Location(file, int(line), None) if line.isdigit() else Location(None, None, None)


def not_judged(sides: Sides) -> list[ComparisonFinding]:
    """The finding of outputs and gradients that rounding decides, at most one.

    There is none where they are few: fewer than half of the outputs, or of the leaves of the
    gradient, with less than half of their norm. Notes name them.
    """
    bad = []
    for kind in ("output", "gradient"):
        pairs = sides.of(kind)
        own = [p for p in pairs if not p.judgment.is_judged and not is_nothing(sides, p)]
        far = [p for p in own if math.isinf(p.judgment.difference)]
        bad += own if _are_many(own, pairs) else far
    if not bad:
        return []
    names = first_few([f"the {p.kind} {sides.rows(p)[0].label}" for p in bad], MOST_NAMES)
    farthest = max(p.judgment.difference for p in bad)
    text = f"rounding decides {names}, up to {farthest:.2g} apart in the versions, so that is not "
    text += "judged; "
    eps = [row.eps for p in bad for row in sides.rows(p) if row.eps]
    if eps and max(eps) > 2.0**-52:
        wider = "float32" if max(eps) > 2.0**-23 else "float64"
        text += f"compare in {wider}, with wider arguments and types; "
        text += f'compare(fun, "{wider}", args), of each version, says where precision is lost; '
    return [ComparisonFinding("not judged", f"{text}or give rtol=, a tolerance of your own")]


def _are_many(some: Sequence[Pair], pairs: Sequence[Pair]) -> bool:
    """Whether some pairs are half or more of all of them, or have half or more of their norm."""
    norm, whole = _joint_norm(some), _joint_norm(pairs)
    return bool(some) and (2 * len(some) >= len(pairs) or norm >= math.sqrt(0.5) * whole > 0)


def _joint_norm(pairs: Sequence[Pair]) -> float:
    """The norm of some rows together, each as large as in the version where it is larger."""
    return math.hypot(*(max((norm for norm, _ in p.judgment.sizes), default=0) for p in pairs))


def is_nothing(sides: Sides, pair: Pair) -> bool:
    """Whether a gradient that rounding decides is zero but for rounding, in both versions.

    The bias of keys, or one before a normalization, has such a gradient: half of the digits of its
    type below the largest gradient, and so no part of the whole gradient.
    """
    if pair.kind != "gradient" or not pair.judgment.sizes:
        return False
    own = max(norm for norm, _ in pair.judgment.sizes)
    whole = [norm for p in sides.of("gradient") for norm, _ in p.judgment.sizes]
    return own <= math.sqrt(max(row.eps for row in sides.rows(pair))) * max(whole)
