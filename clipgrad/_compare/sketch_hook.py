"""The hook that sketches each named value of a program, and its cotangent."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Self

import jax
from jax import lax
from jax.extend.core import Literal

from clipgrad._compare.record import ENTERS
from clipgrad._compare.sketches import sketch, tapped, tapped_whole
from clipgrad._names import (
    DEPTH,
    LineKeys,
    LineNames,
    LineValue,
    Place,
    Seen,
    line_values,
    module_entries,
    path,
    placed_equations,
)
from clipgrad._programs import (
    Part,
    ProgramValues,
    called_program,
    equations,
    holds_floats,
    is_scan,
    opened,
    scan_counts,
    value_programs,
)
from clipgrad._values import NamedValue, NotedValues, ValueHook, named_values, value_hook


@value_hook(data=(), choices=("carried", "sketched"))
class Sketches(ValueHook):
    """Notes the sketch of each value, and of its cotangent where it has a tap.

    What a scan carries from step to step has the name of the scan; see `carried_values`.

    Attributes:
      carried: how many results of the program a scan carries to its next step.
      sketched: whether sketches are noted, or values and cotangents themselves.
    """

    carried: int = 0
    sketched: bool = True

    def value(self, seen: Seen, x: Any) -> Any:
        """What the program goes on with; a line that calls others has the numbers of theirs."""
        return x if seen.position[-1] < DEPTH else super().value(seen, x)

    def note_of(self, seen: Seen, x: jax.Array) -> jax.Array:
        """The sketch, or the value."""
        del seen
        x = lax.stop_gradient(x)
        return sketch(x) if self.sketched else x

    def replaced(self, seen: Seen, x: jax.Array, tap: Any) -> jax.Array:
        """The value, with its tap."""
        del seen
        if tap is None:
            return x
        return tapped(x, tap) if self.sketched else tapped_whole(x, tap)

    def values(self, jaxpr: Any) -> ProgramValues:
        """The values of the program; a scan's are replaced when its step is over, too."""
        super().values(jaxpr)
        return _SketchedValues(self)

    def inside(self, equation: Any, part: Part) -> Self:
        """The hook for a program inside of an equation."""
        count = scan_counts(equation)[1] if is_scan(equation) else 0
        return dataclasses.replace(super().inside(equation, part), carried=count)

    def has_names_inside(self, equation: Any) -> bool:
        """Whether there are values to see in the programs of an equation."""
        inner = [e for program in value_programs(equation) for e in equations(program)]
        scans = any(map(is_scan, (equation, *inner)))
        entered = any(map(_has_entries, value_programs(equation)))
        return scans or entered or super().has_names_inside(equation)


class _SketchedValues(NotedValues):
    """The values of a program, or of a step of a scan."""

    def replaced(self, equation: Any, outputs: list) -> list:
        """The results of an equation; what enters a module is replaced, too."""
        outputs = super().replaced(equation, outputs)
        for i, variable in enumerate(equation.outvars):
            if scopes := module_entries(self.visit.jaxpr).get(variable):
                outputs[i] = self.see(self.hook.name(scopes), ENTERS, i, -1, outputs[i])
        return outputs

    def outputs(self, jaxpr: Any) -> list:
        """The results of the program; what a scan carries is seen at the end of its step."""
        results, inputs = super().outputs(jaxpr), set(jaxpr.invars)
        self.visit.number += 1
        for i, v in enumerate(jaxpr.outvars[: self.hook.carried]):
            if type(v) is not Literal and v not in inputs:
                seen = Seen(self.hook.name(()), "module", (self.visit.number, i, 0), v)
                results[i] = self.hook.value(seen, results[i])
        return results


def _has_entries(program: Any) -> bool:
    """Whether a value enters a module in a program, or in one inside of it."""
    jaxpr = opened(program)[0]
    inner = (p for equation in jaxpr.eqns for p in value_programs(equation))
    return bool(module_entries(jaxpr)) or any(map(_has_entries, inner))


def entering_values(program: Any) -> Iterator[NamedValue]:
    """The floating values that enter modules, and leave none; they have the names of these."""
    for numbers, place, jaxpr, scopes in placed_equations(program, value_programs):
        for i, v in enumerate(place.equation.outvars):
            entered = module_entries(jaxpr).get(v)
            if entered and holds_floats(v):
                name = "/".join((*scopes, *entered))
                yield NamedValue((*numbers, i, -1), name, ENTERS, place, v)


def carried_values(program: Any) -> Iterator[NamedValue]:
    """The floating values that scans carry from step to step, as `Sketches` sees them.

    Each has the name of its scan, "" outside of modules, and is last in its step.
    """
    for numbers, place, _, scopes in placed_equations(program, value_programs):
        equation = place.equation
        if not is_scan(equation):
            continue
        inside = (*scopes, *path(equation))
        body = opened(called_program(equation))[0]
        makers = {v: e for e in body.eqns for v in e.outvars}
        for i, v in enumerate(body.outvars[: scan_counts(equation)[1]]):
            if type(v) is not Literal and v in makers and holds_floats(v):
                position = (*numbers, 0, len(body.eqns), i, 0)
                at = Place(makers[v], place)
                yield NamedValue(position, "/".join(inside), "module", at, v)


def seen_values(program: Any) -> list[NamedValue]:
    """The values with names that `Sketches` sees; those of one array are `in_order`.

    What a scan returns is what its last step carries on, and is left out.
    """
    carried = list(carried_values(program))
    ends = {(v.position[:-4], v.position[-2], v.name) for v in carried}
    named = [
        v for v in named_values(program) if (v.position[:-2], v.position[-2], v.name) not in ends
    ]
    return in_order((*named, *carried, *entering_values(program)))


def note_key(position: tuple[int, ...]) -> tuple[int, ...]:
    """The key of the note of a value; all lines of one array have the key of the innermost."""
    return (*position[:-1], max(position[-1], DEPTH))


def in_order(values: Iterable[NamedValue]) -> list[NamedValue]:
    """The values; those of one array are in the order of `Row.time`."""
    return sorted(values, key=lambda v: (v.kind != "tag", -v.position[-1]))


def values_of_lines(
    program: Any, scopes: Collection[str] | None = None
) -> tuple[LineKeys, list[tuple[NamedValue, LineValue]]]:
    """The lines of a program, as `Sketches` takes them, and the values that it sees then.

    All lines, or those of which a value is computed in one of some scopes.
    """
    names, values = LineNames.of(program), list(line_values(program))
    keys = {v.line.key for v in values if scopes is None or v.place.module in scopes}
    by_key = {line.key: name for name, line in names.lines.items() if line.key in keys}
    chosen = [v for v in values if v.line.key in by_key]
    noted = {v.position for v in chosen}
    return names.keys(dict.fromkeys(by_key.values())), [
        (NamedValue(v.position, by_key[v.line.key], v.kind, v.place, v.variable), v)
        for v in chosen
        if note_key(v.position) in noted  # a line within it may be in no such scope
    ]
