"""The walk along the program of a loss, and the taps where a weight meets data."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from clipgrad._per_example.places import ViewPlace, has_views
from clipgrad._per_example.uses import EquationPath, Use, use_of
from clipgrad._programs import (
    CALLS,
    JIT,
    REMAT,
    SCANS,
    Chain,
    NotingHook,
    Part,
    bind,
    flow,
    is_reference,
    kind_of,
    noun_of,
    opened,
    scan_counts,
    scan_length,
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
        carry = lambda *own: None  # noqa: E731  what is carried ends, so each step is the first
        results = flow(program, [*leaves, *rest], found._step, _one_of, carry=carry)
        found._end(results, "it is a result of the loss")
        return found

    def _step(self, chain: Chain, places: list, inside: Callable[..., list]) -> list:
        """The places of the results of an operation."""
        equation = chain[0]
        nothing = [None] * len(equation.outvars)
        if not any(places):
            return nothing
        kind = kind_of(equation)
        if not equation.outvars:
            if any(map(is_reference, equation.invars)):  # by which it may come back
                self._end(places, f"used by {noun_of(equation)}")
            return []
        if kind in (JIT, CALLS):
            return inside()
        if kind in (REMAT, SCANS):
            entered = self._entered(equation, places) if kind is SCANS else places
            self._end(inside(entered), f"{noun_of(equation)} returns it")
            return nothing
        if use := self._use(chain, places):
            self.uses.append(use)
            return nothing
        if len(places) == 1:
            results = places[0].results(equation)
            if None not in results and all(has_views(v.aval) for v in equation.outvars):
                return results
        self._end(places, f"used by {noun_of(equation)}")
        return nothing

    def _entered(self, scan: JaxprEqn, places: list) -> list:
        """The places of what a step of a scan gets."""
        (constants, carried), length = scan_counts(scan), scan_length(scan) or 0
        split = constants + carried
        self._end(places[constants:split], "carried by a scan")
        pairs = enumerate(places)
        inside = [place and place.in_scan(length, i >= split) for i, place in pairs]
        return [None if constants <= i < split else place for i, place in enumerate(inside)]

    def _use(self, chain: Chain, places: list) -> Use | None:
        """The use of a view by an operation that meets it with data."""
        views = [i for i, place in enumerate(places) if place]
        if len(views) != 1:
            return None
        path = tuple(equation.outvars[0] for equation in reversed(chain))
        return use_of(path, chain[0], views[0], places[views[0]])


def _one_of(*places: ViewPlace | None) -> ViewPlace | None:
    """The place of a value that is one of several: it is followed if there is only one."""
    return places[0] if len(places) == 1 else None


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
      taps: which input of a use is handed out, its number, and the number of the use.
      zeros: by the numbers of uses.
      where: the equations around the program.
      seen: what met the weights, by their numbers.
    """

    taps: Mapping[EquationPath, tuple[int, int, int]]
    zeros: dict[int, jax.Array]
    where: EquationPath = ()
    seen: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    in_place = (JIT,)  # nothing is kept from call to call

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results, tapped; None where programs inside have uses."""
        if not equation.outvars:  # such as a print, which no use is inside of
            return bind(equation, inputs)
        place = (*self.where, equation.outvars[0])
        if place in self.taps:
            source, x, number = self.taps[place]
            self.seen[x] = inputs[source]
            return [tap(bind(equation, inputs)[0], self.zeros[number])]
        return None if self._inside(equation) else bind(equation, inputs)

    def _inside(self, equation: JaxprEqn) -> list[int]:
        """The numbers of the uses inside of an equation."""
        place = (*self.where, equation.outvars[0])
        return [n for path, (*_, n) in self.taps.items() if path[: len(place)] == place]

    def slices(self, equation: JaxprEqn) -> dict[int, jax.Array]:
        """The zeros of the uses inside of a scan, which has one of each for each step."""
        return {n: self.zeros[n] for n in self._inside(equation)}

    def inside(self, equation: JaxprEqn, part: Part) -> "Taps":
        """The taps of a program inside."""
        zeros = self.zeros if part.own is None else part.own
        return Taps(self.taps, zeros, (*self.where, equation.outvars[0]))

    def noted(self) -> dict[int, jax.Array]:
        """The data that met the weights in this program."""
        return self.seen

    def note(self, equation: JaxprEqn, inputs: list, notes: list) -> None:
        """Keeps what met the weights in a program inside."""
        self.seen |= notes[0]
