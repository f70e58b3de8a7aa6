"""A program in parts: runs of equations of one module, with the programs inside of them."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend.core import DropVar, JaxprEqn, Literal, Var

import clipgrad._jaxpr as _jaxpr
from clipgrad._jaxpr import STATE, Place, Site, holds_floats

# Code without scopes is cut into so many parts, of at most so many equations: 184 probes in a
# transformer of 12 layers and 997 equations, which compile in 18 seconds on two busy cores.
_PARTS, _LONGEST = 64, 24
# A function that JAX compiles by itself, such as `jnp.linalg.norm`, stays whole up to this size.
_SMALL_FUNCTION = 24
_LAYERS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
CLOSED = frozenset({"while", "pallas_call", "pure_callback", "ffi_call", "cond"})
_ENTERED = frozenset({"scan", "cond", "shard_map"}) | _jaxpr.CALLS | _jaxpr.REMAT | _jaxpr.JIT


class Unit:
    """Equations next to each other, of one module and with at most one matrix product.

    Attributes:
      equations: in program order; one alone if there are programs inside of it to go into.
      block: the program that they belong to.
      reads: the variables of other units that they read.
      leaves: for each variable that other units read its equation and position.
      is_layer: whether a matrix product or convolution is among them.
    """

    def __init__(self, block: "ProgramBlock", equations: list[JaxprEqn], used: dict[Var, set[int]]):
        self.block, self.equations = block, equations
        own = set(map(id, equations))
        made = {v for equation in equations for v in equation.outvars}
        read = {
            v: None for equation in equations for v in equation.invars if type(v) is not Literal
        }
        self.reads = [v for v in read if v not in made]
        self.leaves = {
            v: (equation, i)
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
      children: the blocks inside, by the id of their equation.
      states: what a scan carries, as variables of its body.
      outer: for each other input the variable around the block that it is.
    """

    def __init__(
        self,
        programs: list[Any],
        parent: Place | None = None,
        outside: "ProgramBlock | None" = None,
    ):
        self.parent, self.outside = parent, outside
        self.programs = [_jaxpr.opened(program)[0] for program in programs]
        self.equations = [equation for program in self.programs for equation in program.eqns]
        self.children = {
            id(e): ProgramBlock(_jaxpr.entered_programs(e)[0], Place(e, parent), self)
            for e in self.equations
            if _is_entered(e)
        }
        self.count = len(self.equations) + sum(child.count for child in self.children.values())
        self.states, self.outer = _inputs(parent and parent.equation, self.programs)

    @property
    def holders(self) -> list[JaxprEqn]:
        """The equations with programs inside that are gone into."""
        return [equation for equation in self.equations if id(equation) in self.children]

    @functools.cached_property
    def units(self) -> list[Unit]:
        """All equations in order."""
        return [unit for program in self.programs for unit in self._cut(program)]

    @functools.cached_property
    def makers(self) -> dict[Var, Unit]:
        """The unit that each variable leaves."""
        return {v: unit for unit in self.units for v in unit.leaves}

    @functools.cached_property
    def longest(self) -> int:
        """How many equations a unit may have."""
        if self.outside:
            return self.outside.longest
        return min(max(self.count // _PARTS, 1), _LONGEST)

    @property
    def nest(self) -> tuple[int, ...]:
        """The lengths of the scans around its equations, outermost first."""
        if self.parent is None:
            return ()
        equation = self.parent.equation
        own = (equation.params["length"],) if equation.primitive.name == "scan" else ()
        return self.parent.nest + own

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The scans and the `shard_map`s around its equations, with their lengths."""
        if self.parent is None or self.outside is None:
            return ()
        equation = self.parent.equation
        name = equation.primitive.name
        lengths = {"scan": lambda: equation.params["length"]}
        lengths["shard_map"] = lambda: _jaxpr.device_count(equation)
        return self.outside.axes + (((name, lengths[name]()),) if name in lengths else ())

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of `axes`."""
        return tuple(length for _, length in self.axes)

    def apart(self, index: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """An index into numbers of shape `shape` as steps of the scans, and devices."""
        pairs = [(name, int(i)) for (name, _), i in zip(self.axes, index, strict=True)]
        steps = tuple(i for name, i in pairs if name == "scan")
        return steps, tuple(i for name, i in pairs if name != "scan")

    @property
    def is_small(self) -> bool:
        """Whether it stays whole in a measurement of modules."""
        name = self.parent.equation.primitive.name if self.parent else None
        return name in _jaxpr.JIT and self.count <= _SMALL_FUNCTION and not self.has_loops

    @property
    def has_loops(self) -> bool:
        """Whether there is a scan inside."""
        loops = any(e.primitive.name == "scan" for e in self.equations)
        return loops or any(child.has_loops for child in self.children.values())

    def site(self, kind: str, equation: JaxprEqn, position: int) -> Site:
        """A result or an operand of one of its equations."""
        return Site(kind, Place(equation, self.parent).key, position)

    def state(self, variable: Var) -> Site:
        """What a scan carries in this variable of its body."""
        assert self.parent is not None
        return Site(STATE, self.parent.key, self.states.index(variable))

    def blocks(self) -> "Iterator[ProgramBlock]":
        """This block and all inside."""
        yield self
        for child in self.children.values():
            yield from child.blocks()

    def all_units(self) -> Iterator[Unit]:
        """The units of this block and of those inside that are gone into, in program order."""
        for unit in self.units:
            if unit.holder:
                yield from unit.holder.all_units()
            yield unit

    def all_equations(self) -> Iterator[tuple["ProgramBlock", JaxprEqn]]:
        """The equations of this block and of all blocks inside, but for those that hold these."""
        for equation in self.equations:
            yield from equations_of(self, equation)

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


def equations_of(
    block: ProgramBlock, equation: JaxprEqn
) -> Iterator[tuple[ProgramBlock, JaxprEqn]]:
    """The equation in its block, or those of the programs inside of it."""
    inner = block.children.get(id(equation))
    if inner:
        yield from inner.all_equations()
    else:
        yield block, equation


def _is_entered(equation: JaxprEqn) -> bool:
    platforms = equation.params.get("branches_platforms")
    return equation.primitive.name in _ENTERED and platforms is None


def _is_layer(equation: JaxprEqn) -> bool:
    return equation.primitive.name in _LAYERS


def _inputs(equation: JaxprEqn | None, programs: list[Any]) -> tuple[list[Var], dict[Var, Any]]:
    """The states of a scan, and the variables around an equation that its programs read."""
    if equation is None:
        return [], {}
    around = equation.invars[1:] if equation.primitive.name == "cond" else equation.invars
    constants, carried = (
        _jaxpr.scan_counts(equation) if equation.primitive.name == "scan" else (0, 0)
    )
    states = [v for p in programs for v in p.invars[constants : constants + carried]]
    pairs = [pair for p in programs for pair in zip(p.invars, around, strict=True)]
    return states, {inner: v for inner, v in pairs if inner not in set(states)}
