"""The origins of the values of a program that are not finite."""

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from clipgrad._diagnose.flags import (
    SAME_AS_OPERAND,
    Flags,
    Followed,
    badness,
    every_number,
    flags_of,
    is_followed,
)
from clipgrad._jaxpr import (
    PRINTS,
    crossed_axes,
    holds_floats,
    is_reference,
    manual_axes,
    opened,
    scan_counts,
    tracked_programs,
)
from clipgrad._names import Place

ARGUMENT, CONSTANT = (-1,), (np.inf,)  # times before and behind all operations
Device = tuple[int, ...]  # its number in each `shard_map` around, outermost first


class Source(NamedTuple):
    """An operation whose result is worse than its operands, at an iteration of the loops around.

    ``time`` is an order, on all devices: at each level the position of the equation, and the
    iteration. Arguments come before all operations, constants behind.
    """

    time: tuple[float, ...]
    argument: int | None = None
    place: Place | None = None
    steps: tuple[int, ...] = ()
    root: "Source | None" = None  # where the inf is from that it, or an operation before, reads
    devices: Set[Device] = frozenset([()])  # of all such sources
    badness: int = 0  # of the result

    @property
    def is_operation(self) -> bool:
        """Whether it is neither an argument nor a constant, which an operation may read."""
        return self.place is not None and self.time != CONSTANT

    @property
    def step(self) -> int | None:
        """The step of the innermost scan."""
        around = reversed(self.place.chain[1:]) if self.place else ()
        loops = [e.primitive.name for e in around if e.primitive.name in ("scan", "while")]
        steps = [step for name, step in zip(loops, self.steps, strict=True) if name == "scan"]
        return steps[-1] if steps else None

    @property
    def device(self) -> str | None:
        """The coordinates of the first device, see `Place.device`; None for a constant."""
        return self.place.device(self.devices) if self.place and self.is_operation else None


class Taint(NamedTuple):
    """Whether a value holds NaN (2) or inf (1), and where it is from."""

    badness: int = 0
    source: Source | None = None
    earlier: Source | None = None  # of a finite value: an operation whose inf it is computed from


class Origins(NamedTuple):
    """The origins of the results of a program."""

    results: list[Taint]
    # Of each operation that reads what is not finite, or computed from an inf, by the key of its
    # `Place` and the steps around: its operands on the first device on which it does.
    operands: dict[tuple, list[Taint]]
    # Of each operation whose value is worse than its operands, by the same key: the first operation
    # that makes a finite value of that, or None.
    hidden: dict[tuple, Place | None]


_FINITE = Taint()
Taints = dict[Device, Taint]  # of one variable


class _Frame(NamedTuple):
    """An evaluation of a program, at some steps, on all devices that do the same."""

    parent: Place | None = None
    steps: tuple[int, ...] = ()
    time: tuple[float, ...] = ()
    devices: Sequence[Device] = ((),)

    def each(self, taint: Taint) -> Taints:
        """A taint of all devices."""
        return dict.fromkeys(self.devices, taint)


def origins(
    program: Any,
    inputs: Sequence[Any],
    cured: Iterable[Place] = (),
    followed: Followed = every_number,
    is_excused: Callable[[Place, tuple[int, ...]], bool] = lambda *_: False,
) -> "Origins":
    """The origin of each result of a program, by its flags, see `flags_of`.

    What is not followed counts as finite. What is excused at some steps is the origin only where no
    other operation is.
    """
    flags = flags_of(program, inputs, cured, followed)
    taints = [
        {(): _tainted(flags.of(v, None, (), ()) or 0, Source(ARGUMENT, argument=i))}
        for i, v in enumerate(opened(program)[0].invars)
    ]
    replay = _Replay(flags, followed, is_excused)
    results = replay.evaluate(program, taints, _Frame())
    return Origins([result[()] for result in results], replay.operands, replay.hidden)


def _tainted(bad: int, source: Source | None, earlier: Source | None = None) -> Taint:
    return Taint(bad, source) if bad else Taint(earlier=earlier) if earlier else _FINITE


