"""A program evaluated in one compiled pass that says of each result whether it is finite.

Only that is computed for each operation: what follows from it is found outside, in `values`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import PartitionSpec

import clipgrad._jaxpr as _jaxpr
from clipgrad._compat import to_varying
from clipgrad._diagnose.numbers import at_first, dtype_of, holds_floats
from clipgrad._diagnose.places import EquationPlace
from clipgrad._diagnose.subject import PRINTS

_CALLS = _jaxpr.JIT | _jaxpr.CALLS | _jaxpr.REMAT | _jaxpr.CUSTOM_RULES
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


class Target(NamedTuple):
    """An operation, the iterations of the loops around it, and the device.

    The device is its number in each `shard_map` around, outermost first.
    """

    place: EquationPlace
    steps: tuple[int, ...]
    device: tuple[int, ...] = ()


class NonfiniteRecord(NamedTuple):
    """What an operation reads where its result is not finite."""

    found: Any
    values: Any


def inner_programs(equation: JaxprEqn) -> list:
    """The programs of an equation whose operations are followed one by one."""
    name, params = equation.primitive.name, equation.params
    if name == "while":
        return [params["body_jaxpr"]]
    if name in _CALLS:
        return [_jaxpr.called_program(equation)]
    is_chosen = name == "cond" and params.get("branches_platforms") is None
    entered = is_chosen or name in ("scan", "shard_map")
    return _jaxpr.entered_programs(equation)[0] if entered else []


def badness(x: Any) -> jax.Array:
    """2 if there is NaN, else 1 if there is inf, else 0."""
    kinds = jnp.where(jnp.isnan(x), jnp.int32(2), jnp.where(jnp.isinf(x), jnp.int32(1), 0))
    return jnp.max(kinds, initial=0)


class Walk:
    """An evaluation of a program.

    Args:
      cured: the operations whose infinities are replaced by ordinary numbers.
      target: an operation whose operands are recorded; there are no flags then.
    """

    def __init__(self, cured: Sequence[EquationPlace] = (), target: Target | None = None):
        self._cured = {place.key for place in cured}
        self._target = target
        self._axes: tuple[str, ...] = ()  # of the mesh, in the `shard_map`s around
        self._varying, self._depth = False, 0  # and how many of these there are
        self._steps: tuple[Any, ...] = ()
        count = len(target.place.equation.invars) if target else 0
        self.record = NonfiniteRecord(jnp.array(False), jnp.zeros(count, jnp.result_type(float)))

    def evaluate(
        self,
        program: Any,
        inputs: Sequence[Any],
        parent: EquationPlace | None,
        elements: Sequence[Any],
    ) -> tuple[list, Flags]:
        """The results of a program and its flags; a value is dropped after its last use."""
        jaxpr, constants = _jaxpr.opened(program)
        values = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*inputs, *constants), strict=True))
        uses = Counter(v for e in jaxpr.eqns for v in e.invars if type(v) is not Literal)
        uses.update(v for v in jaxpr.outvars if type(v) is not Literal)

        def read(atom):
            if type(atom) is Literal:
                return jnp.asarray(atom.val, dtype_of(atom))
            uses[atom] -= 1
            return values[atom] if uses[atom] else values.pop(atom)

        flags, inside = [], []
        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            with equation.ctx.manager:
                results = self._results(EquationPlace(equation, parent), operands, flags, inside)
            results = zip(equation.outvars, results, strict=True)
            values |= {v: result for v, result in results if uses[v]}
        own = [badness(x) for x in elements if holds_floats(x)]
        found = Flags(self._stacked(own), self._stacked(flags), inside, jnp.int32(0))
        return [read(atom) for atom in jaxpr.outvars], found

    def _stacked(self, flags: list) -> jax.Array:
        flags = [] if self._target else flags
        return self._marked(jnp.stack(flags) if flags else jnp.zeros(0, jnp.int32))

    def _results(self, place: EquationPlace, inputs: list, flags: list, inside: list) -> list:
        equation = place.equation
        name, inner = equation.primitive.name, inner_programs(equation)
        if name in PRINTS:
            return []
        if not inner:
            outputs = self._operation(place, inputs)
            if name not in SAME_AS_OPERAND:
                flags += [badness(y) for y in outputs if holds_floats(y)]
            return outputs
        enter = {"scan": self._scan, "while": self._while, "cond": self._cond}
        enter["shard_map"] = self._shard_map
        outputs, found = enter.get(name, self._call)(place, inner, inputs)
        inside.append(found)
        flags += [badness(y) for y in outputs if name == "while" and holds_floats(y)]
        return outputs

    def _operation(self, place: EquationPlace, inputs: list) -> list:
        outputs = _jaxpr.bind(place.equation, inputs)
        if self._target and place.key == self._target.place.key:
            self._note(self._target, inputs, [y for y in outputs if holds_floats(y)])
        if place.key in self._cured:
            outputs = [_ordinary(y) if holds_floats(y) else y for y in outputs]
        return outputs

    def _note(self, target: Target, inputs: list, outputs: list) -> None:
        """Record the operands of the operation that is asked for, at its step."""
        y = max(outputs, key=lambda y: y.size)
        bad = jnp.where(jnp.isnan(y).any(), jnp.isnan(y), jnp.isinf(y))
        read = [at_first(bad, x) if holds_floats(x) else jnp.zeros(()) for x in inputs]
        is_now = bad.any()  # on this device of a `shard_map`
        for step, wanted in zip(self._steps, target.steps, strict=True):
            is_now &= step == wanted
        new = NonfiniteRecord(jnp.array(True), jnp.asarray(read, self.record.values.dtype))
        self.record = jax.tree.map(lambda n, o: jnp.where(is_now, n, o), new, self.record)

    def _call(self, place: EquationPlace, inner: list, inputs: list) -> tuple[list, Any]:
        outputs, flags = self.evaluate(inner[0], inputs, place, ())
        return outputs, [flags]

    def _scan(self, place: EquationPlace, inner: list, inputs: list) -> tuple[list, Any]:
        params = place.equation.params
        constants, carried = _jaxpr.scan_counts(place.equation)
        fixed, stacked, around = inputs[:constants], inputs[constants + carried :], self._steps

        def run(state, element):
            t, own = element
            self._steps = (*around, t)
            results, flags = self._inside(inner[0], state, place, fixed, own)
            return self._state(results[:carried]), (results[carried:], flags)

        first = self._state(inputs[constants : constants + carried])
        elements = jnp.arange(params["length"], dtype=jnp.int32), stacked
        options = {"length": params["length"], "reverse": params["reverse"]}
        (carry, self.record), (outputs, flags) = lax.scan(run, first, elements, **options)
        self._steps = around
        return [*carry, *outputs], [flags]

    def _while(self, place: EquationPlace, inner: list, inputs: list) -> tuple[list, Any]:
        params = place.equation.params
        first = params["cond_nconsts"]
        second, around = first + params["body_nconsts"], self._steps

        def again(carry):
            values = [*inputs[:first], *carry]
            return _jaxpr.evaluate(params["cond_jaxpr"], values, _Silent())[0]

        def step(state, number):
            self._steps = (*around, number)
            results, flags = self._inside(inner[0], state, place, inputs[first:second])
            goes_on = again(state[0])
            if goes_on.ndim:  # of a `vmap`: those that have ended keep their values
                pairs = zip(results, state[0], strict=True)
                results = [_kept_lanes(goes_on, new, old) for new, old in pairs]
            return self._state(results), flags._replace(index=number)

        def run(state):
            values, number, old = state
            values, flags = step(values, number)
            is_first = ~_is_any_bad(old) & _is_any_bad(flags)
            kept = jax.tree.map(lambda n, o: jnp.where(is_first, n, o), flags, old)
            return values, number + 1, jax.tree.map(self._marked, kept)

        zero = self._marked(jnp.int32(0))
        start = self._state(inputs[second:])
        flags = self._zeros(jax.eval_shape(step, start, zero)[1])
        goes_on = lambda state: jnp.any(again(state[0][0]))  # noqa: E731
        (carry, self.record), _, flags = lax.while_loop(goes_on, run, (start, zero, flags))
        self._steps = around
        return list(carry), [flags]

    def _cond(self, place: EquationPlace, inner: list, inputs: list) -> tuple[list, Any]:
        def alone(program):
            def run(state):
                results, flags = self._inside(program, state, place)
                return self._state(results), jax.tree.map(self._marked, flags)

            return run

        start = self._state(inputs[1:])
        branches = [alone(program) for program in inner]
        silent = [self._zeros(jax.eval_shape(branch, start)[1]) for branch in branches]

        def among_all(i):
            def run(state):
                results, flags = branches[i](state)
                return results, [flags if i == j else other for j, other in enumerate(silent)]

            return run

        chosen = [among_all(i) for i in range(len(inner))]
        (results, self.record), flags = lax.switch(inputs[0], chosen, start)
        return list(results), [flag._replace(index=inputs[0]) for flag in flags]

    def _shard_map(self, place: EquationPlace, inner: list, inputs: list) -> tuple[list, Any]:
        params = place.equation.params
        around = self._axes, self._varying, self._steps, self._depth
        names = _jaxpr.manual_axes(place.equation)

        def shard(record, steps, *shards):
            self._axes, self._varying = (*around[0], *names), params["check_vma"]
            self._steps = steps
            self._depth = around[3] + 1
            results, flags = self._inside(inner[0], self._state((), record), place, own=shards)
            apart = flags, self._state((), self.record)[1]
            return tuple(results), jax.tree.map(lambda x: self._marked(x)[None], apart)

        mapped = jax.shard_map(
            shard,
            mesh=params["mesh"],
            in_specs=(PartitionSpec(), PartitionSpec(), *params["in_specs"]),
            out_specs=(tuple(params["out_specs"]), PartitionSpec(names)),
            axis_names=set(names),
            check_vma=params["check_vma"],
        )
        outputs, (flags, record) = mapped(self.record, self._steps, *inputs)
        self._axes, self._varying, self._steps, self._depth = around
        device = self._target.device if self._target else ()
        number = dict(enumerate(device)).get(self._depth, 0)
        self.record = jax.tree.map(lambda x: x[number], record)
        return list(outputs), [flags]

    def _state(self, values: Sequence[Any], record: NonfiniteRecord | None = None) -> tuple:
        """What a loop carries: values, and what was recorded."""
        return list(values), jax.tree.map(self._marked, record or self.record)

    def _inside(
        self,
        program: Any,
        state: tuple,
        place: EquationPlace,
        before: Sequence = (),
        own: Sequence = (),
    ) -> tuple[list, Flags]:
        """Evaluate a program of an equation with what is carried."""
        values, self.record = state
        return self.evaluate(program, [*before, *values, *own], place, own)

    def _zeros(self, shapes: Any) -> Any:
        return jax.tree.map(lambda x: self._marked(jnp.zeros(x.shape, x.dtype)), shapes)

    def _marked(self, x: Any) -> Any:
        """Marked as different on each device of the `shard_map`s around."""
        return to_varying(x, frozenset(self._axes)) if self._varying else x


def _kept_lanes(where: Any, new: Any, old: Any) -> Any:
    """What each loop of a `vmap` carries: those that have ended keep it."""
    return jnp.where(where.reshape(where.shape + (1,) * (jnp.ndim(new) - where.ndim)), new, old)


class _Silent(_jaxpr.Hook):
    """Leaves prints out."""

    def __call__(self, equation, inputs):
        return [] if equation.primitive.name in PRINTS else None


def _is_any_bad(flags: Flags) -> jax.Array:
    found = [jnp.any(x > 0) for x in jax.tree.leaves(flags._replace(index=()))]
    return jnp.any(jnp.stack(found))


def _ordinary(y: Any) -> Any:
    number = jnp.asarray(_ORDINARY, y.dtype) * jnp.sign(jnp.real(y)).astype(y.dtype)
    return jnp.where(jnp.isinf(y), number, y)
