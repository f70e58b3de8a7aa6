"""Outputs whose slopes cannot be seen: where the function jumps, and beside so large a number."""

from collections.abc import Callable, Sequence

import numpy as np

import clipgrad._trees as _trees
from clipgrad._check.differences import Differences
from clipgrad._check.points import NEARBY, SINGLE, random_direction
from clipgrad._check.scales import Scales
from clipgrad._check.subject import CheckSubject
from clipgrad._check.tolerances import NOISE, NOISY, RELATIVE, narrowest

# The least share of the outputs that are the same in two precisions, if it is one function.
SAME_SHARE = 0.75
# An output that nothing moves, and that is so many times as large as what moves, is a mask.
MASK = 2.0**10
BY_CHANCE = 0.01  # of the outputs, which may be as small as they are by chance


def jumped(subject: CheckSubject, values: np.ndarray, dtypes: Sequence[str]) -> np.ndarray:
    """The outputs whose `values` in float64 are others by more than rounding in these types.

    So they are where a tie is broken otherwise. Where they are more than a part, none is returned:
    then the whole is another function, or all of it is rounding.
    """
    own = _trees.to_numpy(subject.outputs)
    narrow = narrowest([*dtypes, *(_trees.real_dtype(y).name for y in subject.outputs)])
    size = np.fmin(np.abs(own), np.abs(values))
    typical = np.sqrt(np.mean(np.fmin(size, np.quantile(size, SAME_SHARE)) ** 2))
    found = np.abs(own - values) > RELATIVE[narrow] * (size + typical)
    return found & (found.mean() <= 1 - SAME_SHARE)


# Needed by test_a_mask_among_the_outputs_has_no_noise.
def masked(
    subject: CheckSubject, differences: Differences, pulled: Callable
) -> tuple[np.ndarray, np.ndarray]:
    """The outputs that hold a mask such as -1e30 alone, and those that are sums with one.

    The first stay as they are, and depend on nothing, as `pulled`, the gradient for a cotangent,
    shows; in the others the changes of the function are lost.
    """
    size, none = np.abs(differences.base), np.zeros(differences.base.shape, bool)
    if not (size > 0).any() or size.max() <= MASK * np.quantile(size[size > 0], BY_CHANCE):
        return none, none
    along = Scales(subject.inputs).times(random_direction(subject, 0, SINGLE)) * NEARBY
    change = np.abs(differences.change(subject.inputs, along)).max(axis=0)
    still = (change == 0) & (size > MASK * size.max(initial=0.0, where=change > 0))
    lost = NOISE * differences.evaluation.eps * size > NOISY * change.max()
    if still.any() and not pulled(differences.covectors[:1] * still).any():
        return still, lost & ~still
    return none, lost


def unseen_notes(subject: CheckSubject, values, lost: np.ndarray, jumps: np.ndarray) -> list[str]:
    """The notes on outputs that are left out, one for each reason."""
    own, notes = _trees.to_numpy(subject.outputs), []
    for where, why in ((jumps, "the function jumps here"), (lost, "lost beside so large a number")):
        if where.any():
            k = int(np.argmax(where))
            numbers = f"{own[k]:.7g}" + (f", in float64 {values[k]:.7g}" if where is jumps else "")
            name = f"{subject.output_element(k)}: {int(where.sum())} of {where.size} outputs"
            notes.append(f"{name} not verified: {why} ({numbers})")
    return notes
