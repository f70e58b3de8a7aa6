"""Results of loss functions: the loss alone, or with auxiliary results beside it."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from clipgrad._arrays.trees import described, is_array


def loss_and_aux(name: str, result: Any, has_aux: bool) -> tuple[Any, Any]:
    """The loss, and what is beside it or None; `ValueError` if ``has_aux`` says otherwise."""
    if has_aux and (not isinstance(result, tuple) or len(result) != 2):
        raise ValueError(
            f"{name}: got {described(result)} from it, expected (loss, aux) for has_aux=True; "
            "leave has_aux out if it returns the loss alone"
        )
    value, aux = result if has_aux else (result, None)
    if isinstance(value, tuple):
        raise ValueError(
            f"{name}: got a tuple from it, expected a scalar; write has_aux=True for (loss, aux), "
            "or give the loss itself instead of its jax.value_and_grad"
        )
    return value, aux


def check_scalar(name: str, value: Any, where: str = "", instead: str = "") -> None:
    """Raises `ValueError` for a loss that is not one floating number; ``instead`` says more."""
    numeric = is_array(value) or isinstance(value, (int, float, complex, np.generic))
    if not numeric or jnp.shape(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        advice = f"write its mean or sum{instead}" if numeric else "give the loss, not its jax.grad"
        raise ValueError(
            f"{name}: got {described(value)} from it{where}, expected a floating scalar; {advice}"
        )
