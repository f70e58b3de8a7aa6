"""The factor between two versions of an output, and whether it is a number of devices."""

import math

import numpy as np

CLOSE = 1e-3  # a factor explains a difference if it leaves less; a mean of parts is not as exact
EXPLAINED = 0.1  # of the difference; a leaf that moved a little is near to 1.00 times any other


def ratio(own: np.ndarray, other: np.ndarray, tolerance: float) -> float | None:
    r"""The factor r for which ``own`` is r times ``other``, shape (...); None if none is.

    Of the difference of the two the factor leaves at most a tenth, and of ``own`` at most 0.001.
    Source: the least squares fit, :math:`r = \langle b, a\rangle / \lVert b\rVert^2`.
    """
    a, b = np.ravel(own), np.ravel(other)
    if not (np.all(np.isfinite(a)) and np.all(np.isfinite(b))):
        return None
    scales = [float(np.max(np.abs(x), initial=0)) for x in (a, b)]
    if not all(scales):
        return None
    a, b = a / scales[0], b / scales[1]  # squares of what is left neither over- nor underflow
    found = float(np.vdot(b, a) / np.vdot(b, b))
    left = np.linalg.norm(a - found * b)
    most = max(CLOSE, tolerance) * np.linalg.norm(a)
    parts = [scale / max(scales) for scale in scales]
    difference = np.linalg.norm(a * parts[0] - b * parts[1])
    if left > most or left * parts[0] > EXPLAINED * difference:
        return None
    factor = found * (scales[0] / scales[1])
    return factor if math.isfinite(factor) else None


def factor_text(factor: float, devices: tuple[int, ...]) -> str:
    """The text of a factor; a factor of one has none."""
    shown = f"{factor:.3g}"
    if float(shown) == 1:
        return ""
    size = max(abs(factor), 1 / abs(factor)) if factor else 0.0
    known = [n for n in devices if abs(size / n - 1) < CLOSE]
    means = f"; {known[0]} is the number of devices" if known else ""
    return f"; fun is {shown} times other{means}"
