"""A program, with the programs inside of its equations as far as derivatives go into them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._diagnose.probe import OPERAND, RESULT, Site
from clipgrad._jaxpr import chooses_by_platform, differentiated_programs, opened, scan_counts
from clipgrad._names import Place

ZERO = (0.0, 0.0)
LONGER = frozenset({"scan", "shard_map"})  # what is measured inside has an axis more


def inner_programs(equation: JaxprEqn) -> list:
    """The programs inside of an equation that are measured."""
    return [] if chooses_by_platform(equation) else differentiated_programs(equation)


class Block:
    """A program, or one inside of an equation: the place ``parent``, in the block ``outer``.

    ``values`` are the `EdgeValues` of the outermost program, if they are measured, and ``order``
    the numbers of the equations around, each with that of the program inside of it.
    """

    def __init__(
        self,
        program: Any,
        values: Any = None,
        parent: Place | None = None,
        outer: "Block | None" = None,
        order: tuple[int, ...] = (),
    ):
        self.jaxpr, self.constants = opened(program)
        self.values, self.parent, self.outer, self.order = values, parent, outer, order
        # For each result of an equation its number, the equation, and which result it is.
        self.producers = {
            v: (i, e, k) for i, e in enumerate(self.jaxpr.eqns) for k, v in enumerate(e.outvars)
        }
        self.positions = {v: i for i, v in enumerate(self.jaxpr.invars)}

    @property
    def key(self) -> tuple[int, ...]:
        """The key of the equation that it is inside of."""
        return self.parent.key if self.parent else ()

    @functools.cached_property
    def uses(self) -> dict[Var, list[tuple[int, int]]]:
        """For each variable the equations that read it, by number, and as which operand."""
        found: dict[Var, list[tuple[int, int]]] = {}
        for i, equation in enumerate(self.jaxpr.eqns):
            for k, v in enumerate(equation.invars):
                if type(v) is not Literal:
                    found.setdefault(v, []).append((i, k))
        return found

    def place(self, equation: JaxprEqn) -> Place:
        """The place of an equation."""
        return Place(equation, self.parent)

    @functools.cached_property
    def children(self) -> dict[int, list["Block"]]:
        """The blocks inside of each equation, by its number."""
        return {
            i: [
                Block(program, self.values, self.place(e), self, (*self.order, i, n))
                for n, program in enumerate(programs)
            ]
            for i, e in enumerate(self.jaxpr.eqns)
            if (programs := inner_programs(e))
        }

    def around(self) -> Iterator["Block"]:
        """This block and those around, innermost first."""
        yield self
        yield from self.outer.around() if self.outer else ()

    def blocks(self) -> Iterator["Block"]:
        """This block and those inside that were run."""
        yield self
        for inner in (block for own in self.children.values() for block in own):
            if inner.ran:
                yield from inner.blocks()

    def operations(self) -> Iterator[tuple["Block", JaxprEqn]]:
        """All equations but for those with blocks inside, each with its block."""
        for block in self.blocks():
            held = enumerate(block.jaxpr.eqns)
            yield from ((block, e) for i, e in held if i not in block.children)

    @property
    def ran(self) -> bool:
        """Whether the program was run at all; a measured branch may not be."""
        if self.values is None:
            return True
        return bool(np.isfinite(self.values.range((id(self.jaxpr), *self.key), None)[0]))

    def cotangent(self, number: int, kind: str, position: int) -> np.ndarray | None:
        """The largest magnitude of a cotangent at an equation; None if it is not measured."""
        key = self.place(self.jaxpr.eqns[number]).key
        return self.values.cotangents.get(Site(kind, key, position))

    def total(self, variable: Var) -> np.ndarray | None:
        """The cotangent of a value from all of its uses; None if it is not measured."""
        if variable in self.producers:
            number, _, k = self.producers[variable]
            return self.cotangent(number, RESULT, k)
        position = self.positions.get(variable, -1)
        if self.parent is None or self.outer is None:
            found = self.values.gradients.get((position, (0,)))
            return None if found is None else np.asarray(np.any(found))
        if position < 0 or self.is_carry(position):
            return None
        found = self.outer.cotangent(self.order[-2], OPERAND, position + self.first)
        is_longer = self.parent.equation.primitive.name in LONGER
        return found[..., None] if found is not None and is_longer else found

    def reads(self, variable: Var) -> bool:
        """Whether an operation of the block, or its result, is of an input."""
        return variable in self.uses or any(v is variable for v in self.jaxpr.outvars)

    def range(self, atom: Any, where: Any = None) -> tuple[float, float]:
        """The smallest and the largest element of a value, at all steps or at those ``where``."""
        constants = dict(zip(self.jaxpr.constvars, self.constants, strict=True))
        if type(atom) is Literal or atom in constants:
            value = atom.val if type(atom) is Literal else constants[atom]
            value = np.real(np.asarray(value, np.complex64))
            return float(value.min(initial=np.inf)), float(value.max(initial=-np.inf))
        return self.values.range((id(atom), *self.key), where)

    def outside(self, variable: Any) -> Any:
        """The value around the block that an input of it is at first; None at the outermost."""
        if self.parent is None or type(variable) is Literal or variable not in self.positions:
            return None
        return self.parent.equation.invars[self.positions[variable] + self.first]

    @property
    def first(self) -> int:
        """The operand of the equation around that is the first input."""
        return 1 if self.parent and self.parent.equation.primitive.name == "cond" else 0

    def is_carry(self, position: int) -> bool:
        """Whether an input of the block is what a scan carries."""
        if self.parent is None or self.parent.equation.primitive.name != "scan":
            return False
        constants, carried = scan_counts(self.parent.equation)
        return constants <= position < constants + carried

    def origin(self, atom: Any) -> Any:
        """The value of the outermost program that a value is, but for what scans carry."""
        around = self.outside(atom)
        if around is None or self.outer is None or self.is_carry(self.positions[atom]):
            return atom
        return self.outer.origin(around)

    def behind(self, variable: Var, goes_on: "GoesOn") -> Iterator[tuple["Block", Var]]:
        """The values computed from a variable, in this block, those inside and the one around."""
        for i, k in self.uses.get(variable, ()):
            if not goes_on(self, i, k):
                continue
            equation, inside = self.jaxpr.eqns[i], self.children.get(i, [])
            first = 1 if equation.primitive.name == "cond" else 0
            if not inside or k < first:  # or what chooses the branch
                yield from ((self, v) for v in equation.outvars)
            yield from ((b, b.jaxpr.invars[k - first]) for b in inside if k >= first and b.ran)
        if self.parent is None or self.outer is None:
            return
        equation = self.parent.equation
        constants, carried = scan_counts(equation) if equation.primitive.name == "scan" else (0, 0)
        for n in (n for n, v in enumerate(self.jaxpr.outvars) if v is variable):
            yield self.outer, equation.outvars[n]
            if n < carried:
                yield self, self.jaxpr.invars[constants + n]


GoesOn = Callable[[Block, int, int], bool]


def reached(block: Block, start: Sequence[Var], goes_on: GoesOn) -> set[tuple[Block, Var]]:
    """The values that are computed from variables of a block, each with its block.

    Args:
      block: the block, from which the walk goes into those inside and around.
      start: the variables.
      goes_on: whether the walk goes through an operand of an equation, given the block, the number
        of the equation and the position of the operand; asked in the order of the program.
    """
    found = {(block, v) for v in start}
    todo = [block.behind(v, goes_on) for v in start]
    while todo:
        value = next(todo[-1], None)
        if value is None:
            todo.pop()
        elif value not in found:
            found.add(value)
            todo.append(value[0].behind(value[1], goes_on))
    return found
