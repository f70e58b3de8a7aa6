"""Whether a value is finite, and when the operation ran that made it otherwise."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Times are unsigned: those of arguments come before all operations, those of constants behind.
NEVER = np.uint32(2**32 - 1)
UNUSED = np.uint32(2**32 - 2)  # of a constant, until the first operation that reads it
CONSTANT = np.uint32(2**31)  # added to the time of this operation


class Track(NamedTuple):
    """What is known of a value; `NEVER` stands for no time."""

    badness: Any  # 2: it holds NaN, 1: inf, 0: it is finite
    origin: Any  # when it was made not finite
    root: Any  # when the inf was made that the origin made NaN of


def finite() -> Track:
    """The track of a finite value."""
    return Track(jnp.int32(0), jnp.uint32(NEVER), jnp.uint32(NEVER))


def badness(x: Any) -> jax.Array:
    """2 if there is NaN, else 1 if there is inf, else 0."""
    kinds = jnp.where(jnp.isnan(x), jnp.int32(2), jnp.where(jnp.isinf(x), jnp.int32(1), 0))
    return jnp.max(kinds, initial=0)


def given(x: Any, time: Any, root: Any = NEVER) -> Track:
    """The track of a value that is not made by an operation, or of a part of one that is."""
    bad = badness(x)
    return Track(bad, _where(bad > 0, time), _where(bad > 0, root))


def computed(y: Any, operands: Sequence[Track], time: Any) -> Track:
    """The track of a result of an operation, from those of its operands.

    It has its origin here if it is worse than all of them: inf of what is finite, or NaN of what
    holds no NaN. Else its origin is the earliest of those operands that are as bad.
    """
    bad = badness(y)
    if not operands:
        return given(y, time)
    worst = operands[0].badness
    for track in operands[1:]:
        worst = jnp.maximum(worst, track.badness)
    least = jnp.minimum(bad, worst)
    origin, root = jnp.uint32(NEVER), jnp.uint32(NEVER)
    for track in operands:
        other = _where((track.badness >= least) & (track.badness > 0), track.origin)
        other = jnp.where(other == UNUSED, time | CONSTANT, other)
        root = jnp.where(other < origin, track.root, root)
        origin = jnp.minimum(origin, other)
    is_born = bad > worst
    root = jnp.where(is_born, origin, root)
    origin = jnp.where(is_born, time, origin)
    return Track(bad, _where(bad > 0, origin), _where(bad > 0, root))


def earliest(stacked: Track) -> Track:
    """One track for those along the leading axis: of steps, or of devices."""
    origin = jnp.min(stacked.origin, 0, initial=NEVER)
    roots = _where(stacked.origin == origin, stacked.root)
    return Track(jnp.max(stacked.badness, 0, initial=0), origin, jnp.min(roots, 0, initial=NEVER))


def selected(where: jax.Array, x: Any, new: Track, old: Track) -> Track:
    """The track of a value that is selected from two."""
    bad = badness(x)
    is_new = jnp.any(where) & (new.badness > 0)
    origin = jnp.where(is_new, new.origin, old.origin)
    root = jnp.where(is_new, new.root, old.root)
    return Track(bad, _where(bad > 0, origin), _where(bad > 0, root))


def _where(condition: Any, time: Any) -> jax.Array:
    return jnp.where(condition, jnp.uint32(time), jnp.uint32(NEVER))
