"""The leaves whose gradient was exactly zero, as the state of an optimizer shows it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._clip import GradientClipState
from clipgrad._docs import docs_page
from clipgrad._errors import first_few
from clipgrad._frameworks import without_variables
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
    found = _zeros_by_stats(state) or _zeros_by_moments(state)
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


def _zeros_by_stats(state: Any) -> dict[str, Any]:
    clips = instances(state, GradientClipState)
    return {path: s.zeros == 1 for clip in clips for path, s in (clip.leaf_stats or {}).items()}


def _zeros_by_moments(state: Any) -> dict[str, Any]:
    """Of each leaf whether its first moment is zero, in types whose smallest number is not."""

    def has(part: Any, name: str) -> bool:
        return name in getattr(part, "_fields", ()) and getattr(part, name) is not None

    leaves = {}
    for name in _MOMENTS:
        for own in jax.tree.leaves(state, is_leaf=lambda x, name=name: has(x, name)):
            leaves |= dict(with_paths(getattr(own, name))) if has(own, name) else {}
    wide = {
        path: x
        for path, x in leaves.items()
        if is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact) and jnp.finfo(x.dtype).tiny < _TINY
    }
    return _are_zero(wide)


@jax.jit
def _are_zero(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.all(x == 0) for path, x in leaves.items()}
