"""From two versions of a loss to the first place where they differ."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from clipgrad._compare.comparison import GradientComparison
from clipgrad._compare.gradients import compare_gradients
from clipgrad._compare.steps import compare_steps
from clipgrad._error_clip import check_call

DTYPES = ("float32", "float64")


def compare(
    fun: Callable[..., Any],
    other: Callable[..., Any] | str,
    args: tuple,
    kwargs: Mapping[str, Any] | None = None,
    *,
    other_args: tuple | None = None,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    names: Mapping[str, str] | None = None,
    rtol: float | None = None,
) -> GradientComparison:
    """WIP"""
    check_call(fun, args, kwargs)
    given = args if other_args is None else other_args
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        if argnums is None:
            return compare_steps(fun, other, args, dict(kwargs or {}), given, rtol)
        return compare_gradients(
            fun, other, args, dict(kwargs or {}), given, argnums, has_aux, names, rtol
        )
