"""The edges of a record: one walk over a program finds what each row is computed from."""

import collections
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from clipgrad._compare.record import Edge
from clipgrad._names import ScopePath, path
from clipgrad._programs import (
    is_cond,
    is_scan,
    is_while,
    opened,
    scan_counts,
    value_programs,
    while_counts,
)

Carried = frozenset[int]  # the depths of scans, as of an edge
# The rows that a variable is computed from, each with the scans that carry it on; and the scopes of
# the operations on the way, as the bits of a number.
RowOrigins = dict[tuple[int, Carried], int]


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
        self._edges: collections.Counter[tuple[int, int, Carried]] = collections.Counter()
        # Of each scope in a program: the numbers of operations and programs around that.
        self._numbers: dict[tuple[tuple, ScopePath], int] = {}
        given = [({(i, frozenset()): 0}, 0) for i in inputs]
        found = self._program(program, given, (), (), 0)
        self.results, self.ages = [x for x, _ in found], [age for _, age in found]

    def edges(self) -> tuple[list[Edge], list[str]]:
        """The edges, and the names of the scopes that they count.

        To a row inside of another operation, those of the operations outside of that do not count.
        """
        known = [(around, "/".join(scope)) for around, scope in self._numbers]
        names: dict[str, int] = {}
        found = []
        for (source, target, carried), bits in self._edges.items():
            inside = self._rows[target].position[:-3]
            on_the_way = (known[i] for i in range(bits.bit_length()) if bits >> i & 1)
            within = {name for around, name in on_the_way if around[: len(inside)] == inside}
            scopes = tuple(names.setdefault(name, len(names)) for name in sorted(within))
            found.append(Edge(source, target, tuple(sorted(carried)), scopes))
        return found, list(names)

    def lead(self, own: RowOrigins, row: int) -> None:
        """Add the edges from origins to a row."""
        for (source, carried), scopes in own.items():
            self._edges[source, row, carried] |= scopes

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
                own = self._joined([x for x, _ in inputs], (around, scope))
                found = [(own, age)] * len(equation.outvars)
            for i, (v, (own, age)) in enumerate(zip(equation.outvars, found, strict=True)):
                known[v] = self._through((*here, i), own), age
        return [of(atom) for atom in jaxpr.outvars]

    def _through(self, place: tuple, own: RowOrigins) -> RowOrigins:
        """The origins of what goes on from a place: the last of the rows there, if any."""
        for row in self._places.get(place, ()):
            self.lead(own, row)
            own = {(row, frozenset()): 0}
        return own

    def _joined(self, parts: Sequence[RowOrigins], scope: Any = None) -> RowOrigins:
        """All origins of what an operation of a scope, in a program, computes."""
        bit = 0 if scope is None else 1 << self._numbers.setdefault(scope, len(self._numbers))
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
            chosen = self._joined([inputs[0][0]], (here[:-1], scope))
            return [self._both([(chosen, inputs[0][1] + 1), *own]) for own in zip(*branches)]  # noqa: B905
        if is_scan(equation):
            return self._scan(equation, inputs, (*here, 0), scope, depth)
        if is_while(equation):
            first, constants = while_counts(equation)
            start = inputs[first:]
            carried = len(start) - constants
            ends = self._twice(programs[0], start, constants, carried, (*here, 0), scope, depth)
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
        found = self._twice(body, inputs, constants, carried, inside, scope, depth + 1, depth)
        return [
            (self._carried(own, inside, depth, i < carried), age)
            for i, (own, age) in enumerate(found)
        ]

    def _twice(
        self, body: Any, given: list, constants: int, carried: int, inside: tuple, scope: ScopePath,
        depth: int, crossed: int | None = None,
    ) -> list[tuple[RowOrigins, int]]:  # fmt: skip
        """The results of the body of a loop: what a step carries on is known in the next one."""
        first, count = given[constants : constants + carried], len(opened(body)[0].eqns)
        carry, found = first, []
        for _ in range(2):
            every = [*given[:constants], *carry, *given[constants + carried :]]
            found = self._program(body, every, inside, scope, depth)
            for i, (own, age) in enumerate(found[:carried]):
                found[i] = self._through((*inside, count, i), own), age
            later = [
                (own if crossed is None else self._carried(own, inside, crossed), first[i][1])
                for i, (own, _) in enumerate(found[:carried])
            ]
            carry = [self._both(pair) for pair in zip(first, later, strict=True)]
        return found

    def _carried(
        self, own: RowOrigins, inside: tuple, depth: int, is_carried: bool = True
    ) -> RowOrigins:
        """The origins of what a step of a scan carries on, or of what it returns at each step."""
        found: RowOrigins = {}
        for (source, depths), scopes in own.items():
            is_inside = self._rows[source].position[: len(inside)] == inside
            key = source, depths | {depth} if is_inside and is_carried else depths - {depth}
            found[key] = found.get(key, 0) | scopes
        return found
