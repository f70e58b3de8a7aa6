"""The loss of one example, checked where it is traced."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from clipgrad._rules import is_rule
from clipgrad._trees import described, is_array


def scalar_loss(loss_fn: Callable[..., Any], has_aux: bool) -> Callable[[Any, Any], Any]:
    """The loss function, which raises `ValueError` if it returns no loss of one example.

    It is not traced once more for that.
    """
    if is_rule(loss_fn) or not callable(loss_fn):
        hint = "; write the loss before the rule" if is_rule(loss_fn) else ""
        raise TypeError(
            f"loss_fn: got {loss_fn!r:.60} of type {type(loss_fn).__name__}, expected a function "
            f"of (params, example){hint}"
        )

    def loss(params: Any, example: Any) -> Any:
        result = loss_fn(params, example)
        _check_loss(_loss_beside_aux(result) if has_aux else result)
        return result

    return loss


def _loss_beside_aux(result: Any) -> Any:
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"loss_fn: got {described(result)} from it, expected (loss, aux) for has_aux=True; "
            "leave has_aux out if it returns the loss alone"
        )
    return result[0]


def _check_loss(value: Any) -> None:
    if isinstance(value, tuple):
        raise ValueError(
            "loss_fn: got a tuple from it, expected a scalar; write has_aux=True for (loss, aux)"
        )
    numeric = is_array(value) or isinstance(value, (int, float, complex, np.generic))
    if not numeric or jnp.shape(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise ValueError(
            f"loss_fn: got {described(value)} from it for one example, expected a floating scalar; "
            "write its mean or sum, as in\n  lambda params, x: jnp.mean(loss_fn(params, x[None]))"
        )
