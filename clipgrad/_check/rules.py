"""The derivative rules of a function: where they are written, and which of them is wrong."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

import clipgrad._programs as _programs
from clipgrad._check.float64 import Unsupported, Wide
from clipgrad._check.subject import CheckSubject
from clipgrad._check.theirs import TheirError, theirs
from clipgrad._check.witnesses import Witness
from clipgrad._names import Location, Place, is_users

MOST = 8  # rules that are left out one by one
SHARE = 0.1  # of what a gradient is wrong by that leaving out one rule must change


def is_rule(equation: JaxprEqn) -> bool:
    """Whether an equation is a function with a derivative rule of its own."""
    return equation.primitive.name in _programs.CUSTOM_RULES and rule_of(equation) is not None


def rule_of(equation: JaxprEqn) -> Any:
    """The rule of an equation: a backward function, or the rule of a JVP."""
    return equation.params.get("bwd") or equation.params.get("jvp_jaxpr_fun")


def line_of_rule(equation: JaxprEqn) -> str:
    """The line of the user's where a rule is written, or its function, or where it is called."""
    program = _programs.opened(_programs.called_program(equation))[0]
    for info in (getattr(rule_of(equation), "debug_info", None), program.debug_info):
        file, line = getattr(info, "func_filename", None), getattr(info, "func_lineno", None)
        if file and line and is_users(file):
            name = info.func_name  # pyright: ignore[reportOptionalMemberAccess]
            return f"{name} ({Location(file, line, None)})"
    return str(Place(equation).location)


def rules_in(program: Any) -> Iterator[JaxprEqn]:
    """The rules that users wrote, of a program and of all programs inside it."""
    found = [] if program is None else _programs.equations(program)
    return (e for e in found if is_rule(e) and "(" in line_of_rule(e))


def lines_of_wrong_rules(
    subject: CheckSubject, xs: Sequence[Any], covectors: np.ndarray, wrong: np.ndarray, exact: Any
) -> list[str]:
    """The lines of the rules without which some elements are no longer what they are.

    Of one rule it is said to be that; of several, those without which plain AD in float64 has other
    numbers there, or all of them where that cannot be known.

    Args:
      subject: the function.
      xs: the point.
      covectors: the cotangents.
      wrong: the elements.
      exact: the gradient by rules and by plain AD, or None if either is missing.
    """
    lines = list(dict.fromkeys(line_of_rule(e) for e in rules_in(subject.program)))
    if len(lines) < 2 or exact is None or len(lines) > MOST:
        return lines
    rule, plain = (gradient[:, wrong] for gradient in exact)
    guilty = []
    for line in lines:
        without = _without(subject, xs, covectors, line)
        changed = 0 if without is None else np.abs(without[:, wrong] - rule).max()
        guilty += [line] if changed > SHARE * np.abs(plain - rule).max() else []
    return guilty or lines


def _without(subject: CheckSubject, xs, covectors, line: str) -> np.ndarray | None:
    count, hook = len(subject.inputs), _Without(line)

    def pull_back(leaves):
        run = lambda xs: _programs.evaluate(subject.program, xs, hook)  # noqa: E731
        return jax.vjp(run, leaves[:count])[1](leaves[count:])[0]

    seeds = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in subject.outputs]
    try:
        program = theirs(jax.make_jaxpr(pull_back), [*subject.inputs, *seeds])
        return Witness(Wide(program), subject).at(xs, covectors)
    except (Unsupported, TheirError):
        return None


class _Without(_programs.Hook):
    """Replaces the function of one rule by what it computes."""

    def __init__(self, line: str):
        self.line = line

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        if not is_rule(equation) or line_of_rule(equation) != self.line:
            return None
        return _programs.evaluate(_programs.called_program(equation), inputs, self)
