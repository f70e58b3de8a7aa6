"""The factor between two versions of an output, and whether it is a number of devices."""

import math

import numpy as np

CLOSE = 1e-3  # a factor explains a difference if it leaves less; a mean of parts is not as exact
EXPLAINED = 0.1  # of the difference; a leaf that moved a little is near to 1.00 times any other


def ratio(a: np.ndarray, b: np.ndarray, tolerance: float) -> float | None:
    r"""The factor r for which ``a`` is r times ``b``, shape (...); None if there is none.

    ``a - r * b`` is at most a tenth of ``a - b``, and at most 0.001 of ``a``, as norms.
    Source: the least squares fit, :math:`r = \langle b, a\rangle / \lVert b\rVert^2`.
    """
    a, b = np.ravel(a), np.ravel(b)
    scale = max(np.max(np.abs(x), initial=0) for x in (a, b))
    if not np.isfinite(scale) or not np.any(a):
        return None
    a, b = a / scale, b / scale  # squares do not overflow
    square = np.vdot(b, b)
    factor = float(np.vdot(b, a) / square) if square else math.inf
    if not math.isfinite(factor):
        return None
    left = np.linalg.norm(a - factor * b)
    is_close = left <= max(CLOSE, tolerance) * np.linalg.norm(a)
    return factor if is_close and left <= EXPLAINED * np.linalg.norm(a - b) else None


def factor_text(factor: float, devices: tuple[int, ...]) -> str:
    """The text of a factor; a factor of one has none."""
    shown = f"{factor:.3g}"
    if float(shown) == 1:
        return ""
    size = max(abs(factor), 1 / abs(factor)) if factor else 0.0
    known = [n for n in devices if abs(size / n - 1) < CLOSE]
    means = f"; {known[0]} is the number of devices" if known else ""
    return f"; fun is {shown} times other{means}"
