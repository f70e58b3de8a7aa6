"""A program as a tree: the programs inside of its equations, as far as derivatives go into them."""

import functools
from collections.abc import Iterator
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._diagnose.probe import STATE, Site
from clipgrad._jaxpr import (
    chooses_by_platform,
    device_count,
    differentiated_programs,
    holds_floats,
    opened,
    scan_counts,
)
from clipgrad._names import Place


class Block:
    """The programs inside of an equation, or the outermost program.

    Attributes:
      parent: the place of the equation that holds the programs.
      outside: the block that this equation is in.
      programs: the jaxprs: of a cond one for each branch.
      equations: those of all programs.
      children: the blocks inside, of the same class, by the id of their equation.
      states: what a scan carries, as variables of its body.
      outer: for each other input the variable around the block that it is.
      count: how many equations there are, inside of others too.
    """

    def __init__(self, programs: list[Any], parent: Place | None = None, outside: Any = None):
        self.parent, self.outside = parent, outside
        self.programs = [opened(program)[0] for program in programs]
        self.equations = [equation for program in self.programs for equation in program.eqns]
        self.children = {
            id(e): type(self)(inner, Place(e, parent), self)
            for e in self.equations
            if (inner := differentiated_programs(e)) and not chooses_by_platform(e)
        }
        self.count = len(self.equations) + sum(child.count for child in self.children.values())
        self.states, self.outer = _inputs(parent and parent.equation, self.programs)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The scans and the `shard_map`s around its equations, with their lengths."""
        if self.parent is None or self.outside is None:
            return ()
        equation = self.parent.equation
        name = equation.primitive.name
        lengths = {"scan": lambda: equation.params["length"]}
        lengths["shard_map"] = lambda: device_count(equation)
        return self.outside.axes + (((name, lengths[name]()),) if name in lengths else ())

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of `axes`."""
        return tuple(length for _, length in self.axes)

    @property
    def nest(self) -> tuple[int, ...]:
        """The lengths of the scans around its equations, outermost first."""
        return tuple(length for name, length in self.axes if name == "scan")

    @property
    def has_loops(self) -> bool:
        """Whether there is a scan inside."""
        loops = any(e.primitive.name == "scan" for e in self.equations)
        return loops or any(child.has_loops for child in self.children.values())

    def site(self, kind: str, equation: JaxprEqn, position: int) -> Site:
        """A result or an operand of one of its equations."""
        return Site(kind, Place(equation, self.parent).key, position)

    @functools.cached_property
    def carried(self) -> dict[Var, Site]:
        """The floating numbers that a scan carries, and where their cotangents are measured."""
        key = self.parent.key if self.parent else ()
        sites = {v: Site(STATE, key, i) for i, v in enumerate(self.states)}
        return {v: site for v, site in sites.items() if holds_floats(v)}

    def origin(self, variable: Any) -> Any:
        """The variable of the outermost program that a variable is, or the variable itself."""
        block: Any = self
        while type(variable) is not Literal and variable in block.outer:
            block, variable = block.outside, block.outer[variable]
        return None if type(variable) is Literal else variable

    def all_equations(self) -> Iterator[tuple[Any, JaxprEqn]]:
        """The equations of this block and of all blocks inside, but for those that hold these."""
        for equation in self.equations:
            if inner := self.children.get(id(equation)):
                yield from inner.all_equations()
            else:
                yield self, equation


def _inputs(equation: JaxprEqn | None, programs: list[Any]) -> tuple[list[Var], dict[Var, Any]]:
    """The states of a scan, and the variables around an equation that its programs read."""
    if equation is None:
        return [], {}
    around = equation.invars[1:] if equation.primitive.name == "cond" else equation.invars
    constants, carried = scan_counts(equation) if equation.primitive.name == "scan" else (0, 0)
    states = [v for p in programs for v in p.invars[constants : constants + carried]]
    pairs = [pair for p in programs for pair in zip(p.invars, around, strict=True)]
    return states, {inner: v for inner, v in pairs if inner not in set(states)}
