"""A program in parts: runs of equations of one module, with the programs inside of them.

Programs inside are parts as far as derivatives go into them.
"""

import functools
from collections.abc import Iterator
from typing import Any

from jax.extend.core import DropVar, JaxprEqn, Literal, Var

from clipgrad._diagnose.probe import RESULT, STATE, Site, carried_variables
from clipgrad._jaxpr import (
    JIT,
    chooses_by_platform,
    differentiated_programs,
    holds_floats,
    opened,
)
from clipgrad._names import Place

# Code without scopes is cut into so many parts, of at most so many equations: 184 probes in a
# transformer of 12 layers and 997 equations, which compile in 18 seconds on two busy cores.
_PARTS, _LONGEST = 64, 24
# A function that JAX compiles by itself, such as `jnp.linalg.norm`, stays whole up to this size.
_SMALL_FUNCTION = 24
_LAYERS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
CLOSED = frozenset({"while", "pallas_call", "pure_callback", "ffi_call", "cond"})


class Unit:
    """Equations next to each other, of one module and with at most one matrix product.

    Attributes:
      equations: in program order; one alone if there are programs inside of it to go into.
      block: the program that they belong to.
      leaves: the variables that other units read, and where their cotangents are measured.
      is_layer: whether a matrix product or convolution is among them.
    """

    def __init__(self, block: "ProgramBlock", equations: list[JaxprEqn], used: dict[Var, set[int]]):
        self.block, self.equations = block, equations
        own = set(map(id, equations))
        self.leaves = {
            v: block.site(RESULT, equation, i)
            for equation in equations
            for i, v in enumerate(equation.outvars)
            if not isinstance(v, DropVar) and holds_floats(v) and used.get(v, set()) - own
        }
        self.is_layer = any(map(_is_layer, equations))

    @property
    def place(self) -> Place:
        """The last equation of the unit."""
        return Place(self.equations[-1], self.block.parent)

    @property
    def holder(self) -> "ProgramBlock | None":
        """The programs inside of the unit, if it is to be gone into."""
        inner = self.block.children.get(id(self.equations[0]))
        return inner if inner and not inner.is_small else None


class ProgramBlock:
    """The programs inside of an equation, or the outermost program.

    Attributes:
      parent: the place of the equation that holds the programs.
      outside: the block that this equation is in.
      programs: the jaxprs: of a cond one for each branch.
      equations: the equations of all programs.
      children: the blocks inside, by the id of their equation.
      states: what a scan carries, as variables of its body.
      outer: for each other input the variable around the block that it is.
      count: how many equations there are, inside of others too.
    """

    def __init__(
        self,
        programs: list[Any],
        parent: Place | None = None,
        outside: "ProgramBlock | None" = None,
    ):
        self.parent, self.outside = parent, outside
        self.programs = [opened(program)[0] for program in programs]
        self.equations = [equation for program in self.programs for equation in program.eqns]
        self.children = {
            id(e): ProgramBlock(inner, Place(e, parent), self)
            for e in self.equations
            if (inner := differentiated_programs(e)) and not chooses_by_platform(e)
        }
        self.count = len(self.equations) + sum(child.count for child in self.children.values())
        self.states, self.outer = _inputs(parent and parent.equation, self.programs)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The scans and the `shard_map`s around its equations, with their lengths."""
        return self.parent.axes if self.parent else ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of `axes`."""
        return tuple(length for _, length in self.axes)

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

    def all_equations(self) -> Iterator[tuple["ProgramBlock", JaxprEqn]]:
        """The equations of this block and of all blocks inside, but for those that hold these."""
        for equation in self.equations:
            if inner := self.children.get(id(equation)):
                yield from inner.all_equations()
            else:
                yield self, equation

    @functools.cached_property
    def units(self) -> list[Unit]:
        """All equations in order."""
        return [unit for program in self.programs for unit in self._cut(program)]

    @functools.cached_property
    def longest(self) -> int:
        """The number of equations that a unit may have."""
        if self.outside:
            return self.outside.longest
        return min(max(self.count // _PARTS, 1), _LONGEST)

    @property
    def is_small(self) -> bool:
        """Whether it stays whole in a measurement of modules."""
        name = self.parent.equation.primitive.name if self.parent else None
        return name in JIT and self.count <= _SMALL_FUNCTION and not self.has_loops

    def all_units(self) -> Iterator[Unit]:
        """The units of this block and of those inside that are gone into, in program order."""
        for unit in self.units:
            if unit.holder:
                yield from unit.holder.all_units()
            yield unit

    def _cut(self, program: Any) -> Iterator[Unit]:
        used: dict[Var, set[int]] = {v: {0} for v in program.outvars if type(v) is not Literal}
        for equation in program.eqns:
            for v in equation.invars:
                if type(v) is not Literal:
                    used.setdefault(v, set()).add(id(equation))
        run: list[JaxprEqn] = []
        for equation in program.eqns:
            if run and not self._continues(run, equation):
                yield Unit(self, run, used)
                run = []
            run.append(equation)
        if run:
            yield Unit(self, run, used)

    def _continues(self, run: list[JaxprEqn], equation: JaxprEqn) -> bool:
        inner = [self.children.get(id(e)) for e in (run[0], equation)]
        if len(run) >= self.longest or any(block and not block.is_small for block in inner):
            return False
        if _is_layer(equation) and any(map(_is_layer, run)):
            return False
        return Place(run[0]).module == Place(equation).module


def _inputs(equation: JaxprEqn | None, programs: list[Any]) -> tuple[list[Var], dict[Var, Any]]:
    """The states of a scan, and the variables around an equation that its programs read."""
    if equation is None:
        return [], {}
    around = equation.invars[1:] if equation.primitive.name == "cond" else equation.invars
    states = carried_variables(equation) if equation.primitive.name == "scan" else []
    pairs = [pair for p in programs for pair in zip(p.invars, around, strict=True)]
    return states, {inner: v for inner, v in pairs if inner not in set(states)}


def _is_layer(equation: JaxprEqn) -> bool:
    return equation.primitive.name in _LAYERS
