"""Functions that compute gradients themselves, which a clip from outside does not reach."""

from collections.abc import Iterable, Iterator
from typing import Any

import clipgrad._names as _names
import clipgrad._programs as _programs
from clipgrad._errors import warn


def warn_of_own_gradients(program: Any, names: Iterable[str] | None, caller: str) -> None:
    """Warns of clips in a program that differentiates what is clipped, as one of `jax.grad` does.

    The gradient is then a value like any other, and no cotangent passes the clips. A loss with
    gradients inside is left alone: it is differentiated once more. ``names`` are the tags and
    modules that are clipped; ``None``: everything.
    """
    if not _has_transposes(program) or _is_loss(program):
        return
    inside = [] if names is None else _inside_of_gradients(program, names)
    if names is None or inside:
        what, rules = ("", "rule") if names is None else (f" for {inside}", "rules")
        warn(
            f"{caller}: got a rule{what} in a function that computes gradients itself, and no "
            f"cotangent of these passes the clip, expected the loss; write "
            f"jax.grad({caller}(loss, {rules}))"
        )


@_programs.read_once
def _has_transposes(jaxpr: Any) -> bool:
    """Whether there is a step of a backward pass in a program, at any depth."""
    return any(
        "transpose" in _names.transforms(e)
        or any(map(_has_transposes, _programs.entered_programs(e)[0]))
        for e in jaxpr.eqns
    )


def _is_loss(program: Any, result: int = 0) -> bool:
    """Whether a result is one number, which no gradient inside has computed."""
    jaxpr, _ = _programs.opened(program)
    if not jaxpr.outvars or jaxpr.outvars[result].aval.shape:
        return False
    makers = (
        (e, i) for e in jaxpr.eqns for i, v in enumerate(e.outvars) if v is jaxpr.outvars[result]
    )
    e, place = next(makers, (None, 0))
    if e is None or _names.transforms(e):
        return e is None
    is_call = _programs.is_jit(e)
    return not is_call or _is_loss(_programs.called_program(e), place)


def _inside_of_gradients(program: Any, names: Iterable[str]) -> list[str]:
    """The names of which each variable is differentiated in the program."""
    plain: set[str] = set()
    for e, around, scopes in _with_transforms(program, frozenset(), ""):
        if "jvp" not in around:
            tag = {_programs.tag_of(e) or ""}
            plain |= tag | {name for name in names if scopes.startswith(f"{name}/")}
    return [name for name in names if name not in plain]


def _with_transforms(
    program: Any, around: frozenset[str], path: str
) -> Iterator[tuple[Any, Any, str]]:
    """The equations in a program, with the transformations and the scopes around each of them."""
    for e in _programs.opened(program)[0].eqns:
        own, scopes = around | _names.transforms(e), path + "".join(f"{s}/" for s in _names.path(e))
        yield e, own, scopes
        for inner in _programs.entered_programs(e)[0]:
            yield from _with_transforms(inner, own, scopes)
