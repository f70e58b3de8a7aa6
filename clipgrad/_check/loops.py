"""Loops that come nearer and nearer to a result: which results they find, and how near."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params

from clipgrad._jaxpr import (
    ENTRANCES,
    Widen,
    equations,
    evaluate,
    holds_floats,
    opened,
    scan_counts,
    tracked_programs,
)


# Needed by the case deep_equilibrium.
def found_by_loops(program: Any) -> list[bool]:
    """Whether each result depends on a loop that stops when its numbers are near enough."""
    jaxpr = opened(program)[0]
    return _through_loops(jaxpr, [False] * len(jaxpr.invars))


def _through_loops(jaxpr: Any, flags: list[bool]) -> list[bool]:
    found = {variable for variable, flag in zip(jaxpr.invars, flags, strict=True) if flag}
    for equation in jaxpr.eqns:
        known = [not isinstance(atom, Literal) and atom in found for atom in equation.invars]
        chooses = equation.primitive.name in ("scan", "while", "cond")
        if not chooses and (called := tracked_programs(equation)):
            flags = _through_loops(opened(called[0])[0], known)
        else:
            inside = (e for held in jaxprs_in_params(equation.params) for e in equations(held))
            stops = any(map(_stops_by_its_numbers, [equation, *inside]))
            flags = [any(known) or stops] * len(equation.outvars)
        found |= {variable for variable, flag in zip(equation.outvars, flags, strict=True) if flag}
    return [not isinstance(atom, Literal) and atom in found for atom in jaxpr.outvars]


def _stops_by_its_numbers(equation: Any) -> bool:
    held = equation.params["cond_jaxpr"] if equation.primitive.name == "while" else None
    return held is not None and any(holds_floats(v) for e in equations(held) for v in e.invars)


class Longer(Widen):
    """Widens, and has loops run on where they end: converged ones change little.

    A `while_loop` runs for `more` further iterations; a loop of a fixed number of them, which has
    nothing but what it carries, for as many again. Loops inside of such a loop stay as they are.
    """

    def __init__(self, dtype: Any, stop: Callable = lax.stop_gradient, more: int = 1):
        super().__init__(dtype, stop)
        self.more = more

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results of a loop that ran on; of anything else as they are."""
        name, params = equation.primitive.name, equation.params
        inner = copy.copy(self)
        inner.more = 0
        if name == "while" and self.more:
            first = params["cond_nconsts"]
            constants = inputs[first : first + params["body_nconsts"]]
            carry = ENTRANCES[name](equation, inputs, inner)
            again = lambda _, c: tuple(evaluate(params["body_jaxpr"], [*constants, *c], inner))  # noqa: E731
            return list(lax.fori_loop(0, self.more, again, tuple(carry)))
        if self.more and _is_carried_alone(equation):
            constants = inputs[: scan_counts(equation)[0]]
            carry = ENTRANCES[name](equation, inputs, inner)
            return ENTRANCES[name](equation, [*constants, *carry], inner)
        return super().__call__(equation, inputs)


# Needed by the case root_by_bisection.
def stops_by_numbers(program: Any) -> bool:
    """Whether a program has a loop that stops when its numbers are near enough."""
    return any(map(_stops_by_its_numbers, equations(program)))


def _is_carried_alone(equation: JaxprEqn) -> bool:
    """Whether it is a scan with nothing but what it carries, as `lax.fori_loop` is."""
    if equation.primitive.name != "scan":
        return False
    constants, carried = scan_counts(equation)
    return len(equation.invars) == constants + carried and len(equation.outvars) == carried


def has_loops(program: Any) -> bool:
    """Whether a program, if there is one, has a loop that `Longer` has run on."""
    found = [] if program is None else equations(program)
    return any(e.primitive.name == "while" or _is_carried_alone(e) for e in found)
