"""Functions that compute gradients themselves, which a clip from outside does not reach."""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

import clipgrad._jaxpr as _jaxpr
import clipgrad._names as _names

# JAX has no public name for the entries that transformations leave in a name stack.
with source_info_util.transform_name_stack("jvp"):
    _TRANSFORM = type(source_info_util.current_name_stack().stack[-1])


class _Placed(NamedTuple):
    """An equation with the transformations and the scopes around it, outside of its own program."""

    equation: JaxprEqn
    transforms: frozenset[str]
    scopes: tuple[str, ...]

    def has_name(self, name: str) -> bool:
        is_tag = self.equation.primitive.name == "name" and self.equation.params["name"] == name
        return is_tag or f"{'/'.join(self.scopes)}/".startswith(f"{name}/")


def warn_of_own_gradients(
    program: Any, names: Iterable[str] | None, caller: str, stacklevel: int
) -> None:
    """Warns of clips in a program that differentiates what is clipped, as one of `jax.grad` does.

    The gradient is then a value like any other, and no cotangent passes the clips. A loss is left
    alone, whose gradients inside are differentiated once more: its first result is one number that
    is computed from them.

    Args:
      program: the traced function.
      names: the tags and modules that are clipped; ``None``: everything.
      caller: the function that clips, for the warning.
      stacklevel: as of `warnings.warn`.
    """
    if not _has_transposes(program) or _is_loss(program):
        return
    placed = list(_placed(program, frozenset(), ()))
    inside = [n for n in names or () if all("jvp" in p.transforms for p in placed if p.has_name(n))]
    if names is None or inside:
        what, rules = ("", "rule") if names is None else (f" for {inside}", "rules")
        warnings.warn(
            f"{caller}: got a rule{what} in a function that computes gradients itself, and no "
            f"cotangent of these passes the clip, expected the loss; write "
            f"jax.grad({caller}(loss, {rules}))",
            stacklevel=stacklevel,
        )


@_jaxpr.read_once
def _has_transposes(jaxpr: Any) -> bool:
    """Whether there is a step of a backward pass in a program, at any depth."""
    return any(
        "transpose" in _transforms(equation)
        or any(map(_has_transposes, _jaxpr.held_programs(equation)))
        for equation in jaxpr.eqns
    )


def _transforms(equation: JaxprEqn) -> frozenset[str]:
    stack = equation.source_info.name_stack.stack
    return frozenset(entry.name for entry in stack if type(entry) is _TRANSFORM)


def _is_loss(program: Any, result: int = 0) -> bool:
    """Whether a result is one number, which no gradient inside has computed."""
    jaxpr, _ = _jaxpr.opened(program)
    variable = jaxpr.outvars[result] if jaxpr.outvars else None
    if variable is None or variable.aval.shape:
        return False
    for equation in jaxpr.eqns:
        if any(variable is made for made in equation.outvars):
            if _transforms(equation) or equation.primitive.name not in _jaxpr.JIT:
                return not _transforms(equation)
            place = [made is variable for made in equation.outvars].index(True)
            return _is_loss(_jaxpr.called_program(equation), place)
    return True


def _placed(program: Any, transforms: frozenset[str], scopes: tuple[str, ...]) -> Iterator[_Placed]:
    """The equations of a program and of those inside it."""
    for equation in _jaxpr.opened(program)[0].eqns:
        own = transforms | _transforms(equation)
        path = (*scopes, *_names.path(equation))
        yield _Placed(equation, own, path)
        for inner in _jaxpr.held_programs(equation):
            yield from _placed(inner, own, path)
