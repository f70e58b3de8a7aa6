"""Parameters that their gradient overwrites: the scales and histories of flax's 8-bit floats.

The backward pass of ``flax.linen.Fp8DotGeneralOp`` and the like returns their next value in place
of a gradient. flax keeps them in a collection of this name, and ``flax.training.TrainState`` puts
what the backward pass returns in their place, without the optimizer.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._arrays.trees import combine, is_none, partition

COLLECTION = "_overwrite_with_gradient"


def are_overwritten(tree: Any) -> list[bool]:
    """For each leaf of a tree, ``None`` included, whether it is one of these."""
    entries, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)
    return [any(getattr(key, "key", None) == COLLECTION for key in path) for path, _ in entries]


def split_overwritten(grads: Any) -> tuple[Any, list[Any]]:
    """The gradients with ``None`` instead of next values, and these."""
    return partition(grads, [not flag for flag in are_overwritten(grads)])


def zeros_for(values: Sequence[Any]) -> list[Any]:
    """Zeros that an optimizer sees instead of next values."""
    return [None if value is None else jnp.zeros_like(value) for value in values]


def overwrite(params: Any, values: Sequence[Any], keep: Any) -> Any:
    """The parameters with these next values, or as they are where ``keep`` holds."""
    others, old = partition(params, [value is None for value in values])
    pairs = zip(old, values, strict=True)
    return combine(others, [v if v is None else jnp.where(keep, o, v) for o, v in pairs])
