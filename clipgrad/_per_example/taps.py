"""The taps where weights meet data: they change nothing, and hand out the rows of gradients."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from jax.extend.core import JaxprEqn

from clipgrad._per_example.uses import EquationPath
from clipgrad._programs import JIT, NotingHook, Part, bind


@jax.custom_vjp
def tap(y: jax.Array, zero: jax.Array) -> jax.Array:
    """``y``, whose cotangent is also that of a zero."""
    return y


tap.defvjp(lambda y, zero: (y, None), lambda _, ct: (ct, ct))


@dataclasses.dataclass
class Taps(NotingHook):
    """Taps the results of uses, and hands out what meets the weights there.

    Which uses there are is known from shapes, by the flow of `WalkedProgram`; what meets them is an
    array, for which the program is evaluated.

    Attributes:
      taps: by the path of a use: which of its inputs is handed out, the number of that, and the
        number of the use.
      zeros: by the numbers of uses: their cotangents are those of the results.
      around: the equations around the program.
      seen: what met the weights, by the numbers of what is handed out.
    """

    taps: Mapping[EquationPath, tuple[int, int, int]]
    zeros: dict[int, jax.Array]
    around: EquationPath = ()
    seen: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    in_place = (JIT,)  # nothing is kept from call to call

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results, tapped; None where programs inside have uses."""
        if not equation.outvars:  # such as a print, which no use is inside of
            return bind(equation, inputs)
        path = (*self.around, equation.outvars[0])
        if path in self.taps:
            source, x, number = self.taps[path]
            self.seen[x] = inputs[source]
            return [tap(bind(equation, inputs)[0], self.zeros[number])]
        return None if self._inside(equation) else bind(equation, inputs)

    def _inside(self, equation: JaxprEqn) -> list[int]:
        """The numbers of the uses inside of an equation."""
        outer = (*self.around, equation.outvars[0])
        return [n for path, (*_, n) in self.taps.items() if path[: len(outer)] == outer]

    def slices(self, equation: JaxprEqn) -> dict[int, jax.Array]:
        """The zeros of the uses inside of a scan, which has one of each for each step."""
        return {n: self.zeros[n] for n in self._inside(equation)}

    def inside(self, equation: JaxprEqn, part: Part) -> "Taps":
        """The taps of a program inside."""
        zeros = self.zeros if part.slices is None else part.slices
        return Taps(self.taps, zeros, (*self.around, equation.outvars[0]))

    def noted(self) -> dict[int, jax.Array]:
        """The data that met the weights in this program."""
        return self.seen

    def note(self, equation: JaxprEqn, inputs: list, notes: list) -> None:
        """Keeps what met the weights in a program inside."""
        self.seen |= notes[0]
