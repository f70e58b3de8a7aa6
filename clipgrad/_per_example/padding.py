"""Examples that only fill a batch up to its size: which they are, and that they add nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._arrays import described, is_array

Padding = jax.Array | None  # a boolean for each example; None: there is no padding


def as_padding(mask: Any, size: int) -> Padding:
    """The mask as an array, which is refused if it is no boolean for each of ``size`` examples."""
    if mask is None:
        return None
    array = mask if is_array(mask) else np.asarray(mask)
    if array.dtype != bool or array.shape != (size,):
        raise ValueError(
            f"is_padding_example: got {described(array)}, expected an array of {size} booleans, "
            "one for each example, True for padding"
        )
    return jnp.asarray(array)


def count_real(padding: Padding, size: int) -> Any:
    """By what a mean divides: the number of examples that are no padding, 1 if there are none."""
    if padding is None:
        return float(size)
    return jnp.maximum(jnp.sum(~padding, dtype="float32"), 1)


def real_losses(losses: jax.Array, padding: Padding) -> jax.Array:
    """The losses, 0 for padding."""
    return losses if padding is None else jnp.where(padding, jnp.zeros_like(losses), losses)
