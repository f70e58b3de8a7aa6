"""The programs inside the equations of a jaxpr."""

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from jax.extend.core import JaxprEqn, jaxprs_in_params

from clipgrad._programs.elements import is_reference

Kept = TypeVar("Kept")
CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vmap_call"})
CALLS = frozenset({"closed_call", "core_call"})
REMAT = frozenset({"checkpoint", "remat", "remat2"})
JIT = frozenset({"jit", "pjit"})
PRINTS = frozenset({"debug_callback", "debug_print"})
# JAX has no public names for the effects of an operation on a reference, along a named axis, or of
# a kernel of Pallas on the memory, the semaphores and the units of its device.
_OF_REFERENCES = {"ReadEffect", "WriteEffect", "AccumEffect", "InternalMutableArrayEffect"}
_HARMLESS = {
    "NamedAxisEffect", "SemaphoreEffect", "CommsEffect", "DelayEffect", "PRNGEffect", "TraceEffect",
    "MXUEffect", "MemoryEffect", "BarrierEffect",
}  # fmt: skip
_DIFFERENTIATED = frozenset({"scan", "cond", "shard_map"}) | CALLS | REMAT | JIT


def opened(program: Any) -> tuple[Any, Sequence]:
    """Return the jaxpr and the constants of a program in any of JAX's containers."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def read_once(function: Callable[[Any], Kept]) -> Callable[[Any], Kept]:
    """A function of a jaxpr as one of programs: what is called from many places is read once."""
    known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def read(program: Any) -> Kept:
        jaxpr = opened(program)[0]
        if jaxpr not in known:
            known[jaxpr] = function(jaxpr)
        return known[jaxpr]

    return read


def called_program(equation: JaxprEqn) -> Any:
    """Return the program of an equation that holds one, such as `jit`, `scan` or a custom rule."""
    names = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")
    return next(equation.params[name] for name in names if name in equation.params)


def equations(program: Any) -> Iterator[JaxprEqn]:
    """Iterate over the equations of a program and of all programs inside it."""
    for equation in opened(program)[0].eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def map_programs(equation: JaxprEqn, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the parameters with programs in them, each replaced by `change` of it."""

    def changed(value):
        if hasattr(value, "eqns"):
            return change(value)
        if isinstance(value, tuple) and any(hasattr(item, "eqns") for item in value):
            items = [changed(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value

    new = {name: changed(value) for name, value in equation.params.items()}
    return {name: value for name, value in new.items() if value is not equation.params[name]}


def held_programs(equation: JaxprEqn) -> list:
    """Return all programs inside an equation, in JAX's containers."""
    parts = (p if isinstance(p, tuple) else (p,) for p in equation.params.values())
    return [item for part in parts for item in part if hasattr(item, "eqns")]


def differentiated_programs(equation: JaxprEqn) -> list:
    """Return the programs inside an equation that JAX differentiates operation by operation.

    Those of a custom rule, a kernel, a `while` and a linear solve are not: they have derivatives of
    their own, or none.
    """
    return held_programs(equation) if equation.primitive.name in _DIFFERENTIATED else []


def entered_programs(equation: JaxprEqn) -> tuple[list, list]:
    """Return the programs inside an equation: those that derivatives go through, and the others.

    Of the others `evaluate` enters only `while`'s, and custom rules if its hook flattens.
    """
    if equation.primitive.name == "custom_linear_solve":
        solve = equation.params["jaxprs"]
        others = [solve.solve, solve.vecmat, solve.transpose_solve]
        return [solve.matvec], [program for program in others if program is not None]
    inner = differentiated_programs(equation)
    return (inner, []) if inner else ([], held_programs(equation))


def value_programs(equation: JaxprEqn) -> list:
    """Return the programs inside an equation whose values can be kept besides its results.

    They are in the order in which `evaluate` numbers the branches of a cond. Custom rules and
    linear solves are left whole; the condition of a `while` is computed apart from its body.
    """
    is_while = equation.primitive.name == "while"
    return [equation.params["body_jaxpr"]] if is_while else differentiated_programs(equation)


def tracked_programs(equation: JaxprEqn) -> list:
    """Return the programs inside an equation whose operations are followed one by one.

    They are the `value_programs`, and custom rules; a choice by platform is one operation.
    """
    if equation.primitive.name in CUSTOM_RULES:
        return [called_program(equation)]
    return [] if chooses_by_platform(equation) else value_programs(equation)


def chooses_by_platform(equation: JaxprEqn) -> bool:
    """Whether an equation is a cond that chooses by the platform, when XLA compiles."""
    return equation.params.get("branches_platforms") is not None


def side_effects(program: Any) -> list[str]:
    """Return the names of the operations that change something outside of a program.

    An operation that holds programs is judged by the operations in them: a kernel that is
    interpreted, say, has the effects of its interpreter besides. Prints and collectives change
    nothing, nor do reads and writes of references that the program creates itself.
    """
    jaxpr = opened(program)[0]
    from_outside = any(map(is_reference, [*jaxpr.invars, *jaxpr.constvars]))
    harmless = _HARMLESS if from_outside else _HARMLESS | _OF_REFERENCES
    found = {
        equation.primitive.name
        for equation in equations(program)
        if not held_programs(equation) and equation.primitive.name not in PRINTS
        if any(type(effect).__name__ not in harmless for effect in equation.effects)
    }
    return sorted(found)


def manual_axes(equation: JaxprEqn) -> tuple[str, ...]:
    """Return the axes of the mesh that a `shard_map` maps over, in the order of the mesh."""
    params = equation.params
    axes = params.get("newly_manual_axes", params.get("manual_axes"))
    return tuple(name for name in params["mesh"].axis_names if name in axes)


def device_count(equation: JaxprEqn) -> int:
    """Return over how many devices a `shard_map` maps."""
    shape = equation.params["mesh"].shape
    return math.prod(shape[name] for name in manual_axes(equation))


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """Return how many inputs of a scan are constants and how many are carried."""
    params = equation.params
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)
