"""The first operation whose value is not finite although what goes in is."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._diagnose.numbers import is_float
from clipgrad._diagnose.places import Place
from clipgrad._diagnose.suspects import MASKING
from clipgrad._diagnose.tracks import CONSTANT, NEVER, given
from clipgrad._diagnose.walk import Places, Record, Tracked, Walk

# NaN such as inf - inf is made of two infinities, of several operations at times.
_TRIED = 4


class ValueOrigin(NamedTuple):
    """Where a NaN or inf is from: an argument, an operation, or a constant in an operation."""

    argument: int | None
    place: Place | None = None
    step: int | None = None  # of the innermost scan
    values: tuple[float, ...] | None = None  # what goes in where it goes wrong; None: a constant
    cause: int | None = None  # the argument with the inf that an operation makes NaN of
    becomes: Place | None = None  # the operation that makes NaN of the inf


class _Times(NamedTuple):
    """When a result was made not finite, and when the inf that it was made of; None: not at all."""

    origin: int | None
    root: int | None


def origin_of_loss(program: Any, inputs: Sequence[Any]) -> ValueOrigin | None:
    """Where the first result of a program is not finite from; None if it is finite.

    NaN or inf that is masked later is not followed, so that masks made of -inf are harmless. NaN
    that is made of the inf of an operation is the doing of this operation, if there is no NaN
    where the inf is replaced by an ordinary number.
    """
    places = Places(program, len(inputs))
    times = _times(program, inputs, places, frozenset())
    if times.origin is None:
        return None
    if times.origin < places.arguments:
        return ValueOrigin(times.origin)
    place = places.at(times.origin)
    if times.origin >= CONSTANT:
        return ValueOrigin(None, place, _record(program, inputs, places, times.origin)[0])
    root = _overflow(program, inputs, places, times)
    if root is not None:
        step, values = _record(program, inputs, places, root)
        return ValueOrigin(None, places.at(root), step, values, becomes=place)
    step, values = _record(program, inputs, places, times.origin)
    is_given = times.root is not None and times.root < places.arguments
    return ValueOrigin(None, place, step, values, times.root if is_given else None)


def _overflow(
    program: Any, inputs: Sequence[Any], places: Places, times: _Times
) -> int | None:
    """The operation that makes inf of finite numbers, without which there is no such NaN."""
    found, cured, first = times, frozenset[int](), times.root
    for _ in range(_TRIED):
        root = found.root
        if root is None or not places.arguments <= root < CONSTANT or _is_mask(places, times):
            return None
        cured |= {places.number(places.at(root))}
        found = _times(program, inputs, places, cured)
        if found.origin is None or places.at(found.origin) is not places.at(times.origin or 0):
            return first
    return None


def _is_mask(places: Places, times: _Times) -> bool:
    """Whether NaN is made of log(0) by a softmax: that of a row that is masked throughout."""
    assert times.root is not None and times.origin is not None
    package = places.at(times.origin).location.package or ""
    is_log = places.at(times.root).operation in ("log", "log1p")
    return is_log and package.partition(" ")[0] in MASKING


def _times(
    program: Any, inputs: Sequence[Any], places: Places, cured: frozenset[int]
) -> _Times:
    @jax.jit
    def run(inputs):
        tracked = [Tracked(x, given(x, i) if is_float(x) else None) for i, x in enumerate(inputs)]
        return Walk(places, cured).evaluate(program, tracked, None, -1)[0].track

    track = run(list(inputs))
    times = [int(time) for time in (track.origin, track.root)]
    return _Times(*(None if time == NEVER else time for time in times))


def _record(
    program: Any, inputs: Sequence[Any], places: Places, time: int
) -> tuple[int | None, tuple[float, ...]]:
    """The step at which an operation runs at this time, and what it reads."""
    place = places.at(time)

    @jax.jit
    def run(inputs, time):
        walk = Walk(places, frozenset(), place, time)
        walk.evaluate(program, [Tracked(x, None) for x in inputs], None, -1)
        return walk.record

    record: Record = run(list(inputs), jnp.uint32(time % int(CONSTANT)))
    step = int(record.step)
    pairs = zip(place.equation.invars, np.asarray(record.values), strict=True)
    values = tuple(float(value) for v, value in pairs if is_float(v))
    return step if step >= 0 else None, values
