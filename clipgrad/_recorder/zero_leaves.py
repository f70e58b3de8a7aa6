"""The leaves whose gradient was exactly zero, as the state of an optimizer shows it."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._docs import docs_page
from clipgrad._errors import first_few
from clipgrad._frameworks import without_variables
from clipgrad._gradient_clip import GradientClipState
from clipgrad._trees import instances, is_array, with_paths

_MOMENTS = ("mu", "trace")  # of Adam and its like, and of momentum: the mean, without squares
_TINY = 1e-30  # moments whose smallest number is larger may be zero by rounding
_NAMED_LEAVES = 4


def warning_of_zeros(state: Any, loss: Any) -> str | None:
    """A warning of leaves whose gradient was exactly zero in the first step; None: there are none.

    The statistics of each leaf say it, where a clip keeps them, else the moments. Nothing is known
    if all leaves are zero, as at a loss of 0 or where gradients are still accumulated.
    """
    state = without_variables(state)
    found = dict(_zeros_by_stats(state)) or dict(_zeros_by_moments(state))
    loss, flags = jax.device_get((loss, found))
    zero = [name for name, is_zero in flags.items() if np.all(is_zero)]
    if not zero or len(zero) == len(found) or (loss is not None and not np.any(loss)):
        return None
    names = first_few([*map(repr, zero)], _NAMED_LEAVES)
    return (
        f"the gradient of {names} was exactly zero in the first recorded step, which trains "
        "nothing; to find the line, call clipgrad.diagnose(loss, (params, batch)) "
        f"({docs_page('zero')})"
    )


def _zeros_by_stats(state: Any) -> Iterator[tuple[str, Any]]:
    for clip in instances(state, GradientClipState):
        by_path = clip.leaf_stats or {}
        yield from ((path, stats.zeros == 1) for path, stats in by_path.items())


def _zeros_by_moments(state: Any) -> Iterator[tuple[str, Any]]:
    for name in _MOMENTS:
        for own in _states_with(state, name):
            leaves = {path: x for path, x in with_paths(getattr(own, name)) if _is_wide(x)}
            yield from _are_zero(leaves).items()


@jax.jit
def _are_zero(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.all(x == 0) for path, x in leaves.items()}


def _is_wide(x: Any) -> bool:
    is_floating = is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    return is_floating and bool(jnp.finfo(x.dtype).tiny < _TINY)


def _states_with(state: Any, field: str) -> list[Any]:
    """The parts of a state that are named tuples with something in this field."""

    def has_field(part: Any) -> bool:
        return field in getattr(part, "_fields", ()) and getattr(part, field) is not None

    return [part for part in jax.tree.leaves(state, is_leaf=has_field) if has_field(part)]
