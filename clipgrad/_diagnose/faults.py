"""The first operation whose value, or whose VJP, is not finite although what goes in is."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from clipgrad._diagnose.origins import Origins, Source, origins
from clipgrad._diagnose.recorded import OperandOfVjp, operands_of, operands_of_vjp
from clipgrad._diagnose.suspects import MASKING
from clipgrad._names import Place
from clipgrad._program import GradientProgram, SummedValue, summed_value

# NaN such as inf - inf is made of two infinities, of several operations at times.
_TRIED_VALUES = 4


class BadValue(NamedTuple):
    """A value that is not finite although what goes in is."""

    source: Source  # an argument, an operation, or a constant in an operation
    values: tuple[float, ...] | None = None  # what goes in where it goes wrong; None: a constant
    becomes: Source | None = None  # the operation that is not finite because of its inf
    hidden_by: Place | None = None  # of what a VJP alone reads, the operation that makes it finite


def origin_of_loss(program: Any, inputs: Sequence[Any], found: Origins) -> BadValue | None:
    """The origin of the NaN or inf in the first result of a program; None if it is finite.

    NaN or inf that is masked later is not followed, so that masks made of -inf are harmless. NaN
    that is made of the inf of an operation is the doing of this operation, if there is no NaN
    where the inf is replaced by an ordinary number.
    """
    source = found.results[0].source
    if source is None or not source.is_operation:
        return source and BadValue(source)
    root = _overflow(program, inputs, source)
    return bad_value(program, inputs, root or source)._replace(becomes=root and source)


def bad_value(program: Any, inputs: Sequence[Any], source: Source) -> BadValue:
    """The value of an operation, or an argument or a constant, that is not finite."""
    values = operands_of(program, inputs, source) if source.is_operation else None
    return BadValue(source, values)


def _overflow(program: Any, inputs: Sequence[Any], source: Source) -> Source | None:
    """The operation that makes inf of finite numbers, without which there is no such NaN."""
    assert source.place is not None
    package = source.place.location.package or ""
    is_masking = package.partition(" ")[0] in MASKING
    cured: list[Place] = []
    again: Source | None = source
    for _ in range(_TRIED_VALUES):
        root = again and again.root
        if root is None or root.place is None or not root.is_operation:
            return None
        if is_masking and root.place.operation in ("log", "log1p"):
            return None  # NaN of log(0): a row that is masked throughout
        cured.append(root.place)
        again = origins(program, inputs, cured).results[0].source
        if again is None or again.place != source.place:
            return source.root
    return None


class VjpFault(NamedTuple):
    """An operation whose VJP, or a value of whose cotangents the sum, is not finite first."""

    source: Source  # where the program of the gradient has it from
    place: Place  # the operation of the function
    operands: list[OperandOfVjp | None]  # what it reads there, as far as it is known
    summed: SummedValue | None = None  # the value whose cotangents are finite, but not their sum

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

    ``bad`` are the gradients that are not finite; nothing is said of the VJP of an operation that
    is ``excused`` at some steps.
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
    sources = [source for i in bad if (source := taints[i].source)]
    while any(source.root and source.root.place for source in sources):
        # The first operation at fault, where a second makes NaN of its inf.
        sources = [s.root if s.root and s.root.place else s for s in sources]
    source = min(sources, key=lambda source: source.time, default=None)
    if source is None or source.place is None or is_excused(source.place, source.steps):
        return None
    return _fault(gradient, inputs, source)


def _fault(gradient: GradientProgram, inputs: Sequence[Any], source: Source) -> VjpFault:
    assert source.place is not None
    if source.place.operation == "add_any" and (value := summed_value(gradient, source.place)):
        return VjpFault(source, value.place or source.place, [], value)
    place = gradient.marks.place(source.place)
    if place is None:
        return VjpFault(source, source.place, [])
    try:
        operands = operands_of_vjp(gradient.forward, inputs, place, source)
    except (TypeError, ValueError, NotImplementedError, NameError):
        operands = []  # an operation that has no derivative by itself
    return VjpFault(source, place, operands)


def is_value_at_fault(
    origin: BadValue, forward: Origins
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
