"""Sketches: a few numbers of each value and cotangent, whose differences are as large as theirs."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from clipgrad._compare.differences import Judgment, judge
from clipgrad._compat import on_every_device, to_varying, varying_axes
from clipgrad._jaxpr import (
    ProgramValues,
    called_program,
    equations,
    holds_floats,
    opened,
    scan_counts,
    value_programs,
)
from clipgrad._names import ModuleValues, Place, module_entries, path, placed_equations
from clipgrad._program import measuring, mixed
from clipgrad._values import NamedValue, Seen, ValueHook, value_hook

SHIFTS = 0x3C6EF372  # of the hashes that turn rows, which are others than those of signs
NUMBERS = 256  # the norm of a difference is right to sqrt(2 / 256), 9 %
MASKED = 1e6  # what masks are made of has a sketch of its own, in which it hides nothing
SCALE = 2.0**-64  # sums of the largest float32 would overflow
NORM_AT, LARGEST_AT = 2 * NUMBERS, 2 * NUMBERS + 1  # the places of these in a sketch
LENGTH = 2 * NUMBERS + 3
ENTERS = "enters"  # the kind of values that enter a module


def sketch_dtype(dtype: Any) -> Any:
    """The type of a sketch: float64 for values in it, or else float32."""
    return np.dtype(np.float64 if jnp.finfo(dtype).bits == 64 else np.float32)


@measuring  # traced once for each shape
def sketch(x: jax.Array) -> jax.Array:
    r"""The sketch of an array, shape (515,): of ordinary, of large and of non-finite elements.

    The first 256 numbers are sums of elements below 1e6 in magnitude, each with a sign and in a
    bucket by a hash of its position, the next 256 sums of larger ones, times :math:`2^{-64}`. Then
    come the norm and the largest magnitude of the finite elements, which only describe it. The last
    number is an exact code of which elements are NaN, inf and -inf. The squared norm of a sum with
    random signs is on average the squared norm of the summed vector (Charikar, Chen and
    Farach-Colton, "Finding frequent items in data streams", 2002).
    """
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    return _sketch_sums(on_every_device(x).ravel().astype(sketch_dtype(x.dtype)), jnp)


def host_sketch(x: np.ndarray) -> np.ndarray:
    """The `sketch` of an array in NumPy, in float64."""
    if np.iscomplexobj(x):
        x = np.stack([np.real(x), np.imag(x)], axis=-1)
    return _sketch_sums(np.ravel(x).astype(np.float64), np)


def _sketch_sums(flat: Any, xp: Any) -> Any:
    """The numbers of a sketch, in NumPy or in JAX.

    Elements are in rows of 256, each rotated by a hash of its number: so neither neighbors nor a
    column of a matrix come into one bucket.
    """
    hashes = hashes_of(xp.arange(flat.size, dtype=np.uint32))
    finite, large = xp.isfinite(flat), xp.abs(flat) >= MASKED
    signed = flat * (1 - 2 * (hashes >> np.uint32(13) & np.uint32(1)).astype(flat.dtype))
    parts = [xp.where(finite & ~large, signed, 0), xp.where(finite & large, signed * SCALE, 0)]
    count = -(-flat.size // NUMBERS)
    padded = xp.pad(xp.stack(parts), ((0, 0), (0, count * NUMBERS - flat.size)))
    shifts = hashes_of(xp.arange(count, dtype=np.uint32), SHIFTS)[:, None]
    columns = xp.arange(NUMBERS, dtype=np.uint32)[None, :] + shifts & np.uint32(NUMBERS - 1)
    rows = padded.reshape(2, count, NUMBERS)
    turned = xp.take_along_axis(rows, columns.astype(np.int32)[None], axis=2)
    kinds = xp.where(xp.isnan(flat), 1, xp.where(finite, 0, xp.where(flat > 0, 2, 3)))
    code = xp.sum(kinds.astype(np.uint32) * hashes, dtype=np.uint32) & np.uint32(0xFFFFFF)
    sizes = _sizes(xp.where(finite, flat, 0), xp)
    return xp.concatenate([xp.sum(turned, axis=1).ravel(), *sizes, code.astype(flat.dtype)[None]])


def _sizes(x: Any, xp: Any) -> tuple[Any, Any]:
    """The norm and the largest magnitude, each of shape (1,); squares do not overflow."""
    largest = xp.max(xp.abs(x), initial=0, keepdims=True)
    scale = xp.where(largest > 0, largest, 1)
    return largest * xp.sqrt(xp.sum(xp.square(x / scale), keepdims=True)), largest


def hashes_of(positions: Any, first: int = 0) -> Any:
    """A number of 32 bits for each position, in NumPy or in JAX."""
    return mixed(positions * np.uint32(2654435761) + np.uint32(first))


def judge_sketches(
    own: np.ndarray, other: np.ndarray, floor: np.ndarray, eps: float, rtol: float | None
) -> Judgment:
    """Compare the sketches of two versions of a value, shape (..., 515), as `judge` does."""

    def parts(start: int, end: int) -> list[np.ndarray]:
        return [np.asarray(x, np.float64)[..., start:end] for x in (own, other, floor)]

    own_code, code, changes = parts(LENGTH - 1, LENGTH)
    if not np.array_equal(own_code, code):
        return Judgment(float("inf"), 0.0, not np.any(changes))
    found = []
    for start in (0, NUMBERS):
        first, second, moved = parts(start, start + NUMBERS)
        found.append(judge(first, second, moved, eps, rtol))
    return max(found, key=lambda j: (j.differs, not j.is_judged, j.difference))


def judge_values(
    own: np.ndarray, other: np.ndarray, floor: np.ndarray, eps: float, rtol: float | None
) -> Judgment:
    """`judge_sketches` of two versions of a value, with the sizes of both."""
    sizes = (
        (float(np.linalg.norm(x[..., NORM_AT])), float(np.max(x[..., LARGEST_AT])))
        for x in (own, other)
    )
    return judge_sketches(own, other, floor, eps, rtol)._replace(sizes=tuple(sizes))


@jax.custom_vjp
def tapped(x: jax.Array, tap: jax.Array) -> jax.Array:
    """A value; the sketch of its cotangent becomes the cotangent of the tap."""
    del tap
    return x


def _tapped_backward(tap: jax.Array, cotangent: jax.Array) -> tuple:
    return cotangent, to_varying(sketch(cotangent).astype(tap.dtype), varying_axes(tap))


tapped.defvjp(lambda x, tap: (x, tap), _tapped_backward)


@value_hook(data=(), choices=("carried",))
class Sketches(ValueHook):
    """Notes the sketch of each value, and of its cotangent where it has a tap.

    What a scan carries from step to step has the name of the scan; see `carried_values`.

    Attributes:
      carried: how many results of the program a scan carries.
    """

    carried: int = 0

    def starts(self, inputs: Sequence) -> None:
        """Begin a new evaluation."""
        super().starts(inputs)
        self._sketched: dict[tuple, jax.Array] = {}

    def note_of(self, seen: Seen, x: jax.Array) -> jax.Array:
        """The sketch; a value that leaves several modules has one."""
        at = seen.position[:2]
        if at not in self._sketched:
            self._sketched[at] = self.sketch_of(lax.stop_gradient(x))
        return self._sketched[at]

    def sketch_of(self, x: jax.Array) -> jax.Array:
        """The numbers that are noted of a value."""
        return sketch(x)

    def replaced(self, seen: Seen, x: jax.Array, tap: Any) -> jax.Array:
        """The value, with its tap."""
        del seen
        return x if tap is None else tapped(x, tap)

    def values(self, jaxpr: Any) -> ProgramValues:
        """The values of the program; a scan's are replaced when its step is over, too."""
        values = super().values(jaxpr)
        return _CarriedValues(self, jaxpr, self._leave) if self.carried else values

    def results(self, equation: Any, outputs: Sequence) -> Sequence:
        """See what nothing uses, and what enters a module; that is replaced."""
        found = list(super().results(equation, outputs))
        for i, variable in enumerate(equation.outvars):
            if scopes := module_entries(self._jaxpr).get(variable):
                found[i] = self._see(self._name(scopes), ENTERS, i, -1, found[i])
        return found

    def inside(self, equation: Any, step: Any) -> Self:
        """The hook for a program inside of an equation."""
        count = scan_counts(equation)[1] if equation.primitive.name == "scan" else 0
        return dataclasses.replace(super().inside(equation, step), carried=count)

    def end_of_step(self, jaxpr: Any, results: list) -> list:
        """The carries of a scan and its other results, after one step."""
        self._number += 1
        name, given = self._name(()), set(jaxpr.invars)
        made = [type(v) is not Literal and v not in given for v in jaxpr.outvars[: self.carried]]
        for i in (i for i, is_made in enumerate(made) if is_made):
            results[i] = self._see(name, "module", i, 0, results[i])
        return results

    def _has_names_inside(self, equation: Any) -> bool:
        inner = [e for program in value_programs(equation) for e in equations(program)]
        scans = any(e.primitive.name == "scan" for e in (equation, *inner))
        entered = any(map(_has_entries, value_programs(equation)))
        return scans or entered or super()._has_names_inside(equation)


