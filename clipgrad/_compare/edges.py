"""The edges of a record: one walk over a program finds what each row is computed from."""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from clipgrad._compare.record import Edge
from clipgrad._names import ScopePath, custom_rule, path
from clipgrad._programs import (
    detaches,
    is_cond,
    is_scan,
    is_while,
    opened,
    scan_counts,
    value_programs,
    while_counts,
)

Carried = tuple[int, ...]  # the depths of scans, as of an edge
# The rows that a variable is computed from, each with the scans that carry it on, and whether a
# `stop_gradient` is between; and the kinds of operations on the way, as the bits of a number.
RowOrigins = dict[tuple[int, Carried, bool], int]


class Passed(NamedTuple):
    """A kind of operations on the way.

    Attributes:
      around: the numbers of operations and programs around them.
      scope: their scope.
      rule: the custom rule that they are, or "".
    """

    around: tuple[int, ...]
    scope: ScopePath
    rule: str = ""


class Walk:
    """Follows rows through a program.

    Args:
      places: the rows at each place: the numbers of the operations and programs around, of the
        operation, and of its result. Those of one array are in order.

    Attributes:
      results: what each result of the program is computed from.
      ages: of each result the length of the longest chain of operations from an input to it. A
        scan is as old as one step of it. A result that is computed from another one is older.
    """

    def __init__(
        self, program: Any, inputs: Sequence[int], places: dict[tuple, list[int]], rows: Any
    ) -> None:
        self._places, self._rows = places, rows
        self._edges: collections.Counter[tuple[int, int, Carried, bool]] = collections.Counter()
        self._numbers: dict[Passed, int] = {}
        given = [({(i, (), False): 0}, 0) for i in inputs]
        found = self._program(program, given, (), (), 0)
        self.results, self.ages = [x for x, _ in found], [age for _, age in found]

    def edges(self) -> tuple[list[Edge], list[str], list[str]]:
        """The edges, and the names of the scopes and of the custom rules that they count.

        To a row inside of another operation, the scopes outside of that do not count.
        """
        known = list(self._numbers)
        scopes: dict[str, int] = {}
        rules: dict[str, int] = {}
        found = []
        for (source, target, carried, is_stopped), bits in self._edges.items():
            inside = self._rows[target].position[:-3]
            on_the_way = [known[i] for i in range(bits.bit_length()) if bits >> i & 1]
            within = (own for own in on_the_way if own.around[: len(inside)] == inside)
            parts = {"/".join(own.scope) for own in within}, {own.rule for own in on_the_way} - {""}
            of_scopes, of_rules = (
                tuple(of.setdefault(name, len(of)) for name in sorted(names))
                for of, names in zip((scopes, rules), parts, strict=True)
            )
            found.append(Edge(source, target, carried, of_scopes, of_rules, is_stopped))
        return found, list(scopes), list(rules)

    def lead(self, own: RowOrigins, row: int) -> None:
        """Add the edges from origins to a row."""
        for (source, carried, is_stopped), scopes in own.items():
            self._edges[source, row, carried, is_stopped] |= scopes

    def _program(
        self, program: Any, given: list, around: tuple, scopes: ScopePath, depth: int
    ) -> list[tuple[RowOrigins, int]]:
        """The origins and the age of each result of a program, of those of its inputs."""
        jaxpr = opened(program)[0]
        known = dict(zip(jaxpr.invars, given, strict=True))
        of = lambda atom: ({}, 0) if type(atom) is Literal else known.get(atom, ({}, 0))  # noqa: E731
        for number, equation in enumerate(jaxpr.eqns):
            here, scope = (*around, number), (*scopes, *path(equation))
            inputs = [of(atom) for atom in equation.invars]
            if value_programs(equation):
                found = self._inside(equation, inputs, here, scope, depth)
            else:
                age = 1 + max((age for _, age in inputs), default=0)
                passed = Passed(around, scope, custom_rule(equation))
                own = self._joined([x for x, _ in inputs], passed)
                if detaches(equation):
                    own = self._stopped(own)
                found = [(own, age)] * len(equation.outvars)
            for i, (v, (own, age)) in enumerate(zip(equation.outvars, found, strict=True)):
                known[v] = self._through((*here, i), own), age
        return [of(atom) for atom in jaxpr.outvars]

    def _through(self, place: tuple, own: RowOrigins) -> RowOrigins:
        """The origins of what goes on from a place: the last of the rows there, if any."""
        for row in self._places.get(place, ()):
            self.lead(own, row)
            own = {(row, (), False): 0}
        return own

    def _stopped(self, own: RowOrigins) -> RowOrigins:
        found: RowOrigins = {}
        for (source, carried, _), scopes in own.items():
            found[source, carried, True] = found.get((source, carried, True), 0) | scopes
        return found

    def _joined(self, parts: Sequence[RowOrigins], passed: Passed | None = None) -> RowOrigins:
        """All origins of what an operation computes."""
        bit = 0 if passed is None else 1 << self._numbers.setdefault(passed, len(self._numbers))
        found: RowOrigins = {}
        for own in parts:
            for key, scopes in own.items():
                found[key] = found.get(key, 0) | scopes | bit
        return found

    def _inside(
        self, equation: Any, inputs: list, here: tuple, scope: ScopePath, depth: int
    ) -> list[tuple[RowOrigins, int]]:
        programs = value_programs(equation)
        if is_cond(equation):
            branches = [
                self._program(p, inputs[1:], (*here, i), scope, depth)
                for i, p in enumerate(programs)
            ]
            chosen = self._joined([inputs[0][0]], Passed(here[:-1], scope))
            return [self._both([(chosen, inputs[0][1] + 1), *own]) for own in zip(*branches)]  # noqa: B905
        if is_scan(equation):
            return self._scan(equation, inputs, (*here, 0), scope, depth)
        if is_while(equation):
            first, constants = while_counts(equation)
            start = inputs[first:]
            carried = len(start) - constants
            ends = self._looped(programs[0], start, constants, carried, (*here, 0), scope, depth)
            return [self._both(pair) for pair in zip(start[constants:], ends, strict=True)]
        given = inputs[len(inputs) - len(opened(programs[0])[0].invars) :]
        return self._program(programs[0], given, (*here, 0), scope, depth)

    def _both(self, pairs: Any) -> tuple[RowOrigins, int]:
        return self._joined([own for own, _ in pairs]), max(age for _, age in pairs)

    def _scan(
        self, equation: Any, inputs: list, inside: tuple, scope: ScopePath, depth: int
    ) -> list[tuple[RowOrigins, int]]:
        """The results of a scan: what its last step carries on, and what all steps return."""
        constants, carried = scan_counts(equation)
        (body,) = value_programs(equation)
        found = self._looped(body, inputs, constants, carried, inside, scope, depth + 1, depth)
        results = []
        for i, (own, age) in enumerate(found):
            most = carried if i < carried else 0
            results.append((self._carried(own, inside, depth, most), age))
        return results

    def _looped(
        self, body: Any, given: list, constants: int, carried: int, inside: tuple, scope: ScopePath,
        depth: int, crossed: int | None = None,
    ) -> list[tuple[RowOrigins, int]]:  # fmt: skip
        """The results of the body of a loop, in whose steps nothing new is carried on any more."""
        first, count = given[constants : constants + carried], len(opened(body)[0].eqns)
        carry, known, found = first, None, []
        while carry != known:
            known = carry
            every = [*given[:constants], *carry, *given[constants + carried :]]
            found = self._program(body, every, inside, scope, depth)
            for i, (own, age) in enumerate(found[:carried]):
                found[i] = self._through((*inside, count, i), own), age
            later = [
                (own if crossed is None else self._carried(own, inside, crossed, carried), age)
                for (own, _), (_, age) in zip(found[:carried], first, strict=True)
            ]
            carry = [self._both(pair) for pair in zip(first, later, strict=True)]
        return found

    def _carried(self, own: RowOrigins, inside: tuple, depth: int, most: int) -> RowOrigins:
        """The origins of what a step of a scan carries on, or of what it returns at each step.

        From one of as many places as it carries to another what is handed on comes back to none
        after ``most`` steps; if it is returned at each step, that is 0.
        """
        found: RowOrigins = {}
        for (source, depths, is_stopped), scopes in own.items():
            if self._rows[source].position[: len(inside)] == inside:
                if depths.count(depth) < most:
                    depths = tuple(sorted((*depths, depth)))
                elif not most:
                    depths = tuple(d for d in depths if d != depth)
            key = source, depths, is_stopped
            found[key] = found.get(key, 0) | scopes
        return found
