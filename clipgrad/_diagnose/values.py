"""The first operation whose value is not finite although what goes in is.

The program runs operation by operation, not compiled: a compiled program that follows every value
through a model takes minutes to compile, and here loops and branches have concrete values.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

import clipgrad._jaxpr as _jaxpr
from clipgrad._diagnose.numbers import at_index, dtype_of, is_float
from clipgrad._diagnose.places import Place
from clipgrad._diagnose.subject import PRINTS

_CALLS = _jaxpr.JIT | _jaxpr.CALLS | _jaxpr.REMAT | _jaxpr.CUSTOM_RULES
_FIRST, _LATEST = -1, 2**62


class ValueOrigin(NamedTuple):
    """Where a NaN or inf is from: an argument, an operation, or a constant in an operation."""

    time: int  # arguments come before all operations, constants behind
    argument: int | None
    place: Place | None
    step: int | None  # of the innermost scan
    values: tuple[float, ...] | None  # what goes in where it goes wrong; None: a constant
    cause: int | None = None  # the argument with the inf that an operation makes NaN of


class _Tracked(NamedTuple):
    """A value, whether it holds NaN (2) or inf (1), and where the first of them is from."""

    x: Any
    badness: int
    origin: ValueOrigin | None


def origin_of_loss(program: Any, inputs: Sequence[Any]) -> ValueOrigin | None:
    """Where the first result of a program is not finite from; None if it is finite.

    A NaN or inf that is masked later is not followed, so that masks made of -inf are harmless.
    """
    arguments = [
        _tracked(x, ValueOrigin(_FIRST, i, None, None, None)) for i, x in enumerate(inputs)
    ]
    return _Run().evaluate(program, arguments, None, None)[0].origin


class _Run:
    """One evaluation of a program of tracked values."""

    def __init__(self):
        self._time = 0

    def evaluate(
        self, program: Any, inputs: list, parent: Place | None, step: int | None
    ) -> list[_Tracked]:
        """The results of a program; a value is dropped after its last use."""
        jaxpr, constants = _jaxpr.opened(program)
        values = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {v: self._constant(x) for v, x in zip(jaxpr.constvars, constants, strict=True)}
        uses = Counter(v for e in jaxpr.eqns for v in e.invars if type(v) is not Literal)
        uses.update(v for v in jaxpr.outvars if type(v) is not Literal)

        def read(atom):
            if type(atom) is Literal:
                return self._constant(jnp.asarray(atom.val, dtype_of(atom)))
            uses[atom] -= 1
            return values[atom] if uses[atom] else values.pop(atom)

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            with equation.ctx.manager:
                results = self._results(equation, operands, parent, step)
            results = zip(equation.outvars, results, strict=True)
            values |= {v: result for v, result in results if uses[v]}
        return [read(atom) for atom in jaxpr.outvars]

    def _results(self, equation, inputs, parent, step) -> list[_Tracked]:
        name, params, place = equation.primitive.name, equation.params, Place(equation, parent)
        if name in PRINTS:
            return []
        if name == "scan":
            return self._scan(equation, inputs, place)
        if name == "while":
            return self._while(params, inputs, place, step)
        if name == "cond" and params.get("branches_platforms") is None:
            chosen = params["branches"][int(inputs[0].x)]
            return self.evaluate(chosen, inputs[1:], place, step)
        if name in _CALLS:
            return self.evaluate(_jaxpr.called_program(equation), inputs, place, step)
        return self._operation(place, inputs, step)

    def _operation(self, place: Place, inputs: list[_Tracked], step: int | None) -> list[_Tracked]:
        self._time += 1
        outputs = _jaxpr.bind(place.equation, [x.x for x in inputs])
        worst = max((x.badness for x in inputs), default=0)
        origin = min((x.origin for x in inputs if x.origin), key=lambda o: o.time, default=None)
        if origin and origin.time == _LATEST and origin.place is None:
            origin = ValueOrigin(_LATEST, None, place, step, None)
        results = []
        for y in outputs:
            badness = _badness(y)
            if badness > worst:
                values = tuple(_values(y, [x.x for x in inputs if is_float(x.x)]))
                cause = origin.argument if origin else None
                born = ValueOrigin(self._time, None, place, step, values, cause)
                results.append(_Tracked(y, badness, born))
            else:
                results.append(_Tracked(y, badness, origin if badness else None))
        return results

    def _scan(self, equation: JaxprEqn, inputs: list[_Tracked], place: Place) -> list[_Tracked]:
        constants, carried = _jaxpr.scan_counts(equation)
        (program,), _ = _jaxpr.entered_programs(equation)
        fixed, carry = inputs[:constants], inputs[constants : constants + carried]
        stacked, steps = inputs[constants + carried :], range(equation.params["length"])
        outputs = {}
        for t in reversed(steps) if equation.params["reverse"] else steps:
            elements = [_tracked(x.x[t], x.origin) for x in stacked]
            results = self.evaluate(program, [*fixed, *carry, *elements], place, t)
            carry, outputs[t] = results[:carried], results[carried:]
        if not steps:
            return [*carry, *(_zeros(v.aval) for v in equation.outvars[carried:])]
        return [*carry, *map(_stacked, zip(*(outputs[t] for t in steps), strict=True))]

    def _while(self, params, inputs, place, step) -> list[_Tracked]:
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        carry = inputs[second:]
        while self.evaluate(params["cond_jaxpr"], [*inputs[:first], *carry], place, step)[0].x:
            given = [*inputs[first:second], *carry]
            carry = self.evaluate(params["body_jaxpr"], given, place, step)
        return carry

    def _constant(self, x: Any) -> _Tracked:
        return _tracked(x, ValueOrigin(_LATEST, None, None, None, None))


def _tracked(x: Any, origin: ValueOrigin | None) -> _Tracked:
    badness = _badness(x)
    return _Tracked(x, badness, origin if badness else None)


def _badness(x: Any) -> int:
    return int(_compiled_badness(x)) if is_float(x) else 0


@jax.jit
def _compiled_badness(x: Any) -> jax.Array:
    return jnp.max(jnp.where(jnp.isnan(x), 2, jnp.where(jnp.isinf(x), 1, 0)), initial=0)


def _values(y: Any, inputs: Sequence[Any]) -> list[float]:
    index = jnp.argmax(jnp.isnan(y) if jnp.isnan(y).any() else jnp.isinf(y))
    return [float(at_index(x, y.shape, index)) for x in inputs]


def _zeros(aval: Any) -> _Tracked:
    return _Tracked(jnp.zeros(aval.shape, aval.dtype), 0, None)


def _stacked(parts: Sequence[_Tracked]) -> _Tracked:
    origins = [part.origin for part in parts if part.origin]
    first = min(origins, key=lambda origin: origin.time, default=None)
    return _Tracked(jnp.stack([p.x for p in parts]), max(p.badness for p in parts), first)
