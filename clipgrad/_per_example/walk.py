"""The walk along the program of a loss, and the taps where a weight meets data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal

from clipgrad._per_example.places import ViewPlace, has_views
from clipgrad._per_example.uses import EquationPath, Use, use_of
from clipgrad._programs import (
    CALLS,
    JIT,
    REMAT,
    SCANS,
    Hook,
    bind,
    called_program,
    evaluate,
    is_jit,
    is_reference,
    kind_of,
    opened,
    scan_counts,
)


@dataclasses.dataclass
class WalkedProgram:
    """The uses of the weights of a program.

    Attributes:
      uses: where a view of a leaf meets data.
      others: for each leaf that is used in another way, how.
    """

    uses: list[Use] = dataclasses.field(default_factory=list)
    others: dict[int, str] = dataclasses.field(default_factory=dict)

    def _end(self, places: Sequence[ViewPlace | None], reason: str) -> None:
        """Notes that views are not followed any further."""
        for place in places:
            if place is not None:
                self.others.setdefault(place.leaf, reason)

    @classmethod
    def of(cls, program: Any, count: int) -> "WalkedProgram":
        """The uses of the first ``count`` inputs of a program, from shapes alone."""
        jaxpr, found = opened(program)[0], cls()
        leaves = [
            ViewPlace.of_leaf(i, v.aval.shape) if has_views(v.aval) else None
            for i, v in enumerate(jaxpr.invars[:count])
        ]
        rest = [None] * (len(jaxpr.invars) - count)
        found.others |= {i: "not real numbers" for i, place in enumerate(leaves) if place is None}
        results = found._along(program, [*leaves, *rest], ())
        found._end(results, "it is a result of the loss")
        return found

    def _along(self, program: Any, inputs: Sequence[ViewPlace | None], where: EquationPath) -> list:
        """The places of the results."""
        jaxpr = opened(program)[0]
        places: dict[Any, ViewPlace | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        read = lambda v: None if isinstance(v, Literal) else places.get(v)  # noqa: E731
        for equation in jaxpr.eqns:
            own = [read(v) for v in equation.invars]
            if any(own):
                results = self._results(equation, own, where)
                places.update(zip(equation.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _results(self, equation: JaxprEqn, inputs: list, where: EquationPath) -> list:
        if not equation.outvars:
            if any(map(is_reference, equation.invars)):  # by which it may come back
                self._end(inputs, f"used by {equation.primitive.name}")
            return []
        name, inner = equation.primitive.name, (*where, equation.outvars[0])
        kind = kind_of(equation)
        if kind in (JIT, CALLS):
            return self._along(called_program(equation), inputs, inner)
        if kind is REMAT:
            results = self._along(called_program(equation), inputs, inner)
            self._end(results, f"{name} returns it")
            return [None] * len(results)
        if kind is SCANS:
            return self._scanned(equation, inputs, inner)
        views = [i for i, place in enumerate(inputs) if place]
        if len(views) == 1:
            use = use_of(inner, equation, views[0], inputs[views[0]])
            if use is not None:
                self.uses.append(use)
                return [None]
        if len(inputs) == 1:
            results = inputs[0].results(equation)
            if None not in results and all(has_views(v.aval) for v in equation.outvars):
                return results
        self._end(inputs, f"used by {name}")
        return [None] * len(equation.outvars)

    def _scanned(self, equation: JaxprEqn, inputs: list, where: EquationPath) -> list:
        (constants, carries), length = scan_counts(equation), equation.params["length"]
        self._end(inputs[constants:][:carries], "carried by a scan")
        entered = [
            place and place.in_scan(length, i >= constants)
            for i, place in enumerate([*inputs[:constants], *inputs[constants + carries :]])
        ]
        entered[constants:constants] = [None] * carries
        results = self._along(called_program(equation), entered, where)
        self._end(results, "scan returns it")
        return [None] * len(results)


@jax.custom_vjp
def tap(y: jax.Array, zero: jax.Array) -> jax.Array:
    """``y``, whose cotangent is also that of a zero."""
    return y


tap.defvjp(lambda y, zero: (y, None), lambda _, ct: (ct, ct))


@dataclasses.dataclass
class Taps(Hook):
    """Taps the results of uses, and hands out what meets the weights there.

    Attributes:
      taps: which input of a use is handed out, its number, and the number of the use.
      zeros: by the numbers of uses.
      where: the equations around the program.
      seen: what met the weights, by their numbers.
    """

    taps: Mapping[EquationPath, tuple[int, int, int]]
    zeros: dict[int, jax.Array]
    where: EquationPath = ()
    seen: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    has_notes = True

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results, tapped; None where programs inside have uses."""
        if not equation.outvars:  # such as a print, which no use is inside of
            return bind(equation, inputs)
        place = (*self.where, equation.outvars[0])
        if place in self.taps:
            source, x, number = self.taps[place]
            self.seen[x] = inputs[source]
            return [tap(bind(equation, inputs)[0], self.zeros[number])]
        if not self._inside(equation):
            return bind(equation, inputs)
        if not is_jit(equation):
            return None
        inner = self.inside(equation, ())  # in place: nothing is kept from call to call
        results = evaluate(called_program(equation), inputs, inner)
        self.note(equation, inputs, [inner.seen])
        return results

    def _inside(self, equation: JaxprEqn) -> list[int]:
        """The numbers of the uses inside of an equation."""
        place = (*self.where, equation.outvars[0])
        return [n for path, (*_, n) in self.taps.items() if path[: len(place)] == place]

    def steps(self, equation: JaxprEqn) -> dict[int, jax.Array]:
        """The zeros of the uses inside of a scan, which has one of each for each step."""
        return {n: self.zeros[n] for n in self._inside(equation)}

    def inside(self, equation: JaxprEqn, step: Any) -> "Taps":
        """The taps of a program inside."""
        zeros = step if isinstance(step, dict) else self.zeros
        return Taps(self.taps, zeros, (*self.where, equation.outvars[0]))

    def noted(self) -> dict[int, jax.Array]:
        """The data that met the weights in this program."""
        return self.seen

    def note(self, equation: JaxprEqn, inputs: list, notes: list) -> None:
        """Keeps what met the weights in a program inside."""
        self.seen |= notes[0]
