"""Seeing the values with names while a program is evaluated, and replacing what goes on."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self, dataclass_transform

import jax
import jax.numpy as jnp
from jax.extend.core import Var

import clipgrad._names as _names
import clipgrad._programs as _programs
from clipgrad._compat import to_varying, varying_axes
from clipgrad._names import Seen

Key = tuple[Any, ...]
KeyedNotes = dict[Key, Any]


@dataclasses.dataclass(eq=False)
class ValueHook(_names.NamedHook, _programs.NotingHook):
    """Passes each named floating value to `note_of`, and continues with the result of `replaced`.

    Every tag has a name, and every value that leaves a module, or that nothing uses. Notes leave
    the programs inside of equations as further results: with a leading axis for the steps of a scan
    and the devices of a `shard_map`; a loop's are `joined`; in a branch that is not taken
    they are zeros. `jit` and `remat` stay, and custom rules and linear solves are left whole. A
    `jax.pmap` or other primitive that is not entered is left whole, too.

    The notes of a program are a dictionary, by default from positions in it: what is inside of an
    equation has the number of the equation, and of the program in it, before. The same program has
    the same positions each time. See `named_values` for what is there.

    A subclass says what is noted, and is decorated by `value_hook`.

    Attributes:
      taps: an array for each key of notes that `replaced` gets, with the leading axes of notes.
      axes: the axes of the meshes around it that JAX tracks what varies along.
    """

    taps: KeyedNotes = dataclasses.field(default_factory=dict)
    axes: frozenset[str] = frozenset()

    def note_of(self, seen: Seen, x: jax.Array) -> Any:
        """The note of a value, a tree of arrays."""
        raise NotImplementedError

    def replaced(self, seen: Seen, x: jax.Array, tap: Any) -> jax.Array:
        """The replacement of a value; a module's value is replaced where it is used outside."""
        del seen, tap
        return x

    def key(self, seen: Seen) -> Key:
        """The key of a note in its own program."""
        return seen.position

    def key_around(self, equation: Any, program: int, key: Key) -> Key:
        """The key outside of an equation, of a note of the ``program``-th program inside of it."""
        del equation
        return (self.visit.number, program, *key)

    def joined(self, first: Any, second: Any) -> Any:
        """The note of two steps of a loop, or of two values with one key."""
        del first
        return second

    def over_devices(self, equation: Any, key: Key, note: Any) -> Any:
        """The note to keep outside of a `shard_map`, from a note with a leading axis of devices."""
        del equation, key
        return note

    # What follows is the evaluation.

    def values(self, jaxpr: Any) -> _programs.ProgramValues:
        super().values(jaxpr)
        return NotedValues(self)

    def value(self, seen: Seen, x: Any) -> Any:
        """What goes on instead of a value that is noted."""
        if not _programs.holds_floats(x):
            return x
        key = self.key(seen)
        self._keep(key, self._once(x, self.note_of(seen, _names.look(x))))
        return self.replaced(seen, x, self.taps.get(key))

    def slices(self, equation: Any) -> KeyedNotes:
        """The taps inside of an equation, by their keys there without the program's number."""
        inside = {key: tap for key, tap in self.taps.items() if len(key) > 3}
        return {key[1:]: tap for key, tap in inside.items() if key[0] == self.visit.number}

    def inside(self, equation: Any, part: _programs.Part) -> Self:
        """The hook for a program inside of an equation, with the taps of this step or device."""
        axes = self.axes
        if _programs.tracks_devices(equation):
            axes |= {*_programs.manual_axes(equation)}
        taps = self.slices(equation) if part.slices is None else part.slices
        taps = {key[1:]: tap for key, tap in taps.items() if key[0] == part.program}
        scopes, lines = self.scopes_inside(equation), self.lines_inside(equation)
        return dataclasses.replace(self, taps=taps, scopes=scopes, lines=lines, axes=axes)

    def noted(self) -> KeyedNotes:
        return self.visit.notes

    def note(self, equation: Any, inputs: list, notes: list[KeyedNotes]) -> None:
        """Keep the notes of the programs inside of an equation."""
        del inputs
        on_devices = _programs.is_shard_map(equation)
        for program, notes_of_program in enumerate(notes):
            for key, note in notes_of_program.items():
                note = self.over_devices(equation, key, note) if on_devices else note
                self._keep(self.key_around(equation, program, key), note)

    def empty(self, shapes: Any) -> Any:
        return jax.tree.map(self._varying, super().empty(shapes))

    def kept(self, old: KeyedNotes, new: KeyedNotes, number: Any) -> KeyedNotes:
        del number
        return {key: self.joined(old[key], note) for key, note in new.items()}

    def _keep(self, key: Key, note: Any) -> None:
        notes = self.visit.notes
        note = self.joined(notes[key], note) if key in notes else note
        notes[key] = jax.tree.map(_names.aside, note)

    def _once(self, x: jax.Array, note: Any) -> Any:
        """A note on one of the devices that hold the same value; zeros on the others."""
        same = sorted(self.axes - varying_axes(x))
        if not same:
            return jax.tree.map(self._varying, note)
        flags = [jax.lax.axis_index(axis) == 0 for axis in same]
        first = functools.reduce(jnp.logical_and, flags)
        return jax.tree.map(lambda n: self._varying(jnp.where(first, n, jnp.zeros_like(n))), note)

    def _varying(self, x: Any) -> Any:
        return to_varying(x, self.axes) if self.axes else x


