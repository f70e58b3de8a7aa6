"""Evaluating a jaxpr again equation by equation.

A hook sees every equation first. If it returns None, an equation with a program inside is entered,
and any other is bound as it is.
"""

import collections
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from clipgrad._programs.hijax import bound_as_written
from clipgrad._programs.kinds import CUSTOM_RULES, Kind, kind_of
from clipgrad._programs.programs import opened

Entrance = Callable[[JaxprEqn, list, "Hook"], Sequence]
ENTRANCES: dict[Kind | None, Entrance] = {}


def entrance(*kinds: Kind) -> Callable[[Entrance], Entrance]:
    """Decorates the function by which `evaluate` goes inside of primitives of these kinds."""

    def register(function: Entrance) -> Entrance:
        ENTRANCES.update(dict.fromkeys(kinds, function))
        return function

    return register


class Part(NamedTuple):
    """The part of an equation that a hook goes into.

    Attributes:
      program: the number of the program inside: the branch of a cond, else 0.
      slices: of `Hook.slices` those of this step or device; None elsewhere.
    """

    program: int = 0
    slices: Any = None


class Hook:
    """The actions at the equations of a program; the defaults change nothing.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from clipgrad import _programs
      >>> from jax.extend.core.primitives import sin_p
      >>> class DoubledSines(_programs.Hook):
      ...     def __call__(self, equation, inputs):
      ...         return [2 * jnp.sin(*inputs)] if equation.primitive is sin_p else None
      >>> program = jax.make_jaxpr(jax.jit(lambda x: jnp.sin(x) + 1))(0.0)
      >>> print(*_programs.evaluate(program, [jnp.pi / 2], DoubledSines()))
      3.0

    What an equation computes is said by `__call__`, and what goes on inside of it by `inside`. All
    other methods are for hooks with numbers for each step, or for constants, or that see values.
    The arrays of a hook become arguments of a `jit` inside the program; a hook with arrays is a
    pytree.

    Attributes:
      in_place: the kinds of equations whose program is evaluated without them. Of `jit` and `remat`
        only the wrapper goes; a function with a custom rule is entered by its primal program, and
        in no other way.
      whole: the kinds of equations that are never entered.
    """

    in_place: Collection[Kind] = ()
    whole: Collection[Kind] = ()

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """Return the outputs of `equation`, or None to have it evaluated or entered."""
        return None

    def inside(self, equation: JaxprEqn, part: Part) -> "Hook":
        """Return the hook for a program of `equation`."""
        return self

    def slices(self, equation: JaxprEqn) -> Any:
        """Return a tree with a leading axis over the steps of a scan, or `shard_map`'s devices."""
        return ()

    def constant(self, value: Any, aval: Any) -> Any:
        """Return the value that replaces a literal or a closed-over constant."""
        return value

    def values(self, jaxpr: Any) -> "ProgramValues":
        """Return what keeps the values of a program while it is evaluated, and may see them."""
        return ProgramValues(self)

    @property
    def is_reusable(self) -> bool:
        """Whether hooks that are equal but for their arrays share one compiled `jit`.

        A hook that calls functions of a user is not reusable: their state may change.
        """
        return False


