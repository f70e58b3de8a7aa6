"""From two records to the result: match, judge, first."""

from collections.abc import Mapping

from clipgrad._compare.findings import MOST_NAMES, Sides, first, is_nothing
from clipgrad._compare.match import match
from clipgrad._compare.pairs import Pair
from clipgrad._compare.record import Record
from clipgrad._compare.result import ComparisonRow, GradientComparison
from clipgrad._errors import first_few
from clipgrad._names import CALL


def compare_records(
    a: Record,
    b: Record,
    names: Mapping[str, str] | None,
    rtol: float | None,
    with_arguments: bool,
) -> GradientComparison:
    """Compare two records of any kind; arguments that differ are told where they may.

    Raises:
      ValueError: no output and no gradient is in both; or as of `match`.
    """
    sides = Sides(a, b, match(a, b, names, rtol, with_arguments))
    if not any(sides.of(kind) for kind in ("output", "gradient")):
        theirs = [b.rows[i].name for i in (*b.of("output"), *b.of("gradient"))][:MOST_NAMES]
        ours = [a.rows[i].name for i in (*a.of("output"), *a.of("gradient"))][:MOST_NAMES]
        raise ValueError(
            f"other: got outputs {theirs}, expected the outputs of fun, {ours}; return trees with "
            "the same paths, and write argnums=None for both or for none"
        )
    return result(sides, first(sides))


def result(sides: Sides, findings: list) -> GradientComparison:
    """The result of findings, with the rows of the table and notes."""
    notes = [*sides.a.notes, *sides.b.notes, *undecided(sides)]
    if sides.a.is_loss and sides.b.is_loss and not sides.of("value"):
        notes.append("no named value was matched; name values by names=, or tag them")
    if not any(p.judgment.differs for kind in ("output", "gradient") for p in sides.of(kind)):
        notes += _inner_differences(sides)
    notes += _other_types(sides) + _other_circumstances(sides.a, sides.b)
    unmatched = [*sides.matching.unmatched, *(own.message for own in sides.matching.alone)]
    parts = tuple(findings), _rows_of_both(sides), tuple(unmatched), tuple(dict.fromkeys(notes))
    return GradientComparison(not findings, *parts)


def is_same(found: GradientComparison) -> bool:
    """Whether nothing that was compared differs by more than its tolerance."""
    rows = [(row.value, row.value_tolerance) for row in found.rows]
    rows += [(r.cotangent, r.cotangent_tolerance) for r in found.rows if r.cotangent is not None]
    return found.ok and all(difference <= most for difference, most in rows)


def undecided(sides: Sides) -> list[str]:
    """Notes of the rows that rounding decides, each name once."""
    steps: dict[tuple[str, str], list[int]] = {}
    for p in sides.matching.pairs:
        row, _ = sides.rows(p)
        if not p.judgment.is_judged and p.kind != "argument":
            what = "zero but for rounding" if is_nothing(sides, p) else p.kind
            own = steps.setdefault((row.label, what), [])
            own += [] if (step := row.step(p.own[1])) is None else [step]
    found = []
    for (name, what), at in steps.items():
        if what.startswith("zero"):
            found.append(f"{name}: {what}")
            continue
        listed = f", steps {', '.join(map(str, sorted({*at})))}" if at else ""
        it = "it" if what == "output" else f"its {what}"
        found.append(f"{name}{listed}: rounding decides here, so {it} is not judged")
    return found


def _inner_differences(sides: Sides) -> list[str]:
    """Notes of what differs inside of versions whose outputs and gradients agree."""
    found = []
    for kind in ("argument", "value", "cotangent"):
        bad = [sides.rows(p)[0].label for p in sides.of(kind) if p.judgment.differs]
        if bad:
            names = first_few(list(dict.fromkeys(bad)), MOST_NAMES)
            found.append(f"outputs and gradients agree, but the {kind}s of {names} differ")
    return found


def _other_types(sides: Sides) -> list[str]:
    pairs = [] if sides.a.is_loss else [sides.rows(p) for p in sides.of("output")]
    return [
        f"{row.name}: {row.dtype} in fun, {its.dtype} in other"
        for row, its in pairs
        if row.dtype != its.dtype
    ]


def _other_circumstances(a: Record, b: Record) -> list[str]:
    """A note of what differs in versions and devices."""
    if a.framework != b.framework:
        return []
    own, other = a.circumstances, b.circumstances
    found = [
        f"{name} {own.get(name)!s} in fun, {other.get(name)!s} in other"
        for name in dict.fromkeys([*own, *other])
        if own.get(name) != other.get(name)
    ]
    return ["; ".join(found)] if found else []


def _rows_of_both(sides: Sides) -> tuple[ComparisonRow, ...]:
    """The values, with their cotangents, and the outputs of steps."""
    nodes = sides.a.rows
    back: dict[tuple, Pair] = {(nodes[p.own[0]].node, p.own[1]): p for p in sides.of("cotangent")}
    is_loss = sides.a.is_loss
    found = []
    for p in [*sides.of("value"), *([] if is_loss else sides.of("output"))]:
        row, cotangent = sides.rows(p)[0], back.get(p.own)
        if row.view == CALL:  # its numbers are those of a line that it called
            continue
        own, its = p.judgment, cotangent and cotangent.judgment
        numbers = own.difference, its and its.difference, own.tolerance, its and its.tolerance
        kind = row.view if p.kind == "value" else "output"
        steps = row.indices(p.own[1])
        found.append(ComparisonRow(row.name, row.step(p.own[1]), *numbers, steps, kind))
    return tuple(found)
