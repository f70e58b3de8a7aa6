"""The programs inside the equations of a jaxpr."""

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from jax.extend.core import JaxprEqn

from clipgrad._programs.elements import is_reference
from clipgrad._programs.hijax import high_operation, with_plain_equations
from clipgrad._programs.kinds import (
    KERNELS,
    Kind,
    called_program,
    held_programs,
    kind_of,
    operation_name,
)
from clipgrad._programs.numeric import Does, does, is_print

Kept = TypeVar("Kept")
# JAX has no public names for the effects of an operation on a reference, along a named axis, or of
# a kernel of Pallas on the memory, the semaphores and the units of its device.
_OF_REFERENCES = {"ReadEffect", "WriteEffect", "AccumEffect", "InternalMutableArrayEffect"}
_HARMLESS = {
    "NamedAxisEffect", "SemaphoreEffect", "CommsEffect", "DelayEffect", "PRNGEffect", "TraceEffect",
    "MXUEffect", "MemoryEffect", "BarrierEffect",
}  # fmt: skip
_NO_KIND = Kind("operation")
# Of each jaxpr the one with plain equations; None if that is itself.
_PLAIN: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def opened(program: Any) -> tuple[Any, Sequence]:
    """Return the jaxpr and the constants of a program in any of JAX's containers.

    Equations are as JAX writes them without upgrade flags, see `hijax.py`.
    """
    jaxpr = getattr(program, "jaxpr", program)
    if jaxpr not in _PLAIN:
        plain = with_plain_equations(jaxpr, _plain_params)
        _PLAIN[jaxpr] = None if plain is jaxpr else plain
    return _PLAIN[jaxpr] or jaxpr, getattr(program, "consts", ())


def _plain_params(equation: JaxprEqn) -> dict[str, Any]:
    return map_programs(equation, lambda program: opened(program)[0])


def read_once(function: Callable[[Any], Kept]) -> Callable[[Any], Kept]:
    """Caches a function of a jaxpr, and lets it take programs in any container."""
    known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def read(program: Any) -> Kept:
        jaxpr = opened(program)[0]
        if jaxpr not in known:
            known[jaxpr] = function(jaxpr)
        return known[jaxpr]

    return read


def equations(program: Any) -> Iterator[JaxprEqn]:
    """Iterate over the equations of a program and of all programs inside it."""
    for equation in opened(program)[0].eqns:
        yield equation
        for inner in held_programs(equation):
            yield from equations(inner)


def map_programs(equation: JaxprEqn, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the parameters with programs in them, each replaced by `change` of it."""

    def changed(value):
        if hasattr(value, "eqns"):
            return change(value)
        if isinstance(value, tuple) and any(hasattr(item, "eqns") for item in value):
            items = [changed(item) for item in value]
            if all(item is old for item, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value

    new = {name: changed(value) for name, value in equation.params.items()}
    return {name: value for name, value in new.items() if value is not equation.params[name]}


def differentiated_programs(equation: JaxprEqn) -> list:
    """Return the programs inside an equation that JAX differentiates operation by operation.

    The programs of a custom rule, a kernel, a `while` and a linear solve are not differentiated:
    these have derivatives of their own, or none.
    """
    kind = kind_of(equation) or _NO_KIND
    return kind.through(equation) if kind.values(equation) else []


def entered_programs(equation: JaxprEqn) -> tuple[list, list]:
    """Return the programs inside an equation: those that derivatives go through, and the others.

    Among the others, `evaluate` enters those of `while`, and of custom rules if the hook says so.
    """
    through = (kind_of(equation) or _NO_KIND).through(equation)
    others = [p for p in held_programs(equation) if all(p is not one for one in through)]
    return through, others


def value_programs(equation: JaxprEqn) -> list:
    """Return the programs inside an equation whose values can be kept besides its results.

    They are in the order in which `evaluate` numbers the branches of a cond. Custom rules and
    linear solves are left whole; the condition of a `while` is computed apart from its body.
    """
    return (kind_of(equation) or _NO_KIND).values(equation)


def tracked_programs(equation: JaxprEqn) -> list:
    """Return the programs inside an equation whose operations are followed one by one.

    They are the `value_programs`, and custom rules; a choice by platform is one operation.
    """
    return (kind_of(equation) or _NO_KIND).followed(equation)


def is_foreign(equation: JaxprEqn) -> bool:
    """Whether an equation is a kernel or a function outside of JAX, which is seen from outside."""
    if (kind := kind_of(equation)) is not None:
        return kind is KERNELS
    return does(equation) is Does.CALLS or high_operation(equation) is not None


def side_effects(program: Any) -> list[str]:
    """Return the names of the operations that change something outside of a program.

    An operation that holds programs is judged by the operations in them: a kernel that is
    interpreted, say, has the effects of its interpreter besides. Prints and collectives change
    nothing, nor do reads and writes of references that the program creates itself.
    """
    jaxpr = opened(program)[0]
    from_outside = any(map(is_reference, [*jaxpr.invars, *jaxpr.constvars]))
    harmless = _HARMLESS if from_outside else _HARMLESS | _OF_REFERENCES
    operations = {
        operation_name(equation)
        for equation in equations(program)
        if not held_programs(equation) and not is_print(equation)
        if any(type(effect).__name__ not in harmless for effect in equation.effects)
    }
    return sorted(operations)


def manual_axes(equation: JaxprEqn) -> tuple[str, ...]:
    """Return the axes of the mesh that a `shard_map` maps over, in the order of the mesh."""
    params = equation.params
    axes = params.get("newly_manual_axes", params.get("manual_axes"))
    return tuple(name for name in params["mesh"].axis_names if name in axes)


def axis_lengths(equation: JaxprEqn) -> tuple[int, ...]:
    """Return the lengths of the `manual_axes` of a `shard_map`."""
    shape = equation.params["mesh"].shape
    return tuple(shape[name] for name in manual_axes(equation))


def device_count(equation: JaxprEqn) -> int:
    """Return over how many devices a `shard_map` maps."""
    return math.prod(axis_lengths(equation))


def function_name(equation: JaxprEqn, kind: str = "func_name") -> str:
    """Return the name of the function that an equation calls, or else that of the operation.

    Its file and line are another ``kind``: ``"func_src_info"``.
    """
    known = (getattr(_debug_info(equation), name, None) for name in (kind, "func_name"))
    return next(filter(None, known), operation_name(equation))


def function_file(equation: JaxprEqn) -> str | None:
    """Return the file of the function that an equation calls; None if JAX does not say."""
    return getattr(_debug_info(equation), "func_filename", None)


def _debug_info(equation: JaxprEqn) -> Any:
    """What JAX knows of the function that an equation calls."""
    return getattr(opened(called_program(equation))[0], "debug_info", None)
