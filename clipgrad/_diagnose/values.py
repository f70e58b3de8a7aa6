"""The first operation whose value is not finite although what goes in is."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from clipgrad._diagnose.origins import CONSTANT, Origins, Source, operands_at, origins
from clipgrad._diagnose.suspects import MASKING
from clipgrad._names import Place

# NaN such as inf - inf is made of two infinities, of several operations at times.
_TRIED_VALUES = 4


class ValueOrigin(NamedTuple):
    """The origin of a NaN or inf."""

    source: Source  # an argument, an operation, or a constant in an operation
    values: tuple[float, ...] | None = None  # what goes in where it goes wrong; None: a constant
    becomes: Place | None = None  # the operation that is not finite because of the inf
    is_nan: bool = True  # whether it makes NaN

    @property
    def cause(self) -> int | None:
        """The argument with the inf that the operation makes NaN of."""
        return self.source.root and self.source.root.argument


class HiddenValue(NamedTuple):
    """A value that is not finite, but that the loss does not depend on: a VJP does.

    Attributes:
      source: the operation.
      values: what goes in where it goes wrong.
      hidden_by: the operation that makes a finite value of it.
    """

    source: Source
    values: tuple[float, ...]
    hidden_by: Place | None


def hidden_value(
    program: Any, inputs: Sequence[Any], source: Source, forward: Origins
) -> HiddenValue:
    """The value of an operation, and what becomes of it."""
    assert source.place is not None
    hider = forward.hidden.get((source.place.key, source.steps))
    return HiddenValue(source, operands_at(program, inputs, source), hider)


def origin_of_loss(program: Any, inputs: Sequence[Any], found: Origins) -> ValueOrigin | None:
    """The origin of the NaN or inf in the first result of a program; None if it is finite.

    NaN or inf that is masked later is not followed, so that masks made of -inf are harmless. NaN
    that is made of the inf of an operation is the doing of this operation, if there is no NaN
    where the inf is replaced by an ordinary number.
    """
    source = found.results[0].source
    if source is None or source.place is None or source.time == CONSTANT:
        return source and ValueOrigin(source)
    root = _overflow(program, inputs, source)
    values = operands_at(program, inputs, root or source)
    then = source.place if root else None
    return ValueOrigin(root or source, values, then, source.badness == 2)


def origin_of(program: Any, inputs: Sequence[Any], source: Source) -> ValueOrigin:
    """The origin of the NaN or inf in a value of the program."""
    if source.place is None or source.time == CONSTANT:
        return ValueOrigin(source)
    return ValueOrigin(source, operands_at(program, inputs, source))


def _overflow(program: Any, inputs: Sequence[Any], source: Source) -> Source | None:
    """The operation that makes inf of finite numbers, without which there is no such NaN."""
    cured: list[Place] = []
    again: Source | None = source
    for _ in range(_TRIED_VALUES):
        root = again and again.root
        if root is None or root.place is None or root.time == CONSTANT or _is_mask(source, root):
            return None
        cured.append(root.place)
        again = origins(program, inputs, cured).results[0].source
        if again is None or again.place != source.place:
            return source.root
    return None


def _is_mask(source: Source, root: Source) -> bool:
    """Whether a softmax makes NaN of log(0): that is a row that is masked throughout."""
    assert source.place is not None and root.place is not None
    package = source.place.location.package or ""
    is_log = root.place.operation in ("log", "log1p")
    return is_log and package.partition(" ")[0] in MASKING
