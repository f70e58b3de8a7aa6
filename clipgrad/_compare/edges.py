"""The edges of a record: one walk over a program finds what each row is computed from."""

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from clipgrad._compare.record import Edge
from clipgrad._names import ScopePath, custom_rule, path
from clipgrad._programs import (
    Chain,
    called_program,
    detaches,
    flow,
    is_cond,
    is_move,
    is_scan,
    opened,
    scan_counts,
    value_programs,
)

Carried = tuple[int, ...]  # the depths of scans, as of an edge
# The rows that a variable is computed from, each with the scans that carry it on, and whether a
# `stop_gradient` is between; and the kinds of operations on the way, as the bits of a number.
RowOrigins = dict[tuple[int, Carried, bool], int]


class Known(NamedTuple):
    """What is known of a value: its origins, and its age, see `Walk`."""

    origins: RowOrigins
    age: int


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
    """Follows through a program from which rows each value is computed.

    Args:
      program: the program.
      inputs: the numbers of the rows of its inputs.
      places: the numbers of the rows at each place, those of one array in order. A place has the
        numbers of the operations and programs around, of the operation, and of its result.
      rows: the rows of the record.

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
        self._scopes: dict[tuple, ScopePath] = {}
        arguments = [Known({(i, (), False): 0}, 0) for i in inputs]
        known = flow(program, arguments, self._step, _joined, value_programs, carry=self._carry)
        self.results, self.ages = [value.origins for value in known], [value.age for value in known]

    def edges(self) -> tuple[list[Edge], list[str], list[str]]:
        """The edges, and the names of the scopes and of the custom rules that they number.

        An edge to a row inside of a scan or a branch has only the scopes inside of that.
        """
        known = list(self._numbers)
        scopes: dict[str, int] = {}
        rules: dict[str, int] = {}
        edges = []
        for (source, target, carried, is_stopped), bits in self._edges.items():
            inside = self._rows[target].position[:-3]
            on_the_way = [known[i] for i in range(bits.bit_length()) if bits >> i & 1]
            within = (x for x in on_the_way if x.around[: len(inside)] == inside)
            parts = {"/".join(x.scope) for x in within}, {x.rule for x in on_the_way} - {""}
            of_scopes, of_rules = (
                tuple(of.setdefault(name, len(of)) for name in sorted(names))
                for of, names in zip((scopes, rules), parts, strict=True)
            )
            edges.append(Edge(source, target, carried, of_scopes, of_rules, is_stopped))
        return edges, list(scopes), list(rules)

    def lead(self, origins: RowOrigins, row: int) -> None:
        """Add the edges from origins to a row."""
        for (source, carried, is_stopped), scopes in origins.items():
            self._edges[source, row, carried, is_stopped] |= scopes

    def _step(self, chain: Chain, operands: list[Known], inside: Callable) -> list[Known]:
        """The origins and the age of each result of an operation."""
        equation, scope = chain[0], self._scope(chain)
        if value_programs(equation):
            results = inside()
            if is_cond(equation):
                results = self._chosen(operands[0], results, Passed(chain.position[:-1], scope))
            if is_scan(equation):
                results = [self._end_of_step(chain, i, value) for i, value in enumerate(results)]
        else:
            around = chain.position[:-1]
            origins, age = _joined(*operands)
            if not (is_move(equation) and self._are_arguments(origins)):
                origins = self._passed(origins, Passed(around, scope, custom_rule(equation)))
            if detaches(equation):
                origins = _stopped(origins)
            results = [Known(origins, age + 1)] * len(equation.outvars)
        here = chain.position
        return [Known(self._through((*here, i), value.origins), value.age)
                for i, value in enumerate(results)]  # fmt: skip

    def _scope(self, chain: Chain) -> ScopePath:
        """The scopes around an operation, within those around its program."""
        if chain.position not in self._scopes:
            paths = (path(equation) for equation in reversed(chain))
            self._scopes[chain.position] = tuple(itertools.chain.from_iterable(paths))
        return self._scopes[chain.position]

    def _chosen(self, index: Known, results: list[Known], passed: Passed) -> list[Known]:
        """The results of branches, which are computed from what chooses between them, too."""
        choice = Known(self._passed(index.origins, passed), index.age + 1)
        return [_joined(choice, result) for result in results]

    def _carry(self, loop: Chain, number: int, value: Known) -> Known:
        """What the next step of a loop begins with; a scan is as old as one step of it."""
        end = self._end_of_step(loop, number, value) if is_scan(loop[0]) else value
        return Known(end.origins, 0)

    def _end_of_step(self, scan: Chain, number: int, value: Known) -> Known:
        """A result of a step of a scan as the next step has it, or as all steps return it."""
        carried, inside = scan_counts(scan[0])[1], (*scan.position, 0)
        count, depth = len(opened(called_program(scan[0]))[0].eqns), sum(map(is_scan, scan[1:]))
        if number >= carried:
            return value._replace(origins=self._carried(value.origins, inside, depth, 0))
        origins = self._through((*inside, count, number), value.origins)
        return value._replace(origins=self._carried(origins, inside, depth, carried))

    def _through(self, place: tuple, origins: RowOrigins) -> RowOrigins:
        """The origins of what goes on from a place: the last of the rows there, if any."""
        for row in self._places.get(place, ()):
            self.lead(origins, row)
            origins = {(row, (), False): 0}
        return origins

    def _are_arguments(self, origins: RowOrigins) -> bool:
        """Whether a value is an argument, such as the weight of a layer out of a stack of layers.

        To take it out, or to cast it, belongs to the module that uses it.
        """
        rows = self._rows
        return all(not on and rows[i].kind == "argument" for (i, *_), on in origins.items())

    def _passed(self, origins: RowOrigins, passed: Passed) -> RowOrigins:
        """The origins of what an operation computes of values with these origins."""
        bit = 1 << self._numbers.setdefault(passed, len(self._numbers))
        return {key: kinds | bit for key, kinds in origins.items()}

    def _carried(self, origins: RowOrigins, inside: tuple, depth: int, most: int) -> RowOrigins:
        """The origins of what a step of a scan carries on, or of what it returns at each step.

        A scan hands on as many values as it carries, so that after ``most`` steps each has been
        everywhere, and no further step counts. Of what is returned at each step, ``most`` is 0.
        """
        carried: RowOrigins = {}
        for (source, depths, is_stopped), scopes in origins.items():
            if self._rows[source].position[: len(inside)] == inside:
                if depths.count(depth) < most:
                    depths = tuple(sorted((*depths, depth)))
                elif not most:
                    depths = tuple(d for d in depths if d != depth)
            key = source, depths, is_stopped
            carried[key] = carried.get(key, 0) | scopes
        return carried


def _joined(*known: Known) -> Known:
    """What is known of a value that is one of several, or computed from all."""
    origins: RowOrigins = {}
    for each, _ in known:
        for key, kinds in each.items():
            origins[key] = origins.get(key, 0) | kinds
    return Known(origins, max((age for _, age in known), default=0))


def _stopped(origins: RowOrigins) -> RowOrigins:
    """The origins of a value behind a `stop_gradient`."""
    stopped: RowOrigins = {}
    for (source, carried, _), kinds in origins.items():
        stopped[source, carried, True] = stopped.get((source, carried, True), 0) | kinds
    return stopped
