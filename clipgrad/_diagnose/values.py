"""The first operation whose value is not finite although what goes in is."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

import clipgrad._jaxpr as _jaxpr
from clipgrad._diagnose.numbers import holds_floats
from clipgrad._diagnose.places import EquationPlace
from clipgrad._diagnose.subject import PRINTS
from clipgrad._diagnose.suspects import MASKING
from clipgrad._diagnose.walk import SAME_AS_OPERAND, Flags, Target, Walk, badness, inner_programs

# NaN such as inf - inf is made of two infinities, of several operations at times.
_TRIED_VALUES = 4
_FIRST, _LATEST = -1, 2**62


class ValueOrigin(NamedTuple):
    """Where a NaN or inf is from: an argument, an operation, or a constant in an operation."""

    argument: int | None
    place: EquationPlace | None = None
    step: int | None = None  # of the innermost loop
    values: tuple[float, ...] | None = None  # what goes in where it goes wrong; None: a constant
    cause: int | None = None  # the argument with the inf that an operation makes NaN of
    becomes: EquationPlace | None = None  # the operation that makes NaN of the inf


class _Birth(NamedTuple):
    """An operation whose result is worse than its operands, at an iteration of the loops around.

    ``time`` is an order: arguments come before all operations, constants behind.
    """

    time: int
    argument: int | None = None
    place: EquationPlace | None = None
    steps: tuple[int, ...] = ()
    root: "_Birth | None" = None  # where the inf is from that it makes NaN of


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
        values = _operands(program, inputs, root)
        return ValueOrigin(None, root.place, _step_of(root), values, becomes=birth.place)
    values, cause = _operands(program, inputs, birth), birth.root and birth.root.argument
    return ValueOrigin(None, birth.place, step, values, cause)


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

    flags = jax.tree.map(np.asarray, run(list(inputs)))
    own = iter(flags.elements)
    births = (_Birth(_FIRST, argument=i) for i in range(len(inputs)))
    pairs = zip(inputs, births, strict=True)
    tracks = [_tracked(int(next(own)), b) if holds_floats(x) else _FINITE for x, b in pairs]
    return _Replay().evaluate(program, flags, tracks, None, ())[0].birth


def _tracked(bad: int, birth: _Birth | None) -> _Track:
    return _Track(bad, birth) if bad else _FINITE


def _operands(program: Any, inputs: Sequence[Any], birth: _Birth) -> tuple[float, ...]:
    """What an operation reads where its result is not finite."""
    assert birth.place is not None
    target = Target(birth.place, birth.steps)

    @jax.jit
    def run(inputs):
        walk = Walk((), target)
        walk.evaluate(program, inputs, None, ())
        return walk.record.values

    pairs = zip(birth.place.equation.invars, np.asarray(run(list(inputs))), strict=True)
    return tuple(float(value) for v, value in pairs if holds_floats(v))


class _Replay:
    """A second evaluation, of the flags alone."""

    def __init__(self):
        self._time = 0
        self._constants: dict[int, _Track] = {}

    def evaluate(
        self,
        program: Any,
        flags: Flags,
        inputs: Sequence[_Track],
        parent: EquationPlace | None,
        steps: tuple[int, ...],
    ) -> list[_Track]:
        """Where the results of a program are from."""
        jaxpr, constants = _jaxpr.opened(program)
        tracks = dict(zip(jaxpr.invars, inputs, strict=True))
        tracks |= {v: self._constant(x) for v, x in zip(jaxpr.constvars, constants, strict=True)}
        results, inside = iter(flags.results), iter(flags.inside)

        def read(atom):
            return self._constant(atom.val) if type(atom) is Literal else tracks[atom]

        for equation in jaxpr.eqns:
            if equation.primitive.name in PRINTS:
                continue
            operands = [read(atom) for atom in equation.invars]
            place = EquationPlace(equation, parent)
            if inner := inner_programs(equation):
                enter = {"scan": self._scan, "while": self._while, "cond": self._cond}
                run = enter.get(equation.primitive.name, self._call)
                outputs = run(place, inner, operands, next(inside), steps)
                if equation.primitive.name == "while":
                    outputs = self._after(place, outputs, results, steps)
            elif equation.primitive.name in SAME_AS_OPERAND:
                outputs = operands[: len(equation.outvars)]
            else:
                bad = [int(next(results)) if holds_floats(v) else 0 for v in equation.outvars]
                outputs = self._operation(place, operands, bad, steps)
            tracks |= dict(zip(equation.outvars, outputs, strict=True))
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
        self._time += 1
        if not any(bad):
            return [_FINITE] * len(bad)
        worst = max((x.badness for x in operands), default=0)
        outputs = []
        for level in bad:
            origin = _earliest(x.birth for x in operands if x.badness >= max(min(level, worst), 1))
            if origin and origin.time == _LATEST and origin.place is None:
                origin = origin._replace(place=place, steps=steps)
            if level > worst:
                origin = _Birth(self._time, None, place, steps, origin)
            outputs.append(_tracked(level, origin))
        return outputs

    def _call(
        self, place: EquationPlace, inner: list, operands: list, flags: Any, steps: tuple
    ) -> list:
        return self.evaluate(inner[0], flags[0], operands, place, steps)

    def _cond(
        self, place: EquationPlace, inner: list, operands: list, flags: Any, steps: tuple
    ) -> list:
        index = int(np.clip(flags[0].index, 0, len(inner) - 1))
        return self.evaluate(inner[index], flags[index], operands[1:], place, steps)

    def _scan(
        self, place: EquationPlace, inner: list, operands: list, flags: Any, steps: tuple
    ) -> list:
        params = place.equation.params
        constants, carried = _jaxpr.scan_counts(place.equation)
        fixed, carry = operands[:constants], operands[constants : constants + carried]
        whole = operands[constants + carried :]
        floats = [holds_floats(v) for v in place.equation.invars[constants + carried :]]
        stacked = [_FINITE] * (len(place.equation.outvars) - carried)
        order = range(params["length"])
        is_bad = _bad_steps(flags[0], params["length"])
        for t in reversed(order) if params["reverse"] else order:
            if not is_bad[t] and not any(x.badness for x in (*fixed, *carry)):
                continue
            own = jax.tree.map(lambda x: x[t], flags[0])  # noqa: B023
            bad = iter(own.elements)
            pairs = zip(whole, floats, strict=True)
            elements = [_tracked(int(next(bad)), x.birth) if f else x for x, f in pairs]
            results = self.evaluate(inner[0], own, [*fixed, *carry, *elements], place, (*steps, t))
            carry = results[:carried]
            stacked = [
                _joined_tracks(*pair) for pair in zip(stacked, results[carried:], strict=True)
            ]
        return [*carry, *stacked]

    def _while(
        self, place: EquationPlace, inner: list, operands: list, flags: Any, steps: tuple
    ) -> list:
        first = place.equation.params["cond_nconsts"]
        number = int(flags[0].index)
        given = operands[first:]
        if number:  # what is carried was finite until then
            count = len(place.equation.outvars)
            given = [*given[:-count], *[_FINITE] * count]
        return self.evaluate(inner[0], flags[0], given, place, (*steps, number))

    def _after(
        self, place: EquationPlace, tracks: list[_Track], results: Iterator, steps: tuple
    ) -> list[_Track]:
        """What a loop carries at its end, from the first iteration at which something is bad."""
        self._time += 1
        first = _earliest(x.birth for x in tracks) or _Birth(self._time, None, place, steps)
        pairs = zip(place.equation.outvars, tracks, strict=True)
        return [
            _tracked(int(next(results)), x.birth or first) if holds_floats(v) else _FINITE
            for v, x in pairs
        ]


def _bad_steps(flags: Flags, length: int) -> np.ndarray:
    leaves = jax.tree.leaves(flags._replace(index=()))
    return np.any([leaf.reshape(length, -1).any(-1) for leaf in leaves], axis=0)


def _joined_tracks(one: _Track, other: _Track) -> _Track:
    bad = max(one.badness, other.badness)
    return _Track(bad, _earliest((one.birth, other.birth)))


def _earliest(births: Any) -> _Birth | None:
    return min((birth for birth in births if birth), key=lambda birth: birth.time, default=None)
