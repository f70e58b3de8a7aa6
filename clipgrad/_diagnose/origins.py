"""The origins of the values of a program that are not finite."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from clipgrad._diagnose.tracker import (
    SAME_AS_OPERAND,
    Flags,
    Followed,
    OperandOfVjp,
    badness,
    elements_followed,
    every_number,
    is_followed,
    track,
)
from clipgrad._jaxpr import (
    PRINTS,
    crossed_axes,
    device_count,
    holds_floats,
    is_reference,
    jit_for_one_call,
    manual_axes,
    on_host,
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
    def step(self) -> int | None:
        """The step of the innermost scan."""
        loops = zip(_loops(self.place), self.steps, strict=True) if self.place else ()
        return ([step for e, step in loops if e.primitive.name == "scan"] or [None])[-1]

    @property
    def device(self) -> str | None:
        """The coordinates of the first device, see `Place.device`; None for a constant."""
        is_known = self.place is not None and self.time != CONSTANT
        return self.place.device(self.devices) if self.place and is_known else None


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


def origins(
    program: Any,
    inputs: Sequence[Any],
    cured: Iterable[Place] = (),
    followed: Followed = every_number,
    is_excused: Callable[[Place, tuple[int, ...]], bool] = lambda *_: False,
) -> "Origins":
    """The origin of each result of a program.

    Args:
      program: a jaxpr.
      inputs: its inputs.
      cured: the operations whose infinities are replaced by ordinary numbers.
      followed: which operands of an equation are followed; all others count as finite.
      is_excused: whether an operation at some steps is the origin only where no other is.
    """
    run = jit_for_one_call(program)(lambda inputs: track(program, inputs, cured, followed=followed))
    flags = on_host(run(list(inputs))).on_host()
    own = iter(flags.elements)
    sources = [Source(ARGUMENT, argument=i) for i in range(len(inputs))]
    taints = [{(): _FINITE} for _ in inputs]
    if followed is every_number:
        pairs = zip(inputs, sources, strict=True)
        taints = [{(): _tainted(next(own), b) if holds_floats(x) else _FINITE} for x, b in pairs]
    replay = _Replay(followed, is_excused)
    results = replay.evaluate(program, {(): flags}, taints, None, (), ())
    return Origins([result[()] for result in results], replay.operands, replay.hidden)


def operands_of(program: Any, inputs: Sequence[Any], source: Source) -> tuple[float, ...]:
    """The operands of an operation where its result is not finite.

    Of a gather these are the index that is out of range, and its axis.
    """
    place = source.place
    assert place is not None
    run = jit_for_one_call(program)(lambda inputs: track(program, inputs, target=place).values)
    values = _at(on_host(run(list(inputs))), place, source.steps, min(source.devices))
    pairs = zip(place.equation.invars, values, strict=True)
    is_gather = place.equation.primitive.name == "gather"
    return tuple(float(value) for v, value in pairs if is_gather or holds_floats(v))


def operands_of_vjp(
    program: Any, inputs: Sequence[Any], place: Place, steps: Sequence[int], device: Device
) -> list[OperandOfVjp | None]:
    """The operands of an operation at some steps where its VJP is not finite."""
    run = jit_for_one_call(program)(
        lambda inputs: track(program, inputs, target=place, is_vjp=True).values
    )
    return jax.tree.map(lambda x: _at(x, place, steps, device), on_host(run(list(inputs))))


def _at(values: Any, place: Place, steps: Sequence[int], device: Device) -> Any:
    """The values that were recorded at some steps and on a device."""
    left, numbers = list(steps), list(device)
    for equation in place.chain[:0:-1]:  # a loop of unknown length has one iteration alone
        name = equation.primitive.name
        step = left.pop(0) if name in ("scan", "while") and left else 0
        if name in ("scan", "shard_map"):
            values = values[step if name == "scan" else numbers.pop(0)]
    return values


def _loops(place: Place) -> list[JaxprEqn]:
    """The loops around an operation, outermost first."""
    return [e for e in place.chain[:0:-1] if e.primitive.name in ("scan", "while")]


def _tainted(bad: Any, source: Source | None, earlier: Source | None = None) -> Taint:
    return Taint(int(bad), source) if bad else Taint(earlier=earlier) if earlier else _FINITE


class _Replay:
    """A second evaluation, of the flags alone, of all devices that do the same together."""

    def __init__(self, followed: Followed, is_excused: Callable[[Place, tuple[int, ...]], bool]):
        self._followed, self._is_excused = followed, is_excused
        self._devices_of: dict[tuple, set[Device]] = {}  # the devices, by operation and steps
        self._constants: dict[int, Taint] = {}
        self.operands: dict[tuple, list[Taint]] = {}
        self.hidden: dict[tuple, Place | None] = {}
        # A loop may begin to be bad at another iteration on each device: what came last.
        self._latest: dict[tuple, list[Taint]] = {}

    def evaluate(
        self,
        program: Any,
        flags: dict[Device, Flags],
        inputs: Sequence[Taints],
        parent: Place | None,
        steps: tuple[int, ...],
        time: tuple[float, ...],
    ) -> list[Taints]:
        """The taints of the results of a program, on each device that has flags."""
        jaxpr, constants = opened(program)
        taints = dict(zip(jaxpr.invars, inputs, strict=True))
        bad = {device: iter(own.results) for device, own in flags.items()}
        inside = {device: iter(own.inside) for device, own in flags.items()}

        finite, is_all = dict.fromkeys(flags, _FINITE), self._followed is every_number

        def constant(x):
            return dict.fromkeys(flags, self._constant(x))

        def read(atom):
            if type(atom) is Literal and not is_all:
                return finite
            return constant(atom.val) if type(atom) is Literal else taints[atom]

        closed = zip(jaxpr.constvars, constants, strict=True)
        taints |= {v: constant(x) if is_all else finite for v, x in closed}
        for i, equation in enumerate(jaxpr.eqns):
            if equation.primitive.name in PRINTS:
                continue
            place = Place(equation, parent)
            if not is_followed(place, self._followed):
                taints |= dict.fromkeys(equation.outvars, finite)
                continue
            operands = self._operands(place, [read(atom) for atom in equation.invars], finite)
            self._keep((place.key, steps), operands)
            where = place, steps, (*time, i)
            if tracked_programs(equation):
                found = {device: next(own) for device, own in inside.items()}
                outputs = self._enter(where, operands, found, bad)
            elif equation.primitive.name in SAME_AS_OPERAND:
                outputs = [dict(own) for own in operands[: len(equation.outvars)]]
            else:
                outputs = self._operation(where, operands, bad)
            taints |= dict(zip(equation.outvars, outputs, strict=True))
            _write(equation, operands)
        return [read(atom) for atom in jaxpr.outvars]

    def _keep(self, key: tuple, operands: list[Taints]) -> None:
        pairs = (pair for taints in operands for pair in taints.items())
        bad = [device for device, x in pairs if x.badness or x.earlier]
        if bad and key not in self.operands:
            self.operands[key] = [taints[min(bad)] for taints in operands]

    def _operands(self, place: Place, given: list[Taints], finite: Taints) -> list[Taints]:
        """The taints of an equation's operands that are followed; finite ones for the others."""
        if self._followed is every_number:
            return given
        pairs = zip(given, self._followed(place), strict=True)
        return [taints if is_own else finite for taints, is_own in pairs]

    def _constant(self, x: Any) -> Taint:
        if id(x) not in self._constants:
            bad = badness(jnp.asarray(x)) if holds_floats(jnp.asarray(x)) else 0
            self._constants[id(x)] = _tainted(int(bad), Source(CONSTANT))
        return self._constants[id(x)]

    def _operation(
        self, where: tuple, operands: list[Taints], bad: dict[Device, Iterator]
    ) -> list[Taints]:
        equation = where[0].equation
        levels = {device: _levels(equation, own) for device, own in bad.items()}
        given = {device: [taints[device] for taints in operands] for device in bad}
        if any(levels[d] != [0] * len(levels[d]) for d in bad) and crossed_axes(equation):
            given = self._of_other_devices(where[0], given)
        results = {d: self._results(where, given[d], levels[d], d) for d in bad}
        return [{d: own[i] for d, own in results.items()} for i in range(len(equation.outvars))]

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
        self, where: tuple, operands: list[Taint], bad: list[int], device: Device
    ) -> list[Taint]:
        """Has an origin here what is worse than all operands, else an operand's as bad."""
        place, steps, time = where
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
                when = (*CONSTANT, *time) if self._is_excused(place, steps) else time
                origin = Source(when, None, place, steps, origin, devices, level)
            outputs.append(_tainted(level, origin, earlier))
        if worst and not any(bad):
            self._hide(place, operands)
        return outputs

    def _hide(self, place: Place, operands: list[Taint]) -> None:
        """Keep that an operation makes a finite value of operands that are not finite."""
        for source in (x.source for x in operands if x.badness):
            key = source and source.place and (source.place.key, source.steps)
            if key in self.hidden and self.hidden[key] is None:
                self.hidden[key] = place

    def _enter(
        self, where: tuple, operands: list[Taints], found: dict, bad: dict[Device, Iterator]
    ) -> list[Taints]:
        """The taints of the results of an equation with programs, by the flags of each."""
        name = where[0].equation.primitive.name
        if not found:
            return [{}] * len(where[0].equation.outvars)
        if name == "while":
            return self._after(where, self._chosen(where, operands, found), bad)
        enter = {"scan": self._scan, "shard_map": self._shard_map}
        return enter.get(name, self._chosen)(where, operands, found)

    def _chosen(self, where: tuple, operands: list[Taints], found: dict) -> list[Taints]:
        """The taints of devices that run together: in one branch, or one iteration, in order."""
        place, steps, time = where
        programs, given = tracked_programs(place.equation), operands
        is_loop = place.equation.primitive.name == "while"
        if is_loop:
            given = operands[place.equation.params["cond_nconsts"] :]
        elif place.equation.primitive.name == "cond":
            given = operands[1:]
        groups: dict[int, list[Device]] = {}
        for device, own in found.items():
            groups.setdefault(int(own[0].index), []).append(device)
        outputs: list[Taints] = [{} for _ in place.equation.outvars]
        for index, devices in sorted(groups.items()):
            i = 0 if is_loop else min(max(index, 0), len(programs) - 1)
            variables = opened(programs[i])[0].invars
            inputs = [
                own if is_reference(v) else {device: own[device] for device in devices}
                for own, v in zip(given, variables, strict=True)
            ]
            if is_loop and index:  # what is carried was finite until then
                finite = [dict.fromkeys(devices, _FINITE)] * len(outputs)
                inputs = [*inputs[: -len(outputs)], *finite]
            flags = {device: found[device][i] for device in devices}
            now = ((*steps, index), (*time, index)) if is_loop else (steps, time)
            results = self.evaluate(programs[i], flags, inputs, place, *now)
            outputs = [old | new for old, new in zip(outputs, results, strict=True)]
        return outputs

    def _shard_map(self, where: tuple, operands: list[Taints], found: dict) -> list[Taints]:
        place, steps, time = where
        (program,) = tracked_programs(place.equation)
        count, variables = device_count(place.equation), place.equation.invars
        flags, shards = {}, [{} for _ in variables]
        for device, own in _of_program(found).items():
            for number in map(int, np.flatnonzero(_bad_steps(own, count))):
                flags[*device, number] = part = jax.tree.map(lambda x: x[number], own)  # noqa: B023
                whole = [taints[device] for taints in operands]
                taints = self._parts(place, part, whole)
                for shard, own_taint in zip(shards, taints, strict=True):
                    shard[*device, number] = own_taint
        results = self.evaluate(program, flags, shards, place, steps, time)
        return [
            {d: _joined([t for inner, t in own.items() if inner[:-1] == d]) for d in found}
            for own in results
        ]

    def _scan(self, where: tuple, operands: list[Taints], found: dict) -> list[Taints]:
        place, steps, time = where
        (program,), params = tracked_programs(place.equation), place.equation.params
        (constants, carried), length = scan_counts(place.equation), params["length"]
        fixed, carry = operands[:constants], operands[constants : constants + carried]
        whole = operands[constants + carried :]
        stacked = [dict.fromkeys(found, _FINITE)] * (len(place.equation.outvars) - carried)
        flags = _of_program(found)
        is_bad = np.any([_bad_steps(own, length) for own in flags.values()], axis=0)
        for now in range(length):
            t = length - 1 - now if params["reverse"] else now
            bad = any(x.badness for taints in (*fixed, *carry) for x in taints.values())
            earlier = any(x.earlier for taints in carry for x in taints.values())
            if not (is_bad[t] or bad or earlier):
                continue
            own = jax.tree.map(lambda x: x[t], flags)  # noqa: B023
            parts = {d: self._parts(place, own[d], [x[d] for x in whole]) for d in own}
            sliced = [{d: parts[d][i] for d in own} for i in range(len(whole))]
            given = [*fixed, *carry, *sliced]
            results = self.evaluate(program, own, given, place, (*steps, t), (*time, now))
            carry = results[:carried]
            pairs = zip(stacked, results[carried:], strict=True)
            stacked = [{d: _joined([old[d], new[d]]) for d in own} for old, new in pairs]
        return [*carry, *stacked]

    def _parts(self, place: Place, flags: Flags, whole: list[Taint]) -> list[Taint]:
        """The elements that a scan goes through, or the shards of arrays."""
        bad, first = iter(flags.elements), len(place.equation.invars) - len(whole)
        own = {i - first for i in elements_followed(place, self._followed)}
        pairs = enumerate(whole)
        return [_tainted(next(bad), x.source, x.earlier) if i in own else x for i, x in pairs]

    def _after(
        self, where: tuple, outputs: list[Taints], bad: dict[Device, Iterator]
    ) -> list[Taints]:
        """The taints of a loop's carries at its end, from the first iteration with a bad value."""
        place, steps, time = where
        found: list[Taints] = [{} for _ in outputs]
        for device, own in bad.items():
            new = Source((*time, np.inf), None, place, steps, None, frozenset([device]))
            first = _earliest(taints[device].source for taints in outputs) or new
            levels = _levels(place.equation, own)
            for result, taints, level in zip(found, outputs, levels, strict=True):
                result[device] = _tainted(level, taints[device].source or first)
        return found


