"""Variables of flax Linen, and states of a training, instead of parameters."""

from collections.abc import Mapping
from typing import Any

import jax

from clipgrad._arrays import is_clippable
from clipgrad._flax import has_linen

# flax overwrites the variables of this collection by their gradients, as its `TrainState` does.
_TRAINED = ("params", "_overwrite_with_gradient")


def check_no_collections(params: Any) -> None:
    """Raises `ValueError` for what has the parameters in it, and numbers that are not trained.

    A gradient would train these as well: the statistics of a `flax.linen.BatchNorm`, or the state
    of an optimizer.
    """
    names = [name for name in ("params", "opt_state") if hasattr(params, name)]
    if isinstance(params, Mapping):
        names = list(params)
    if "params" in names and "opt_state" in names:
        raise ValueError(
            f"params: got a {type(params).__name__} with params and opt_state, expected the "
            "parameters alone; write state.params"
        )
    if not has_linen() or "params" not in names:
        return
    for name in names:
        numbers = jax.tree.leaves(params[name] if isinstance(params[name], Mapping) else ())
        if name not in _TRAINED and any(map(is_clippable, numbers)):
            raise ValueError(
                f"params: got the collection {name!r} of flax Linen beside 'params', which is not "
                "trained, expected the parameters alone; write loss_fn(params, batch) with "
                f"model.apply({{'params': params, {name!r}: {name}}}, x), where {name} is in the "
                "batch, and the new one is returned as aux; to train both, use another name than "
                "'params'"
            )