class _CarriedValues(ModuleValues):
    """The values of a step of a scan."""

    def __init__(self, hook: Sketches, *args: Any) -> None:
        super().__init__(hook, *args)
        self._hook = hook

    def outputs(self, jaxpr: Any) -> list:
        """The results of the step."""
        return self._hook.end_of_step(jaxpr, super().outputs(jaxpr))


def _has_entries(program: Any) -> bool:
    """Whether a value enters a module in a program, or in one inside of it."""
    jaxpr = opened(program)[0]
    inner = (p for equation in jaxpr.eqns for p in value_programs(equation))
    return bool(module_entries(jaxpr)) or any(map(_has_entries, inner))


def entering_values(program: Any) -> Iterator[NamedValue]:
    """The floating values that enter modules, and leave none; they have the names of these."""
    for own, place, jaxpr, scopes in placed_equations(program, value_programs):
        for i, v in enumerate(place.equation.outvars):
            entered = module_entries(jaxpr).get(v)
            if entered and holds_floats(v):
                name = "/".join((*scopes, *entered))
                yield NamedValue((*own, i, -1), name, ENTERS, place, v)


def carried_values(program: Any) -> Iterator[NamedValue]:
    """The floating values that scans carry from step to step, as `Sketches` sees them.

    Each has the name of its scan, "" outside of modules, and is last in its step.
    """
    for own, place, _, scopes in placed_equations(program, value_programs):
        equation = place.equation
        if equation.primitive.name != "scan":
            continue
        inside = (*scopes, *path(equation))
        body = opened(called_program(equation))[0]
        makers = {v: e for e in body.eqns for v in e.outvars}
        for i, v in enumerate(body.outvars[: scan_counts(equation)[1]]):
            if type(v) is not Literal and v in makers and holds_floats(v):
                position = (*own, 0, len(body.eqns), i, 0)
                at = Place(makers[v], place)
                yield NamedValue(position, "/".join(inside), "module", at, v)