class _Replay:
    """A second evaluation, of the flags alone, of all devices that do the same together."""

    def __init__(
        self,
        flags: Flags,
        followed: Followed,
        is_excused: Callable[[Place, tuple[int, ...]], bool],
    ):
        self._flags, self._followed, self._is_excused = flags, followed, is_excused
        self._devices_of: dict[tuple, set[Device]] = {}  # the devices, by operation and steps
        self._constants: dict[int, Taint] = {}
        self.operands: dict[tuple, list[Taint]] = {}
        self.hidden: dict[tuple, Place | None] = {}
        # A loop may begin to be bad at another iteration on each device: what came last.
        self._latest: dict[tuple, list[Taint]] = {}

    def evaluate(self, program: Any, inputs: Sequence[Taints], frame: _Frame) -> list[Taints]:
        """The taints of the results of a program on each device."""
        jaxpr, constants = opened(program)
        taints = dict(zip(jaxpr.invars, inputs, strict=True))
        closed = zip(jaxpr.constvars, constants, strict=True)
        taints |= {v: frame.each(self._constant(x)) for v, x in closed}

        def read(atom):
            is_literal = type(atom) is Literal
            return frame.each(self._constant(atom.val)) if is_literal else taints[atom]

        for i, equation in enumerate(jaxpr.eqns):
            if equation.primitive.name not in PRINTS:
                operands = [read(atom) for atom in equation.invars]
                now = frame._replace(time=(*frame.time, i))
                outputs = self._equation(Place(equation, frame.parent), operands, now)
                taints |= dict(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _constant(self, x: Any) -> Taint:
        if id(x) not in self._constants:
            bad = badness(jnp.asarray(x)) if holds_floats(jnp.asarray(x)) else 0
            self._constants[id(x)] = _tainted(int(bad), Source(CONSTANT))
        return self._constants[id(x)]

    def _equation(self, place: Place, operands: list[Taints], frame: _Frame) -> list[Taints]:
        equation, name = place.equation, place.equation.primitive.name
        if not is_followed(place, self._followed):
            return [frame.each(_FINITE) for _ in equation.outvars]
        if self._followed is not every_number:
            pairs = zip(operands, self._followed(place), strict=True)
            operands = [own if followed else frame.each(_FINITE) for own, followed in pairs]
        self._keep((place.key, frame.steps), operands)
        if tracked_programs(equation):
            enter = {"scan": self._scan, "shard_map": self._shard_map, "while": self._while}
            outputs = enter.get(name, self._chosen)(place, operands, frame)
        elif name in SAME_AS_OPERAND:
            outputs = [dict(own) for own in operands[: len(equation.outvars)]]
        else:
            outputs = self._operation(place, operands, frame)
        _write(equation, operands)
        return outputs

    def _keep(self, key: tuple, operands: list[Taints]) -> None:
        pairs = (pair for taints in operands for pair in taints.items())
        bad = [device for device, x in pairs if x.badness or x.earlier]
        if bad and key not in self.operands:
            self.operands[key] = [taints[min(bad)] for taints in operands]

    def _operation(self, place: Place, operands: list[Taints], frame: _Frame) -> list[Taints]:
        levels = self._levels(place, frame)
        given = {device: [taints[device] for taints in operands] for device in frame.devices}
        if any(map(any, levels.values())) and crossed_axes(place.equation):
            given = self._of_other_devices(place, given)
        results = {d: self._results(place, given[d], levels[d], d, frame) for d in frame.devices}
        return [
            {d: own[i] for d, own in results.items()} for i, _ in enumerate(place.equation.outvars)
        ]

    def _levels(self, place: Place, frame: _Frame) -> dict[Device, list[int]]:
        """The flags of the results of an equation on each device."""
        return {
            d: [
                self._flags.of(v, place.parent, frame.steps, d) or 0 for v in place.equation.outvars
            ]
            for d in frame.devices
        }

    def _of_other_devices(
        self, place: Place, given: dict[Device, list[Taint]]
    ) -> dict[Device, list[Taint]]:
        """The bad taints of all devices from which an operation takes values."""
        mapped = [e for e in place.chain[1:] if e.primitive.name == "shard_map"]
        if not mapped:
            return given
        groups: dict[tuple, list[Taint]] = {}
        keys = {d: (place.key, *d[:-1], *_others(place.equation, mapped[0], d[-1])) for d in given}
        for device, key in keys.items():
            groups.setdefault(key, []).extend(x for x in given[device] if x.badness)
        self._latest |= {key: taints for key, taints in groups.items() if taints}
        return {device: self._latest.get(key, []) for device, key in keys.items()}

    def _results(
        self, place: Place, operands: list[Taint], bad: list[int], device: Device, frame: _Frame
    ) -> list[Taint]:
        """Has an origin here what is worse than all operands, else an operand's as bad."""
        steps = frame.steps
        worst = max((x.badness for x in operands), default=0)
        earlier = _earliest(x.earlier or _inf_of(x) for x in operands)
        outputs = []
        for level in bad:
            as_bad = (x.source for x in operands if x.badness >= max(min(level, worst), 1))
            origin = (_earliest(as_bad) or earlier) if level else None
            if origin and origin.time == CONSTANT and origin.place is None:
                origin = origin._replace(place=place, steps=steps)
            if level > worst:
                devices = self._devices_of.setdefault((place.key, steps), set())
                devices.add(device)
                self.hidden.setdefault((place.key, steps), None)
                is_last = self._is_excused(place, steps)
                when = (*CONSTANT, *frame.time) if is_last else frame.time
                origin = Source(when, None, place, steps, origin, devices, level)
            outputs.append(_tainted(level, origin, earlier))
        for source in [x.source for x in operands if x.badness] if not any(bad) else ():
            key = source and source.place and (source.place.key, source.steps)
            if key in self.hidden and self.hidden[key] is None:
                self.hidden[key] = place  # which makes a finite value of it
        return outputs

    def _chosen(self, place: Place, operands: list[Taints], frame: _Frame) -> list[Taints]:
        """The taints of devices that run together: in one branch, or one iteration, in order."""
        programs, given, params = tracked_programs(place.equation), operands, place.equation.params
        is_loop = place.equation.primitive.name == "while"
        if is_loop:
            given = operands[params["cond_nconsts"] :]
        elif place.equation.primitive.name == "cond":
            given = operands[1:]
        groups: dict[int, list[Device]] = {}
        for device in frame.devices:
            number = self._flags.taken(place, frame.steps, device)
            groups.setdefault(number, []).append(device)
        outputs: list[Taints] = [{} for _ in place.equation.outvars]
        for number, devices in sorted(groups.items()):
            program = programs[0 if is_loop else min(max(number, 0), len(programs) - 1)]
            now = _Frame(place, frame.steps, frame.time, devices)
            if is_loop:
                now = now._replace(steps=(*frame.steps, number), time=(*frame.time, number))
            inputs = [
                own if is_reference(v) else {device: own[device] for device in devices}
                for own, v in zip(given, opened(program)[0].invars, strict=True)
            ]
            if is_loop and number:  # what is carried was finite until then
                inputs[-len(outputs) :] = [now.each(_FINITE)] * len(outputs)
            results = self.evaluate(program, inputs, now)
            outputs = [old | new for old, new in zip(outputs, results, strict=True)]
        return outputs

    def _while(self, place: Place, operands: list[Taints], frame: _Frame) -> list[Taints]:
        """The taints of a loop's carries at its end, from the first iteration with a bad value."""
        outputs, levels = self._chosen(place, operands, frame), self._levels(place, frame)
        for device in frame.devices:
            time = (*frame.time, np.inf)
            new = Source(time, None, place, frame.steps, None, frozenset([device]))
            first = _earliest(taints[device].source for taints in outputs) or new
            for taints, level in zip(outputs, levels[device], strict=True):
                taints[device] = _tainted(level, taints[device].source or first)
        return outputs

    def _shard_map(self, place: Place, operands: list[Taints], frame: _Frame) -> list[Taints]:
        (program,) = tracked_programs(place.equation)
        shards: list[Taints] = [{} for _ in operands]
        devices = []
        for device in frame.devices:
            bad = self._flags.bad_steps(place, frame.steps, device)
            for own in ((*device, int(number)) for number in np.flatnonzero(bad)):
                devices.append(own)
                whole = [taints[device] for taints in operands]
                for shard, taint in zip(
                    shards, self._parts(place, whole, frame.steps, own), strict=True
                ):
                    shard[own] = taint
        results = self.evaluate(program, shards, frame._replace(parent=place, devices=devices))
        return [
            {d: _joined([t for inner, t in own.items() if inner[:-1] == d]) for d in frame.devices}
            for own in results
        ]

    def _scan(self, place: Place, operands: list[Taints], frame: _Frame) -> list[Taints]:
        (program,), params = tracked_programs(place.equation), place.equation.params
        constants, carried = scan_counts(place.equation)
        fixed, carry = operands[:constants], operands[constants : constants + carried]
        stacked = [frame.each(_FINITE)] * (len(place.equation.outvars) - carried)
        flags = [self._flags.bad_steps(place, frame.steps, device) for device in frame.devices]
        is_bad = np.any(flags, axis=0)
        for now in range(params["length"] if flags else 0):
            t = params["length"] - 1 - now if params["reverse"] else now
            bad = any(x.badness for taints in (*fixed, *carry) for x in taints.values())
            earlier = any(x.earlier for taints in carry for x in taints.values())
            if not (is_bad[t] or bad or earlier):
                continue
            steps = (*frame.steps, t)
            parts = {
                d: self._parts(place, [own[d] for own in operands], steps, d) for d in frame.devices
            }
            sliced = [
                {d: own[i] for d, own in parts.items()}
                for i in range(constants + carried, len(operands))
            ]
            own = _Frame(place, steps, (*frame.time, now), frame.devices)
            results = self.evaluate(program, [*fixed, *carry, *sliced], own)
            carry = results[:carried]
            pairs = zip(stacked, results[carried:], strict=True)
            stacked = [{d: _joined([old[d], new[d]]) for d in old} for old, new in pairs]
        return [*carry, *stacked]

    def _parts(
        self, place: Place, whole: list[Taint], steps: tuple[int, ...], device: Device
    ) -> list[Taint]:
        """The elements that a scan goes through, or the shards of arrays."""
        variables = opened(tracked_programs(place.equation)[0])[0].invars
        flags = [self._flags.of(v, place, steps, device) for v in variables]
        pairs = zip(flags, whole, strict=True)
        return [x if flag is None else _tainted(flag, x.source, x.earlier) for flag, x in pairs]


def _others(equation: JaxprEqn, mapped: JaxprEqn, device: int) -> tuple[int, ...]:
    """The coordinates of a device along the axes that an operation does not go across."""
    names, crossed = manual_axes(mapped), crossed_axes(equation)
    shape = [mapped.params["mesh"].shape[name] for name in names]
    places = zip(names, np.unravel_index(device, shape), strict=True)
    return tuple(int(i) for name, i in places if name not in crossed)


def _joined(taints: list[Taint]) -> Taint:
    bad = max((taint.badness for taint in taints), default=0)
    earlier = None if bad else _earliest(taint.earlier for taint in taints)
    return Taint(bad, _earliest(taint.source for taint in taints), earlier)


def _inf_of(taint: Taint) -> Source | None:
    """The operation that a value has its inf from."""
    is_operation = taint.source is not None and taint.source.is_operation
    return taint.source if taint.badness == 1 and is_operation else None


def _write(equation: JaxprEqn, operands: list[Taints]) -> None:
    """Keep in each reference that an operation may write to what it may write."""
    for variable, taints in zip(equation.invars, operands, strict=True):
        if is_reference(variable):
            for device, old in taints.items():
                new = [own[device] for own in operands if own is not taints and device in own]
                taints[device] = _joined([old, *new])


def _earliest(sources: Iterable[Source | None]) -> Source | None:
    return min(filter(None, sources), key=lambda source: source.time, default=None)
