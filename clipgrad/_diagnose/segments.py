"""The segments of a program that a tape runs: equations, or calls of many behind each other."""

import collections
from collections.abc import Iterable
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, new_jaxpr_eqn, primitives

from clipgrad._names import common_start, path

# A program of more equations is run in parts: each equation alone costs a call, each part a
# compilation, so that the two meet at some tens.
_LONG_PROGRAM = 24
_FEW = 4  # equations that are not worth a compilation


def segments_to_run(jaxpr: Any) -> list[JaxprEqn]:
    """The equations of a program; of a long one calls of those of a module, else of so many.

    Parts of equal modules are equal programs, which are compiled once.
    """
    if len(jaxpr.eqns) <= _LONG_PROGRAM:
        return list(jaxpr.eqns)
    read = all_reads(jaxpr)
    segments: list[JaxprEqn] = []
    for run in _runs(jaxpr.eqns):
        if len(run) < _FEW:
            segments += run
        else:
            program = as_program(run, jaxpr, leaving(run, read))
            call = {"call_jaxpr": ClosedJaxpr(program, ())}
            ends = program.invars, program.outvars
            closed_call = primitives.closed_call_p
            segments.append(new_jaxpr_eqn(*ends, closed_call, call, program.effects))
    return segments


def _runs(equations: list[JaxprEqn]) -> list[list[JaxprEqn]]:
    """Equations behind each other of one module; of none, or of too many, so many together."""
    paths = [path(equation) for equation in equations]
    depth = len(common_start(paths)) + 1
    runs: list[list[JaxprEqn]] = []
    before: Any = None
    for equation, modules in zip(equations, paths, strict=True):
        if modules[:depth] != before or not runs:
            runs.append([])
        runs[-1].append(equation)
        before = modules[:depth]
    if 1 < len(runs) <= len(equations) // _FEW:
        return runs
    return [equations[i : i + _LONG_PROGRAM] for i in range(0, len(equations), _LONG_PROGRAM)]


def _reads(equations: Iterable[JaxprEqn]) -> collections.Counter:
    return collections.Counter(v for e in equations for v in e.invars if type(v) is not Literal)


def all_reads(jaxpr: Any) -> collections.Counter:
    """The number of reads of each variable of a program; to be returned is one."""
    return _reads(jaxpr.eqns) + collections.Counter(
        v for v in jaxpr.outvars if type(v) is not Literal
    )


def leaving(run: list[JaxprEqn], read: collections.Counter) -> list:
    """The results of some equations of a program that others read, or that it returns."""
    inside = _reads(run)
    return [v for equation in run for v in equation.outvars if read[v] > inside[v]]


def as_program(run: list[JaxprEqn], jaxpr: Any, results: list) -> Jaxpr:
    """Some equations of a program as a program of their own."""
    made = {v for equation in run for v in equation.outvars}
    reads = [v for equation in run for v in equation.invars if type(v) is not Literal]
    inputs = reads if len(run) == 1 else list(dict.fromkeys(v for v in reads if v not in made))
    return Jaxpr((), inputs, results, run, debug_info=jaxpr.debug_info.with_unknown_names())
