"""The derivative rules of a function: where they are written, and which of them is wrong."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

import clipgrad._programs as _programs
from clipgrad._check.checked_function import CheckedFunction
from clipgrad._check.float64 import Unsupported, Wide
from clipgrad._check.theirs import TheirError, theirs
from clipgrad._check.witnesses import Witness
from clipgrad._names import Location, is_users

# Files whose rules are no user's.
NOT_NAMED = os.path.dirname(jax.__file__ or ""), str(pathlib.Path(__file__).parents[1])
NOTEBOOK = "ipykernel_"  # in the name of a file that a cell is run from
MOST_RULES = 8  # rules that are left out one by one
SHARE = 0.1  # of what a gradient is wrong by that leaving out one rule must change


def has_own_rule(equation: JaxprEqn) -> bool:
    """Whether an equation is a function with a derivative rule of its own."""
    return _programs.has_custom_rule(equation) and rule_of(equation) is not None


def rule_of(equation: JaxprEqn) -> Any:
    """The rule of an equation: a backward function, or the rule of a JVP."""
    return equation.params.get("bwd") or equation.params.get("jvp_jaxpr_fun")


def same_rule(equation: JaxprEqn) -> Any:
    """A key that two calls of one function with a rule have in common.

    A backward function is itself; of the rule of a JVP, which is traced anew at each call, it is
    the line.
    """
    return getattr(equation.params.get("bwd"), "f", None) or line_of_rule(equation)


def line_of_rule(equation: JaxprEqn) -> str:
    """The line where a rule is written, or else its function; "" of a rule of JAX or this library.

    Of a notebook it is the line of a cell.
    """
    program = _programs.opened(_programs.called_program(equation))[0]
    for info in (getattr(rule_of(equation), "debug_info", None), program.debug_info):
        file, line = getattr(info, "func_filename", None), getattr(info, "func_lineno", None)
        if info is None or not file or not line:
            continue
        if is_users(file) or not file.startswith(NOT_NAMED):
            place = f"line {line} of its cell" if NOTEBOOK in file else Location(file, line, None)
            return f"{info.func_name} ({place})"
    return ""


def rules_in(program: Any) -> list[JaxprEqn]:
    """The rules of a program and of all programs inside it, but for JAX's own.

    The user's own, or those of installed packages if there are none.
    """
    found = [] if program is None else _programs.equations(program)
    rules = [e for e in found if has_own_rule(e) and line_of_rule(e)]
    users = [e for e in rules if is_users(line_of_rule(e).partition("(")[2])]
    return users or rules


def lines_of_wrong_rules(
    function: CheckedFunction,
    xs: Sequence[Any],
    covectors: np.ndarray,
    wrong: np.ndarray,
    exact: Any,
) -> list[str]:
    """The lines of the rules without which some elements are no longer what they are.

    Of one rule it is said to be that; of several, those without which plain AD in float64 has other
    numbers there, or all of them where that cannot be known.

    Args:
      function: the function.
      xs: the point.
      covectors: the cotangents.
      wrong: the elements.
      exact: the gradient by rules and by plain AD, or None if either is missing.
    """
    lines = list(dict.fromkeys(line_of_rule(e) for e in rules_in(function.program)))
    if len(lines) < 2 or exact is None or len(lines) > MOST_RULES:
        return lines
    rule, plain = (gradient[:, wrong] for gradient in exact)
    guilty = []
    for line in lines:
        without = _without(function, xs, covectors, line)
        changed = 0 if without is None else np.abs(without[:, wrong] - rule).max()
        guilty += [line] if changed > SHARE * np.abs(plain - rule).max() else []
    return guilty or lines


def _without(function: CheckedFunction, xs, covectors, line: str) -> np.ndarray | None:
    count, hook = len(function.inputs), _Without(line)

    def pull_back(leaves):
        run = lambda xs: _programs.evaluate(function.program, xs, hook)  # noqa: E731
        return jax.vjp(run, leaves[:count])[1](leaves[count:])[0]

    seeds = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in function.outputs]
    try:
        program = theirs(jax.make_jaxpr(pull_back), [*function.inputs, *seeds])
        return Witness(Wide(program), function).at(xs, covectors)
    except (Unsupported, TheirError):
        return None


class _Without(_programs.Hook):
    """Replaces the function of one rule by what it computes."""

    def __init__(self, line: str):
        self.line = line

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        if not has_own_rule(equation) or line_of_rule(equation) != self.line:
            return None
        return _programs.evaluate(_programs.called_program(equation), inputs, self)
