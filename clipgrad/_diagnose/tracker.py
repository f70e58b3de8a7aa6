"""The values of a program that are not finite, flagged in one compiled pass.

Only that is computed for each operation: what follows from it is found outside, in `origins`.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from clipgrad._diagnose.probe import as_varying, is_sent_whole
from clipgrad._jaxpr import (
    PRINTS,
    Hook,
    at_first,
    bind,
    evaluate,
    holds_floats,
    scan_counts,
    tracked_programs,
)
from clipgrad._names import Place

# What is in the result of these is what was in their operand.
SAME_AS_OPERAND = frozenset(
    {"reshape", "transpose", "broadcast_in_dim", "squeeze", "neg", "rev", "name"}
)
SAME_AS_OPERAND |= {"new_ref", "freeze", "copy", "pvary", "pcast", "sharding_constraint", "reshard"}
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
# An infinity is replaced by a number of its sign that is no pole or zero of common functions.
_ORDINARY = 1.25


class SmallArray(NamedTuple):
    """An array that is flagged on the host."""

    value: Any


class Flags(NamedTuple):
    """2 for each result of a program that holds NaN, 1 for inf, 0 if it is finite.

    With a leading axis for each scan and each `shard_map` around the program. Of a loop of unknown
    length these are of the first iteration at which one is not 0.
    """

    elements: Any  # of the elements that a scan goes through; of shards; of the arguments
    results: Any  # of operations, in order, by floating result
    inside: Any  # of the equations with programs inside, for each program
    index: Any  # which branch of a cond, which iteration of a loop
    found: Any = ()  # of the operation that is asked for: whether its result is not finite
    values: Any = ()  # and what is recorded of it there

    def any_bad(self, reduce: Callable[[Any], Any]) -> list:
        """The flags of each array, reduced; `reduce` gets the mask of elements above zero."""
        own = [reduce(x > 0) for x in (*self.elements, *self.results, *jax.tree.leaves(self.found))]
        return own + [x for each in self.inside for flags in each for x in flags.any_bad(reduce)]

    def on_host(self) -> "Flags":
        """These flags, with flags in place of small arrays, once they are on the host."""
        axes = np.ndim(self.index)
        inside = [[flags.on_host() for flags in each] for each in self.inside]
        elements, results = (
            [_flagged(x.value, axes) if isinstance(x, SmallArray) else x for x in own]
            for own in (self.elements, self.results)
        )
        return self._replace(elements=elements, results=results, inside=inside)


def _flagged(x: np.ndarray, axes: int) -> np.ndarray:
    """The `badness` of arrays behind some leading axes."""
    kinds = np.where(np.isnan(x), 2, np.where(np.isfinite(x), 0, 1))
    return np.max(kinds.reshape(*x.shape[:axes], -1), axis=-1, initial=0)


Followed = Callable[[Place], Sequence[bool]]


def every_number(place: Place) -> list[bool]:
    """The floating operands of an equation: all that can be followed."""
    return [holds_floats(v) for v in place.equation.invars]


def is_followed(place: Place, followed: Followed) -> bool:
    """Whether the results of an equation are followed."""
    return followed is every_number or any(followed(place))


def elements_followed(place: Place | None, followed: Followed) -> list[int]:
    """The positions of the inputs of a scan or a `shard_map` that are flagged at the beginning."""
    if place is None:
        return []
    first = sum(scan_counts(place.equation)) if place.equation.primitive.name == "scan" else 0
    pairs = zip(place.equation.invars, followed(place), strict=True)
    return [i for i, (v, own) in enumerate(pairs) if i >= first and own and holds_floats(v)]


def track(
    program: Any,
    inputs: Sequence,
    cured: Iterable[Place] = (),
    target: Any = None,
    followed: Followed = every_number,
    is_vjp: bool = False,
) -> Flags:
    """The flags of a program.

    Args:
      program: a jaxpr.
      inputs: its inputs.
      cured: the operations whose infinities are replaced by ordinary numbers.
      target: a `Place` whose operands are recorded; there are no other flags then.
      followed: which operands of an equation are followed; its results are if one operand is.
      is_vjp: whether the target's operands are recorded where its VJP is not finite.
    """
    keys = frozenset(place.key for place in cured)
    tracker = Tracker(keys, target, followed=followed, is_vjp=is_vjp)
    evaluate(program, inputs, tracker)
    return tracker.noted()


class Tracker(Hook):
    """Flags the results of one evaluation of a program, see `track`."""

    flatten, has_notes = True, True

    def __init__(
        self,
        cured: frozenset[tuple],
        target: Place | None = None,
        parent: Place | None = None,
        followed: Followed = every_number,
        is_vjp: bool = False,
    ):
        self._cured, self._target, self._parent = cured, target, parent
        self._followed, self._is_vjp = followed, is_vjp
        self._elements: list[Any] = []
        self._results: list[Any] = []
        self._inside: list[list[Flags]] = []
        self._record: tuple[Any, Any] = ((), ())

    def starts(self, inputs: Sequence) -> None:
        """Flag the arguments, the shards, or the elements that a scan goes through."""
        if self._parent is None:
            chosen = range(len(inputs)) if self._followed is every_number else ()
            self._elements = [self._flag(inputs[i]) for i in chosen if holds_floats(inputs[i])]
        elif self._parent.equation.primitive.name in ("scan", "shard_map"):
            chosen = elements_followed(self._parent, self._followed)
            self._elements = [self._flag(inputs[i]) for i in chosen]

    def constant(self, value: Any, aval: Any) -> Any:
        """The value as an array."""
        return value if hasattr(value, "dtype") else jnp.asarray(value, aval.dtype)

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results of an operation; None where it has programs to go into."""
        if equation.primitive.name in PRINTS:
            return []
        whole = Place(equation, self._parent)
        place = whole.key
        if self._target and place == self._target.key:
            recorded = _recorded_vjp if self._is_vjp else _recorded
            self._record = recorded(equation, inputs)
        elif tracked_programs(equation) and is_followed(whole, self._followed):
            if not self._target or self._target.key[-len(place) :] == place:
                return None
        outputs = bind(equation, inputs)
        return [_ordinary(y) for y in outputs] if place in self._cured else outputs

    def results(self, equation: JaxprEqn, outputs: Sequence) -> Sequence:
        """Flag the results of an operation, and of a loop."""
        name = equation.primitive.name
        if not is_followed(Place(equation, self._parent), self._followed):
            return outputs
        if name == "while" or not (name in SAME_AS_OPERAND or tracked_programs(equation)):
            self._results += [self._flag(y) for y in outputs if holds_floats(y)]
        return outputs

    def inside(self, equation: JaxprEqn, step: Any) -> "Tracker":
        """The tracker for the programs inside of an equation."""
        place = Place(equation, self._parent)
        return Tracker(self._cured, self._target, place, self._followed, self._is_vjp)

    def _flag(self, x: Any) -> Any:
        # A loop compares its notes.
        is_whole = not self._target and is_sent_whole(x.size, self._parent, but_in=("while",))
        return SmallArray(x) if is_whole else badness(x)

    def noted(self) -> Flags:
        """The flags of this evaluation."""
        elements, results = ([], []) if self._target else (self._elements, self._results)
        elements, results, record = jax.tree.map(self._marked, (elements, results, self._record))
        return Flags(elements, results, self._inside, self._marked(jnp.int32(0)), *record)

    def note(self, equation: JaxprEqn, inputs: list, notes: list) -> None:
        """Keep the flags of the programs inside of an equation, and what was recorded there."""
        if equation.primitive.name == "cond":
            notes = [flags._replace(index=self._marked(inputs[0])) for flags in notes]
        self._inside.append(notes)
        recorded = [
            (flags.found, flags.values) for flags in notes if not isinstance(flags.found, tuple)
        ]
        self._record = recorded[0] if recorded else self._record

    def empty(self, shapes: Any) -> Any:
        """Flags of what is finite."""
        return jax.tree.map(self._marked, super().empty(shapes))

    def kept(self, old: Flags, new: Flags, number: Any) -> Any:
        """The flags of the first iteration at which something is not finite."""
        before, now = (jnp.any(jnp.stack(flags.any_bad(jnp.any))) for flags in (old, new))
        new = new._replace(index=self._marked(number))
        return jax.tree.map(lambda n, o: jnp.where(~before & now, n, o), new, old)

    def _marked(self, x: Any) -> Any:
        """Marked as different on each device of the `shard_map`s around."""
        return as_varying(x, self._parent)


