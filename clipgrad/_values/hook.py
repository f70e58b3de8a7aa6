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

Key = tuple[Any, ...]
KeyedNotes = dict[Key, Any]


class Seen(NamedTuple):
    """A value with a name, as a hook sees it.

    Attributes:
      name: the tag, or the path of the module.
      kind: ``"tag"`` or ``"module"``.
      position: where it is in the program that is evaluated: the number of its equation, the number
        of the value among the results, and the depth of the module among the scopes of the
        program; 0 for a tag.
    """

    name: str
    kind: str
    position: tuple[int, int, int]


@dataclasses.dataclass(eq=False)
class ValueHook(_programs.Hook):
    """Shows each floating value with a name to `note_of`, and lets `replaced` of it go on.

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
      scopes: the scopes around the program.
      axes: the axes of the meshes around it that JAX tracks what varies along.
    """

    has_notes = True

    taps: KeyedNotes = dataclasses.field(default_factory=dict)
    scopes: _names.ScopePath = ()
    axes: frozenset[str] = frozenset()

    def wants(self, name: str, kind: str, used: bool) -> bool:
        """Whether values of a name are to be seen; ``used``: those that the program uses."""
        del name, kind, used
        return True

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
        return (self._number, program, *key)

    def keys_inside(self, number: int) -> KeyedNotes:
        """The taps inside of an equation, by their keys there but for the number of the program."""
        return {key[1:]: tap for key, tap in self.taps.items() if key[0] == number and len(key) > 3}

    def joined(self, first: Any, second: Any) -> Any:
        """The note of two steps of a loop, or of two values with one key."""
        del first
        return second

    def over_devices(self, equation: Any, key: Key, note: Any) -> Any:
        """The note kept outside of a `shard_map`, of a note whose leading axis is over devices."""
        del equation, key
        return note

    # What follows is the evaluation.

    def starts(self, inputs: Sequence) -> None:
        del inputs
        self._notes: KeyedNotes = {}
        self._number = -1
        self._equation: Any = None

    def operands(self, equation: Any, inputs: list) -> list:
        self._number += 1
        self._equation = equation
        return inputs

    def __call__(self, equation: Any, inputs: list) -> Sequence | None:
        """The tagged value; an equation without names inside is bound as it is."""
        tag = _programs.tag_of(equation)
        if tag is not None and not _names.is_mark(equation):
            (tagged,) = _programs.bind(equation, inputs)
            used = _names.is_used(self._jaxpr, equation.outvars[0])
            return [self._see(tag, "tag", 0, 0, tagged, used)]
        return None if self._has_names_inside(equation) else _programs.bind(equation, inputs)

    def values(self, jaxpr: Any) -> _programs.ProgramValues:
        self._jaxpr = jaxpr
        return _names.ModuleValues(self, jaxpr, self._leave)

    def results(self, equation: Any, outputs: Sequence) -> Sequence:
        for i, (variable, x) in enumerate(zip(equation.outvars, outputs, strict=True)):
            for scopes in _names.left_unused(self._jaxpr, equation, variable):
                self._see(self._name(scopes), "module", i, len(scopes), x, used=False)
        return outputs

    def steps(self, equation: Any) -> KeyedNotes:
        return {} if _programs.is_cond(equation) else self.keys_inside(self._number)

    shards = steps

    def inside(self, equation: Any, step: Any) -> Self:
        """The hook for a program inside of an equation, with the taps of this step."""
        axes, taps, is_mapped = self.axes, step, _programs.is_shard_map(equation)
        if _programs.tracks_devices(equation):
            axes |= {*_programs.manual_axes(equation)}
        if not isinstance(step, dict):
            taps = {} if is_mapped else self.keys_inside(self._number)
        inner = dataclasses.replace(
            self, taps=taps, scopes=(*self.scopes, *_names.path(equation)), axes=axes
        )
        return inner if is_mapped or _programs.is_cond(equation) else inner.branch(0)

    def branch(self, number: int) -> Self:
        taps = {key[1:]: tap for key, tap in self.taps.items() if key[0] == number}
        return dataclasses.replace(self, taps=taps)

    def shard(self, own: Any) -> Self:
        return dataclasses.replace(self, taps=own).branch(0)

    def noted(self) -> KeyedNotes:
        return self._notes

    def note(self, equation: Any, inputs: list, notes: list[KeyedNotes]) -> None:
        """Keep the notes of the programs inside of an equation."""
        del inputs
        on_devices = _programs.is_shard_map(equation)
        for program, own in enumerate(notes):
            for key, note in own.items():
                note = self.over_devices(equation, key, note) if on_devices else note
                self._keep(self.key_around(equation, program, key), note)

    def empty(self, shapes: Any) -> Any:
        return jax.tree.map(self._varying, super().empty(shapes))

    def kept(self, old: KeyedNotes, new: KeyedNotes, number: Any) -> KeyedNotes:
        del number
        return {key: self.joined(old[key], note) for key, note in new.items()}

    def _has_names_inside(self, equation: Any) -> bool:
        scopes = (*self.scopes, *_names.path(equation))
        inner = _programs.value_programs(equation)
        found = (site.below(scopes) for program in inner for site in _names.sites(program))
        return any(site.has_value and self.wants(site.name, site.kind, site.used) for site in found)

    def _name(self, scopes: _names.ScopePath) -> str:
        return "/".join((*self.scopes, *scopes))

    def _leave(
        self, variable: Any, scopes: _names.ScopePath
    ) -> Callable[[jax.Array], jax.Array] | None:
        name = self._name(scopes)
        if not self.wants(name, "module", True):
            return None
        output = self._equation.outvars.index(variable)
        return functools.partial(self._see, name, "module", output, len(scopes))

    def _see(self, name: str, kind: str, output: int, depth: int, x: Any, used: bool = True) -> Any:
        """Note a value; return what goes on."""
        if not _programs.holds_floats(x) or not self.wants(name, kind, used):
            return x
        seen = Seen(name, kind, (self._number, output, depth))
        key = self.key(seen)
        self._keep(key, self._once(x, self.note_of(seen, _names.look(x))))
        return self.replaced(seen, x, self.taps.get(key))

    def _keep(self, key: Key, note: Any) -> None:
        notes = self._notes
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


@dataclass_transform(eq_default=False)
def value_hook(*, data: Sequence[str] = (), choices: Sequence[str] = ()) -> Callable[[type], type]:
    """Decorates a `ValueHook` with more fields: ``data`` are arrays, ``choices`` can be hashed.

    Data reach the programs inside of equations as further inputs, if they are `jit` or `shard_map`.
    """

    def register(cls: type) -> type:
        return jax.tree_util.register_dataclass(
            dataclasses.dataclass(eq=False)(cls),
            data_fields=["taps", *data],
            meta_fields=["scopes", "axes", *choices],
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
    for own, place, jaxpr, scopes in _names.placed_equations(program, _programs.value_programs):
        equation = place.equation
        for output, variable in enumerate(equation.outvars):
            if not _programs.holds_floats(variable):
                continue
            position = (*own, output)
            tag = _programs.tag_of(equation)
            if tag is not None and not _names.is_mark(equation):
                yield NamedValue((*position, 0), tag, "tag", place, variable)
            exit = _names.exits(jaxpr).get(variable)
            for left in exit.left if exit else _names.left_unused(jaxpr, equation, variable):
                name = "/".join((*scopes, *left))
                yield NamedValue((*position, len(left)), name, "module", place, variable)
