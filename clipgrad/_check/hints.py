"""What a wrong gradient looks like: a factor, a sign, a transpose, a permutation."""

import numpy as np

# Ratios that spread this much, relative to what sets them apart from 1 and from 0, are one number:
# results rounded to bfloat16 spread by 0.4 %, so a missing factor of 2 is still seen there.
SAME = 0.01
EXACT = 1e-3


def ratio_hint(numeric: np.ndarray, analytic: np.ndarray) -> str:
    """A remark if analytic/numeric is one number throughout."""
    known = np.isfinite(analytic) & np.isfinite(numeric) & (numeric != 0)
    if len(numeric) < 2 or not known.all():
        return ""
    ratio = analytic / numeric
    middle = float(np.median(ratio))
    if middle == 0 and not ratio.any():
        return "; analytic is 0 throughout"
    if np.ptp(ratio) > SAME * min(abs(middle), abs(middle - 1)):
        return ""
    meaning = " (the sign)" if abs(middle + 1) < EXACT else ""
    digits = 4 if abs(middle - 1) > EXACT else 8
    return f"; analytic/numeric is {middle:.{digits}g} throughout{meaning}"


def layout_hint(numeric: np.ndarray, analytic: np.ndarray) -> str:
    """A remark if a whole leaf's analytic gradient is the numeric one, rearranged."""
    if numeric.size < 3 or not np.all(np.isfinite(analytic)) or _near(numeric, analytic):
        return ""
    if numeric.ndim == 2 and numeric.shape[0] == numeric.shape[1] and _near(numeric.T, analytic):
        return "; analytic is the transpose of numeric"
    for axis in range(numeric.ndim):
        if numeric.shape[axis] > 1 and _near(np.flip(numeric, axis), analytic):
            return f"; analytic is numeric reversed along axis {axis}"
    if _near(np.sort(numeric, axis=None), np.sort(analytic, axis=None)):
        return "; analytic is a permutation of numeric"
    return ""


def _near(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=EXACT, atol=EXACT * np.sqrt(np.mean(a**2))))