class NotingHook(Hook):
    """A hook for one evaluation of a program, which keeps arrays besides the results.

    They leave the programs inside of equations by `noted` and come to the hook around by `note`:
    with a leading axis for the steps of a scan or the devices of a `shard_map`; of a loop what
    `kept` keeps of its iterations.
    """

    def noted(self) -> Any:
        """Return what was kept in this evaluation, a tree of arrays."""
        raise NotImplementedError

    def note(self, equation: JaxprEqn, inputs: list, notes: list) -> None:
        """Keep the notes of the programs inside of `equation`: one for each branch of a cond."""
        raise NotImplementedError

    def empty(self, shapes: Any) -> Any:
        """Return the notes of a branch that is not taken, and of a loop before it begins."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def kept(self, old: Any, new: Any, number: Any) -> Any:
        """Return what a loop keeps of its notes until now and the notes of iteration `number`."""
        return new


class ProgramValues:
    """The values of a program's variables while it is evaluated."""

    def __init__(self, hook: Hook) -> None:
        self._constant = hook.constant
        self._values: dict[Var, Any] = {}

    def write(self, variables: Sequence[Var], values: Sequence[Any]) -> None:
        self._values.update(zip(variables, values, strict=True))

    def read(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            return self._constant(atom.val, atom.aval)
        return self._values[atom]

    def inputs(self, equation: JaxprEqn) -> list:
        """The inputs of an equation, which comes next."""
        return [self.read(atom) for atom in equation.invars]

    def write_results(self, equation: JaxprEqn, outputs: Sequence[Any]) -> None:
        """Keep what an equation has computed, which may also have been entered."""
        self.write(equation.outvars, outputs)

    def outputs(self, jaxpr: Any) -> list:
        return [self.read(atom) for atom in jaxpr.outvars]


class FreedValues(ProgramValues):
    """Values that are kept until the last operation that reads them: they may be arrays."""

    def __init__(self, hook: Hook, jaxpr: Any) -> None:
        super().__init__(hook)
        read = [atom for equation in jaxpr.eqns for atom in equation.invars]
        self._uses = collections.Counter(
            v for v in (*read, *jaxpr.outvars) if not isinstance(v, Literal)
        )

    def write(self, variables: Sequence[Var], values: Sequence[Any]) -> None:
        used = [(v, x) for v, x in zip(variables, values, strict=True) if self._uses[v]]
        super().write([v for v, _ in used], [x for _, x in used])

    def read(self, atom: Any) -> Any:
        value = super().read(atom)
        if not isinstance(atom, Literal):
            self._uses[atom] -= 1
            if not self._uses[atom]:
                del self._values[atom]
        return value


def evaluate(program: Any, inputs: Sequence, hook: Hook) -> list:
    """Evaluate a program on flat inputs, showing each equation to the hook.

    Every equation keeps its source line, name scope and context (such as `compute_on`). Equations
    of programs inside it are shown to `hook.inside(equation, part)`.
    """
    jaxpr, constants = opened(program)
    values = hook.values(jaxpr)
    values.write(jaxpr.invars, inputs)
    closed = zip(constants, jaxpr.constvars, strict=True)
    values.write(jaxpr.constvars, [hook.constant(value, var.aval) for value, var in closed])
    scope = source_info_util.current_name_stack()
    for equation in jaxpr.eqns:
        info = equation.source_info
        user = source_info_util.user_context(info.traceback, name_stack=scope + info.name_stack)
        with user, equation.ctx.manager:
            operands = values.inputs(equation)
            outputs = hook(equation, operands)
            if outputs is None:
                if is_entered(equation, hook):
                    outputs = ENTRANCES[kind_of(equation)](equation, operands, hook)
                else:
                    outputs = bind(equation, operands)
            values.write_results(equation, outputs)
    return values.outputs(jaxpr)


def bind(equation: JaxprEqn, inputs: Sequence, **changed: Any) -> list:
    """Apply the primitive of `equation` to `inputs`, with some parameters changed."""
    params = {**equation.params, **changed}
    if (written := bound_as_written(equation.primitive, params, inputs)) is not None:
        return written
    params = equation.primitive.get_bind_params(params)
    outputs = equation.primitive.bind(*inputs, **params)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def is_entered(equation: JaxprEqn, hook: Hook) -> bool:
    """Whether `evaluate` goes inside this equation with this hook."""
    kind = kind_of(equation)
    has_way = kind in hook.in_place or kind is not CUSTOM_RULES
    return has_way and kind in ENTRANCES and kind not in hook.whole


def retrace(program: Any, avals: Sequence, hook: Hook) -> Any:
    """Trace a program again under `hook` for inputs of other types; keeps its container."""
    traced = jax.make_jaxpr(lambda *inputs: evaluate(program, inputs, hook))(*avals)
    return traced if isinstance(program, ClosedJaxpr) else opened(traced)[0]
