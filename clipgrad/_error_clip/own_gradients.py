"""Functions that compute gradients themselves, which a clip from outside does not reach."""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend import source_info_util

import clipgrad._jaxpr as _jaxpr
import clipgrad._names as _names

# JAX has no public name for the entries that transformations leave in a name stack.
with source_info_util.transform_name_stack("jvp"):
    _TRANSFORM = type(source_info_util.current_name_stack().stack[-1])


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
    placed = list(_with_transforms(program, frozenset(), ""))
    inside = [n for n in names or () if all("jvp" in around for around in _around(n, placed))]
    if names is None or inside:
        what, rules = ("", "rule") if names is None else (f" for {inside}", "rules")
        warnings.warn(
            f"{caller}: got a rule{what} in a function that computes gradients itself, and no "
            f"cotangent of these passes the clip, expected the loss; write "
            f"jax.grad({caller}(loss, {rules}))",
            stacklevel=stacklevel,
        )


def _transforms(equation: Any) -> frozenset[str]:
    stack = equation.source_info.name_stack.stack
    return frozenset(entry.name for entry in stack if type(entry) is _TRANSFORM)


@_jaxpr.read_once
def _has_transposes(jaxpr: Any) -> bool:
    """Whether there is a step of a backward pass in a program, at any depth."""
    return any(
        "transpose" in _transforms(e) or any(map(_has_transposes, _jaxpr.entered_programs(e)[0]))
        for e in jaxpr.eqns
    )


def _is_loss(program: Any, result: int = 0) -> bool:
    """Whether a result is one number, which no gradient inside has computed."""
    jaxpr, _ = _jaxpr.opened(program)
    if not jaxpr.outvars or jaxpr.outvars[result].aval.shape:
        return False
    for e in jaxpr.eqns:
        places = [i for i, made in enumerate(e.outvars) if made is jaxpr.outvars[result]]
        if places and e.primitive.name in _jaxpr.JIT and not _transforms(e):
            return _is_loss(_jaxpr.called_program(e), places[0])
        if places:
            return not _transforms(e)
    return True


def _with_transforms(
    program: Any, around: frozenset[str], path: str
) -> Iterator[tuple[Any, Any, str]]:
    """The equations in a program, with the transformations and the scopes around each of them."""
    for e in _jaxpr.opened(program)[0].eqns:
        own, scopes = around | _transforms(e), path + "".join(f"{s}/" for s in _names.path(e))
        yield e, own, scopes
        for inner in _jaxpr.entered_programs(e)[0]:
            yield from _with_transforms(inner, own, scopes)


def _around(name: str, placed: list[tuple[Any, Any, str]]) -> Iterator[frozenset[str]]:
    """The transformations around each variable with a name."""
    for e, around, scopes in placed:
        is_tag = e.primitive.name == "name" and e.params["name"] == name
        if is_tag or scopes.startswith(f"{name}/"):
            yield around