def _recorded(equation: JaxprEqn, inputs: list) -> tuple[Any, Any]:
    """Whether a result is not finite, and the elements of the operands where it is not."""
    outputs = [y for y in bind(equation, inputs) if holds_floats(y)]
    y = max(outputs, key=lambda y: y.size)
    bad = jnp.where(jnp.isnan(y).any(), jnp.isnan(y), jnp.isinf(y))
    if equation.primitive.name == "gather":
        read = _first_out_of_range(equation, *inputs)
    else:
        read = [at_first(bad, x) if holds_floats(x) else jnp.zeros(()) for x in inputs]
    return bad.any().astype(jnp.int32), jnp.asarray(read, jnp.result_type(float))


def _first_out_of_range(equation: JaxprEqn, array: Any, indices: Any) -> list:
    """The first index of a gather that is out of range, and its axis."""
    params, indices = equation.params, jnp.asarray(indices, jnp.int32)
    axes = params["dimension_numbers"].start_index_map
    last = [array.shape[axis] - params["slice_sizes"][axis] for axis in axes]
    axes, last = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), indices.shape) for x in (axes, last))
    bad = (indices < 0) | (indices > last)
    return [at_first(bad, indices), at_first(bad, axes)]


class OperandOfVjp(NamedTuple):
    """A floating operand of an operation whose VJP is not finite."""

    is_at_fault: Any  # whether its own cotangent is not finite, see `_recorded_vjp`
    value: Any  # its element where the cotangent is not finite
    is_bad: Any  # whether it is not finite where a cotangent is not finite


