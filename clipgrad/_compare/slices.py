"""Slices of a record: the edges between a row and the rows around it that agree."""

import functools
import math
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from clipgrad._compare.pairs import Pair
from clipgrad._compare.record import Edge, Graph, Instance
from clipgrad._names import common_start

Step = tuple[Edge, Instance, Instance]  # an edge, from where and to where it was followed


class Slice(NamedTuple):
    """The edges between an instance and those that end the slice, in one record."""

    graph: Graph
    steps: list[Step]

    @property
    def scopes(self) -> list[str]:
        names = self.graph.record.scopes
        return [names[i] for edge, *_ in self.steps for i in edge.scopes]

    @property
    def rules(self) -> list[str]:
        """The custom rules among the operations, each once."""
        names = self.graph.record.rules
        return list(dict.fromkeys(names[i] for edge, *_ in self.steps for i in edge.rules))

    @property
    def differentiated(self) -> set[Instance]:
        """The instances from which a cotangent comes back to the first one."""
        ways = [(at, to) for edge, at, to in self.steps if not edge.is_stopped]
        reached = {at for _, at, _ in self.steps[:1]}
        while more := {to for at, to in ways if at in reached} - reached:
            reached |= more
        return reached


def module_of(slices: Sequence[Slice]) -> str | None:
    """The common module of the operations; None if there are none."""
    scopes = [scope for part in slices for scope in part.scopes]
    if not scopes:
        return None
    return "/".join(common_start(name.split("/") if name else () for name in scopes))


def made_from(
    pair: Pair, agreeing: Sequence[Pair], graphs: Sequence[Graph], with_all: bool = False
) -> list[Slice]:
    """The operations behind a pair, up to the values that agree, in each record.

    Operations that compute something from arguments alone, such as a cast of a weight, are left out
    if there are others, unless ``with_all``. A row without a partner does not end the slice.
    """
    slices = []
    for side, graph in enumerate(graphs):
        ends = {graph.node(p.at(side)) for p in agreeing}
        start = graph.node(pair.at(side))
        inside = graph.record.rows[start[0]].position[:-3]
        every = _walked(start, ends, functools.partial(_inside_before, graph, inside))
        fed = {at for _, at, to in every if to in ends}
        while more := {at for _, at, to in every if to in fed} - fed:
            fed |= more
        kept = [step for step in every if step[2] in ends or step[2] in fed]
        slices.append(Slice(graph, every if with_all else kept or every))
    return slices


def _inside_before(graph: Graph, inside: tuple, at: Instance) -> list[tuple[Edge, Instance]]:
    """The instances that one is computed from; none of one outside of a program."""
    is_inside = graph.record.rows[at[0]].position[: len(inside)] == inside
    return graph.before(at) if is_inside else []


def used_by(pair: Pair, later: Sequence[Pair], graphs: Sequence[Graph]) -> list[Slice]:
    """The operations that use a pair, up to the values that agree, in each record.

    The uses at the same step if there are any, or else in the nearest later one, or else behind the
    scan.
    """
    slices = []
    for side, graph in enumerate(graphs):
        ends = {graph.node(p.at(side)) for p in later}
        nearest = functools.partial(_nearest, graph)
        slices.append(Slice(graph, _walked(graph.node(pair.at(side)), ends, graph.after, nearest)))
    return slices


def descends(graph: Graph, start: Instance, ends: Set[Instance]) -> bool:
    """Whether one of some instances is computed from another."""
    return bool(next_of(graph, start, ends))


def next_of(graph: Graph, start: Instance, ends: Set[Instance]) -> set[Instance]:
    """Those of some instances that are computed from another without one of them between."""
    return {to for _, _, to in _walked(start, ends, graph.after) if to in ends}


def _walked(
    start: Instance,
    ends: Set[Instance],
    follow: Callable[[Instance], list[tuple[Edge, Instance]]],
    chosen: Callable[[list], list] = lambda steps: steps,
) -> list[Step]:
    steps, seen, todo = [], {start}, [start]
    while todo:
        at = todo.pop(0)
        for edge, to in chosen(follow(at)) if at == start else follow(at):
            steps.append((edge, at, to))
            if to not in ends and to not in seen:
                seen.add(to)
                todo.append(to)
    return steps


def _nearest(graph: Graph, steps: list[tuple[Edge, Instance]]) -> list[tuple[Edge, Instance]]:
    """The uses at the same step, or else in the nearest later one, or else behind the scan."""
    far = [_distance(graph, edge) for edge, _ in steps]
    return [step for step, distance in zip(steps, far, strict=True) if distance == min(far)]


def _distance(graph: Graph, edge: Edge) -> float:
    """The number of steps from one end to the other; infinite behind a scan."""
    shared = graph.shared(edge)
    return max((edge.carried.count(d) if d < shared else math.inf for d in edge.carried), default=0)
