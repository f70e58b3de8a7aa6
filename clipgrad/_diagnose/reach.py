"""A walk from values of a measured program to those that are computed from them."""

from collections.abc import Callable, Iterable
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._diagnose.blocks import Block
from clipgrad._jaxpr import scan_counts


class Reach:
    """A walk from variables to those computed from them.

    Args:
      goes_on: whether the walk goes through an operand, given the block, the number of the equation
        and the position of the operand.
      start: the variables.
    """

    def __init__(self, goes_on: Callable[[Block, int, int], bool], start: Iterable[Any]):
        self._goes_on = goes_on
        self.reached: set[Var] = set(start)

    def follow(self, block: Block) -> None:
        """Go through a program, again as long as loops carry something new."""
        count = -1
        while count != len(self.reached):
            count = len(self.reached)
            for i, equation in enumerate(block.jaxpr.eqns):
                operands = [k for k, v in enumerate(equation.invars) if self.has(v)]
                if through := [k for k in operands if self._goes_on(block, i, k)]:
                    self._pass(block, i, equation, through)

    def leave(self, block: Block) -> None:
        """Go through a program and those around it."""
        self.follow(block)
        if block.outer is not None and block.parent is not None:
            self._results(block, block.parent.equation)
            self.leave(block.outer)

    def _pass(self, block: Block, i: int, equation: JaxprEqn, through: list[int]) -> None:
        first = 1 if equation.primitive.name == "cond" else 0
        if i not in block.children or through[0] < first:  # or what chooses the branch
            self.reached.update(equation.outvars)
            return
        for inner in (b for b in block.children[i] if b.ran):
            self.reached.update(inner.jaxpr.invars[k - first] for k in through)
            self.follow(inner)
            self._results(inner, equation)

    def _results(self, inner: Block, equation: JaxprEqn) -> None:
        constants, carried = scan_counts(equation) if equation.primitive.name == "scan" else (0, 0)
        state = inner.jaxpr.invars[constants : constants + carried]
        pairs = zip(state, inner.jaxpr.outvars, strict=False)
        self.reached.update(own for own, out in pairs if self.has(out))
        self.follow(inner)
        results = zip(equation.outvars, inner.jaxpr.outvars, strict=True)
        self.reached.update(v for v, out in results if self.has(out))

    def has(self, atom: Any) -> bool:
        """Whether the walk has come to a value."""
        return type(atom) is not Literal and atom in self.reached
