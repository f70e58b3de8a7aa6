"""The operation that raises an error when it runs, as a callback may."""

import contextlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._errors import first_line
from clipgrad._jaxpr import (
    CALLS,
    CUSTOM_RULES,
    JIT,
    PRINTS,
    REMAT,
    Hook,
    bind,
    evaluate,
    holds_floats,
)
from clipgrad._names import Place
from clipgrad._program import GradientProgram

_IN_PLACE = JIT | REMAT | CALLS | CUSTOM_RULES
_KIND = re.compile(r"^(?:[\w.]+\.)?_?(\w+(?:Error|Exception|Warning)): ", re.MULTILINE)


class Raised(NamedTuple):
    """An operation that raises."""

    place: Place  # the operation, or the call of a library on the user's line that it is in
    steps: tuple[int, ...]  # the iterations of the scans around it
    text: str  # the error in a line
    is_finite: bool | None  # whether its operands are; None in the gradient, where it is not known


def is_of_callback(error: Exception) -> bool:
    """Whether a program was ended by an error in a callback; JAX has no type of its own for it."""
    return isinstance(error, RuntimeError | ValueError) and "callback" in str(error).lower()


def raised_in(given: DiagnosisSubject) -> Raised | None:
    """The first operation of a loss that raises, or else of its gradient; each runs by itself."""
    found = _first_error(given.program, given.inputs)
    if found:
        return found
    gradient = GradientProgram.of(given.program, given.inputs, given.chosen)
    found = _first_error(gradient.program, [*given.inputs, *gradient.seeds])
    own = found and gradient.marks.place(found.place)
    return found and found._replace(place=own or found.place, is_finite=None)


def without(given: DiagnosisSubject, raised: Raised) -> DiagnosisSubject:
    """The loss with a sum of its operands for the operation: as finite as these are."""
    through = _Through(raised.place.key)

    def run(*inputs: Any) -> list:
        return evaluate(given.program, inputs, through)

    return given._replace(program=jax.make_jaxpr(run)(*given.inputs))


def _first_error(program: Any, inputs: Sequence) -> Raised | None:
    caught: list[Raised] = []

    def run(*inputs: Any) -> list:
        return evaluate(program, inputs, _Catching(caught))

    with contextlib.suppress(Exception):
        jax.block_until_ready(jax.jit(run)(*inputs))
    return caught[0] if caught else None


class _Catching(Hook):
    """Keeps what callbacks raise, with the steps, and whether operands are finite."""

    flatten = True

    def __init__(
        self,
        caught: list[Raised],
        parent: Place | None = None,
        steps: tuple = (),
        finite: tuple = (),
    ):
        self._caught, self._parent = caught, parent
        self._steps, self._finite = steps, finite  # of the equations that hold this program
        self._operands: list = []

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results of a callback, which gets the steps and the flags besides; else None."""
        if equation.primitive.name in PRINTS:
            return []
        if "callback" not in equation.params:
            return None
        place, callback = Place(equation, self._parent), equation.params["callback"]
        finite, first = [*self._finite, _is_finite(inputs)], len(self._steps)

        def call(*args: Any) -> Any:
            own = first + len(finite)
            try:
                return callback(*args[own:])
            except Exception as error:
                self._caught.append(_raised(place, args[:first], args[first:own], error))
                raise

        return bind(equation, [*self._steps, *finite, *inputs], callback=call)

    def operands(self, equation: JaxprEqn, inputs: list) -> list:
        """The operands, which are kept for the programs inside."""
        self._operands = inputs
        return inputs

    def steps(self, equation: JaxprEqn) -> Any:
        """The numbers of the steps."""
        return jnp.arange(equation.params["length"])

    def inside(self, equation: JaxprEqn, step: Any) -> "_Catching":
        """The hook for a program inside."""
        steps = (*self._steps, step) if equation.primitive.name == "scan" else self._steps
        finite = (*self._finite, _is_finite(self._operands))
        return _Catching(self._caught, Place(equation, self._parent), steps, finite)


def _is_finite(inputs: Sequence) -> Any:
    flags = [jnp.isfinite(x).all() for x in inputs if holds_floats(x)]
    return jnp.all(jnp.stack([jnp.bool_(True), *flags]))


def _raised(place: Place, steps: Sequence, finite: Sequence, error: Exception) -> Raised:
    """Has the outermost call on the user's line, of which alone the user knows."""
    around = [*finite]
    while (outer := place.parent) and outer.equation.primitive.name in _IN_PLACE | {"cond"}:
        if outer.location[:2] != place.location[:2]:
            break
        place = outer
        around.pop()
    return Raised(
        place,
        tuple(map(int, steps)),
        told_error(error),
        bool(around[-1]),
    )


class _Through(Hook):
    """Puts the sum of its floating operands in place of the results of one operation.

    A boolean result is true: a check that succeeds.
    """

    def __init__(self, key: tuple, parent: Place | None = None):
        self._key, self._parent = key, parent

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The sum, or None for other operations."""
        if Place(equation, self._parent).key != self._key:
            return None
        total = sum((jnp.sum(jnp.real(x)) for x in inputs if holds_floats(x)), jnp.zeros(()))
        types: list[Any] = [v.aval for v in equation.outvars]
        return [
            jnp.broadcast_to(total if holds_floats(t) else t.dtype == bool, t.shape).astype(t.dtype)
            for t in types
        ]

    def inside(self, equation: JaxprEqn, step: Any) -> "_Through":
        """The hook for the programs inside."""
        return _Through(self._key, Place(equation, self._parent))


def told_error(error: Exception) -> str:
    """The kind and the first sentence of the error that a callback raised."""
    whole = f"{type(error).__name__}: {error}"
    found = list(_KIND.finditer(whole))
    if not found:
        return first_line(error)
    text = " ".join(whole[found[-1].end() :].partition("\n\n")[0].split())
    return f"{found[-1].group(1)}: {text.partition('. ')[0].rstrip('.')}"
