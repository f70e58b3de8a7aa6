"""The first operation whose value is not finite although what goes in is."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

import clipgrad._jaxpr as _jaxpr
from clipgrad._diagnose.suspects import MASKING
from clipgrad._jaxpr import CONSTANT, Birth, Place, holds_floats, on_host

# NaN such as inf - inf is made of two infinities, of several operations at times.
_TRIED_VALUES = 4


class ValueOrigin(NamedTuple):
    """Where a NaN or inf is from: an argument, an operation, or a constant in an operation."""

    argument: int | None
    place: Place | None = None
    step: int | None = None  # of the innermost loop
    values: tuple[float, ...] | None = None  # what goes in where it goes wrong; None: a constant
    cause: int | None = None  # the argument with the inf that an operation makes NaN of
    becomes: Place | None = None  # the operation that makes NaN of the inf
    device: str | None = None


def origin_of_loss(program: Any, inputs: Sequence[Any]) -> ValueOrigin | None:
    """Where the first result of a program is not finite from; None if it is finite.

    NaN or inf that is masked later is not followed, so that masks made of -inf are harmless. NaN
    that is made of the inf of an operation is the doing of this operation, if there is no NaN
    where the inf is replaced by an ordinary number.
    """
    birth = _birth(program, inputs, ())
    if birth is None:
        return None
    if birth.place is None:
        return ValueOrigin(birth.argument)
    step = _step_of(birth)
    if birth.time == CONSTANT:
        return ValueOrigin(None, birth.place, step)
    root = _overflow(program, inputs, birth)
    if root:
        values, step = _operands(program, inputs, root), _step_of(root)
        return ValueOrigin(None, root.place, step, values, None, birth.place, _device(root))
    values, cause = _operands(program, inputs, birth), birth.root and birth.root.argument
    return ValueOrigin(None, birth.place, step, values, cause, None, _device(birth))


def _device(birth: Birth) -> str | None:
    assert birth.place is not None
    return birth.place.device(birth.devices)


def _step_of(birth: Birth) -> int | None:
    """The step of the innermost scan."""
    assert birth.place is not None
    loops = [e for e in birth.place.chain[:0:-1] if e.primitive.name in ("scan", "while")]
    steps = [s for e, s in zip(loops, birth.steps, strict=True) if e.primitive.name == "scan"]
    return steps[-1] if steps else None


def _overflow(program: Any, inputs: Sequence[Any], birth: Birth) -> Birth | None:
    """The operation that makes inf of finite numbers, without which there is no such NaN."""
    cured: list[Place] = []
    again: Birth | None = birth
    for _ in range(_TRIED_VALUES):
        root = again and again.root
        if root is None or root.place is None or root.time == CONSTANT or _is_mask(birth, root):
            return None
        cured.append(root.place)
        again = _birth(program, inputs, cured)
        if again is None or again.place != birth.place:
            return birth.root
    return None


def _is_mask(birth: Birth, root: Birth) -> bool:
    """Whether a softmax makes NaN of log(0): that is a row that is masked throughout."""
    assert birth.place is not None and root.place is not None
    package = birth.place.location.package or ""
    is_log = root.place.operation in ("log", "log1p")
    return is_log and package.partition(" ")[0] in MASKING


def _birth(program: Any, inputs: Sequence[Any], cured: Sequence[Place]) -> Birth | None:
    """Where the first result is from, if it is not finite."""
    run = jax.jit(lambda inputs: _jaxpr.track(program, inputs, cured))
    return _jaxpr.origins(program, on_host(run(list(inputs))), inputs)[0].birth


def _operands(program: Any, inputs: Sequence[Any], birth: Birth) -> tuple[float, ...]:
    """What an operation reads where its result is not finite."""
    place, steps, device = birth.place, list(birth.steps), list(min(birth.devices))
    assert place is not None

    @jax.jit
    def run(inputs):
        return _jaxpr.track(program, inputs, target=place).values

    values = on_host(run(list(inputs)))
    for equation in place.chain[:0:-1]:  # a loop of unknown length has one iteration alone
        name = equation.primitive.name
        step = steps.pop(0) if name in ("scan", "while") else 0
        if name in ("scan", "shard_map"):
            values = values[step if name == "scan" else device.pop(0)]
    pairs = zip(place.equation.invars, values, strict=True)
    return tuple(float(value) for v, value in pairs if holds_floats(v))
