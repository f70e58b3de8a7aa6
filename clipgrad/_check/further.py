"""Further points: where nothing is equal by accident, or else of the structure of the given one."""

from collections.abc import Sequence

import jax
import numpy as np

import clipgrad._trees as _trees
from clipgrad._check.points import generator
from clipgrad._check.subject import CheckSubject
from clipgrad._check.tolerances import pieces

# What a further point keeps of the given one, besides signs, what lies in [0, 1] and the order of
# the elements of each leaf where the function's value depends on it: nothing, the symmetry of its
# matrices, or all that is equal or 0.
NOTHING, SYMMETRY, EQUALITY = range(3)
# By which parts of themselves elements move nearer to zero, at least and at most; what is equal is
# moved apart by as much again, but by no more than a part of its distance to the next number.
LEAST, MOST = 0.02, 0.08
SPREAD, OF_GAP = 0.06, 1 / 3


def nearby(
    subject: CheckSubject, seed: int, reach: float = 1.0, keeps: int = EQUALITY
) -> list[jax.Array]:
    """Another point: every element nearer to zero by 2 to 8 percent of itself, times `reach`.

    By how much is a function of the element's value, one for each leaf, so the order stays as it
    is, and what is in [0, 1] stays there. Equal elements, zeros among them, are then moved apart:
    no two are equal, no matrix is symmetric, no complex number is real and nothing vanishes.
    `SYMMETRY` moves those of symmetric matrices in pairs. `EQUALITY` moves all leaves alike and
    nothing apart, but for leaves of one value throughout, which are more often a test's `ones` than
    a structure.
    """
    symmetric = symmetric_leaves(subject.inputs) if keeps == SYMMETRY else set()
    shared, moved = generator(seed, "nearby").uniform(0, 2 * np.pi), []
    for k, (name, leaf) in enumerate(zip(subject.names, subject.inputs, strict=True)):
        rng, values = generator(seed, f"nearby {name}"), _trees.widened_leaf(leaf)
        if np.all(values == values.ravel()[0]) and k not in symmetric:
            # Told apart: needed by matrices_of_ones of check_lazy.
            part = reach * rng.uniform(LEAST, MOST, values.shape)
            values = (1 - part) * values if values.any() else part
        elif keeps == EQUALITY:
            values = _nearer_to_zero(values, shared, reach)
        else:
            nearer = _nearer_to_zero(values, rng.uniform(0, 2 * np.pi), reach)
            values = _moved_apart(nearer, _parts(rng, values.shape, k in symmetric), reach)
        if keeps == NOTHING and np.iscomplexobj(values):
            # Turned about zero, each by its own angle: none is real or imaginary. Needed by
            # a_product_of_complex_numbers_that_are_real of check_lazy.
            values = values * np.exp(1j * reach * rng.uniform(LEAST, MOST, values.shape))
        moved.append(values)
    pairs = zip(moved, subject.inputs, strict=True)
    return [jax.device_put(values.astype(leaf.dtype)) for values, leaf in pairs]


def _nearer_to_zero(values: np.ndarray, phase: float, reach: float) -> np.ndarray:
    size = np.where(values == 0, 1.0, np.abs(values))
    middle, swing = (LEAST + MOST) / 2, (MOST - LEAST) / 2
    return values * (1 - reach * (middle + swing * np.sin(phase + np.log(size))))


def _parts(rng, shape: tuple[int, ...], symmetric: bool) -> np.ndarray:
    parts = rng.uniform(0.2, 1.0, shape)
    return np.tril(parts) + np.swapaxes(np.tril(parts, -1), -1, -2) if symmetric else parts


def _moved_apart(values: np.ndarray, parts: np.ndarray, reach: float) -> np.ndarray:
    """Elements of equal size nearer to zero by some part of the room there, zeros away from it.

    Complex numbers have no order, and room enough. Only what is moved is looked at one by one.
    """
    values, parts, is_complex = values.copy(), parts.ravel(), np.iscomplexobj(values)
    flat = values.reshape(-1)
    indices = np.arange(flat.size) if is_complex else _of_equal_size(flat)
    own, typical = flat[indices], np.sqrt(np.mean(np.abs(flat) ** 2))
    size = np.abs(own)
    room = reach * SPREAD * np.where(own == 0, typical, size)
    if not is_complex and len(own):
        order = np.sort(flat)
        below = np.searchsorted(order, own, "left") - 1, own - order[0] > 0
        above = np.searchsorted(order, own, "right"), order[-1] - own > 0
        gaps = [
            np.where(there, np.abs(own - order.take(place, mode="clip")), np.inf)
            for place, there in (below, above)
        ]
        room = np.fmin(room, OF_GAP * np.where(own > 0, *gaps))
    towards = np.where(own == 0, 1.0, -own / np.where(own == 0, 1.0, size))
    flat[indices] += towards * room * parts[indices]
    return values


def _of_equal_size(values: np.ndarray) -> np.ndarray:
    """The places of numbers whose size others have as well, and of zeros."""
    sizes = np.sort(np.abs(values))
    repeated = np.unique(np.append(sizes[1:][sizes[1:] == sizes[:-1]], 0.0))
    del sizes
    found = [np.zeros(0, int)]
    for where in pieces(0, values.size):
        own = np.abs(values[where])
        place = np.minimum(np.searchsorted(repeated, own), len(repeated) - 1)
        found.append(np.flatnonzero(repeated[place] == own) + where.start)
    return np.concatenate(found)


def sorted_axes(xs: Sequence[jax.Array]) -> list[tuple[int, int]]:
    """The leaves whose numbers are in order, up or down, along an axis, and this axis."""
    found = []
    for leaf, x in enumerate(xs):
        for axis in () if _trees.is_complex(x) else range(x.ndim):
            steps = np.diff(_trees.widened_leaf(x), axis=axis)
            in_order = (steps >= 0).all() or (steps <= 0).all()
            found += [(leaf, axis)] if x.shape[axis] > 2 and steps.any() and in_order else []
    return found


# Needed by a_sort_of_sorted_numbers of check_lazy.
def disordered(xs: Sequence, axes: Sequence[tuple[int, int]], seed: int) -> list:
    """The leaves with their rows along axes in another order, neither up nor down."""
    moved = list(xs)
    for leaf, axis in axes:
        order = generator(seed, f"order {leaf} {axis}").permutation(moved[leaf].shape[axis])
        if (np.diff(order) > 0).all() or (np.diff(order) < 0).all():
            order = np.roll(order, 1)
        moved[leaf] = jax.device_put(np.asarray(moved[leaf]).take(order, axis))
    return moved


def symmetric_leaves(xs: Sequence[jax.Array]) -> set[int]:
    """The leaves of symmetric or Hermitian matrices, whose elements are not all the same."""
    found = set()
    for leaf, x in enumerate(xs):
        square, values = x.ndim > 1 and x.shape[-2] == x.shape[-1] > 1, np.asarray(x)
        if square and (values == np.conj(np.swapaxes(values, -1, -2))).all():
            found |= {leaf} if (values != values.ravel()[0]).any() else set()
    return found
