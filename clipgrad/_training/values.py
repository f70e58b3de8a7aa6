"""The values inside of a loss that a training step measures."""

from collections.abc import Callable
from typing import Any, NamedTuple

from clipgrad._values import ValueStats, Watch, with_value_stats


class MeasuredLoss(NamedTuple):
    """A loss function, and the names of the values in it that are measured; ``None``: none."""

    loss_fn: Callable[..., Any]
    has_aux: bool
    watch: Watch

    @property
    def fun(self) -> Callable[..., Any]:
        """The loss, whose auxiliary results end with the statistics."""
        if self.watch is None:
            return self.loss_fn
        return with_value_stats(self.loss_fn, watch=self.watch, has_aux=self.has_aux)

    @property
    def fun_has_aux(self) -> bool:
        """Whether `fun` has auxiliary results."""
        return self.has_aux or self.watch is not None

    def split(self, aux: Any, parts: int) -> tuple[Any, dict[str, ValueStats]]:
        """The auxiliary results of the user's, and the statistics joined over microbatches."""
        if self.watch is None:
            return aux, {}
        aux, values = aux if self.has_aux else (None, aux)
        if parts > 1:
            values = {name: stats.over(0) for name, stats in values.items()}
        return aux, values

    def metrics(self, values: dict[str, ValueStats], aux: Any) -> dict[str, Any]:
        """The statistics and the auxiliary results as metrics."""
        measured = {} if self.watch is None else {"values": values}
        return measured | ({"aux": aux} if self.has_aux else {})

    def extra_args(self, values: dict[str, ValueStats]) -> dict[str, Any]:
        """The extra arguments of the optimizer: the largest elements, for `qk_clip`."""
        highest = {name: stats.highest for name, stats in values.items()}
        return {} if self.watch is None else {"max_logits": highest}
