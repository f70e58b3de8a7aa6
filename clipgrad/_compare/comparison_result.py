"""The one result of a comparison, of what any judge says: findings, rows and notes."""

from collections.abc import Iterator

from clipgrad._compare.findings import is_nothing
from clipgrad._compare.matching import MOST_NAMES
from clipgrad._compare.pairs import Pair
from clipgrad._compare.record import Record
from clipgrad._compare.result import ComparisonRow, GradientComparison
from clipgrad._compare.sides import Sides, Verdict
from clipgrad._errors import first_few
from clipgrad._names import CALL


def result(sides: Sides, verdict: Verdict) -> GradientComparison:
    """The result of what a judge says, with the rows of the table and all notes."""
    alone = [finding.message for finding in sides.matching.alone]
    return GradientComparison(
        not verdict.findings,
        tuple(verdict.findings),
        tuple(_rows(sides, bool(verdict.dtype))),
        (*sides.matching.unmatched, *alone),
        tuple(dict.fromkeys(_notes(sides, verdict))),
        verdict.dtype,
    )


def _notes(sides: Sides, verdict: Verdict) -> list[str]:
    notes = [*sides.a.notes, *sides.b.notes, *verdict.notes, *undecided(sides)]
    are_losses = sides.a.is_loss and sides.b.is_loss
    if are_losses and not verdict.dtype and not sides.of("value"):
        notes.append("no named value was matched; name values by names=, or tag them")
    if not any(p.judgment.differs for kind in ("output", "gradient") for p in sides.of(kind)):
        notes += _inner_differences(sides)
    return notes + _other_types(sides) + _other_circumstances(sides.a, sides.b)


def undecided(sides: Sides) -> list[str]:
    """Notes of the rows that rounding decides, each name once, with all its steps."""
    steps: dict[tuple[str, str], list[int]] = {}
    for p in sides.matching.pairs:
        row, _ = sides.rows(p)
        if not p.judgment.is_judged and p.kind != "argument":
            what = "zero but for rounding" if is_nothing(sides, p) else p.kind
            indices = steps.setdefault((row.label, what), [])
            indices += [] if (step := row.step(p.a[1])) is None else [step]
    notes = []
    for (name, what), at in steps.items():
        if what.startswith("zero"):
            notes.append(f"{name}: {what}")
            continue
        listed = f", steps {', '.join(map(str, sorted({*at})))}" if at else ""
        subject = "this" if what == "output" else f"the {what}"
        notes.append(
            f"{name}{listed}: rounding decides here, so {subject} is called neither equal nor "
            "different"
        )
    return notes


def _inner_differences(sides: Sides) -> list[str]:
    """Notes of what differs inside of versions whose outputs and gradients agree."""
    notes = []
    for kind in ("argument", "value", "cotangent"):
        bad = [sides.rows(p)[0].label for p in sides.of(kind) if p.judgment.differs]
        if bad:
            names = first_few(list(dict.fromkeys(bad)), MOST_NAMES)
            notes.append(f"outputs and gradients agree, but the {kind}s of {names} differ")
    return notes


def _other_types(sides: Sides) -> list[str]:
    """Notes of the outputs of a step that have another type in the second version."""
    pairs = [] if sides.a.is_loss else [sides.rows(p) for p in sides.of("output")]
    return [
        f"{row.name}: {row.dtype} in fun, {other.dtype} in other"
        for row, other in pairs
        if row.dtype != other.dtype
    ]


def _other_circumstances(a: Record, b: Record) -> list[str]:
    """A note of what differs in versions and devices."""
    if a.framework != b.framework:
        return []
    first, second = a.circumstances, b.circumstances
    texts = [
        f"{name} {first.get(name)!s} in fun, {second.get(name)!s} in other"
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]
    return ["; ".join(texts)] if texts else []


def _rows(sides: Sides, with_gradients: bool) -> Iterator[ComparisonRow]:
    """The values, with their cotangents; outputs of steps; beside a wider type, gradients, too."""
    nodes = sides.a.rows
    back: dict[tuple, Pair] = {(nodes[p.a[0]].node, p.a[1]): p for p in sides.of("cotangent")}
    kinds = ["output"] if with_gradients or not sides.a.is_loss else []
    kinds += ["gradient"] if with_gradients else []
    for p in [*sides.of("value"), *(p for kind in kinds for p in sides.of(kind))]:
        row, cotangent = sides.rows(p)[0], back.get(p.a)
        if row.view == CALL:  # its numbers are those of a line that it called
            continue
        x, y = p.judgment, cotangent and cotangent.judgment
        numbers = x.difference, y and y.difference, x.tolerance, y and y.tolerance
        is_value, steps = p.kind == "value", row.indices(p.a[1])
        name, kind = (row.name, row.view) if is_value else (row.label, p.kind)
        yield ComparisonRow(name, row.step(p.a[1]), *numbers, steps, kind)
