"""The first place where two records differ, as findings."""

import dataclasses
import math
from collections.abc import Sequence

from clipgrad._compare.judge import Judgment
from clipgrad._compare.line_findings import LinesAlone, lines_of_ends
from clipgrad._compare.matching import MOST_NAMES
from clipgrad._compare.pairs import Pair
from clipgrad._compare.ratios import factor_text, ratio
from clipgrad._compare.record import ENTERS, TEXT, Row
from clipgrad._compare.result import ComparisonFinding
from clipgrad._compare.sides import Sides, Verdict
from clipgrad._compare.sketches import NUMBERS, scalar_of
from clipgrad._compare.slices import Slice, used_by
from clipgrad._errors import first_few

TELLING = 0.01  # sizes that are nearer say nothing of how two versions differ


def by_rounding(sides: Sides) -> Verdict:
    """What differs beyond what rounding explains; see `first`."""
    return Verdict(first(sides))


def first(sides: Sides) -> list[ComparisonFinding]:
    """The findings of two records, in this order.

    Arguments that differ; the first value. Then of a step all outputs that differ; of a loss whose
    values agree the loss, or else the first cotangent, or else each gradient. At last what only one
    record has. If all outputs and gradients were compared, are judged and agree, there are none.
    """
    bad = {k: [p for p in sides.of(k) if p.judgment.differs] for k in
           ("argument", "value", "output", "cotangent", "gradient")}  # fmt: skip
    alone = sides.matching.alone
    if not bad["output"] and not bad["gradient"]:
        return alone or not_judged(sides)
    findings = [*sides.matching.arguments, *argument_findings(sides, bad["argument"])]
    is_loss = sides.a.is_loss and sides.b.is_loss
    if bad["value"]:
        findings.append(first_value(sides, bad["value"][0]))
    if not is_loss:
        findings += [_output_finding(sides, p) for p in bad["output"]]
    elif not bad["value"] and bad["output"]:
        findings.append(loss_finding(sides, bad["output"][0]))
    elif not bad["value"] and bad["cotangent"]:
        findings.append(_cotangent_finding(sides, bad["cotangent"][-1]))
    elif not bad["value"]:
        findings += [_gradient_finding(sides, p) for p in bad["gradient"]]
    return [*findings, *alone]


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
    values, slices = sides.of("value"), sides.behind(pair)
    module, alone = sides.module_of(pair, slices), sides.lines_alone(slices)
    before = [p for p in values[: values.index(pair)] if p.judgment.agrees]
    to = f"that enters {row.name}" if row.view == ENTERS else f"of {row.label}"
    text = f"the value {to} {difference_text(pair.judgment)}"
    text += f"; {alone.text}" if alone.text else called_text(row)
    text += sides.rules_in(slices)
    module = row.name if module is None else module
    finding = sides.at_line("value", text, module, pair, before, alone.row)
    return dataclasses.replace(finding, message=finding.message + sides.place_in_other(pair))


def loss_finding(sides: Sides, pair: Pair) -> ComparisonFinding:
    slices, alone = sides.behind(pair), LinesAlone(None, None)
    if sides.has_lines:
        alone = sides.lines_alone(slices)
        agree = _lines_that_agree(sides, slices, alone)
    else:
        count = len(sides.agreeing)
        agree = "the only named value agrees" if count == 1 else f"all {count} named values agree"
        agree = agree if count else "no named value was matched"
    text = f"the loss {difference_text(pair.judgment)}; {agree}{sides.rules_in(slices)}"
    module = sides.module_of(pair, slices) or ""
    return sides.at_line("value", text, module, pair, sides.agreeing, alone.row)


def _lines_that_agree(sides: Sides, slices: Sequence[Slice], alone: LinesAlone) -> str:
    """The text of the last lines that agree, and of the next ones, of two losses with lines."""
    last = _last_of(sides, slices)
    text = f"the same up to {last[0].words} and {last[1].words}" if last else "nothing is the same"
    return text + (f"; then {alone.text}" if alone.text else "")


def _last_of(sides: Sides, slices: Sequence[Slice]) -> tuple[Row, Row] | None:
    """The last line of each version that agrees, among the ends of the slices; or None."""
    ends = [{to for _, _, to in part.steps} for part in slices]
    agreeing = [p for p in sides.agreeing if p.a in ends[0] or p.b in ends[1]]
    rows = [sides.rows(p) for p in agreeing]
    return next((both for both in reversed(rows) if all(row.is_line for row in both)), None)


def called_text(row: Row) -> str:
    """The calls that led to a line, if there are several."""
    return f", as {' > '.join(row.calls)}" if len(row.calls) > 1 else ""


def _output_finding(sides: Sides, pair: Pair) -> ComparisonFinding:
    row, other = sides.rows(pair)
    text, factor = _output_text(sides, pair, row, other)
    module = sides.module_of(pair, sides.behind(pair)) or None
    finding = sides.at_line("output", text, module, pair)
    return dataclasses.replace(finding, path=row.name, ratio=factor)


