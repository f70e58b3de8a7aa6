"""The state of a training step."""

from typing import Any, NamedTuple

from clipgrad._arrays import answers_lookups
from clipgrad._compat import exportable


@exportable
@answers_lookups(
    "state",
    metrics="state, metrics = step(state, batch)",
    stats='metrics["clips"], or clipgrad.scalars(state)',
    step='optax.tree.get(state.opt_state, "count"), or count the steps in your loop',
)
class TrainState(NamedTuple):
    """The state of a training step: the parameters, and the state of the optimizer."""

    params: Any
    opt_state: Any
