"""The gradient of a function as one program: its values, its cotangents, and what each is from."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._jaxpr import Hook, evaluate, holds_floats, opened
from clipgrad._names import Place
from clipgrad._program.dependence import Sources, dependence
from clipgrad._program.marks import Marks


@dataclasses.dataclass(frozen=True, eq=False)
class GradientProgram:
    """The program of the results of a function and of its VJP.

    Attributes:
      forward: the program of the function.
      chosen: the positions of the inputs that it is differentiated by.
      program: from the inputs, and a cotangent for each floating result, to the results and then
        the gradients of the chosen inputs.
      count: how many inputs of ``program`` come before the cotangents.
      marks: of the equations of the function, which the equations of ``program`` have too.
    """

    forward: Any
    chosen: tuple[int, ...]
    program: Any
    count: int
    marks: Marks

    @classmethod
    def of(cls, forward: Any, inputs: Sequence[Any], chosen: Sequence[int]) -> "GradientProgram":
        """Trace the gradient of a program at its inputs, or at arrays of their types."""
        marks, results = Marks(forward), opened(forward)[0].outvars

        def run(inputs: list, cotangents: list) -> Any:
            def function(given: list) -> tuple[list, list]:
                changed = dict(zip(chosen, given, strict=True))
                every = [changed.get(i, x) for i, x in enumerate(inputs)]
                found = evaluate(marks.marked, every, Hook())
                return [y for y in found if holds_floats(y)], found

            _, pull_back, found = jax.vjp(function, [inputs[i] for i in chosen], has_aux=True)
            return found, pull_back(cotangents)[0]

        seeds = [v.aval for v in results if holds_floats(v)]
        program = jax.make_jaxpr(run)(inputs, seeds)
        return cls(forward, tuple(chosen), program, len(inputs), marks)

    @property
    def seeds(self) -> list[jax.Array]:
        """Cotangents of ones for the results."""
        cotangents = opened(self.program)[0].invars[self.count :]
        return [jnp.ones(v.aval.shape, v.aval.dtype) for v in cotangents]

    @functools.cached_property
    def sources(self) -> dict[tuple[int, ...], list[Sources]]:
        """The cotangents of results that each operand depends on, by the key of the `Place`."""
        inputs = len(opened(self.program)[0].invars)
        return dependence(self.program, range(self.count, inputs))

    def cotangents(self, place: Place) -> list[bool]:
        """Whether each operand of an equation is a cotangent."""
        return [bool(sources) for sources in self.sources[place.key]]
