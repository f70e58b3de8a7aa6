"""Which values of a program are not finite, in one compiled pass.

Only that is computed for each operation: what follows from it is found outside, in `origins`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from clipgrad._compat import to_varying
from clipgrad._jaxpr.elements import at_first, holds_floats
from clipgrad._jaxpr.evaluate import Hook, bind, evaluate
from clipgrad._jaxpr.places import Place
from clipgrad._jaxpr.programs import (
    CALLS,
    CUSTOM_RULES,
    JIT,
    PRINTS,
    REMAT,
    called_program,
    entered_programs,
    manual_axes,
    scan_counts,
)

_IN_PLACE = JIT | CALLS | REMAT | CUSTOM_RULES
# What is in the result of these is what was in their operand.
SAME_AS_OPERAND = frozenset(
    {"reshape", "transpose", "broadcast_in_dim", "squeeze", "neg", "rev", "name"}
)
SAME_AS_OPERAND |= {"copy", "pvary", "pcast", "sharding_constraint", "reshard"}
# An infinity is replaced by a number of its sign that is no pole or zero of common functions.
_ORDINARY = 1.25


class Flags(NamedTuple):
    """2 for each result of a program that holds NaN, 1 for inf, 0 if it is finite.

    With a leading axis for each scan and each `shard_map` around the program. Of a loop of unknown
    length these are those of the first iteration at which one is not 0.
    """

    elements: Any  # of the elements that a scan goes through; of shards; of the arguments
    results: Any  # of operations, in order, by floating result
    inside: Any  # of the equations with programs inside, for each program
    index: Any  # which branch of a cond, which iteration of a loop
    found: Any = ()  # of the operation that is asked for: whether its result is not finite
    values: Any = ()  # and what it reads there

    def any_bad(self, reduce: Callable[[Any], Any]) -> list:
        """Where something is not finite; `reduce` gets what is above zero in each array."""
        own = [reduce(x > 0) for x in (self.elements, self.results, *jax.tree.leaves(self.found))]
        return own + [x for each in self.inside for flags in each for x in flags.any_bad(reduce)]


def tracked_programs(equation: JaxprEqn) -> list:
    """The programs of an equation whose operations are followed one by one."""
    name, params = equation.primitive.name, equation.params
    if name == "while":
        return [params["body_jaxpr"]]
    if name in _IN_PLACE:
        return [called_program(equation)]
    is_chosen = name == "cond" and params.get("branches_platforms") is None
    return entered_programs(equation)[0] if is_chosen or name in ("scan", "shard_map") else []


def track(program: Any, inputs: Sequence, cured: Iterable[Place] = (), target: Any = None) -> Flags:
    """The flags of a program.

    Args:
      program: a jaxpr.
      inputs: its inputs.
      cured: the operations whose infinities are replaced by ordinary numbers.
      target: a `Place` whose operands are recorded; there are no other flags then.
    """
    tracker = Tracker(frozenset(place.key for place in cured), target)
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
        axes: frozenset[str] = frozenset(),
    ):
        self._cured, self._target, self._parent = cured, target, parent
        self._axes = axes  # of the mesh, in the `shard_map`s around that know what varies
        self._elements: list[Any] = []
        self._results: list[Any] = []
        self._inside: list[list[Flags]] = []
        self._record: tuple[Any, Any] = ((), ())

    def starts(self, inputs: Sequence) -> None:
        """Flag the arguments, the shards, or the elements that a scan goes through."""
        around = self._parent and self._parent.equation
        name = around.primitive.name if around else "shard_map"
        if name in ("scan", "shard_map"):
            first = sum(scan_counts(around)) if around and name == "scan" else 0
            self._elements = [badness(x) for x in inputs[first:] if holds_floats(x)]

    def constant(self, value: Any, aval: Any) -> Any:
        """The value as an array."""
        return value if hasattr(value, "dtype") else jnp.asarray(value, aval.dtype)

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results of an operation; None where it has programs to go into."""
        if equation.primitive.name in PRINTS:
            return []
        if tracked_programs(equation):
            return None
        outputs = bind(equation, inputs)
        place = Place(equation, self._parent).key
        if self._target and place == self._target.key:
            self._record = _recorded(inputs, [y for y in outputs if holds_floats(y)])
        return [_ordinary(y) for y in outputs] if place in self._cured else outputs

    def results(self, equation: JaxprEqn, outputs: Sequence) -> Sequence:
        """Flag the results of an operation, and of a loop."""
        name = equation.primitive.name
        if name == "while" or not (name in SAME_AS_OPERAND or tracked_programs(equation)):
            self._results += [badness(y) for y in outputs if holds_floats(y)]
        return outputs

    def inside(self, equation: JaxprEqn, step: Any) -> "Tracker":
        """What flags the programs inside of an equation."""
        axes = self._axes
        if equation.primitive.name == "shard_map" and equation.params["check_vma"]:
            axes |= {*manual_axes(equation)}
        return Tracker(self._cured, self._target, Place(equation, self._parent), axes)

    def noted(self) -> Flags:
        """The flags of this evaluation."""
        elements, results = (
            self._marked(jnp.stack(own) if own and not self._target else jnp.zeros(0, jnp.int32))
            for own in (self._elements, self._results)
        )
        found, values = jax.tree.map(self._marked, self._record)
        return Flags(elements, results, self._inside, self._marked(jnp.int32(0)), found, values)

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
        return to_varying(x, self._axes) if self._axes else x


def _recorded(inputs: list, outputs: list) -> tuple[Any, Any]:
    """Whether a result is not finite, and the elements of the operands where it is not."""
    y = max(outputs, key=lambda y: y.size)
    bad = jnp.where(jnp.isnan(y).any(), jnp.isnan(y), jnp.isinf(y))
    read = [at_first(bad, x) if holds_floats(x) else jnp.zeros(()) for x in inputs]
    return bad.any().astype(jnp.int32), jnp.asarray(read, jnp.result_type(float))


def _ordinary(y: Any) -> Any:
    if not holds_floats(y):
        return y
    number = jnp.asarray(_ORDINARY, y.dtype) * jnp.sign(jnp.real(y)).astype(y.dtype)
    return jnp.where(jnp.isinf(y), number, y)


def badness(x: Any) -> jax.Array:
    """2 if there is NaN, else 1 if there is inf, else 0."""
    kinds = jnp.where(jnp.isnan(x), jnp.int32(2), jnp.where(jnp.isinf(x), jnp.int32(1), 0))
    return jnp.max(kinds, initial=0)
