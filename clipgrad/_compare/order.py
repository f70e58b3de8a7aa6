"""The order in which a program computes its outputs."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal, Var

from clipgrad._jaxpr import differentiated_programs, opened


def ages(program: Any) -> list[int]:
    """For each output the length of the longest chain of operations from an input to it.

    An output that is computed from another one is older. A scan is as old as one step of it, and
    other operations with programs inside are one operation.
    """
    jaxpr, _ = opened(program)
    return _ages(jaxpr, [0] * len(jaxpr.invars))


def _ages(jaxpr: Any, given: Sequence[int]) -> list[int]:
    known: dict[Var, int] = dict(zip(jaxpr.invars, given, strict=True))

    def age(atom: Any) -> int:
        return 0 if isinstance(atom, Literal) else known.get(atom, 0)

    for equation in jaxpr.eqns:
        inputs = [age(atom) for atom in equation.invars]
        inner = differentiated_programs(equation)
        if inner and equation.primitive.name != "cond":
            found = _ages(opened(inner[0])[0], inputs)
        else:
            found = [max(inputs, default=0) + 1] * len(equation.outvars)
        known.update(zip(equation.outvars, found, strict=True))
    return [age(atom) for atom in jaxpr.outvars]
