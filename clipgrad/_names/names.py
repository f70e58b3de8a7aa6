"""The names of the values inside of a program."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from clipgrad._arrays import answers_lookups
from clipgrad._names.line_names import LineNames
from clipgrad._names.lines import Line, line_values, shown_calls
from clipgrad._names.name_patterns import (
    CLIPPED,
    VALUES,
    common_nest,
    sites_by_name,
    why_none,
)
from clipgrad._names.scopes import common_end
from clipgrad._names.sites import Sites


@answers_lookups("name")
class Name(NamedTuple):
    """A name of variables inside of a function.

    Attributes:
      name: the tag, the path of the module, or the file and the number of the line.
      kind: ``"tag"``, ``"module"`` or ``"line"``.
      shape: the shape of the largest variable, within one scan step.
      dtype: the dtype of the largest variable.
      scans: the lengths of the scans around all variables, outermost first: the leading axes of the
        statistics.
      sites: how many variables have the name; for a line, how often it runs.
      cotangent: whether cotangents can be clipped and watched. If so, all other attributes describe
        variables with cotangents. If not, you can still watch the values by `with_value_stats`.
      calls: for a line, the calls that lead there, such as ``"loss:16 > layer:8"``, or their common
        end if there are several; else "".
      variable: what the line assigns, or "".
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    scans: tuple[int, ...]
    sites: int
    cotangent: bool
    calls: str = ""
    variable: str = ""


@answers_lookups("names")
class Names(tuple[Name, ...]):
    """The names of a function, in the order of computation; `str` is a table.

    Attributes:
      reason: why there are none; "" if there are.
    """

    reason = ""

    def __str__(self) -> str:
        if not self:
            return f"no names: {self.reason}"
        heads = ("name", "kind", "calls", "variable")
        first = heads if any(name.calls for name in self) else heads[:2]
        rows = [(*first, "shape", "dtype", "scans", "sites", "cotangent")]
        for name in self:
            shape, scans = (" x ".join(map(str, n)) for n in (name.shape, name.scans))
            rest = str(name.dtype), scans, str(name.sites), "yes" if name.cotangent else "no"
            rows.append((*(getattr(name, head) for head in first), shape or "scalar", *rest))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


def names_of(program: Any, lines: bool = False) -> Names:
    """The names whose values can be watched from outside, a module after the modules inside it.

    With ``lines`` the lines come after them, in the order of computation.
    """
    there = sites_by_name(program)
    listed = _listed(there)
    names = [_name_of_sites(name, listed[name]) for name in _inner_first(listed)]
    listed = Names([*names, *(_names_of_lines(program) if lines else ())])
    listed.reason = "" if listed else why_none(there, lines)
    return listed


def _listed(there: dict[str, Sites]) -> dict[str, Sites]:
    return {n: s for n, s in there.items() if CLIPPED.lists(s) or VALUES.lists(s)}


def _names_of_lines(program: Any) -> list[Name]:
    lines = LineNames.of(program)
    calls: dict[str, list[tuple[Line, ...]]] = {}
    for value in line_values(program):
        calls.setdefault(value.line.key, []).append(value.calls)
    listed = []
    for name, sites in _listed(lines.sites).items():
        line = lines.lines[name]
        if name in lines.listed:
            shown = shown_calls(common_end(calls.get(line.key, ())) or (line,))
            record = _name_of_sites(name, sites)
            listed.append(record._replace(calls=shown, variable=line.variable))
    return listed


def _inner_first(names: Iterable[str]) -> list[str]:
    """Names in their order, but each after those inside it: some leave a module before its end."""
    last: dict[str, int] = {}
    for i, name in enumerate(names):
        segments = name.split("/")
        last |= {"/".join(segments[:depth]): i for depth in range(1, len(segments) + 1)}
    return sorted(names, key=lambda name: (last[name], -name.count("/")))


def _name_of_sites(name: str, sites: Sites) -> Name:
    target = CLIPPED if CLIPPED.lists(sites) else VALUES
    counted = target.counted(sites)
    largest = max(counted, key=lambda site: math.prod(site.shape))
    facts = largest.shape, np.dtype(largest.dtype), common_nest(counted), sum(counted.values())
    return Name(name, largest.kind, *facts, target is CLIPPED)
