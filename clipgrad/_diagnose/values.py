"""The first operation whose value is not finite although what goes in is."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import clipgrad._jaxpr as _jaxpr
from clipgrad._diagnose.numbers import at_index, is_float
from clipgrad._diagnose.places import Place

# Codes of origins: arguments and operations by number, what came in by constants behind them.
_FROM_CONSTANT, _CONSTANT, _NOWHERE = 2**29, 2**30, 2**31 - 1
_SHOWN = 3  # how many operands of an operation are shown


class Origin(NamedTuple):
    """Where a value that is not finite comes from, as arrays."""

    code: Any
    step: Any  # of the innermost scan
    values: Any  # what went in at the element that went wrong


class Tracked(NamedTuple):
    """A value, whether it holds NaN or inf, and where they come from."""

    x: Any
    nan: Any
    inf: Any
    origin: Origin


class ValueOrigin(NamedTuple):
    """Where the loss has its NaN or inf from: an argument, an operation, or a constant in it."""

    argument: int | None
    place: Place | None
    is_constant: bool
    step: int | None
    values: tuple[float, ...]


def origin_of_loss(program: Any, inputs: Sequence[Any]) -> ValueOrigin | None:
    """Where the first result of a program is not finite from; None if it is finite.

    A NaN or inf that is masked later is not followed, so that masks made of -inf are harmless.
    """
    places: list[Place] = []

    @jax.jit
    def run(inputs: Sequence[Any]) -> Origin:
        hook = _Origins(places, len(inputs))
        tracked = [_tracked(x, _origin(i)) for i, x in enumerate(inputs)]
        return _jaxpr.evaluate(program, tracked, hook)[0].origin

    code, step, values = jax.tree.map(np.asarray, run(inputs))
    if code >= _CONSTANT:
        return None
    is_constant = bool(code >= _FROM_CONSTANT)
    index = int(code) - (_FROM_CONSTANT if is_constant else 0)
    if index < len(inputs):
        return ValueOrigin(index, None, False, None, ())
    place = places[index - len(inputs)]
    return ValueOrigin(None, place, is_constant, int(step) if place.nest else None, tuple(values))


class _Origins(_jaxpr.Hook):
    """Evaluates a program of tracked values."""

    flatten = True

    def __init__(self, places: list, first: int, parent: Place | None = None, step: Any = -1):
        self.places, self.first, self.parent, self.step = places, first, parent, step

    def constant(self, value, aval):
        if not hasattr(aval, "dtype") or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
            return Tracked(value, jnp.array(False), jnp.array(False), _origin(_NOWHERE))
        return _tracked(jnp.asarray(value, aval.dtype), _origin(_CONSTANT))

    def inside(self, equation, step):
        step = self.step if isinstance(step, tuple) else step
        return _Origins(self.places, self.first, Place(equation, self.parent), step)

    def __call__(self, equation, inputs):
        name = equation.primitive.name
        if name == "scan":
            return self._scan(equation, inputs)
        if name == "cond" and equation.params.get("branches_platforms") is None:
            return self._cond(equation, inputs)
        if _jaxpr.is_entered(equation, self) and name not in ("while", "cond", "shard_map"):
            return None
        return self._operation(equation, inputs)

    def _operation(self, equation, inputs):
        self.places.append(Place(equation, self.parent))
        code = self.first + len(self.places) - 1
        outputs = _jaxpr.bind(equation, [x.x for x in inputs])
        floats = [x for x in inputs if is_float(x.x)]
        origin = _earliest([x.origin for x in floats])
        mine = jnp.where(origin.code == _CONSTANT, code + _FROM_CONSTANT, origin.code)
        origin = origin._replace(code=mine, step=jnp.where(mine == origin.code, origin.step, self.step))
        return [self._result(y, floats, origin, code) for y in outputs]

    def _result(self, y, floats, origin, code):
        nan, inf = _flags(y)
        if not is_float(y):
            return Tracked(y, nan, inf, _origin(_NOWHERE))
        some_nan = functools.reduce(jnp.logical_or, [x.nan for x in floats], False)
        some_inf = functools.reduce(jnp.logical_or, [x.inf for x in floats], False)
        born = jnp.where(nan, ~some_nan, inf & ~some_nan & ~some_inf)
        index = jnp.argmax(~jnp.isfinite(y))
        values = [at_index(x.x, y.shape, index) for x in floats[:_SHOWN]]
        here = _origin(code, self.step, values)
        return Tracked(y, nan, inf, _choose(nan | inf, _choose(born, here, origin), _origin(_NOWHERE)))

    def _scan(self, equation, inputs):
        constants, carried = _jaxpr.scan_counts(equation)
        (program,), _ = _jaxpr.entered_programs(equation)
        stacked = inputs[constants + carried :]

        def step(carry, element):
            index, sliced = element
            parts = [_tracked(x, whole.origin) for x, whole in zip(sliced, stacked, strict=True)]
            hook = self.inside(equation, index)
            outputs = _jaxpr.evaluate(program, [*inputs[:constants], *carry, *parts], hook)
            return outputs[:carried], outputs[carried:]

        length, reverse = equation.params["length"], equation.params["reverse"]
        xs = jnp.arange(length), [x.x for x in stacked]
        start = inputs[constants : constants + carried]
        carry, ys = lax.scan(step, start, xs, length, reverse)
        return [*carry, *(_over_steps(y, reverse) for y in ys)]

    def _cond(self, equation, inputs):
        def branch(program):
            return lambda *inputs: _jaxpr.evaluate(program, inputs, self.inside(equation, ()))

        branches = [branch(program) for program in equation.params["branches"]]
        return lax.switch(inputs[0].x, branches, *inputs[1:])


def _tracked(x: Any, origin: Origin) -> Tracked:
    nan, inf = _flags(x)
    return Tracked(x, nan, inf, _choose(nan | inf, origin, _origin(_NOWHERE)))


def _flags(x: Any) -> tuple[jax.Array, jax.Array]:
    if not is_float(x):
        return jnp.array(False), jnp.array(False)
    return jnp.any(jnp.isnan(x)), jnp.any(jnp.isinf(x))


def _origin(code: Any, step: Any = -1, values: Sequence[Any] = ()) -> Origin:
    shown = [*values, *[0.0] * (_SHOWN - len(values))]
    return Origin(jnp.int32(code), jnp.int32(step), jnp.asarray(shown, jnp.result_type(float)))


def _choose(condition: Any, yes: Origin, no: Origin) -> Origin:
    return Origin(*(jnp.where(condition, a, b) for a, b in zip(yes, no, strict=True)))


def _earliest(origins: list[Origin]) -> Origin:
    if not origins:
        return _origin(_CONSTANT)
    return functools.reduce(lambda a, b: _choose(b.code < a.code, b, a), origins)


def _over_steps(y: Tracked, reverse: bool) -> Tracked:
    """A stacked result, with the origin of its first step that is not finite."""
    codes = y.origin.code[::-1] if reverse else y.origin.code
    first = jnp.argmin(codes) if codes.size else 0
    first = codes.size - 1 - first if reverse else first
    origin = Origin(*(part[first] for part in y.origin)) if codes.size else _origin(_NOWHERE)
    return Tracked(y.x, jnp.any(y.nan), jnp.any(y.inf), origin)
