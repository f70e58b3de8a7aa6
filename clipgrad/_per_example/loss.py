"""The loss of one example, checked where it is traced."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._rules import is_rule
from clipgrad._trees import check_scalar, combine, is_array, loss_and_aux, partition

_OF_ONE = ", as in\n  lambda params, x: jnp.mean(loss_fn(params, x[None]))"


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
        try:
            result = loss_fn(params, example)
        except (IndexError, TypeError, ValueError) as error:
            _check_is_of_one(loss_fn, params, example, error)
            raise
        value = loss_and_aux("loss_fn", result, has_aux)[0]
        check_scalar("loss_fn", value, " for one example", _OF_ONE)
        return result

    return loss


def _check_is_of_one(loss_fn: Any, params: Any, example: Any, error: Exception) -> None:
    """Raises `ValueError` if a loss that failed for one example can be traced for a batch of it."""
    arrays, rest = partition(example, is_array)
    try:
        batch = jax.tree.map(lambda x: jnp.asarray(x)[None], arrays)
        jax.eval_shape(lambda batch: jax.tree.leaves(loss_fn(params, combine(batch, rest))), batch)
    except Exception:
        return  # it fails for another reason, which the caller raises
    shapes = [jnp.shape(x) for x in jax.tree.leaves(arrays)]
    raise ValueError(
        f"loss_fn: got {type(error).__name__} from it for one example, of shapes {shapes}, "
        "expected the loss of one example, without an axis for the batch; write "
        "lambda params, example: loss_fn(params, jax.tree.map(lambda x: x[None], example))"
    ) from error
