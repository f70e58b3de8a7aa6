"""The lines of custom rules: of the function that has one, and of its backward."""

import os
import re
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from clipgrad._names.places import shown
from clipgrad._programs import called_program, has_custom_rule, opened

_JAX = os.path.dirname(jax.__file__ or "")
_SOURCE = re.compile(r"(?P<name>.*) at (?P<file>.+):(?P<line>\d+)", re.DOTALL)
_RULES = ("bwd", "jvp_jaxpr_fun")  # the parameters that hold the rule


def custom_rule(equation: JaxprEqn) -> str:
    """A function with a custom rule, as "swish (kernels.py:12, its rule: kernels.py:30)".

    "" for any other operation, and for the functions of JAX itself.
    """
    if not has_custom_rule(equation):
        return ""
    function = _source(opened(called_program(equation))[0])
    rules = [found for key in _RULES if (found := _source(equation.params.get(key)))]
    if function is None or function["file"].startswith(_JAX):
        return ""
    lines = [_shown_line(function), *(f"its rule: {_shown_line(own)}" for own in rules)]
    return f"{function['name']} ({', '.join(lines)})"


def _source(function: Any) -> re.Match | None:
    """The name, the file and the line of a function that JAX has traced, or is about to."""
    info = getattr(function, "debug_info", None)
    return _SOURCE.fullmatch(getattr(info, "func_src_info", None) or "")


def _shown_line(source: re.Match) -> str:
    return f"{shown(source['file'])}:{source['line']}"
