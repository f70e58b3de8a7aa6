"""Custom derivative rules in a program: which there are, and the lines where they are written."""

import inspect
import os
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from clipgrad._names.places import is_users, shown
from clipgrad._programs import called_program, equations, has_custom_rule, opened

_JAX = os.path.dirname(jax.__file__ or "")
_WRAPPERS = inspect.getsourcefile(jax.custom_gradient)
_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOTEBOOK = "ipykernel_"  # in the name of a file that a cell is run from
_RULES = ("bwd", "jvp_jaxpr_fun")  # the parameters that hold the rule


class Source(NamedTuple):
    """A function, and the line where it is written."""

    name: str
    file: str
    line: int

    @property
    def place(self) -> str:
        """The line; of a notebook it is the line of a cell."""
        if _NOTEBOOK in self.file:
            return f"line {self.line} of its cell"
        return f"{shown(self.file)}:{self.line}"

    def __str__(self) -> str:
        return f"{self.name} ({self.place})"


def custom_rule(equation: JaxprEqn) -> str:
    """A function with a custom rule, as "swish (kernels.py:12, its rule: kernels.py:30)".

    "" for any other operation, and for the functions of JAX itself.
    """
    if not has_custom_rule(equation):
        return ""
    function, rule = _function_source(equation), _source(_rule_of(equation))
    if function is None or function.file.startswith(_JAX):
        return ""
    lines = [function.place, *([] if rule is None else [f"its rule: {rule.place}"])]
    return f"{function.name} ({', '.join(lines)})"


def rule_source(equation: JaxprEqn) -> Source | None:
    """The place where an equation's rule is written, or else the function.

    None for an equation without a rule, and for rules that JAX or clipgrad wrote.
    """
    if not has_custom_rule(equation) or _rule_of(equation) is None:
        return None
    sources = _source(_rule_of(equation)), _function_source(equation)
    return next((source for source in sources if source and _is_named(source.file)), None)


def is_rule_of_jax(equation: JaxprEqn) -> bool:
    """Whether a custom rule, and the function that has the rule, are JAX's own, as of `relu`.

    Those of `jax.custom_gradient` are not, though JAX wraps both in functions of its own.
    """
    if not has_custom_rule(equation):
        return False
    rule, function = _source(_rule_of(equation)), _function_source(equation)
    if rule is None or function is None or function.file == _WRAPPERS:
        return False
    return rule.file.startswith(_JAX) and function.file.startswith(_JAX)


def rule_key(equation: JaxprEqn) -> Hashable:
    """A key that all calls of one function with a rule have in common.

    For a backward function the key is the function; for a JVP rule, which JAX traces anew at each
    call, the line.
    """
    return getattr(equation.params.get("bwd"), "f", None) or rule_source(equation)


def rules_in(program: Any) -> list[JaxprEqn]:
    """The equations with a custom rule, in a program and in all programs inside; JAX's rules are
    left out.

    Rules in the user's files; if there are none, rules of installed packages.
    """
    sources = [(e, rule_source(e)) for e in ([] if program is None else equations(program))]
    rules = [(equation, source) for equation, source in sources if source is not None]
    users = [equation for equation, source in rules if is_users(source.file)]
    return users or [equation for equation, _ in rules]


def _rule_of(equation: JaxprEqn) -> Any:
    """A backward function, or the rule of a JVP."""
    return next((rule for key in _RULES if (rule := equation.params.get(key))), None)


def _function_source(equation: JaxprEqn) -> Source | None:
    return _source(opened(called_program(equation))[0])


def _source(function: Any) -> Source | None:
    """Where a function is written that JAX has traced, or is about to."""
    info = getattr(function, "debug_info", None)
    file, line = getattr(info, "func_filename", None), getattr(info, "func_lineno", None)
    return Source(info.func_name, file, line) if info and file and line else None


def _is_named(file: str) -> bool:
    return is_users(file) or not file.startswith((_JAX, _LIBRARY))
