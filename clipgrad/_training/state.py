"""The state of a training step."""

from typing import Any, NamedTuple

from clipgrad._compat import exportable


@exportable
class TrainState(NamedTuple):
    """The state of a training step: the parameters, and the state of the optimizer."""

    params: Any
    opt_state: Any
