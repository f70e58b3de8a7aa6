"""Applying the primitive of an equation again, with other functions as its programs.

A `while` that was mapped has one predicate for each lane, which `jax.lax.while_loop` refuses, and a
`cond` on the platform has a default: so a `while`, `cond` or `remat` equation is bound again, with
all its parameters but for the programs. The parameters of a `scan` are private classes in newer
JAX; `jax.lax.scan` can state all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from clipgrad._programs.evaluate import bind
from clipgrad._programs.kinds import called_program
from clipgrad._programs.programs import opened


def scan_again(
    equation: JaxprEqn, body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, elements: Any
) -> tuple[Any, Any]:
    """`jax.lax.scan` of a body with the length, direction and unrolling of an equation."""
    names = ("length", "reverse", "unroll", "_split_transpose")
    options = {name: equation.params[name] for name in names if name in equation.params}
    return lax.scan(body, carry, elements, **options)


def while_again(
    equation: JaxprEqn,
    again: Callable[..., Any],
    body: Callable[..., Sequence],
    carry: Sequence,
    types: Sequence,
) -> list:
    """The loop of a `while` equation with other functions of what it carries, of these types.

    ``again`` may have one predicate for each lane of a `vmap`; then all that is carried has a
    leading axis for the lanes.
    """
    goes_on = Lifted(lambda *carry: [again(*carry)], types)
    step = Lifted(body, types)
    return bind(
        equation,
        [*goes_on.closed, *step.closed, *carry],
        cond_jaxpr=goes_on.like(equation.params["cond_jaxpr"]),
        body_jaxpr=step.like(equation.params["body_jaxpr"]),
        cond_nconsts=len(goes_on.closed),
        body_nconsts=len(step.closed),
    )


def cond_again(
    equation: JaxprEqn,
    branches: Sequence[Callable[..., Sequence]],
    inputs: Sequence,
    types: Sequence,
) -> list:
    """The choice of a `cond` equation among other functions of its inputs behind the index."""
    lifted = [Lifted(branch, types) for branch in branches]
    closed = [x for body in lifted for x in body.closed]
    programs, end = [], 0
    for body, program in zip(lifted, equation.params["branches"], strict=True):
        start, end = end, end + len(body.closed)
        programs.append(body.like(program, closed[:start], closed[end:]))
    return bind(equation, [inputs[0], *closed, *inputs[1:]], branches=tuple(programs))


def remat_again(equation: JaxprEqn, body: Callable[..., Any], inputs: Sequence) -> Any:
    """The function of a `remat` equation with another body; recomputation has its barriers.

    A hook may have trees of arrays in place of arrays.
    """
    program, barriers = called_program(equation), equation.params["prevent_cse"]
    leaves, structure = jax.tree.flatten(list(inputs))
    types = [jax.typeof(x) for x in leaves]
    if len(leaves) == len(inputs):
        types = types_of(opened(program)[0].invars, leaves)
    lifted = Lifted(lambda *leaves: body(*structure.unflatten(leaves)), types)
    if not isinstance(barriers, bool):
        pairs = zip(barriers, inputs, strict=True)
        flags = [flag for flag, x in pairs for _ in jax.tree.leaves(x)]
        barriers = (*[True] * len(lifted.closed), *flags)
    changed = {"jaxpr": lifted.like(program), "prevent_cse": barriers}
    outputs = bind(equation, [*lifted.closed, *leaves], **changed)
    return jax.tree.unflatten(jax.tree.structure(lifted.shapes), outputs)


def types_of(variables: Sequence, values: Sequence) -> list:
    """The types of values as inputs of a program; weak types are taken from the program."""
    kind = lambda x: (getattr(x, "shape", None), getattr(x, "dtype", None))  # noqa: E731
    pairs = [(v.aval, jax.typeof(x)) for v, x in zip(variables, values, strict=True)]
    return [declared if kind(declared) == kind(passed) else passed for declared, passed in pairs]


class Lifted:
    """A function of arrays as a program; the values that it closes over are the first inputs."""

    def __init__(self, fun: Callable[..., Any], types: Sequence):
        self._traced, self.shapes = jax.make_jaxpr(fun, return_shape=True)(*types)
        self._jaxpr, self.closed = opened(self._traced)
        self._types = types

    def __call__(self, *inputs: Any) -> Any:
        """The results for other inputs of these types, without tracing the function again."""
        results = jaxpr_as_fun(self._traced)(*inputs)
        return jax.tree.unflatten(jax.tree.structure(self.shapes), results)

    def like(self, program: Any, before: Sequence = (), behind: Sequence = ()) -> Any:
        """The program in the container of another one.

        Unused inputs may come ``before`` and ``behind`` the values that the function closes over.
        """
        values = [*before, *self.closed, *behind]
        first, end = len(before), len(before) + len(self.closed)

        def explicit(*inputs: Any) -> list:
            program_of_values = ClosedJaxpr(self._jaxpr, list(inputs[first:end]))
            return jaxpr_as_fun(program_of_values)(*inputs[len(values) :])

        traced = self._traced
        if values:
            traced = jax.make_jaxpr(explicit)(*values, *self._types)
        return traced if isinstance(program, ClosedJaxpr) else opened(traced)[0]