def _recorded_vjp(equation: JaxprEqn, inputs: list) -> tuple[Any, list]:
    """An `OperandOfVjp` for each operand; None for one that holds no floating numbers.

    The cotangents of the results are ones, or if these give finite ones, as large as they can be.
    """
    chosen = [i for i, x in enumerate(inputs) if holds_floats(x)]

    def run(*given):
        changed = dict(zip(chosen, given, strict=True))
        outputs = bind(equation, [changed.get(i, x) for i, x in enumerate(inputs)])
        return [y for y in outputs if holds_floats(y)]

    outputs, pull_back = jax.vjp(run, *(inputs[i] for i in chosen))
    found: list[OperandOfVjp | None] = [None] * len(inputs)
    of_ones = pull_back([jnp.ones_like(y) for y in outputs])
    of_most = pull_back([jnp.full_like(y, jnp.finfo(y.dtype).max) for y in outputs])
    is_of_ones = jnp.any(jnp.stack([jnp.any(~jnp.isfinite(x)) for x in of_ones]))
    masks = [
        jnp.where(is_of_ones, ~jnp.isfinite(one), ~jnp.isfinite(most))
        for one, most in zip(of_ones, of_most, strict=True)
    ]
    shapes = {jnp.shape(y) for y in [*outputs, *(inputs[i] for i in chosen)]}
    is_elementwise = len(shapes) == 1 and equation.primitive.name not in _PRODUCTS
    there = functools.reduce(jnp.logical_or, masks) if is_elementwise else True
    for i, bad in zip(chosen, masks, strict=True):
        x = inputs[i]
        value = at_first(bad, x).astype(jnp.result_type(float))
        found[i] = OperandOfVjp(bad.any(), value, jnp.any(~jnp.isfinite(x) & there))
    return jnp.int32(0), found


def _ordinary(y: Any) -> Any:
    if not holds_floats(y):
        return y
    number = jnp.asarray(_ORDINARY, y.dtype) * jnp.sign(jnp.real(y)).astype(y.dtype)
    return jnp.where(jnp.isinf(y), number, y)


@jax.jit  # traced once for each shape
def badness(x: Any) -> jax.Array:
    """2 if there is NaN, else 1 if there is inf, else 0."""
    kinds = jnp.where(jnp.isnan(x), jnp.int32(2), jnp.where(jnp.isinf(x), jnp.int32(1), 0))
    return jnp.max(kinds, initial=0)