class NotedValues(_names.NamedValues):
    """The values of a program while a `ValueHook` notes them, unused values included."""

    def replaced(self, equation: Any, outputs: list) -> list:
        outputs = super().replaced(equation, outputs)
        for i, (variable, x) in enumerate(zip(equation.outvars, outputs, strict=True)):
            for scopes in _names.left_unused(self.visit.jaxpr, equation, variable):
                self.see(self.hook.name(scopes), "module", i, len(scopes), x, used=False)
        return outputs


@dataclass_transform(eq_default=False)
def value_hook(*, data: Sequence[str] = (), choices: Sequence[str] = ()) -> Callable[[type], type]:
    """Decorates a `ValueHook` class that adds fields: ``data`` are arrays, ``choices`` hashable.

    If an equation is a `jit` or `shard_map`, data enter its program as further inputs.
    """

    def register(cls: type) -> type:
        return jax.tree_util.register_dataclass(
            dataclasses.dataclass(eq=False)(cls),
            data_fields=["taps", *data],
            meta_fields=["scopes", "lines", "axes", *choices],
        )

    return register


class NamedValue(NamedTuple):
    """A value with a name, at its position in a program.

    Attributes:
      position: the key of its notes in a `ValueHook`.
      name: the tag, or the path of the module.
      kind: ``"tag"`` or ``"module"``.
      place: the equation that computes it, and those around.
      variable: the result of the equation.
    """

    position: tuple[int, ...]
    name: str
    kind: str
    place: _names.Place
    variable: Var

    @property
    def in_while(self) -> bool:
        """Whether it is in a `while` loop, so that it has no cotangent."""
        return any(map(_programs.is_while, self.place.chain[1:]))


def named_values(program: Any) -> Iterator[NamedValue]:
    for prefix, place, jaxpr, scopes in _names.placed_equations(program, _programs.value_programs):
        equation = place.equation
        for output, variable in enumerate(equation.outvars):
            if not _programs.holds_floats(variable):
                continue
            position = (*prefix, output)
            if (tag := _names.users_tag(equation)) is not None:
                yield NamedValue((*position, 0), tag, "tag", place, variable)
            exit = _names.exits(jaxpr).get(variable)
            for left in exit.left if exit else _names.left_unused(jaxpr, equation, variable):
                name = "/".join((*scopes, *left))
                yield NamedValue((*position, len(left)), name, "module", place, variable)
