"""Slopes of a function, as they were measured."""

from typing import NamedTuple

import numpy as np


class Ladder(NamedTuple):
    """One-sided slopes, shape (directions, steps, cotangents), from the largest step down.

    `width` is half the difference of both, summed without sign over the outputs; `noise` is what
    the measured rounding of the function may do to a slope. `moves` are the directions as the
    inputs could hold them, one for each step or one for all, and where they are not zero.
    """

    ahead: np.ndarray
    behind: np.ndarray
    width: np.ndarray
    noise: np.ndarray
    steps: np.ndarray
    moves: list[tuple[np.ndarray, np.ndarray]]
