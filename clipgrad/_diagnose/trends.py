"""Gradients that grow or shrink steadily on their way back."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from clipgrad._diagnose.diagnosis import GradientFinding, GradientRow
from clipgrad._diagnose.numbers import short
from clipgrad._diagnose.rows import SCAN

_MANY = 6
_STEADY = 0.8
_GROWTH = 1e4
_DECAY = 1e-4


class Trend(NamedTuple):
    """The growth of a series of norms in the order of the backward pass."""

    factor: float  # per entry
    total: float  # from the first entry to the last
    steadiness: float  # the share of the variance of the logarithms that the trend explains
    count: int


def trend(norms: Sequence[float]) -> Trend | None:
    """The trend of norms in backward order, as far as they are positive and finite."""
    array = np.asarray(norms, np.float64)
    usable = np.isfinite(array) & (array > 0)
    array = array[: len(array) if usable.all() else int(np.argmin(usable))]
    if len(array) < _MANY:
        return None
    logs, places = np.log(array), np.arange(len(array))
    slope, start = np.polyfit(places, logs, 1)
    spread = np.sum((logs - logs.mean()) ** 2)
    left = np.sum((logs - start - slope * places) ** 2)
    steadiness = 1 - left / spread if spread else 0.0
    return Trend(np.exp(slope), np.exp(slope * (len(array) - 1)), steadiness, len(array))
