"""Programs for brief use, compiled with little optimization."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from clipgrad._programs.evaluate import FreedValues, Hook, ProgramValues, bind
from clipgrad._programs.kinds import called_program, held_programs, kind_of, scan_length
from clipgrad._programs.programs import opened
from clipgrad._programs.rounded import is_measure
from clipgrad._programs.widen import Widen

# A run without optimization takes up to 20 ns for an element, forward and backward; to optimize the
# gradient of a hundred equations takes 0.3 seconds.
BRIEF = 2**23
# To compile an operation alone takes as long as to compile six of them as part of a program.
REPEATED = 8
MOST_REPEATED = 2**27  # elements that are computed without `jax.jit`
FAST_TO_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,  # JAX 0.10: the new emitters compile for longer
    # Else all products of a model are one kernel, which needs all of its widened weights at once.
    "xla_cpu_experimental_ynn_fusion_type": "",
    # Else leaves are widened all at once, before the first of them is needed.
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}


def low_jit(fun: Callable, **options: Any) -> Callable:
    """`jax.jit` with little optimization; nothing is kept but by what it returns."""
    return jax.jit(fun, compiler_options=low_optimization(), **options)


def jit_by_size(program: Any) -> Callable[[Callable], Callable]:
    """`jax.jit` for something like a program that runs a few times.

    With little optimization if that takes longer than a run without it.
    """
    return low_jit if element_count(program) <= BRIEF else jax.jit


class Inlined(Hook):
    """Evaluates what is inside of `jit`, `remat` and custom rules without them."""

    in_place = Widen.in_place

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        return bind(equation, inputs) if is_measure(equation) else None

    def values(self, jaxpr: Any) -> ProgramValues:
        return FreedValues(self, jaxpr)


def is_repetitive(program: Any) -> bool:
    """Whether to compile each kind of operation once takes less than to compile the program.

    So it is for a loop of Python over layers or steps. The program then runs without `jax.jit`, one
    operation after the other.
    """
    flat = list(_inlined_equations(program))
    is_flat = all(is_measure(e) or not held_programs(e) for e in flat)
    if not is_flat or element_count(program) > MOST_REPEATED:
        return False
    return len(flat) >= REPEATED * len({*map(_operation_of, flat)})


def _inlined_equations(program: Any) -> Iterator[JaxprEqn]:
    for equation in opened(program)[0].eqns:
        if kind_of(equation) in Inlined.in_place and not is_measure(equation):
            yield from _inlined_equations(called_program(equation))
        else:
            yield equation


def _operation_of(equation: JaxprEqn) -> tuple:
    """What JAX compiles once: the operation, with the types of its operands and its options."""
    types = tuple(str(v.aval) for v in equation.invars)
    return equation.primitive, types, "" if is_measure(equation) else str(equation.params)


def element_count(program: Any) -> int:
    """The number of elements that a program computes, in each loop of known length at all steps."""
    count = 0
    for equation in opened(program)[0].eqns:
        count += sum(math.prod(getattr(v.aval, "shape", ())) for v in equation.outvars)
        length = scan_length(equation)
        count += (1 if length is None else length) * sum(
            map(element_count, held_programs(equation))
        )
    return count


@functools.cache
def low_optimization() -> dict[str, Any]:
    """The options for little optimization that this version of the compiler knows."""
    return {name: value for name, value in FAST_TO_COMPILE.items() if _known({name: value})}


def _known(options: dict[str, Any]) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except Exception:
        return False
    return True


@contextlib.contextmanager
def settings_of_runs() -> Iterator[None]:
    """A context in which JAX neither looks for NaN by itself nor forbids transfers."""
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        yield
