"""Which of several rules is to blame: the others are replaced by what their functions compute."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

import clipgrad._programs as _programs
from clipgrad._check.checked_function import CheckedFunction, traced
from clipgrad._check.float64 import Unsupported, Wide
from clipgrad._check.tolerances import BLAME
from clipgrad._check.user_code import UserError, call_user
from clipgrad._check.vjp import differentiated
from clipgrad._check.witnesses import Witness
from clipgrad._names import rule_source, rules_in

Blames = Callable[[CheckedFunction], bool]


def named_rules(lines: Sequence[str]) -> str:
    """The end of a failure that names the rules to blame; "" of none."""
    if not lines:
        return ""
    return f"; {'rule' if len(lines) == 1 else 'rules'}: {', '.join(lines)}"


def lines_to_blame(function: CheckedFunction, blames: Blames) -> list[str]:
    """The lines of the rules that, with all others left out, still make a function fail.

    Of one rule it is said to be that; of several it is asked, of halves of them first, so that the
    cost grows with those to blame. All of them where none alone makes it fail, or none can be left
    out.

    Args:
      function: the function.
      blames: whether a function, which computes the same with some of the rules, still fails.
    """
    lines = lines_of_rules(function)
    if len(lines) < 2:
        return lines
    return _to_blame(function, lines, lines, blames) or lines


def lines_of_rules(function: CheckedFunction) -> list[str]:
    """The lines of the rules of a function."""
    return list(dict.fromkeys(str(rule_source(e)) for e in rules_in(function.program)))


def _to_blame(function: CheckedFunction, some: list[str], lines: list[str], blames) -> list[str]:
    if len(some) == len(lines):
        parts = [some[: len(some) // 2], some[len(some) // 2 :]]
        return [line for part in parts for line in _to_blame(function, part, lines, blames)]
    try:
        if not blames(with_rules(function, some)):
            return []
    except (Unsupported, UserError):
        return []
    if len(some) == 1:
        return some
    parts = [some[: len(some) // 2], some[len(some) // 2 :]]
    return [line for part in parts for line in _to_blame(function, part, lines, blames)]


def with_rules(function: CheckedFunction, lines: Sequence[str]) -> CheckedFunction:
    """The function with the rules of these lines; without the user's others."""
    hook = _Without(frozenset(lines_of_rules(function)) - frozenset(lines))
    run = lambda xs: _programs.evaluate(function.program, xs, hook)  # noqa: E731
    return function._replace(fun=run, program=traced(run, function.inputs))


def of_formula(xs: Sequence[Any], covectors, wrong: np.ndarray, rule, plain) -> Blames:
    """Whether a rule in float64 is still apart from plain AD at wrong elements."""
    off = BLAME * np.abs(rule[:, wrong] - plain[:, wrong]).max()

    def blames(function: CheckedFunction) -> bool:
        count, seeds = len(function.inputs), function.outputs
        pull_back = lambda leaves: function.pull_back(leaves[:count], leaves[count:])  # noqa: E731
        like = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in seeds]
        program = call_user(jax.make_jaxpr(pull_back), [*function.inputs, *like])
        gradient = Witness(Wide(program), function).at(xs, covectors)
        return bool(np.abs(gradient[:, wrong] - plain[:, wrong]).max() > off)

    return blames


def of_arithmetic(xs: Sequence[Any], covectors, wrong: np.ndarray, rule, computed) -> Blames:
    """Whether a gradient as it is computed is still apart from the rule in float64."""
    off = BLAME * np.abs(computed[:, wrong] - rule[:, wrong]).max()

    def blames(function: CheckedFunction) -> bool:
        gradient = differentiated(function, xs).rows(covectors)
        return bool(np.abs(gradient[:, wrong] - rule[:, wrong]).max() > off)

    return blames


class _Without(_programs.Hook):
    """Replaces the functions of some rules by what they compute."""

    def __init__(self, lines: frozenset[str]):
        self.lines = lines

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        source = rule_source(equation)
        if source is None or str(source) not in self.lines:
            return None
        return _programs.evaluate(_programs.called_program(equation), inputs, self)
