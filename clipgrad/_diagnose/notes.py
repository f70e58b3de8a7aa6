"""Notes of the values of a program while it runs: by variable and place, at each step."""

import copy
import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from clipgrad._compat import to_varying
from clipgrad._diagnose.probe import is_sent_whole
from clipgrad._jaxpr import PRINTS, Hook, bind, manual_axes
from clipgrad._names import Place


class Whole(NamedTuple):
    """A small array, which is reduced on the host."""

    value: Any


class ValueNotes(NamedTuple):
    """The notes of a program and of the programs inside of its equations.

    With a leading axis for each scan and each `shard_map` around. Of a loop of unknown length they
    are of the first iteration with a value above zero.
    """

    values: OrderedDict[Any, Any]  # by the ids of the variable and of the equations around it
    taken: OrderedDict[Any, Any]  # by the key of an equation: its branch, or its iteration
    number: Any = 0  # of this iteration


class Noting(Hook):
    """Notes what is `reduced` of values of one evaluation of a program."""

    flatten, has_notes = True, True

    def __init__(self):
        self.parent: Place | None = None
        self.found = ValueNotes(OrderedDict(), OrderedDict())
        self.inputs: Sequence = ()

    def reduced(self, x: Any) -> Any:
        """The note of an array."""
        raise NotImplementedError

    def enters(self, place: Place) -> bool:
        """Whether the values in the programs of an equation are noted."""
        raise NotImplementedError

    def computed(self, place: Place, inputs: list) -> list:
        """The results of an equation that is not entered."""
        return bind(place.equation, inputs)

    def keep(self, variable: Any, x: Any) -> None:
        """Note a value. A branch and a loop have notes of one type, whatever they do."""
        x, around = jnp.asarray(x), self.parent.key if self.parent else ()
        is_whole = is_sent_whole(x.size, self.parent, but_in=("while", "cond"))
        note = Whole(x) if is_whole else self.reduced(x)
        self.found.values[id(variable), *around] = self.marked(note)

    def marked(self, tree: Any) -> Any:
        """Marked as different on each device of the `shard_map`s around that know what varies."""
        held = [e for e in (self.parent.chain if self.parent else ())
                if e.primitive.name == "shard_map" and e.params["check_vma"]]  # fmt: skip
        axes = frozenset(axis for e in held for axis in manual_axes(e))
        return jax.tree.map(lambda x: to_varying(x, axes), tree) if axes else tree

    def starts(self, inputs: Sequence) -> None:
        """Keep the inputs for `values`."""
        self.inputs = inputs

    def constant(self, value: Any, aval: Any) -> Any:
        """The value as an array."""
        return value if hasattr(value, "dtype") else jnp.asarray(value, aval.dtype)

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results of an operation; None where it has programs to go into."""
        if equation.primitive.name in PRINTS:
            return []
        place = Place(equation, self.parent)
        return None if self.enters(place) else self.computed(place, inputs)

    def inside(self, equation: JaxprEqn, step: Any) -> "Noting":
        """The hook for a program inside of an equation."""
        inner = copy.copy(self)
        inner.parent = Place(equation, self.parent)
        inner.found = ValueNotes(OrderedDict(), OrderedDict())
        return inner

    def noted(self) -> ValueNotes:
        """The notes of this evaluation."""
        return self.found._replace(number=self.marked(jnp.int32(0)))

    def note(self, equation: JaxprEqn, inputs: list, notes: list[ValueNotes]) -> None:
        """Keep the notes inside of an equation; its branches may be one program."""
        number = inputs[0] if equation.primitive.name == "cond" else notes[0].number
        self.found.taken[Place(equation, self.parent).key] = self.marked(number)
        for own in notes:
            for old, new in ((self.found.values, own.values), (self.found.taken, own.taken)):
                for key, x in new.items():
                    old[key] = self._joined(old[key], x) if key in old else x

    def _joined(self, old: Any, new: Any) -> Any:
        """Of two branches that are one program the notes of that which is taken."""
        never = self.empty(old)
        return jax.tree.map(lambda a, b, no: jnp.where(a == no, b, a), old, new, never)

    def empty(self, shapes: Any) -> Any:
        """The notes of a branch that is not taken."""
        return self.marked(super().empty(shapes))

    def kept(self, old: ValueNotes, new: ValueNotes, number: Any) -> ValueNotes:
        """The notes of the first iteration at which one is above zero."""
        before, now = (
            functools.reduce(jnp.maximum, (jnp.max(x, initial=0) for x in own.values.values()), 0)
            for own in (old, new)
        )
        is_first = (before == 0) & (now > 0)
        new = new._replace(number=self.marked(number))
        return jax.tree.map(lambda n, o: jnp.where(is_first, n, o), new, old)


def index_of(parent: Place | None, steps: Sequence[int], device: Sequence[int]) -> tuple[int, ...]:
    """The index of the notes of a program at some steps of the loops around and on a device.

    A loop of unknown length has one iteration alone.
    """
    left, numbers = iter(steps), iter(device)
    found = []
    for equation in reversed(parent.chain if parent else ()):
        name = equation.primitive.name
        step = next(left, 0) if name in ("scan", "while") else 0
        if name in ("scan", "shard_map"):
            found.append(step if name == "scan" else next(numbers, 0))
    return tuple(found)