def _levels(equation: JaxprEqn, flags: Iterator) -> list[int]:
    return [int(next(flags)) if holds_floats(v) else 0 for v in equation.outvars]


def _of_program(found: dict[Device, list[Flags]]) -> dict[Device, Flags]:
    return {device: own[0] for device, own in found.items()}


def _others(equation: JaxprEqn, mapped: JaxprEqn, device: int) -> tuple[int, ...]:
    """The coordinates of a device along the axes that an operation does not go across."""
    names, crossed = manual_axes(mapped), crossed_axes(equation)
    shape = [mapped.params["mesh"].shape[name] for name in names]
    places = zip(names, np.unravel_index(device, shape), strict=True)
    return tuple(int(i) for name, i in places if name not in crossed)


def _bad_steps(flags: Flags, length: int) -> np.ndarray:
    return np.any(flags.any_bad(lambda x: np.reshape(x, (length, -1)).any(-1)), axis=0)


def _joined(taints: list[Taint]) -> Taint:
    bad = max((taint.badness for taint in taints), default=0)
    earlier = None if bad else _earliest(taint.earlier for taint in taints)
    return Taint(bad, _earliest(taint.source for taint in taints), earlier)


def _inf_of(taint: Taint) -> Source | None:
    """The operation that a value has its inf from."""
    is_operation = taint.source and taint.source.place and taint.source.time != CONSTANT
    return taint.source if taint.badness == 1 and is_operation else None


def _write(equation: JaxprEqn, operands: list[Taints]) -> None:
    """Keep in each reference that an operation may write to what it may write."""
    for variable, taints in zip(equation.invars, operands, strict=True):
        if is_reference(variable):
            for device, old in taints.items():
                new = [own[device] for own in operands if own is not taints and device in own]
                taints[device] = _joined([old, *new])


def _earliest(sources: Iterable[Source | None]) -> Source | None:
    return min(
        (source for source in sources if source), key=lambda source: source.time, default=None
    )
