"""Curves of several seeds, some of which may end in NaN."""

import itertools
from typing import NamedTuple

import numpy as np


def first_nonfinite(curves: np.ndarray) -> list[int | None]:
    """The first step, counted from 1, at which each row is NaN or inf; ``None``: at none."""
    bad = ~np.isfinite(curves)
    return [int(row.argmax()) + 1 if row.any() else None for row in bad]


class Band(NamedTuple):
    """Minimum, median and maximum around some steps."""

    steps: np.ndarray
    low: np.ndarray
    middle: np.ndarray
    high: np.ndarray


def band(curves: np.ndarray, points: int = 80) -> Band:
    """The range of all rows over neighboring steps, which get wider as the steps go on.

    Args:
      curves: of shape (seeds, steps); what is not finite is left out.
      points: how many groups of steps there are at most.
    """
    steps = curves.shape[1]
    edges = np.unique(np.geomspace(1, steps + 1, points + 1).round().astype(int))
    groups = [curves[:, a - 1 : b - 1] for a, b in itertools.pairwise(edges)]
    rows = [_range(group[np.isfinite(group)]) for group in groups]
    centres = np.sqrt(edges[:-1] * (edges[1:] - 1))
    return Band(centres, *np.array(rows).T)


def over_training(norms: np.ndarray) -> Band:
    """The range of all seeds and training steps at each time step, which are counted from 1.

    Args:
      norms: of shape (seeds, steps, time steps); what is not finite is left out.
    """
    columns = norms.reshape(-1, norms.shape[-1]).T
    rows = [_range(column[np.isfinite(column)]) for column in columns]
    return Band(np.arange(1, len(columns) + 1), *np.array(rows).T)


def _range(values: np.ndarray) -> list[float]:
    if not values.size:
        return [np.nan] * 3
    return [values.min(), float(np.median(values)), values.max()]


def span(values: np.ndarray) -> str:
    """The range of some numbers, for people: ``0.914..0.930, 2 NaN``."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "NaN"
    low, high = (short_number(number) for number in (finite.min(), finite.max()))
    lost = values.size - finite.size
    return (low if low == high else f"{low}..{high}") + (f", {lost} NaN" if lost else "")


def short_number(number: float) -> str:
    """Three digits of a number."""
    return f"{number:#.3g}".rstrip(".")
