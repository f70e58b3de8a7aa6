"""The operation whose VJP makes a cotangent that is not finite of finite ones."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from clipgrad._diagnose.origins import Origins, Source, origins
from clipgrad._diagnose.recorded import OperandOfVjp, operands_of_vjp
from clipgrad._diagnose.values import ValueOrigin
from clipgrad._names import Place
from clipgrad._program import GradientProgram, SummedValue, summed_value


class VjpFault(NamedTuple):
    """An operation whose VJP, or a value of whose cotangents the sum, is not finite first.

    Attributes:
      source: where the program of the gradient has it from.
      place: the operation of the function.
      operands: what the operation reads there, as far as it is known.
      summed: the value whose cotangents are finite, but not their sum.
    """

    source: Source
    place: Place
    operands: list[OperandOfVjp | None]
    summed: SummedValue | None = None

    @property
    def values(self) -> tuple[float, ...]:
        """The elements of the operands whose cotangents are not finite."""
        return tuple(float(x.value) for x in self.operands if x and x.is_at_fault)

    @property
    def bad_operands(self) -> list[int]:
        """The positions of the operands that are not finite where the VJP is not."""
        return [i for i, x in enumerate(self.operands) if x and x.is_bad]

    @property
    def step(self) -> int | None:
        """The step of the innermost scan around the operation, or around the value."""
        if self.summed:
            steps = self.source.steps[: self.summed.loops]
            return steps[-1] if steps else None
        return self.source.step if self.place.nest else None


def first_fault(
    gradient: GradientProgram,
    inputs: Sequence[Any],
    bad: Iterable[int],
    excused: Callable[[Place, tuple[int, ...]], bool],
) -> VjpFault | None:
    """The first operation in backward order whose VJP is at fault, or sum that is.

    Args:
      gradient: the program of the loss and its gradient.
      inputs: the inputs of the loss.
      bad: which of the gradients are not finite.
      excused: whether nothing is said of the VJP of an operation, at some steps.
    """

    def is_excused(place: Place, steps: tuple[int, ...]) -> bool:
        own = gradient.marks.place(place)
        return own is not None and excused(own, steps)

    found = origins(
        gradient.program,
        [*inputs, *gradient.seeds],
        followed=gradient.cotangents,
        is_excused=is_excused,
    )
    taints = found.results[len(found.results) - len(gradient.chosen) :]
    sources = [_first_of(taints[i].source) for i in bad]
    source = min((b for b in sources if b), key=lambda b: b.time, default=None)
    if source is None or source.place is None or is_excused(source.place, source.steps):
        return None
    return _fault(gradient, inputs, source)


def _first_of(source: Source | None) -> Source | None:
    """The first operation at fault, where a second makes NaN of its inf."""
    while source and source.root and source.root.place:
        source = source.root
    return source


def _fault(gradient: GradientProgram, inputs: Sequence[Any], source: Source) -> VjpFault:
    assert source.place is not None
    if source.place.operation == "add_any" and (value := summed_value(gradient, source.place)):
        return VjpFault(source, value.place or source.place, [], value)
    place = gradient.marks.place(source.place)
    if place is None:
        return VjpFault(source, source.place, [])
    where = source.steps, min(source.devices)
    try:
        operands = operands_of_vjp(gradient.forward, inputs, place, *where)
    except (TypeError, ValueError, NotImplementedError, NameError):
        operands = []  # an operation that has no derivative by itself
    return VjpFault(source, place, operands)


def is_value_at_fault(
    origin: ValueOrigin, forward: Origins
) -> Callable[[Place, tuple[int, ...]], bool]:
    """Whether an operation is the origin of a loss that is not finite, or reads what is from it.

    It may also read what is not finite from elsewhere.
    """
    steps_of: dict[tuple, set[tuple[int, ...]]] = {}
    for (key, steps), operands in forward.operands.items():
        if any(
            x.badness or (x.earlier and x.earlier.place == origin.source.place) for x in operands
        ):
            steps_of.setdefault(key, set()).add(steps)
    chain = [id(e) for e in origin.source.place.chain] if origin.source.place else []

    def excused(place: Place, steps: tuple[int, ...]) -> bool:
        own = [id(e) for e in place.chain]
        known = steps_of.get(place.key, set())
        is_same = any(len(one) != len(steps) or one == steps for one in known)
        return is_same or chain[-len(own) :] == own

    return excused
