"""A program evaluated with a track beside each value, in one compiled pass.

Time is counted in one number: each iteration of a loop is a tick of the clock, and within a tick
operations are numbered in program order.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import PartitionSpec

import clipgrad._jaxpr as _jaxpr
from clipgrad._compat import to_varying
from clipgrad._diagnose.numbers import at_first, dtype_of, is_float
from clipgrad._diagnose.places import Place
from clipgrad._diagnose.subject import PRINTS
from clipgrad._diagnose.tracks import (
    CONSTANT,
    UNUSED,
    Track,
    badness,
    computed,
    earliest,
    finite,
    given,
    selected,
)

_CALLS = _jaxpr.JIT | _jaxpr.CALLS | _jaxpr.REMAT | _jaxpr.CUSTOM_RULES
# What is in the result of these is what was in their operand.
_SAME = frozenset({"reshape", "transpose", "broadcast_in_dim", "squeeze", "neg", "rev", "name"})
_SAME |= {"copy", "pvary", "pcast", "sharding_constraint", "reshard"}
# An infinity is replaced by a number of its sign that is no pole or zero of common functions.
_ORDINARY = 1.25


class Tracked(NamedTuple):
    """A value with its track; None if it can only be finite."""

    x: Any
    track: Track | None


class Record(NamedTuple):
    """What an operation reads where its result is not finite, and the step of the scan."""

    found: Any
    step: Any
    values: Any


class Places:
    """The operations of a program in order, in the programs inside of it, with a number each.

    Attributes:
      places: by number; the arguments have the numbers before ``arguments``.
    """

    def __init__(self, program: Any, arguments: int):
        self.arguments = arguments
        self.places: list[Place] = []
        self._numbers: dict[tuple, int] = {}
        self._enter(program, None)

    def _enter(self, program: Any, parent: Place | None) -> None:
        for equation in _jaxpr.opened(program)[0].eqns:
            place = Place(equation, parent)
            for inner in _entered(equation):
                self._enter(inner, place)
            self._numbers[_key(place)] = len(self.places) + self.arguments
            self.places.append(place)

    def number(self, place: Place) -> int:
        """The number of an operation."""
        return self._numbers[_key(place)]

    def time(self, place: Place, clock: Any) -> jax.Array:
        """When an operation runs; the clock stops before times become those of constants."""
        last = (int(CONSTANT) - 1) // self.count - 1
        return jnp.minimum(clock, np.uint32(last)) * np.uint32(self.count) + np.uint32(
            self.number(place)
        )

    @property
    def count(self) -> int:
        """How many numbers there are."""
        return len(self.places) + self.arguments

    def at(self, time: int) -> Place:
        """The operation that runs at a time."""
        return self.places[time % int(CONSTANT) % self.count - self.arguments]


def _key(place: Place) -> tuple:
    return tuple(map(id, place.chain))


def _entered(equation: JaxprEqn) -> list:
    """The programs of an equation whose operations are followed one by one."""
    name, params = equation.primitive.name, equation.params
    if name == "while":
        return [params["body_jaxpr"]]
    if name in _CALLS:
        return [_jaxpr.called_program(equation)]
    is_chosen = name == "cond" and params.get("branches_platforms") is None
    return _jaxpr.entered_programs(equation)[0] if is_chosen or name in ("scan", "shard_map") else []


class Walk:
    """An evaluation of a program of tracked values.

    Args:
      places: the numbers of its operations.
      cured: those whose infinities are replaced by ordinary numbers.
      shown: one whose operands are recorded when it runs at ``time``; nothing is tracked then.
      time: a time.
    """

    def __init__(
        self, places: Places, cured: frozenset[int], shown: Place | None = None, time: Any = None
    ):
        self._places, self._cured, self._shown, self._time = places, cured, shown, time
        self._axes: tuple[str, ...] = ()  # of the mesh, in the `shard_map`s around
        self._varying = False
        count = len(shown.equation.invars) if shown else 0
        empty = jnp.zeros(count, jnp.result_type(float))
        self.record = Record(jnp.array(False), jnp.int32(-1), empty)
        self._clock = jnp.uint32(0)

    def evaluate(
        self, program: Any, inputs: Sequence[Tracked], parent: Place | None, step: Any
    ) -> list[Tracked]:
        """The results of a program; a value is dropped after its last use."""
        jaxpr, constants = _jaxpr.opened(program)
        values = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {v: self._constant(x) for v, x in zip(jaxpr.constvars, constants, strict=True)}
        uses = Counter(v for e in jaxpr.eqns for v in e.invars if type(v) is not Literal)
        uses.update(v for v in jaxpr.outvars if type(v) is not Literal)

        def read(atom):
            if type(atom) is Literal:
                return self._constant(np.asarray(atom.val, dtype_of(atom)))
            uses[atom] -= 1
            return values[atom] if uses[atom] else values.pop(atom)

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            with equation.ctx.manager:
                results = self._results(Place(equation, parent), operands, step)
            results = zip(equation.outvars, results, strict=True)
            values |= {v: result for v, result in results if uses[v]}
        return [read(atom) for atom in jaxpr.outvars]

    def _results(self, place: Place, inputs: list[Tracked], step: Any) -> list[Tracked]:
        equation = place.equation
        name, inner = equation.primitive.name, _entered(equation)
        if name in PRINTS:
            return []
        if not inner:
            return self._operation(place, inputs, step)
        if name in _CALLS:
            return self.evaluate(inner[0], inputs, place, step)
        enter = {"scan": self._scan, "while": self._while, "cond": self._cond}
        return enter.get(name, self._shard_map)(place, inner, inputs, step)

    def _operation(self, place: Place, inputs: list[Tracked], step: Any) -> list[Tracked]:
        outputs = _jaxpr.bind(place.equation, [x.x for x in inputs])
        if self._shown:
            self._note(place, inputs, outputs, step)
        if self._places.number(place) in self._cured:
            outputs = [_ordinary(y) if is_float(y) else y for y in outputs]
        if self._shown:
            return [Tracked(y, None) for y in outputs]
        tracks = [x.track for x in inputs if x.track is not None]
        if place.equation.primitive.name in _SAME:
            return [Tracked(y, tracks[0] if tracks else None) for y in outputs]
        if self._axes and _jaxpr.has_named_axis(place.equation):
            tracks = [earliest(jax.tree.map(self._gathered, track)) for track in tracks]
        time = self._places.time(place, self._clock)
        return [Tracked(y, computed(y, tracks, time) if is_float(y) else None) for y in outputs]

    def _note(self, place: Place, inputs: list[Tracked], outputs: list, step: Any) -> None:
        """Record the operands of the operation that is asked for, when it runs."""
        outputs = [y for y in outputs if is_float(y)]
        is_now = self._places.time(place, self._clock) == self._time
        if self._shown is None or _key(place) != _key(self._shown) or not outputs:
            return
        y = max(outputs, key=lambda y: y.size)
        bad = jnp.where(jnp.isnan(y).any(), jnp.isnan(y), jnp.isinf(y))
        is_now &= bad.any()  # on this device of a `shard_map`
        read = [at_first(bad, x.x) if is_float(x.x) else jnp.zeros(()) for x in inputs]
        new = Record(jnp.array(True), jnp.int32(step), jnp.asarray(read, self.record.values.dtype))
        self.record = jax.tree.map(lambda n, o: jnp.where(is_now, n, o), new, self.record)

    def _scan(self, place: Place, inner: list, inputs: list[Tracked], step: Any) -> list[Tracked]:
        params = place.equation.params
        constants, carried = _jaxpr.scan_counts(place.equation)
        fixed, stacked = inputs[:constants], inputs[constants + carried :]

        def run(state, element):
            t, slices = element
            carry = self._resume(state)
            elements = [self._part(x, whole) for x, whole in zip(slices, stacked, strict=True)]
            results = self.evaluate(inner[0], [*fixed, *carry, *elements], place, t)
            return self._state(results[:carried]), self._full(results[carried:])

        first = self._state(inputs[constants : constants + carried])
        elements = jnp.arange(params["length"], dtype=jnp.int32), [x.x for x in stacked]
        options = {"length": params["length"], "reverse": params["reverse"]}
        state, outputs = lax.scan(run, first, elements, **options)
        carry = self._resume(state, ticks=0)
        return [*carry, *(Tracked(y.x, y.track and earliest(y.track)) for y in outputs)]

    def _while(self, place: Place, inner: list, inputs: list[Tracked], step: Any) -> list[Tracked]:
        params = place.equation.params
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        before = [x.x for x in inputs[:first]]

        def again(state):
            values = [*before, *(x.x for x in state[0])]
            return _jaxpr.evaluate(params["cond_jaxpr"], values, _Silent())[0]

        def run(state):
            old, goes_on = state[0], again(state)
            results = self.evaluate(
                inner[0], [*inputs[first:second], *self._resume(state)], place, step
            )
            if goes_on.ndim:  # of a `vmap`: those that have ended keep their values
                pairs = zip(self._full(results), old, strict=True)
                results = [_kept(goes_on, new, before) for new, before in pairs]
            return self._state(results)

        state = self._state(inputs[second:])
        return self._resume(lax.while_loop(lambda s: jnp.any(again(s)), run, state), ticks=0)

    def _cond(self, place: Place, inner: list, inputs: list[Tracked], step: Any) -> list[Tracked]:
        def branch(program):
            def run(state):
                given = self._resume(state, ticks=0)
                return self._state(self.evaluate(program, given, place, step))

            return run

        state = lax.switch(inputs[0].x, [branch(program) for program in inner], self._state(inputs[1:]))
        return self._resume(state, ticks=0)

    def _shard_map(
        self, place: Place, inner: list, inputs: list[Tracked], step: Any
    ) -> list[Tracked]:
        params = place.equation.params
        around = self._axes, self._varying
        names = _jaxpr.manual_axes(place.equation)

        def shard(state, step, *shards):
            self._axes, self._varying = (*self._axes, *names), params["check_vma"]
            tracked = [Tracked(x, i.track) for x, i in zip(shards, state[0], strict=True)]
            tracked = self._resume((tracked, *state[1:]), ticks=0)
            results, *rest = self._state(self.evaluate(inner[0], tracked, place, step))
            apart = jax.tree.map(lambda x: x[None], ([y.track for y in results], rest))
            return tuple(y.x for y in results), apart

        without = [Tracked(None, x.track) for x in self._full(inputs)]
        mapped = jax.shard_map(
            shard,
            mesh=params["mesh"],
            in_specs=(PartitionSpec(), PartitionSpec(), *params["in_specs"]),
            out_specs=(tuple(params["out_specs"]), PartitionSpec(names)),
            axis_names=set(names),
            check_vma=params["check_vma"],
        )
        state = (without, self._clock, self.record)
        outputs, (tracks, (clock, record)) = mapped(state, jnp.int32(step), *(x.x for x in inputs))
        self._axes, self._varying = around
        self._clock = jnp.max(clock)
        one = jnp.argmax(record.found)
        self.record = jax.tree.map(lambda x: x[one], record)
        tracks = [track and earliest(track) for track in tracks]
        return [Tracked(y, track) for y, track in zip(outputs, tracks, strict=True)]

    def _state(self, values: Sequence[Tracked]) -> tuple[list[Tracked], Any, Record]:
        """Values with the clock and the record, as loops carry them."""
        vary = self._marked
        return self._full(values), vary(self._clock), jax.tree.map(vary, self.record)

    def _resume(self, state: tuple, ticks: int = 1) -> list[Tracked]:
        """Go on with what `_state` returned, after this many ticks of the clock."""
        values, clock, self.record = state
        self._clock = clock + np.uint32(ticks)
        return values

    def _full(self, values: Sequence[Tracked]) -> list[Tracked]:
        """The values, with a track for each that may be not finite."""
        tracked = [Tracked(v.x, v.track or self._none(v.x)) for v in values]
        return [Tracked(v.x, jax.tree.map(self._marked, v.track)) for v in tracked]

    def _none(self, x: Any) -> Track | None:
        return finite() if is_float(x) and not self._shown else None

    def _part(self, x: Any, whole: Tracked) -> Tracked:
        """An element of what a scan goes through."""
        track = whole.track
        return Tracked(x, track and given(x, track.origin, track.root))

    def _constant(self, x: Any) -> Tracked:
        if self._shown or not is_float(x):
            return Tracked(x, None)
        if isinstance(x, Tracer):
            return Tracked(x, given(x, UNUSED))
        with jax.ensure_compile_time_eval():
            is_bad = bool(badness(x))
        return Tracked(x, given(x, UNUSED) if is_bad else None)

    def _marked(self, x: Any) -> Any:
        """Marked as different on each device of the `shard_map`s around."""
        return to_varying(x, frozenset(self._axes)) if self._varying else x

    def _gathered(self, x: Any) -> Any:
        """The same on each device of the `shard_map`s around, from all of them."""
        return lax.all_gather(self._marked(x), self._axes)


class _Silent(_jaxpr.Hook):
    """Leaves prints out."""

    def __call__(self, equation, inputs):
        return [] if equation.primitive.name in PRINTS else None


def _ordinary(y: Any) -> Any:
    number = jnp.asarray(_ORDINARY, y.dtype) * jnp.sign(jnp.real(y)).astype(y.dtype)
    return jnp.where(jnp.isinf(y), number, y)


def _kept(where: Any, new: Tracked, old: Tracked) -> Tracked:
    mask = where.reshape(where.shape + (1,) * (np.ndim(new.x) - where.ndim))
    x = jnp.where(mask, new.x, old.x)
    if new.track is None or old.track is None:
        return Tracked(x, None)
    return Tracked(x, selected(where, x, new.track, old.track))
