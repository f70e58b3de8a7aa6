"""The first operation whose value is not finite although what goes in is."""

import functools
from collections.abc import Generator, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

import clipgrad._jaxpr as _jaxpr
from clipgrad._diagnose.numbers import holds_floats, on_host
from clipgrad._diagnose.places import EquationPlace
from clipgrad._diagnose.subject import PRINTS
from clipgrad._diagnose.suspects import MASKING
from clipgrad._diagnose.walk import SAME_AS_OPERAND, Flags, Target, Walk, badness, inner_programs

# NaN such as inf - inf is made of two infinities, of several operations at times.
_TRIED_VALUES = 4
_FIRST, _LATEST = (-1,), (np.inf,)


class ValueOrigin(NamedTuple):
    """Where a NaN or inf is from: an argument, an operation, or a constant in an operation."""

    argument: int | None
    place: EquationPlace | None = None
    step: int | None = None  # of the innermost loop
    values: tuple[float, ...] | None = None  # what goes in where it goes wrong; None: a constant
    cause: int | None = None  # the argument with the inf that an operation makes NaN of
    becomes: EquationPlace | None = None  # the operation that makes NaN of the inf
    device: str | None = None


class _Birth(NamedTuple):
    """An operation whose result is worse than its operands, at an iteration of the loops around.

    ``time`` is an order, on all devices: at each level the position of the equation, and the
    iteration. Arguments come before all operations, constants behind.
    """

    time: tuple[float, ...]
    argument: int | None = None
    place: EquationPlace | None = None
    steps: tuple[int, ...] = ()
    root: "_Birth | None" = None  # where the inf is from that it makes NaN of
    devices: Set[tuple[int, ...]] = frozenset([()])  # as in `Target`; of all such births


class _Track(NamedTuple):
    """Whether a value holds NaN (2) or inf (1), and where it is from."""

    badness: int = 0
    birth: _Birth | None = None


_FINITE = _Track()


def origin_of_loss(program: Any, inputs: Sequence[Any]) -> ValueOrigin | None:
    """Where the first result of a program is not finite from; None if it is finite.

    NaN or inf that is masked later is not followed, so that masks made of -inf are harmless. NaN
    that is made of the inf of an operation is the doing of this operation, if there is no NaN
    where the inf is replaced by an ordinary number.
    """
    birth = _birth(program, inputs, ())
    if birth is None:
        return None
    if birth.place is None:
        return ValueOrigin(birth.argument)
    step = _step_of(birth)
    if birth.time == _LATEST:
        return ValueOrigin(None, birth.place, step)
    root = _overflow(program, inputs, birth)
    if root:
        values, step = _operands(program, inputs, root), _step_of(root)
        return ValueOrigin(None, root.place, step, values, None, birth.place, _device(root))
    values, cause = _operands(program, inputs, birth), birth.root and birth.root.argument
    return ValueOrigin(None, birth.place, step, values, cause, None, _device(birth))


def _device(birth: _Birth) -> str | None:
    assert birth.place is not None
    return birth.place.device(birth.devices)


def _step_of(birth: _Birth) -> int | None:
    """The step of the innermost scan."""
    assert birth.place is not None
    loops = [e for e in birth.place.chain[:0:-1] if e.primitive.name in ("scan", "while")]
    steps = [s for e, s in zip(loops, birth.steps, strict=True) if e.primitive.name == "scan"]
    return steps[-1] if steps else None


def _overflow(program: Any, inputs: Sequence[Any], birth: _Birth) -> _Birth | None:
    """The operation that makes inf of finite numbers, without which there is no such NaN."""
    cured: list[EquationPlace] = []
    again: _Birth | None = birth
    for _ in range(_TRIED_VALUES):
        root = again and again.root
        if root is None or root.place is None or root.time == _LATEST or _is_mask(birth, root):
            return None
        cured.append(root.place)
        again = _birth(program, inputs, cured)
        if again is None or again.place != birth.place:
            return birth.root
    return None


