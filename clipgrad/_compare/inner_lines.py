"""The line, inside of the first module that differs, at which two versions first differ.

Where values have names, lines are not recorded: there may be many. Once a module is known to
differ, its lines alone are recorded in one more run of each version, forward alone if values
differ. What rounding does to them is not measured: a line differs if it is about as far apart as
the module, not as rounding.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from clipgrad._compare.findings import called_text, line_of_user
from clipgrad._compare.match_by_name import match_by_name
from clipgrad._compare.pairs import Pair
from clipgrad._compare.record import Record
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
    if number is None or sides.has_lines:
        return verdict
    finding = verdict.findings[number]
    if (text := _text(finding, sides, versions, names)) is None:
        return verdict
    findings = list(verdict.findings)
    findings[number] = dataclasses.replace(finding, message=f"{finding.message}; inside, {text}")
    return verdict._replace(findings=findings)


def _text(
    finding: ComparisonFinding,
    sides: Sides,
    versions: Sequence[Record | Recording],
    names: Mapping[str, str] | None,
) -> str | None:
    """What to say of the first line that differs; None where there is nothing to say."""
    records = []
    for version in versions:
        if not isinstance(version, Recording):
            return None
        scopes = _scopes_in(version.record, finding.module or "")
        recording = version.with_lines(scopes, with_gradients=finding.kind != "value")
        if not recording.has_lines:
            return None
        records.append(recording)
    a, b = (recording.run() for recording in records)
    lines = Sides(a, b, match_by_name(a, b, names, _between(sides, finding.kind)))
    return _first_line(lines, finding)


def _scopes_in(record: Record, module: str) -> set[str]:
    """The scopes inside of a module; outside of modules it is only what is in none."""
    start = f"{module}/" if module else "/"
    return {scope for scope in record.scopes if f"{scope}/".startswith(start)}


def _between(sides: Sides, kind: str) -> float:
    """A tolerance between what rounding explains of the first difference and the difference."""
    pairs = [p for p in sides.of(_KINDS[kind]) if p.judgment.differs] or sides.of("output")
    judgment = pairs[0 if kind == "value" else -1].judgment
    return math.sqrt(min(judgment.difference, 1.0) * min(judgment.tolerance, 1.0))


def _first_line(sides: Sides, finding: ComparisonFinding) -> str | None:
    bad = [p for p in sides.of(_KINDS[finding.kind]) if p.judgment.differs and _is_line(sides, p)]
    if not bad:
        return None
    if finding.kind == "value":
        row, _ = sides.rows(bad[0])
        alone = sides.lines_alone(sides.behind(bad[0]))
        told = alone.row or row
        text = alone.text or f"{row.words} differs first, by {bad[0].judgment.difference:.2g}"
        text += "" if alone.text else called_text(row)
    else:
        cotangents = sides.of("cotangent")
        later = [p for p in cotangents[cotangents.index(bad[-1]) + 1 :] if p.judgment.is_judged]
        line = line_of_user(sides, used_by(bad[-1], later, sides.both))
        told, text = line.row, line.text
    is_said = told is None or told.line == f"{finding.file}:{finding.line}"
    return None if is_said else text


def _is_line(sides: Sides, pair: Pair) -> bool:
    row, _ = sides.rows(pair)
    return row.is_line and row.view != CALL
