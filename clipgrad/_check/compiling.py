"""Compiling for programs that run briefly: little optimisation, soon ready."""

import functools
from collections.abc import Callable
from typing import Any

import jax

LOW = {"xla_backend_optimization_level": 0}
OLDER = {"xla_cpu_use_fusion_emitters": False}


def quick_jit(fun: Callable) -> Callable:
    """`jax.jit` with as little optimisation as the installed compiler lets one ask for."""
    return jax.jit(fun, compiler_options=low_optimization())


@functools.cache
def low_optimization() -> dict[str, Any]:
    """The options that this version of the compiler knows."""
    return {key: value for part in (LOW, OLDER) if _known(part) for key, value in part.items()}


def _known(options: dict[str, Any]) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except Exception:
        return False
    return True
