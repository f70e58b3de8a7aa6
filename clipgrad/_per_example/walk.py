"""The walk along the program of a loss, and the taps where a weight meets data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._jaxpr import (
    CALLS,
    JIT,
    REMAT,
    Hook,
    bind,
    called_program,
    evaluate,
    opened,
    scan_counts,
)
from clipgrad._per_example.places import ViewPlace, has_views
from clipgrad._per_example.uses import EquationPath, Use, use_of


@dataclasses.dataclass
class WalkedProgram:
    """The uses of the weights of a program.

    Attributes:
      uses: where a view of a leaf meets data.
      others: for each leaf that is used in another way, how.
    """

    uses: list[Use] = dataclasses.field(default_factory=list)
    others: dict[int, str] = dataclasses.field(default_factory=dict)

    def end(self, places: Sequence[ViewPlace | None], reason: str) -> None:
        """Notes that views are not followed any further."""
        for place in places:
            if place is not None:
                self.others.setdefault(place.leaf, reason)


def found_in(program: Any, count: int, data: frozenset[Var]) -> WalkedProgram:
    """The uses of the first ``count`` inputs of a program; ``data`` depends on the example."""
    jaxpr, found = opened(program)[0], WalkedProgram()
    leaves = [
        ViewPlace.of_leaf(i, v.aval.shape) if has_views(v.aval) else None
        for i, v in enumerate(jaxpr.invars[:count])
    ]
    rest = [None] * (len(jaxpr.invars) - count)
    found.others |= {i: "not real numbers" for i, place in enumerate(leaves) if place is None}
    results = _Search(found, data).along(program, [*leaves, *rest], ())
    found.end(results, "it is a result of the loss")
    return found


@dataclasses.dataclass(frozen=True)
class _Search:
    """The places of the variables of a program, from shapes alone."""

    found: WalkedProgram
    data: frozenset[Var]

    def along(self, program: Any, inputs: Sequence[ViewPlace | None], where: EquationPath) -> list:
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
        name, inner = equation.primitive.name, (*where, equation.outvars[0])
        if name in JIT | CALLS:
            return self.along(called_program(equation), inputs, inner)
        if name in REMAT:
            results = self.along(called_program(equation), inputs, inner)
            self.found.end(results, f"{name} returns it")
            return [None] * len(results)
        if name == "scan":
            return self._scanned(equation, inputs, inner)
        views = [i for i, place in enumerate(inputs) if place]
        if len(views) == 1:
            is_data = any(isinstance(x, Var) and x in self.data for x in equation.invars)
            use = use_of(inner, equation, views[0], inputs[views[0]], is_data)
            if use is not None:
                self.found.uses.append(use)
                return [None]
        if len(inputs) == 1:
            results = inputs[0].results(equation)
            if None not in results and all(has_views(v.aval) for v in equation.outvars):
                return results
        self.found.end(inputs, f"used by {name}")
        return [None] * len(equation.outvars)

    def _scanned(self, equation: JaxprEqn, inputs: list, where: EquationPath) -> list:
        (constants, carries), length = scan_counts(equation), equation.params["length"]
        self.found.end(inputs[constants:][:carries], "carried by a scan")
        entered = [
            place and place.in_scan(length, i >= constants)
            for i, place in enumerate([*inputs[:constants], *inputs[constants + carries :]])
        ]
        entered[constants:constants] = [None] * carries
        results = self.along(called_program(equation), entered, where)
        self.found.end(results, "scan returns it")
        return [None] * len(results)


@jax.custom_vjp
def tap(y: jax.Array, zero: jax.Array) -> jax.Array:
    """``y``, whose cotangent is also that of a zero."""
    return y


tap.defvjp(lambda y, zero: (y, None), lambda _, ct: (ct, ct))


class Taps(Hook):
    """Taps the results of uses, and hands out what meets the weights there.

    What comes from one source is handed out once, under the number of its first use.
    """

    has_notes = True

    def __init__(
        self,
        numbers: Mapping[EquationPath, int],
        sources: Mapping[int, int],
        zeros: Any,
        where: EquationPath,
    ):
        self._numbers, self._sources, self._zeros, self._where = numbers, sources, zeros, where
        self._around = {place[:n] for place in numbers for n in range(1, len(place))}
        self.seen: dict[int, jax.Array] = {}

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results, tapped; None where programs inside have uses."""
        place = (*self._where, equation.outvars[0])
        if place in self._numbers:
            return [self._tapped(self._numbers[place], equation, inputs)]
        if place not in self._around:
            return bind(equation, inputs)
        if equation.primitive.name not in JIT:
            return None
        inner = self.inside(equation, ())  # in place: nothing is kept from call to call
        results = evaluate(called_program(equation), inputs, inner)
        self.seen |= inner.seen
        return results

    def _tapped(self, number: int, equation: JaxprEqn, inputs: list) -> jax.Array:
        if number in self._sources:
            self.seen[number] = inputs[self._sources[number]]
        return tap(bind(equation, inputs)[0], self._zeros[number])

    def steps(self, equation: JaxprEqn) -> dict[int, jax.Array]:
        """The zeros of the uses inside of a scan, which has one of each for each step."""
        place = (*self._where, equation.outvars[0])
        own = [n for other, n in self._numbers.items() if other[: len(place)] == place]
        return {n: self._zeros[n] for n in own}

    def inside(self, equation: JaxprEqn, step: Any) -> "Taps":
        """The taps of a program inside."""
        zeros = step if isinstance(step, dict) else self._zeros
        where = (*self._where, equation.outvars[0])
        return Taps(self._numbers, self._sources, zeros, where)

    def noted(self) -> dict[int, jax.Array]:
        """The data that met the weights in this program."""
        return self.seen

    def note(self, equation: JaxprEqn, inputs: list, notes: list) -> None:
        """Keeps what met the weights in a program inside."""
        self.seen |= notes[0]
