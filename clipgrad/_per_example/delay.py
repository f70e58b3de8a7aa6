"""Keeping a program from beginning before numbers are known that it does not use.

XLA orders a program by what it needs, and `jax.lax.optimization_barrier` is gone by then. So what
is made first of an example becomes another number in a case that does not occur, which no compiler
knows. Zeros that a scan begins with still come first, in memory of their own: so on a CPU the
program is also a branch that is always taken, whose memory is there only while it runs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._compat import by_platform, to_varying, varying_axes
from clipgrad._jaxpr import Hook, entered_programs, opened, scan_counts
from clipgrad._per_example.follow import Follow

# What these make of an example is as large as the example, and fused with what comes next.
_VIEWS = frozenset(
    "broadcast_in_dim convert_element_type copy expand_dims reshape slice squeeze transpose".split()
)


def delay_flag(numbers: Sequence[jax.Array]) -> jax.Array:
    """False, known when these numbers are."""
    found = [jnp.isnan(x) & jnp.isinf(x) for x in numbers]
    return functools.reduce(jnp.logical_or, found, jnp.array(False))


def in_branch(function: Callable[..., Any], arguments: tuple, flag: jax.Array) -> Any:
    """The result of a function; on a CPU in a branch that is taken as long as the flag is false.

    A GPU would wait for the host there, and several devices would exchange the flag.
    """
    leaves, structure = jax.tree.flatten(arguments)
    axes = frozenset[str]().union(*map(varying_axes, leaves))

    @jax.jit
    def run(*leaves: jax.Array) -> Any:
        """Traced once for all platforms."""
        return function(*structure.unflatten(leaves))

    shapes = jax.eval_shape(run, *leaves)

    def zeros(*leaves: jax.Array) -> Any:
        return jax.tree.map(lambda x: to_varying(jnp.zeros(x.shape, x.dtype), axes), shapes)

    def branch(flag: jax.Array, *leaves: jax.Array) -> Any:
        return jax.lax.cond(flag, zeros, run, *leaves)

    def plain(flag: jax.Array, *leaves: jax.Array) -> Any:
        return run(*leaves)

    return by_platform(flag, *leaves, cpu=branch, gpu=plain, default=plain)


@dataclasses.dataclass(frozen=True, eq=False)
class Delay(Hook):
    """Another hook, for a program that begins when a flag of `delay_flag` is known."""

    hook: Follow
    flag: jax.Array
    ties: dict[Var, int | None]

    @classmethod
    def of(cls, program: Any, count: int, hook: Follow, flag: jax.Array) -> "Delay":
        """The hook for a program whose first ``count`` inputs are the parameters."""
        return cls(hook, flag, _ties(opened(program)[0], count))

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The outputs of an equation."""
        variables = equation.outvars
        wanted = any(v in self.hook.wanted for v in variables)
        if wanted or not variables or variables[0] not in self.ties:
            return self.hook(equation, inputs)
        place = self.ties[variables[0]]
        if place is None:
            outputs = self.hook(equation, inputs)
            return None if outputs is None else [self._tied(x) for x in outputs]
        return self.hook(
            equation, [*inputs[:place], self._tied(inputs[place]), *inputs[place + 1 :]]
        )

    def _tied(self, x: Any) -> Any:
        differs = varying_axes(self.flag) - varying_axes(x)  # the program would differ as well
        if differs or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        return jnp.where(self.flag, jnp.zeros_like(x), x)

    def inside(self, equation: JaxprEqn, step: Any) -> Hook:
        """The hook for the program that an equation calls."""
        return self.hook.inside(equation, step)


def _ties(jaxpr: Any, count: int) -> dict[Var, int | None]:
    """For what is made first of an example the input that waits, None: the outputs."""
    raw, found = set(jaxpr.invars[count:]), {}
    for equation in jaxpr.eqns:
        flags = [not isinstance(atom, Literal) and atom in raw for atom in equation.invars]
        if not any(flags):
            continue
        if equation.primitive.name in _VIEWS:
            raw.update(equation.outvars)
        elif equation.outvars:
            inside = entered_programs(equation)[0]
            found[equation.outvars[0]] = _smallest(equation, flags) if inside else None
    return found


def _smallest(equation: Any, flags: Sequence[bool]) -> int:
    """The position of the input that waits: a part of the example, or where a scan begins."""
    places = [i for i, flag in enumerate(flags) if flag]
    if equation.primitive.name == "scan":
        constants, carried = scan_counts(equation)
        state = range(constants, constants + carried)
        places += [i for i in state if jnp.issubdtype(equation.invars[i].aval.dtype, jnp.floating)]
    return min(places, key=lambda i: equation.invars[i].aval.size)
