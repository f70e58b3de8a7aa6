"""Curves of several seeds, some of which may end in NaN."""

import numpy as np


def first_nonfinite(curves: np.ndarray) -> list[int | None]:
    """The first step, counted from 1, at which each row is NaN or inf; ``None``: at none."""
    bad = ~np.isfinite(curves)
    return [int(row.argmax()) + 1 if row.any() else None for row in bad]


def band(curves: np.ndarray) -> np.ndarray:
    """Minimum, median and maximum over the rows that are finite; NaN where none is."""
    finite = np.isfinite(curves)
    some = finite.any(0)
    result = np.full((3, curves.shape[1]), np.nan)
    values = np.where(finite, curves, np.nan)[:, some].astype(np.float64)
    result[:, some] = np.nanquantile(values, [0.0, 0.5, 1.0], axis=0)
    return result


def span(values: np.ndarray) -> str:
    """The range of some numbers, for people: ``0.914..0.930, 2 NaN``."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "NaN"
    low, high = (f"{number:#.3g}" for number in (finite.min(), finite.max()))
    lost = values.size - finite.size
    return (low if low == high else f"{low}..{high}") + (f", {lost} NaN" if lost else "")