def _output_text(sides: Sides, pair: Pair, row: Row, other: Row) -> tuple[str, float | None]:
    if row.shape != other.shape:
        shapes = f"{list(row.shape)} in fun, {list(other.shape)} in other"
        return f"{row.name}: the shape is {shapes}", None
    kinds = [each.dtype for each in (row, other)]
    if TEXT in kinds and kinds[0] != kinds[1]:
        return f"{row.name} is {kinds[0]} in fun, {kinds[1]} in other", None
    if kinds[0] == TEXT:
        return f"{row.name}: its text differs", None
    (exact, x, *_), (other_exact, y, *_) = row.numbers, other.numbers
    if exact and other_exact or x is None or y is None:
        return f"{row.name}: its numbers differ, which are compared exactly", None
    x, y = x[pair.a[1]], y[pair.b[1]]
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
    module = sides.module_of(pair, every)
    module = user if module is None else module
    to = f"what enters {row.name}" if row.view == ENTERS else row.label
    text = (
        f"the cotangent that {module} passes back to {to}" if module else f"the cotangent of {to}"
    )
    text += f" {difference_text(pair.judgment)}; all values agree"
    line = line_of_user(sides, every)
    text += f"; {line.text}" if line.text else ""
    text += sides.rules_in(every)
    return dataclasses.replace(sides.at_line("vjp", text, module, pair, later, line.row), step=step)


def line_of_user(sides: Sides, slices: Sequence[Slice]) -> LinesAlone:
    """The line that uses a value: one that only one version has, or the first that both have."""
    if not sides.has_lines:
        return LinesAlone(None, None)
    alone = sides.lines_alone(slices)
    if not sides.shares_code and alone.is_one:
        ends = [{p.at(side) for p in sides.of("value")} for side in range(2)]
        alone = lines_of_ends(slices, ends)
    if alone.row is not None:
        return alone
    rows = [[part.graph.record.rows[to[0]] for _, _, to in part.steps] for part in slices]
    return LinesAlone(*(next((row for row in part if row.is_line), None) for part in rows))


def _one_sided(sides: Sides, slices: list[Slice]) -> list[Slice]:
    """The slices cut down to values that get a cotangent in one version only, if there are any.

    The other version stops the gradient behind such a value, or before it, as by `stop_gradient`.
    """
    values = sides.of("value")
    rows = [{r.rows[i].node for i in r.of("cotangent")} for r in (sides.a, sides.b)]
    behind = [p for p in values if (p.a[0] in rows[0]) != (p.b[0] in rows[1])]
    moving = [part.differentiated for part in slices]
    before = [p for p in values if (p.a in moving[0]) != (p.b in moving[1])]
    for one in (behind, before):
        parts = []
        for side, part in enumerate(slices):
            ends = {p.at(side) for p in one}
            parts.append(part._replace(steps=[step for step in part.steps if step[2] in ends]))
        if any(part.steps for part in parts):
            return parts
    return slices


def _user(uses: Slice) -> tuple[str, int | None]:
    """The name of the first user of a value, and its step in the scans around both."""
    if not uses.steps:
        return "", None
    rows = uses.graph.record.rows
    edge, at, to = uses.steps[0]
    name = rows[to[0]].name if rows[to[0]].kind == "value" else ""
    return name, rows[at[0]].step(to[1][: uses.graph.shared(edge)])


def _gradient_finding(sides: Sides, pair: Pair) -> ComparisonFinding:
    row, _ = sides.rows(pair)
    later = [p for p in sides.of("cotangent") if p.judgment.is_judged]
    every = used_by(pair, later, sides.both)
    text = f"the gradient of {row.label} {difference_text(pair.judgment)}"
    text += f"; values and cotangents agree{sides.rules_in(every)}"
    module, line = sides.module_of(pair, every) or "", line_of_user(sides, every)
    text += f"; {line.text}" if line.text else ""
    finding = sides.at_line("grads", text, module, pair, line=line.row)
    return dataclasses.replace(finding, path=row.name)


def difference_text(judgment: Judgment) -> str:
    if math.isinf(judgment.difference):
        return "is NaN, inf, nothing or of another shape in one of the versions only"
    text = f"differs by {judgment.difference:.2g}, "
    text += f"of which rounding explains {judgment.tolerance:.1g}"
    sizes = sizes_text(judgment)
    return f"{text} ({sizes})" if sizes else text


def sizes_text(judgment: Judgment) -> str:
    """The norms and the largest elements of both versions where they tell how these differ."""
    sizes = zip(("norm", "largest"), zip(*judgment.sizes, strict=True), strict=False)
    texts = [
        f"{name} {x:.3g} beside {y:.3g}"
        for name, (x, y) in sizes
        if min(x, y) > 0 and abs(x - y) > TELLING * max(x, y)
    ]
    return ", ".join(texts)


def not_judged(sides: Sides) -> list[ComparisonFinding]:
    """The finding of outputs and gradients that rounding decides, at most one.

    There is none where they are few: fewer than half of the outputs, or of the leaves of the
    gradient, with less than half of their norm. Notes name them.
    """
    bad = []
    for kind in ("output", "gradient"):
        pairs = sides.of(kind)
        undecided = [p for p in pairs if not p.judgment.is_judged and not is_nothing(sides, p)]
        far = [p for p in undecided if math.isinf(p.judgment.difference)]
        bad += undecided if _are_many(undecided, pairs) else far
    if not bad:
        return []
    names = first_few([f"the {p.kind} {sides.rows(p)[0].label}" for p in bad], MOST_NAMES)
    farthest = max(p.judgment.difference for p in bad)
    text = f"rounding decides {names}, up to {farthest:.2g} apart in the versions, so they "
    text += "are called neither equal nor different; "
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
    largest = max(norm for norm, _ in pair.judgment.sizes)
    whole = [norm for p in sides.of("gradient") for norm, _ in p.judgment.sizes]
    return largest <= math.sqrt(max(row.eps for row in sides.rows(pair))) * max(whole)
