"""The gradient of one example as a program, evaluated for all examples at once."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._jaxpr import Hook, Traced, evaluate, opened, trace
from clipgrad._per_example import convolutions, linear, products, scans  # noqa: F401  how they are followed
from clipgrad._per_example.follow import End, Follow, Notes
from clipgrad._per_example.wanted import Want, wanted
from clipgrad._trees import is_array


class Examples(NamedTuple):
    """What the examples of a batch gave; each array has an axis for them in front."""

    gradients: list[Any]  # of each leaf: an array, `Products` or `Squares`
    value: Any  # what the loss function returned


def each_example(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    params: Any,
    batch: Any,
    *,
    end: End | None = None,
    notes: Notes | None = None,
) -> Examples:
    """The gradients of the examples, as products or as what ``end`` makes of them."""
    notes = Notes() if notes is None else notes

    def of_one(params: Any, example: Any) -> tuple[list[Any], Any]:
        gradient = ExampleGradient.of(loss_fn, has_aux, params, example, notes)
        return gradient(jnp.ones(()), end)

    return Examples(*jax.vmap(of_one, in_axes=(None, 0))(params, batch))


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleGradient:
    """The gradient of one example, whose backward pass may be evaluated several times.

    The forward pass is evaluated once, so that what it keeps is there once.
    """

    traced: Traced
    inputs: list
    count: int  # of the leaves of the gradient
    hook: "_OnceForward"

    @classmethod
    def of(
        cls, loss_fn: Callable[..., Any], has_aux: bool, params: Any, example: Any, notes: Notes
    ) -> "ExampleGradient":
        """The gradient of a loss function, for ``(params, example)``."""
        count = len(jax.tree.leaves(params))

        def run(params: Any, example: Any, seed: jax.Array) -> Any:
            grads, value = jax.grad(_seeded(loss_fn, has_aux), has_aux=True)(params, example, seed)
            return jax.tree.leaves(grads), value

        traced = trace(run, (params, example, jnp.ones(())), {})
        jaxpr = opened(traced.program)[0]
        wants = [Want(frozenset([i]), True, True, 1) for i in range(count)]
        variables = wanted(traced.program, wants + [None] * (len(jaxpr.outvars) - count))
        follow = Follow(variables, None, notes)
        inputs = [leaf for leaf in jax.tree.leaves((params, example)) if is_array(leaf)]
        return cls(traced, inputs, count, _OnceForward(follow, _behind(jaxpr), {}))

    def __call__(self, seed: jax.Array, end: End | None) -> tuple[list[Any], Any]:
        """The gradient times ``seed`` leaf by leaf, and what the loss function returned."""
        hook = self.hook.ending(end)
        outputs = evaluate(self.traced.program, [*self.inputs, seed], hook)
        zeros = [jnp.zeros(())] * self.count
        _, value = self.traced.result(zeros + outputs[self.count :])
        return outputs[: self.count], value


def _seeded(loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """The loss times ``seed``, and beside it all that the loss function returned."""

    def run(params: Any, example: Any, seed: jax.Array) -> tuple[Any, Any]:
        value = loss_fn(params, example)
        loss = jnp.asarray(value[0] if has_aux else value)
        return loss * seed.astype(loss.dtype), value

    return run


def _behind(jaxpr: Any) -> frozenset[Var]:
    """The variables that depend on the last input."""
    found = {jaxpr.invars[-1]}
    for equation in jaxpr.eqns:
        if any(not isinstance(atom, Literal) and atom in found for atom in equation.invars):
            found.update(equation.outvars)
    return frozenset(found)


@dataclasses.dataclass(frozen=True, eq=False)
class _OnceForward(Hook):
    """Another hook, with what comes before the seed evaluated once."""

    follow: Follow
    backward: frozenset[Var]
    kept: dict[Var, Sequence]

    def ending(self, end: End | None) -> "_OnceForward":
        """The same for gradients that become something else."""
        return dataclasses.replace(self, follow=dataclasses.replace(self.follow, end=end))

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The outputs of an equation."""
        variables = equation.outvars
        if not variables or any(v in self.backward or v in self.follow.wanted for v in variables):
            return self.follow(equation, inputs)
        if variables[0] not in self.kept:
            self.kept[variables[0]] = self.follow(equation, inputs)
        return self.kept[variables[0]]

    def inside(self, equation: JaxprEqn, step: Any) -> Hook:
        """The hook for the program that an equation calls."""
        return self.follow.inside(equation, step)