def _is_mask(birth: _Birth, root: _Birth) -> bool:
    """Whether a softmax makes NaN of log(0): that is a row that is masked throughout."""
    assert birth.place is not None and root.place is not None
    package = birth.place.location.package or ""
    is_log = root.place.operation in ("log", "log1p")
    return is_log and package.partition(" ")[0] in MASKING


def _birth(program: Any, inputs: Sequence[Any], cured: Sequence[EquationPlace]) -> _Birth | None:
    """Where the first result is from, if it is not finite."""

    @jax.jit
    def run(inputs):
        return Walk(cured).evaluate(program, inputs, None, inputs)[1]

    flags = on_host(run(list(inputs)))
    own = iter(flags.elements)
    births = (_Birth(_FIRST, argument=i) for i in range(len(inputs)))
    pairs = zip(inputs, births, strict=True)
    tracks = [_tracked(int(next(own)), b) if holds_floats(x) else _FINITE for x, b in pairs]
    return _together({0: _Replay({}).evaluate(program, flags, tracks, None, ())})[0][0].birth


def _tracked(bad: int, birth: _Birth | None) -> _Track:
    return _Track(bad, birth) if bad else _FINITE


def _operands(program: Any, inputs: Sequence[Any], birth: _Birth) -> tuple[float, ...]:
    """What an operation reads where its result is not finite."""
    assert birth.place is not None
    target = Target(birth.place, birth.steps, min(birth.devices))

    @jax.jit
    def run(inputs):
        walk = Walk((), target)
        walk.evaluate(program, inputs, None, ())
        return walk.record.values

    pairs = zip(birth.place.equation.invars, on_host(run(list(inputs))), strict=True)
    return tuple(float(value) for v, value in pairs if holds_floats(v))


class _Sent(NamedTuple):
    """What a device brings to an operation that takes values of other devices."""

    time: tuple[float, ...]
    equation: JaxprEqn
    tracks: list[_Track]


_Run = Generator[_Sent, list[_Track], list[_Track]]


def _together(runs: dict[int, _Run], mapped: JaxprEqn | None = None) -> list[list[_Track]]:
    """The results of evaluations on the devices of a `shard_map`, in step with each other.

    Each waits where values go from device to device until all have come there.
    """
    waiting: dict[int, _Sent] = {}
    results: dict[int, list[_Track]] = {}
    # A loop may begin to be bad at another iteration on each device.
    latest: dict[tuple, list[_Track]] = {}

    def go_on(device: int, brought: Any) -> None:
        try:
            waiting[device] = runs[device].send(brought)
        except StopIteration as end:
            waiting.pop(device, None)
            results[device] = end.value

    for device in runs:
        go_on(device, None)
    while waiting:
        now = min(sent.time for sent in waiting.values())
        groups: dict[tuple, list[int]] = {}
        for device, sent in waiting.items():
            if sent.time == now:
                key = id(sent.equation), _others(sent.equation, mapped, device)
                groups.setdefault(key, []).append(device)
        for key, group in groups.items():
            brought = [x for device in group for x in waiting[device].tracks if x.badness]
            latest[key] = brought or latest.get(key, [])
            for device in group:
                go_on(device, latest[key])
    return [results[device] for device in runs]


def _others(equation: JaxprEqn, mapped: JaxprEqn | None, device: int) -> tuple[int, ...]:
    """The coordinates of a device along the axes that an operation does not go across."""
    assert mapped is not None
    names, crossed = _jaxpr.manual_axes(mapped), _jaxpr.crossed_axes(equation)
    shape = [mapped.params["mesh"].shape[name] for name in names]
    places = zip(names, np.unravel_index(device, shape), strict=True)
    return tuple(int(i) for name, i in places if name not in crossed)


