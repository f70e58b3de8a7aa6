"""The operation that raises an error when it runs, as a callback may."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
    called_program,
    chooses_by_platform,
    evaluate,
    held_programs,
    holds_floats,
    scan_counts,
)
from clipgrad._names import Place
from clipgrad._program import GradientProgram

_IN_PLACE = JIT | REMAT | CALLS | CUSTOM_RULES
_KIND = re.compile(r"^(?:[\w.]+\.)?_?(\w+(?:Error|Exception|Warning)): ", re.MULTILINE)


class Raised(NamedTuple):
    """An operation that raises.

    Attributes:
      place: the operation, or the call of a library on the user's line that it is in.
      steps: the iterations of the scans around it.
      text: the error in a line.
      is_finite: whether its operands are; None if it is not known, since it is in the gradient.
    """

    place: Place
    steps: tuple[int, ...]
    text: str
    is_finite: bool | None


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


class _Error(Exception):
    """Carries a `Raised` out of an evaluation."""


def _first_error(program: Any, inputs: Sequence) -> Raised | None:
    try:
        evaluate(program, inputs, _OneByOne())
    except _Error as error:
        return error.args[0]
    return None


class _OneByOne(Hook):
    """Runs each operation by itself, also inside of loops."""

    flatten = True

    def __init__(self, parent: Place | None = None, around: tuple = (), steps: tuple = ()):
        self._parent, self._steps = parent, steps
        self._around = around  # the operands of the equations that hold this program
        self._operands: list = []

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results; None for what is gone into in its place."""
        name = equation.primitive.name
        if name in _IN_PLACE | PRINTS:
            return [] if name in PRINTS else None
        loops: dict[str, Callable] = {"scan": self._scan, "while": self._while, "cond": self._cond}
        is_empty = equation.params.get("length") == 0
        if name in loops and not is_empty and not chooses_by_platform(equation):
            return loops[name](equation, inputs)
        try:
            run = jax.jit(lambda *xs: bind(equation, xs)) if held_programs(equation) else None
            return jax.block_until_ready(run(*inputs) if run else bind(equation, inputs))
        except Exception as error:  # whatever it raises
            raise _Error(self._raised(equation, inputs, error)) from error

    def inside(self, equation: JaxprEqn, step: Any) -> "_OneByOne":
        """The hook for a program inside, which has the operands of `operands`."""
        return self._within(equation, self._operands)

    def operands(self, equation: JaxprEqn, inputs: list) -> list:
        """The operands, which the hook inside keeps."""
        self._operands = inputs
        return inputs

    def _within(self, equation: JaxprEqn, inputs: list, *step: int) -> "_OneByOne":
        place = Place(equation, self._parent)
        return _OneByOne(place, (*self._around, inputs), (*self._steps, *step))

    def _raised(self, equation: JaxprEqn, inputs: list, error: Exception) -> Raised:
        """Has the outermost call on the user's line, of which alone the user knows."""
        place, around = Place(equation, self._parent), [*self._around, inputs]
        while (outer := place.parent) and outer.equation.primitive.name in _IN_PLACE | {"cond"}:
            if outer.location[:2] != place.location[:2]:
                break
            place = outer
            around.pop()
        finite = all(bool(np.all(np.isfinite(x))) for x in around[-1] if holds_floats(x))
        return Raised(place, self._steps, told_error(error), finite)

    def _cond(self, equation: JaxprEqn, inputs: list) -> list:
        programs = equation.params["branches"]
        program = programs[min(max(int(inputs[0]), 0), len(programs) - 1)]
        return evaluate(program, inputs[1:], self._within(equation, inputs))

    def _scan(self, equation: JaxprEqn, inputs: list) -> list:
        constants, carried = scan_counts(equation)
        fixed, carry = inputs[:constants], inputs[constants : constants + carried]
        stacked: dict[int, list] = {}
        length = equation.params["length"]
        for t in range(length)[:: -1 if equation.params["reverse"] else 1]:
            own = [x[t] for x in inputs[constants + carried :]]
            hook = self._within(equation, inputs, t)
            results = evaluate(called_program(equation), [*fixed, *carry, *own], hook)
            carry, stacked[t] = results[:carried], results[carried:]
        columns = zip(*(stacked[t] for t in range(length)), strict=True)
        return [*carry, *map(jnp.stack, columns)]

    def _while(self, equation: JaxprEqn, inputs: list) -> list:
        params = equation.params
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        carry, hook = inputs[second:], self._within(equation, inputs)
        while np.any(evaluate(params["cond_jaxpr"], [*inputs[:first], *carry], hook)[0]):
            carry = evaluate(params["body_jaxpr"], [*inputs[first:second], *carry], hook)
        return carry


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
    found = list(_KIND.finditer(str(error)))
    if not found:
        return first_line(error)
    text = " ".join(str(error)[found[-1].end() :].partition("\n\n")[0].split())
    return f"{found[-1].group(1)}: {text.partition('. ')[0].rstrip('.')}"
