"""The lines of a program by name, and those that a pattern means."""

import linecache
from collections.abc import Mapping
from typing import Any, NamedTuple

from clipgrad._arrays import without_sign
from clipgrad._errors import first_few
from clipgrad._names.lines import (
    BACKWARD,
    LINE,
    Line,
    is_line_pattern,
    lines_inside,
    lines_matched,
    lines_of_file,
    names_of_lines,
    nearest_lines,
)
from clipgrad._names.sites import Sites, line_sites

# The key of each line that is chosen, and its name: what hooks know of lines.
LineKeys = tuple[tuple[str, str], ...]


class LineNames(NamedTuple):
    """The lines of a program by name, in the order of computation.

    Attributes:
      sites: of each name; their kind is ``LINE``.
      lines: the line of each name.
      listed: the names of lines that compute a value themselves, not by a call alone.
    """

    sites: dict[str, Sites]
    lines: dict[str, Line]
    listed: frozenset[str]

    @classmethod
    def of(cls, program: Any) -> "LineNames":
        """The lines of a program and of those inside of it."""
        by_key = {line.key: line for line in lines_inside(program)}
        names = names_of_lines(by_key.values())
        by_name: dict[str, Sites] = {}
        of_lines = [pair for pair in line_sites(program).items() if pair[0].kind != BACKWARD]
        for site, count in of_lines:
            same = by_name.setdefault(names[site.name], {})
            renamed = site._replace(name=names[site.name], kind=LINE)
            same[renamed] = same.get(renamed, 0) + count
        listed = {names[site.name] for site, _ in of_lines if site.kind == LINE}
        lines = {names[key]: line for key, line in by_key.items()}
        return cls(by_name, lines, frozenset(listed))

    def keys(self, names: Mapping[str, Any]) -> LineKeys:
        """Those of the lines that are among some names."""
        return tuple((self.lines[name].key, name) for name in names if name in self.lines)

    def meant(self, pattern: str, caller: str) -> dict[str, Sites]:
        """The lines that a pattern means; a star is for lines that compute a value themselves."""
        text = str(without_sign(pattern))
        keys = {line.key for line in lines_matched(text, list(self.lines.values()))}
        chosen = {
            name: sites
            for name, sites in self.sites.items()
            if self.lines[name].key in keys and ("*" not in text or name in self.listed)
        }
        if not chosen:
            raise self._missing(text, caller)
        return chosen

    def _missing(self, pattern: str, caller: str) -> ValueError:
        """The error for a pattern that means no line."""
        lines = [self.lines[name] for name in self.lines if name in self.listed]
        names = {line.key: name for name, line in self.lines.items()}
        near = [f"{names[line.key]} ({_shown(line)})" for line in nearest_lines(pattern, lines)]
        file = pattern.rpartition(":")[0]
        which = "nearest" if lines_of_file(file, lines) else "first"
        there = f"the {which} lines are {first_few(near, len(near))}" if near else "there are none"
        return ValueError(
            f"{caller}: got {pattern!r}, expected a line of this function that computes a floating "
            f"value; {there}; list_names(fun, args, lines=True) lists all"
        )


NO_LINES = LineNames({}, {}, frozenset())


def keys_of_lines(program: Any) -> LineKeys:
    """All lines of a program that compute a value, each with its name."""
    lines = LineNames.of(program)
    return lines.keys(dict.fromkeys(lines.listed))


def asked_lines(program: Any, names: Mapping[Any, Any], others: Mapping[str, Any]) -> LineNames:
    """The lines of a program if a pattern means lines and is no other name; else none."""
    is_asked = any(is_line_pattern(name) and name not in others for name in names)
    return LineNames.of(program) if is_asked else NO_LINES


def _shown(line: Line) -> str:
    """What a line assigns, or its text, or its function."""
    text = linecache.getline(line.file, line.number).strip()
    return f"{line.variable} in {line.function}" if line.variable else text or line.function
