"""A program in parts: runs of equations of one module, with the programs inside of them."""

import functools
from collections.abc import Iterator
from typing import Any

from jax.extend.core import DropVar, JaxprEqn, Literal, Var

import clipgrad._jaxpr as _jaxpr
from clipgrad._diagnose.blocks import Block
from clipgrad._diagnose.probe import RESULT
from clipgrad._jaxpr import holds_floats
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


class ProgramBlock(Block):
    """A `Block` in units."""

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
        return name in _jaxpr.JIT and self.count <= _SMALL_FUNCTION and not self.has_loops

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


def _is_layer(equation: JaxprEqn) -> bool:
    return equation.primitive.name in _LAYERS
