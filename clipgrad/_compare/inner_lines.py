"""The line, inside of the first module that differs, at which two versions first differ.

Where values have names, lines are not recorded: there may be many. Once a module is known to
differ, its lines alone are recorded in one more run of each version, forward alone if values
differ. What rounding does to them is not measured: a line differs if it is about as far apart as
the module, not as rounding.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from clipgrad._compare.findings import called_text, line_of_user, sizes_text
from clipgrad._compare.match_by_name import match_by_name
from clipgrad._compare.pairs import Pair
from clipgrad._compare.record import Record, Row
from clipgrad._compare.recording import Recording
from clipgrad._compare.result import ComparisonFinding
from clipgrad._compare.sides import Sides, Verdict
from clipgrad._compare.slices import used_by
from clipgrad._names import CALL

_KINDS = {"value": "value", "vjp": "cotangent"}  # the kinds of rows that findings are of


def with_inner_line(
    verdict: Verdict,
    sides: Sides,
    versions: Sequence[Record | Recording],
    names: Mapping[str, str] | None,
) -> Verdict:
    """The verdict, whose first finding of a module says which line of it differs first."""
    number = next((i for i, f in enumerate(verdict.findings) if f.kind in _KINDS), None)
    if number is None or sides.has_lines or not verdict.findings[number].module:
        return verdict
    finding = verdict.findings[number]
    recordings = [v for v in versions if isinstance(v, Recording)]
    if len(recordings) < 2 or not (text := _text(finding, sides, recordings, names)):
        return verdict
    findings = list(verdict.findings)
    findings[number] = dataclasses.replace(finding, message=f"{finding.message}; inside, {text}")
    return verdict._replace(findings=findings)


def _text(
    finding: ComparisonFinding,
    sides: Sides,
    versions: Sequence[Recording],
    names: Mapping[str, str] | None,
) -> str:
    """What to say of the first line that differs; "" where there is nothing to say."""
    is_value = finding.kind == "value"
    within = [_scopes_in(version.record, finding.module or "") for version in versions]
    each = zip(versions, within, strict=True)
    recordings = [version.with_lines_in(scopes, not is_value) for version, scopes in each]
    if max(len(_lines(recording.record)) for recording in recordings) < 2:
        return ""
    a, b = (recording.run() for recording in recordings)
    lines = Sides(a, b, match_by_name(a, b, names, _between(sides, finding.kind)))
    pairs = lines.of(_KINDS[finding.kind])
    pairs = [p for p in pairs if p.judgment.differs and _is_line(lines, p)]
    if not pairs:
        return ""
    row, text = _first_value(lines, pairs[0]) if is_value else _first_cotangent(lines, pairs[-1])
    return "" if row is None or row.line == f"{finding.file}:{finding.line}" else text


def _scopes_in(record: Record, module: str) -> set[str]:
    """The scopes inside of a module."""
    return {scope for scope in record.scopes if f"{scope}/".startswith(f"{module}/")}


def _lines(record: Record) -> set[str]:
    """The statements that compute a value themselves, not by a call alone."""
    return {row.statement for row in record.rows if row.is_line and row.view != CALL}


def _between(sides: Sides, kind: str) -> float:
    """A tolerance between what rounding explains of the first difference and the difference."""
    pairs = [p for p in sides.of(_KINDS[kind]) if p.judgment.differs] or sides.of("output")
    judgment = pairs[0 if kind == "value" else -1].judgment
    return math.sqrt(min(judgment.difference, 1.0) * min(judgment.tolerance, 1.0))


def _first_value(sides: Sides, pair: Pair) -> tuple[Row | None, str]:
    """The line of the first value that differs, or one that only one version has before it."""
    row, _ = sides.rows(pair)
    alone = sides.lines_alone(sides.behind(pair))
    if alone.row is not None:
        return alone.row, alone.text
    sizes = sizes_text(pair.judgment) or f"by {pair.judgment.difference:.2g}"
    return row, f"{row.words}{called_text(row)}, is the first line that differs, {sizes}"


def _first_cotangent(sides: Sides, pair: Pair) -> tuple[Row | None, str]:
    """The line that uses the value of the first cotangent that differs, in backward order."""
    cotangents = sides.of("cotangent")
    later = [p for p in cotangents[cotangents.index(pair) + 1 :] if p.judgment.is_judged]
    line = line_of_user(sides, used_by(pair, later, sides.both))
    if line.a is None or line.b is None or line.a.statement != line.b.statement:
        return line.row, line.text
    return line.a, f"{line.a.words}, is the first line that passes back another cotangent"


def _is_line(sides: Sides, pair: Pair) -> bool:
    row, _ = sides.rows(pair)
    return row.is_line and row.view != CALL
