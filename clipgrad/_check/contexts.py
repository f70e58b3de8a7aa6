"""Whether a function does the same in every context in which it is traced."""

import re
from collections.abc import Callable

import jax
from jax.extend.core import jaxpr_as_fun

from clipgrad._check.problem import Problem

ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


def is_steady(problem: Problem) -> bool:
    """Whether tracing the function again, and under `jax.vmap`, gives the operations seen first.

    It does not if the function looks at what it is called with (`isinstance(x, Tracer)`), keeps
    count or draws numbers outside of JAX.
    """
    first = jaxpr_as_fun(problem.program)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in problem.inputs]
    batches = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in problem.inputs]

    def seen_first(xs):
        return first(*xs)

    return _text(lambda xs: problem.fun(xs), shapes) == _text(seen_first, shapes) and (
        _text(jax.vmap(problem.fun), batches) == _text(jax.vmap(seen_first), batches)
    )


def _text(fun: Callable, shapes: list) -> str:
    """The operations of a function in words, or the kind of its error."""
    try:
        return ADDRESS.sub("", str(jax.make_jaxpr(fun)(shapes)))
    except Exception as error:
        return type(error).__name__
