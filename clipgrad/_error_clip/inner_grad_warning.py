"""The warning of gradients inside of a function, which a clip from outside does not reach."""

from collections.abc import Iterator
from typing import Any

import clipgrad._names as _names
import clipgrad._programs as _programs
from clipgrad._errors import warn
from clipgrad._names import Matches


def warn_of_inner_gradients(program: Any, names: Matches | None, caller: str) -> None:
    """Warns if the program itself differentiates the clipped values, as `jax.grad(loss)` does.

    Such a gradient is a value like any other, and no cotangent passes the clips. For a loss with
    gradients inside there is no warning: the loss is differentiated once more. ``names`` are the
    clipped tags, modules and lines; ``None``: everything is clipped.
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


def _inside_of_gradients(program: Any, names: Matches) -> list[str]:
    """For each variable, the names by which the program differentiates it."""
    plain: set[str] = set()
    lines = dict(_names.line_keys(program, names))
    for place in _names.placed_equations(program, lambda e: _programs.entered_programs(e)[0]):
        e = place.place.equation
        if "jvp" not in frozenset().union(*map(_names.transforms, place.place.chain)):
            scopes = "".join(f"{s}/" for s in (*place.scopes, *_names.path(e)))
            plain |= {
                _programs.tag_of(e) or "",
                *(_lines_of(place.jaxpr, e, lines) if lines else ()),
            }
            plain |= {name for name in names if scopes.startswith(f"{name}/")}
    return [name for name in names if name not in plain]


def _lines_of(jaxpr: Any, equation: Any, lines: dict[str, str]) -> Iterator[str]:
    """The names of the lines whose values are results of an equation."""
    for variable in equation.outvars:
        runs = _names.lines_of_program(jaxpr).runs.get(variable, ())
        yield from (lines[run.line.key] for run, _ in runs if run.line.key in lines)
