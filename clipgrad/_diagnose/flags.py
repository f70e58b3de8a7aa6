"""The values of a program that are not finite, flagged in one compiled pass.

Only that is computed for each operation: what follows from it is found outside, in `origins`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from clipgrad._diagnose.notes import Noting, ValueNotes, Whole, index_of
from clipgrad._jaxpr import (
    bind,
    evaluate,
    holds_floats,
    jit_for_one_call,
    on_host,
    scan_counts,
    tracked_programs,
)
from clipgrad._names import Place

# What is in the result of these is what was in their operand.
SAME_AS_OPERAND = frozenset(
    {"reshape", "transpose", "broadcast_in_dim", "squeeze", "neg", "rev", "name"}
)
SAME_AS_OPERAND |= {"new_ref", "freeze", "copy", "pvary", "pcast", "sharding_constraint", "reshard"}
# An infinity is replaced by a number of its sign that is no pole or zero of common functions.
_ORDINARY = 1.25
Followed = Callable[[Place], Sequence[bool]]


def every_number(place: Place) -> list[bool]:
    """The floating operands of an equation: all that can be followed."""
    return [holds_floats(v) for v in place.equation.invars]


def is_followed(place: Place, followed: Followed) -> bool:
    """Whether the results of an equation are followed."""
    return followed is every_number or any(followed(place))


class Flags:
    """2 for each value of a program that holds NaN, 1 for inf, 0 if it is finite."""

    def __init__(self, notes: ValueNotes):
        self._notes = notes
        self._bad_steps: dict[tuple, np.ndarray] = {}

    def of(
        self, variable: Any, parent: Place | None, steps: Sequence[int], device: Sequence[int]
    ) -> int | None:
        """The flag of a variable of a program in some equations; None if it has none."""
        note = self._notes.values.get((id(variable), *(parent.key if parent else ())))
        index = index_of(parent, steps, device)
        if isinstance(note, Whole):
            return int(_flag_of_each(note.value[index]).max(initial=0))
        return note if note is None else int(note[index])

    def taken(self, place: Place, steps: Sequence[int], device: Sequence[int]) -> int:
        """The branch of a cond, or the iteration of a loop of unknown length."""
        return int(self._notes.taken[place.key][index_of(place.parent, steps, device)])

    def bad_steps(self, place: Place, steps: Sequence[int], device: Sequence[int]) -> np.ndarray:
        """At which steps of a scan, or on which devices, something inside is not finite."""
        if place.key not in self._bad_steps:
            shape, count = [length for _, length in place.axes], len(place.key)
            inside = (x for key, x in self._notes.values.items() if key[-count:] == place.key)
            found = np.zeros(shape, bool)
            for x in inside:
                kinds = _flag_of_each(x.value) if isinstance(x, Whole) else x
                found |= np.any(kinds, axis=tuple(range(len(shape), kinds.ndim)))
            self._bad_steps[place.key] = found
        return self._bad_steps[place.key][index_of(place.parent, steps, device)]


def _flag_of_each(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), 2, np.where(np.isfinite(x), 0, 1))


def flags_of(
    program: Any, inputs: Sequence, cured: Iterable[Place] = (), followed: Followed = every_number
) -> Flags:
    """The flags of a program, with ordinary numbers for the infinities of operations ``cured``.

    ``followed`` says which operands of an equation are followed; its results are if one operand is.
    """
    keys = frozenset(place.key for place in cured)

    @jit_for_one_call(program)
    def run(inputs: list) -> ValueNotes:
        flagging = Flagging(keys, followed)
        evaluate(program, inputs, flagging)
        return flagging.noted()

    return Flags(on_host(run(list(inputs))))


class Flagging(Noting):
    """Flags results of operations, arguments, and what scans and `shard_map`s go through."""

    def __init__(self, cured: frozenset[tuple], followed: Followed):
        super().__init__()
        self._cured, self._followed = cured, followed

    def reduced(self, x: Any) -> Any:
        """The flag of an array."""
        return badness(x)

    def enters(self, place: Place) -> bool:
        """Whether the operations inside are followed one by one."""
        return bool(tracked_programs(place.equation)) and is_followed(place, self._followed)

    def computed(self, place: Place, inputs: list) -> list:
        """The results of an operation, with ordinary numbers for infinities that are cured."""
        outputs = bind(place.equation, inputs)
        return [_ordinary(y) for y in outputs] if place.key in self._cured else outputs

    def values(self, jaxpr: Any) -> Any:
        """Flag the arguments, the shards, or the elements that a scan goes through."""
        for i, (v, x) in enumerate(zip(jaxpr.invars, self.inputs, strict=True)):
            if holds_floats(x) and self._is_first(i):
                self.keep(v, x)
        return super().values(jaxpr)

    def _is_first(self, i: int) -> bool:
        """Whether an input of the program is not a value that is flagged already."""
        if self.parent is None:
            return self._followed is every_number
        equation = self.parent.equation
        firsts = {"scan": lambda: sum(scan_counts(equation)), "shard_map": lambda: 0}
        first = firsts.get(equation.primitive.name, lambda: len(equation.invars))()
        return i >= first and self._followed(self.parent)[i]

    def results(self, equation: JaxprEqn, outputs: Sequence) -> Sequence:
        """Flag the results of an operation, and of a loop."""
        name, place = equation.primitive.name, Place(equation, self.parent)
        is_own = name == "while" or not (name in SAME_AS_OPERAND or tracked_programs(equation))
        if is_own and is_followed(place, self._followed):
            for v, x in zip(equation.outvars, outputs, strict=True):
                if holds_floats(x):
                    self.keep(v, x)
        return outputs


def _ordinary(y: Any) -> Any:
    if not holds_floats(y):
        return y
    number = jnp.asarray(_ORDINARY, y.dtype) * jnp.sign(jnp.real(y)).astype(y.dtype)
    return jnp.where(jnp.isinf(y), number, y)


@jax.jit  # traced once for each shape
def badness(x: Any) -> jax.Array:
    """2 if there is NaN, else 1 if there is inf, else 0."""
    kinds = jnp.where(jnp.isnan(x), jnp.int32(2), jnp.where(jnp.isinf(x), jnp.int32(1), 0))
    return jnp.max(kinds, initial=0)
