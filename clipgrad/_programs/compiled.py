"""Programs for brief use, compiled with little optimization."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from clipgrad._programs.kinds import held_programs, scan_length
from clipgrad._programs.programs import opened

# A run without optimization takes up to 20 ns for an element, forward and backward; to optimize the
# gradient of a hundred equations takes 0.3 seconds, and to optimize some of it half of that.
BRIEF = 2**23
FAST_TO_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,  # JAX 0.10: the new emitters compile for longer
    # Else all products of a model are one kernel, which needs all of its widened weights at once.
    "xla_cpu_experimental_ynn_fusion_type": "",
    # Else leaves are widened all at once, before the first of them is needed.
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}
# Loops over arrays run as fast with these options as with XLA's own.
FAST_ENOUGH = FAST_TO_COMPILE | {
    "xla_backend_optimization_level": 1,
    "xla_llvm_disable_expensive_passes": True,
}


def low_jit(fun: Callable, **options: Any) -> Callable:
    """`jax.jit` with little optimization; nothing is kept but by what it returns."""
    return jax.jit(fun, compiler_options=low_optimization(), **options)


def middle_jit(fun: Callable, **options: Any) -> Callable:
    """`jax.jit` with the optimization that loops over large arrays need, and no more."""
    return jax.jit(fun, compiler_options=some_optimization(), **options)


def jit_by_size(program: Any) -> Callable[..., Callable]:
    """`jax.jit` for something like a program that runs a few times.

    With little optimization if more takes longer than a run without it.
    """
    return low_jit if element_count(program) <= BRIEF else middle_jit


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


@functools.cache
def some_optimization() -> dict[str, Any]:
    """The options for enough optimization that this version of the compiler knows."""
    return {name: value for name, value in FAST_ENOUGH.items() if _known({name: value})}


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
