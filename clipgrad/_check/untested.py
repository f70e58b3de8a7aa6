"""The values that slopes hold, and the rules that no point ran: said in notes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

import clipgrad._programs as _programs
from clipgrad._check import vectors
from clipgrad._check.log import Log
from clipgrad._check.points import Point, dense_numbers
from clipgrad._check.user_code import UserError, call_compiled
from clipgrad._names import Place, placed_equations, rule_key, rule_source, rules_in

DERIVATIVE = "transpose("  # JAX's own scope of the operations of a gradient
SECOND_ORDER = (
    "; it is in a derivative: to check that a derivative has the right derivative, write order=2 "
    "with the function itself"
)


def note_stops(program: Any, log: Log) -> None:
    """A note for the values that the user stops: slopes hold them, as JAX differentiates them."""
    places = [] if program is None else [p.place for p in placed_equations(program, _entered)]
    stops = [p for p in places if _is_users_stop(p)]
    if not stops:
        return
    lines = list(dict.fromkeys(str(place.location) for place in stops))
    several = "values" if len(stops) > 1 else "value"
    were = "were" if len(stops) > 1 else "was"
    hint = SECOND_ORDER if any(map(_is_in_a_derivative, stops)) else ""
    log.note(
        f"{len(stops)} {several} under stop_gradient {were} held fixed, at {', '.join(lines)}{hint}"
    )


def _entered(equation: JaxprEqn) -> list:
    """The programs inside; what a custom rule stops in its function is nothing to JAX."""
    if _programs.has_custom_rule(equation):
        return []
    return _programs.held_programs(equation)


def _is_users_stop(place: Place) -> bool:
    """Whether a line of the user's calls `jax.lax.stop_gradient`, not a function of a library."""
    is_known = place.location.file is not None
    calls_it = place.function == jax.lax.stop_gradient.__name__
    return _programs.detaches(place.equation) and calls_it and is_known


def _is_in_a_derivative(place: Place) -> bool:
    scopes = (str(equation.source_info.name_stack) for equation in place.chain)
    return any(DERIVATIVE in scope for scope in scopes)


def note_unused_rules(point: Point, xs: Sequence[Sequence[Any]], log: Log) -> None:
    """A note for each rule that met no cotangent but zero at any of some points."""
    function = point.witnesses.function
    lines = {rule_key(e): rule_source(e) for e in rules_in(function.program)}
    if not lines or _are_all_results(function.program):
        return
    keys = tuple(lines)
    u = vectors.cotangent_leaves(point.covectors[0], function.outputs)
    run = _programs.low_jit(lambda zeros, x: _pulled(function, x, keys, u, zeros))
    try:
        zeros = np.zeros(len(lines), np.float32)
        reached = np.any([np.asarray(call_compiled(run, zeros, list(x))) != 0 for x in xs], axis=0)
    except UserError:
        return
    for line, is_reached in zip(lines.values(), reached, strict=True):
        if not is_reached:
            log.note(f"the rule {line} was not tested: no point ran it with a cotangent but zero")


def _are_all_results(program: Any) -> bool:
    """Whether all rules make results of the program, so that they meet its cotangents."""
    jaxpr = _programs.opened(program)[0]
    results = set(map(id, jaxpr.outvars))
    inner = sum(1 for _ in rules_in(program))
    outer = [e for e in jaxpr.eqns if rule_source(e)]
    return len(outer) == inner and all(results & set(map(id, e.outvars)) for e in outer)


def _pulled(function, xs, keys: tuple, u, zeros) -> Any:
    """The cotangents of the results of each rule, added up with random factors."""

    def run(zeros):
        with _programs.one_promotion():
            return _programs.evaluate(function.program, xs, _Added(zeros, keys))

    return jax.vjp(run, zeros)[1](u)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Added(_programs.Hook):
    """Adds a multiple of a number, which is zero, to the results of each rule."""

    zeros: Any
    keys: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results of a rule, with its number added."""
        if rule_source(equation) is None or (key := rule_key(equation)) not in self.keys:
            return None
        zero = self.zeros[self.keys.index(key)]
        outputs = _programs.bind(equation, inputs)
        return [y + _multiple(zero, y) if _programs.holds_floats(y) else y for y in outputs]


def _multiple(zero: Any, y: Any) -> Any:
    factors = dense_numbers(0, "rule", y.size).reshape(y.shape).astype(np.float32)
    return (zero * jnp.asarray(factors)).astype(y.dtype)