class _Replay:
    """A second evaluation, of the flags alone, on one device.

    It is a generator: at an operation that takes values of other devices it gives those of its
    own, and gets those that are not finite.

    Args:
      births: the devices of each birth, by operation and steps.
      device: as in `Target`.
      time: when it begins.
    """

    def __init__(self, births: dict[tuple, set], device: tuple = (), time: tuple = ()):
        self._births, self._device, self._time = births, device, time
        self._constants: dict[int, _Track] = {}

    def evaluate(
        self,
        program: Any,
        flags: Flags,
        inputs: Sequence[_Track],
        parent: EquationPlace | None,
        steps: tuple[int, ...],
    ) -> _Run:
        """Where the results of a program are from."""
        around = self._time
        jaxpr, constants = _jaxpr.opened(program)
        tracks = dict(zip(jaxpr.invars, inputs, strict=True))
        tracks |= {v: self._constant(x) for v, x in zip(jaxpr.constvars, constants, strict=True)}
        results, inside = iter(flags.results), iter(flags.inside)

        def read(atom):
            return self._constant(atom.val) if type(atom) is Literal else tracks[atom]

        for i, equation in enumerate(jaxpr.eqns):
            self._time = (*around, i)
            if equation.primitive.name in PRINTS:
                continue
            operands = [read(atom) for atom in equation.invars]
            place = EquationPlace(equation, parent)
            if inner := inner_programs(equation):
                enter = {"scan": self._scan, "while": self._while, "cond": self._cond}
                enter["shard_map"] = self._shard_map
                run = enter.get(equation.primitive.name, self._call)
                outputs = yield from run(place, inner, operands, next(inside), steps)
                if equation.primitive.name == "while":
                    outputs = self._after(place, outputs, results, steps)
            elif equation.primitive.name in SAME_AS_OPERAND:
                outputs = operands[: len(equation.outvars)]
            else:
                bad = [int(next(results)) if holds_floats(v) else 0 for v in equation.outvars]
                if any(bad) or any(x.badness for x in operands):
                    if self._device and _jaxpr.crossed_axes(equation):
                        operands = yield _Sent(self._time, equation, operands)
                outputs = self._operation(place, operands, bad, steps)
            tracks |= dict(zip(equation.outvars, outputs, strict=True))
        self._time = around
        return [read(atom) for atom in jaxpr.outvars]

    def _constant(self, x: Any) -> _Track:
        if id(x) not in self._constants:
            bad = int(badness(jnp.asarray(x))) if holds_floats(jnp.asarray(x)) else 0
            self._constants[id(x)] = _tracked(bad, _Birth(_LATEST))
        return self._constants[id(x)]

    def _operation(
        self, place: EquationPlace, operands: list[_Track], bad: list[int], steps: tuple
    ) -> list[_Track]:
        """Has an origin here what is worse than all operands, else that of an operand as bad."""
        if not any(bad):
            return [_FINITE] * len(bad)
        worst = max((x.badness for x in operands), default=0)
        outputs = []
        for level in bad:
            origin = _earliest(x.birth for x in operands if x.badness >= max(min(level, worst), 1))
            if origin and origin.time == _LATEST and origin.place is None:
                origin = origin._replace(place=place, steps=steps)
            if level > worst:
                devices = self._births.setdefault((place.key, steps), set())
                devices.add(self._device)
                origin = _Birth(self._time, None, place, steps, origin, devices)
            outputs.append(_tracked(level, origin))
        return outputs

    def _call(
        self, place: EquationPlace, inner: list, operands: list, flags: Any, steps: tuple
    ) -> _Run:
        return self.evaluate(inner[0], flags[0], operands, place, steps)

    def _cond(
        self, place: EquationPlace, inner: list, operands: list, flags: Any, steps: tuple
    ) -> _Run:
        index = int(np.clip(flags[0].index, 0, len(inner) - 1))
        return self.evaluate(inner[index], flags[index], operands[1:], place, steps)

    def _shard_map(
        self, place: EquationPlace, inner: list, operands: list, flags: Any, steps: tuple
    ) -> _Run:
        yield from ()
        runs = {}
        for number in np.flatnonzero(_bad_steps(flags[0], _jaxpr.device_count(place.equation))):
            own = jax.tree.map(lambda x: x[number], flags[0])  # noqa: B023
            shards = _parts(own, place.equation.invars, operands)
            replay = _Replay(self._births, (*self._device, int(number)), self._time)
            runs[int(number)] = replay.evaluate(inner[0], own, shards, place, steps)
        devices = _together(runs, place.equation)
        finite = [_FINITE] * len(place.equation.outvars)
        return [functools.reduce(_joined_tracks, own) for own in zip(finite, *devices, strict=True)]

    def _scan(
        self, place: EquationPlace, inner: list, operands: list, flags: Any, steps: tuple
    ) -> _Run:
        params = place.equation.params
        constants, carried = _jaxpr.scan_counts(place.equation)
        fixed, carry = operands[:constants], operands[constants : constants + carried]
        whole = operands[constants + carried :]
        variables, now = place.equation.invars[constants + carried :], self._time
        stacked = [_FINITE] * (len(place.equation.outvars) - carried)
        order = range(params["length"])
        is_bad = _bad_steps(flags[0], params["length"])
        for t in reversed(order) if params["reverse"] else order:
            if not is_bad[t] and not any(x.badness for x in (*fixed, *carry)):
                continue
            own = jax.tree.map(lambda x: x[t], flags[0])  # noqa: B023
            given = [*fixed, *carry, *_parts(own, variables, whole)]
            self._time = (*now, params["length"] - 1 - t if params["reverse"] else t)
            results = yield from self.evaluate(inner[0], own, given, place, (*steps, t))
            carry = results[:carried]
            stacked = [
                _joined_tracks(*pair) for pair in zip(stacked, results[carried:], strict=True)
            ]
        self._time = now
        return [*carry, *stacked]

    def _while(
        self, place: EquationPlace, inner: list, operands: list, flags: Any, steps: tuple
    ) -> _Run:
        first = place.equation.params["cond_nconsts"]
        number = int(flags[0].index)
        given = operands[first:]
        if number:  # what is carried was finite until then
            count = len(place.equation.outvars)
            given = [*given[:-count], *[_FINITE] * count]
        now = self._time
        self._time = (*now, number)
        results = yield from self.evaluate(inner[0], flags[0], given, place, (*steps, number))
        self._time = now
        return results

    def _after(
        self, place: EquationPlace, tracks: list[_Track], results: Iterator, steps: tuple
    ) -> list[_Track]:
        """What a loop carries at its end, from the first iteration at which something is bad."""
        devices = frozenset([self._device])
        new = _Birth((*self._time, np.inf), None, place, steps, None, devices)
        first = _earliest(x.birth for x in tracks) or new
        pairs = zip(place.equation.outvars, tracks, strict=True)
        return [
            _tracked(int(next(results)), x.birth or first) if holds_floats(v) else _FINITE
            for v, x in pairs
        ]


def _bad_steps(flags: Flags, length: int) -> np.ndarray:
    leaves = jax.tree.leaves(flags._replace(index=()))
    return np.any([leaf.reshape(length, -1).any(-1) for leaf in leaves], axis=0)


def _parts(flags: Flags, variables: Sequence[Any], whole: list[_Track]) -> list[_Track]:
    """The elements that a scan goes through, or the shards of arrays."""
    bad, pairs = iter(flags.elements), zip(variables, whole, strict=True)
    return [_tracked(int(next(bad)), x.birth) if holds_floats(v) else x for v, x in pairs]


def _joined_tracks(one: _Track, other: _Track) -> _Track:
    bad = max(one.badness, other.badness)
    return _Track(bad, _earliest((one.birth, other.birth)))


def _earliest(births: Any) -> _Birth | None:
    return min((birth for birth in births if birth), key=lambda birth: birth.time, default=None)
