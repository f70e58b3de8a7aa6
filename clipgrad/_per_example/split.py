"""The program of a gradient in two parts: what a seed reaches, and what comes before it.

The cotangent of the loss is an input of the program, the seed. So the forward pass is evaluated
once for several backward passes; and a backward pass whose seed is made of other numbers begins
when these are known, because it needs them.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._compat import varying_axes
from clipgrad._jaxpr import Hook, bind, opened
from clipgrad._per_example.follow import Follow
from clipgrad._per_example.layouts import convolved

# Made again in the backward pass: no larger before, and followed where a gradient meets it.
_AGAIN = frozenset(["broadcast_in_dim", "convert_element_type", "copy"])


def seeds_after(numbers: Sequence[jax.Array], ones: jax.Array) -> jax.Array:
    """1 for each example, known when these numbers of the examples are.

    No compiler knows that none is NaN and inf at once. Numbers of other devices are waited for
    where the seeds, ``ones``, do not vary over the mapped axes that the numbers vary over: there
    the loss has a collective over them as well.
    """
    flags = [jnp.isnan(x) & jnp.isinf(x) for x in numbers]
    never = functools.reduce(jnp.logical_or, flags, jnp.array(False))
    if others := tuple(sorted(varying_axes(never) - varying_axes(ones))):
        never = jax.lax.psum(never.astype("int32"), others) > 0
    return jnp.where(never, jnp.zeros_like(ones), ones)


@dataclasses.dataclass(frozen=True, eq=False)
class SplitProgram:
    """The variables that a forward pass keeps, and the equations that are evaluated after it."""

    kept: tuple[Var, ...]
    late: frozenset[Var]  # what the seed reaches
    backward: frozenset[Var]  # the first outputs of the equations of the backward pass

    @classmethod
    def of(
        cls, program: Any, count: int, late: frozenset[Var], wanted: Mapping[Var, Any]
    ) -> "SplitProgram":
        """The split of a program whose first ``count`` outputs are gradients."""
        jaxpr = opened(program)[0]
        needed = {v for v in jaxpr.outvars[:count] if not isinstance(v, Literal)}
        backward: set[Var] = set()
        for equation in reversed(jaxpr.eqns):
            outputs = needed.intersection(equation.outvars)
            again = equation.primitive.name in _AGAIN
            if outputs and (again or any(v in late or v in wanted for v in equation.outvars)):
                backward.add(equation.outvars[0])
                needed.difference_update(equation.outvars)
                needed.update(v for v in equation.invars if not isinstance(v, Literal))
        made = [v for equation in jaxpr.eqns for v in equation.outvars]
        return cls(tuple(v for v in made if v in needed), late, frozenset(backward))


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPass(Hook):
    """Evaluates what a seed does not reach, and collects what is kept."""

    split: SplitProgram
    found: dict[Var, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence:
        if any(v in self.split.late for v in equation.outvars):
            return [None] * len(equation.outvars)
        if equation.primitive.name == "conv_general_dilated":
            outputs: Sequence = [convolved(equation, *inputs)]
        else:
            outputs = bind(equation, inputs)
        self.found.update(zip(equation.outvars, outputs, strict=True))
        return outputs

    @property
    def residuals(self) -> list[Any]:
        """The values that a backward pass needs."""
        return [self.found[v] for v in self.split.kept]


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardPass(Hook):
    """Another hook for what the seed reaches, beside what the forward pass has kept."""

    hook: Follow
    split: SplitProgram
    residuals: Mapping[Var, Any]

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        variables = equation.outvars
        if variables and variables[0] in self.split.backward:
            return self.hook(equation, inputs)
        return [self.residuals.get(v) for v in variables]

    def inside(self, equation: JaxprEqn, step: Any) -> Hook:
        return self.hook.inside(equation, step)
