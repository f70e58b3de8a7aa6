"""Programs for brief use, compiled with little optimization."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import conv_general_dilated_p

from clipgrad._programs.kinds import held_programs, scan_length
from clipgrad._programs.programs import equations, opened

# To optimize some of an operation takes as long as computing so many of its elements without that:
# some 3 ms, and 12 ns for each.
WORTH_AN_OPERATION = 2**18
FAST_TO_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,  # JAX 0.10: the new emitters compile for longer
    # Else all products of a model are one kernel, which needs all of its widened weights at once.
    # Convolutions, each by itself, keep their kernel: a loop takes a hundred times as long.
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION",
    # Else leaves are widened all at once, before the first of them is needed. In other programs it
    # may take more memory: twice that of a gradient with sketches of its values.
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


def jit_by_size(
    program: Any, runs: int = 1, is_wide: bool = False
) -> Callable[..., Callable[..., Any]]:
    """`jax.jit` for something like a program that runs so many times, in float64 if it is wide.

    With little optimization if more takes longer than the runs without it.
    """
    work = runs * element_count(program, is_wide)
    brief = WORTH_AN_OPERATION * sum(1 for _ in equations(program))
    return low_jit if work <= brief else middle_jit


def element_count(program: Any, is_wide: bool = False) -> int:
    """The number of elements that a program reads and computes, in each loop at all known steps."""
    jaxpr = opened(program)[0]
    leaves = (*jaxpr.invars, *jaxpr.constvars)
    read = sum(math.prod(v.aval.shape) for v in leaves if hasattr(v.aval, "shape"))
    return read + _computed(jaxpr, is_wide)


def _computed(program: Any, is_wide: bool) -> int:
    count = 0
    for equation in opened(program)[0].eqns:
        each = sum(math.prod(getattr(v.aval, "shape", ())) for v in equation.outvars)
        count += each * (_products(equation) if is_wide else 1)
        length = scan_length(equation)
        inner = sum(_computed(held, is_wide) for held in held_programs(equation))
        count += (1 if length is None else length) * inner
    return count


def _products(equation: JaxprEqn) -> int:
    """The products of a convolution for each element: in float64 XLA has no kernel but a loop."""
    if equation.primitive is not conv_general_dilated_p:
        return 1
    kernel: Any = equation.invars[1].aval
    return kernel.size // max(1, kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]])


@functools.cache
def low_optimization() -> dict[str, Any]:
    """The options for little optimization that this version of the compiler knows."""
    return _those_known(FAST_TO_COMPILE)


@functools.cache
def some_optimization() -> dict[str, Any]:
    """The options for enough optimization that this version of the compiler knows."""
    return _those_known(FAST_ENOUGH)


def _those_known(options: dict[str, Any]) -> dict[str, Any]:
    if _known(options):
        return options
    return {name: value for name, value in options.items() if _known({name: value})}


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
