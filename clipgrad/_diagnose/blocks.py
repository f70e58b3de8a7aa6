"""A program that was measured, with the programs inside of its equations."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._diagnose.edges import EdgeValues, inner_programs
from clipgrad._jaxpr import opened, scan_counts
from clipgrad._names import Place

ZERO = (0.0, 0.0)


class MeasuredBlock:
    """A program, or one inside of an equation, and what was measured there.

    Attributes:
      jaxpr: the program.
      values: the cotangents and the ranges.
      parent: the place of the equation that it is inside of.
      outer: the block of this equation.
      branch: which program of the equation it is.
    """

    def __init__(
        self,
        program: Any,
        values: EdgeValues,
        parent: Place | None = None,
        outer: "MeasuredBlock | None" = None,
        branch: int = 0,
    ):
        self.jaxpr, self.constants = opened(program)
        self.values, self.parent, self.outer, self.branch = values, parent, outer, branch
        self.producers = {
            v: (i, e, k) for i, e in enumerate(self.jaxpr.eqns) for k, v in enumerate(e.outvars)
        }
        self.positions = {v: i for i, v in enumerate(self.jaxpr.invars)}

    def place(self, equation: JaxprEqn) -> Place:
        """The place of an equation."""
        return Place(equation, self.parent)

    @functools.cached_property
    def children(self) -> dict[int, list["MeasuredBlock"]]:
        """The blocks inside of each equation, by its number."""
        found = {}
        for i, e in enumerate(self.jaxpr.eqns):
            if programs := inner_programs(e):
                pairs = enumerate(zip(programs, self.values.inside(i), strict=True))
                found[i] = [MeasuredBlock(p, v, self.place(e), self, n) for n, (p, v) in pairs]
        return found

    def blocks(self) -> Iterator["MeasuredBlock"]:
        """This block and those inside that were run."""
        yield self
        for inner in (block for own in self.children.values() for block in own):
            if inner.values.ran:
                yield from inner.blocks()

    def range(self, atom: Any, where: Any = None) -> tuple[float, float]:
        """The smallest and the largest element of a value, at all steps or at those ``where``."""
        if type(atom) is Literal:
            return float(np.min(np.real(atom.val))), float(np.max(np.real(atom.val)))
        if atom in self.positions:
            return self.values.input_range(self.positions[atom], where)
        if atom in self.producers:
            number, _, position = self.producers[atom]
            return self.values.result_range(number, position, where)
        constants = dict(zip(self.jaxpr.constvars, self.constants, strict=True))
        value = np.real(np.asarray(constants[atom], np.complex64))
        return float(value.min(initial=np.inf)), float(value.max(initial=-np.inf))

    def outside(self, variable: Var) -> Any:
        """The value around the block that an input of it is at first; None at the outermost."""
        if self.parent is None or variable not in self.positions:
            return None
        equation = self.parent.equation
        first = 1 if equation.primitive.name == "cond" else 0
        return equation.invars[self.positions[variable] + first]

    def is_carry(self, position: int) -> bool:
        """Whether an input of the block is what a scan carries."""
        if self.parent is None or self.parent.equation.primitive.name != "scan":
            return False
        constants, carried = scan_counts(self.parent.equation)
        return constants <= position < constants + carried
