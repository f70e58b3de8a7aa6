"""Optimizers that would not train: a clip alone, and an average of what is to be skipped."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from clipgrad._clip import as_optimizer, is_clip_alone
from clipgrad._training.optimizer_states import OptimizerStates, found_in


def checked_optimizer(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """An optimizer that takes any extra arguments; an error for one that would not train."""
    if is_clip_alone(optimizer):
        raise TypeError(
            "optimizer: got a clip alone, expected an optimizer, which has a learning rate and a "
            "sign; write optax.chain(clip, optax.sgd(1e-3))"
        )
    average = getattr(getattr(optimizer, "init", None), "__self__", optimizer)
    if isinstance(average, optax.MultiSteps):
        checked_states(_state_of_one_number(average))
    return as_optimizer("optimizer", optimizer)


def checked_states(opt_state: Any) -> OptimizerStates:
    """The states in an optimizer's; `ValueError` for `optax.MultiSteps` around `skip_spikes`."""
    states = found_in(opt_state)
    if states.averages_skipped_steps:
        raise ValueError(
            "optimizer: got optax.MultiSteps around clipgrad.skip_spikes, expected skip_spikes "
            "around it, since its average would keep a NaN forever; write "
            "clipgrad.skip_spikes(optax.MultiSteps(optimizer, k)), or "
            "train_step(loss_fn, clipgrad.skip_spikes(optimizer), accumulate=k)"
        )
    return states


def _state_of_one_number(average: optax.MultiSteps) -> Any:
    try:
        return jax.eval_shape(average.init, jnp.zeros(()))
    except Exception:  # of a selection by names, say: then the first state shows it
        return ()
