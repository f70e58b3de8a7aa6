"""Tracing a Python function to a program that can be evaluated again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from clipgrad._jaxpr._evaluate import Hook, evaluate
from clipgrad._trees import combine, is_array, partition


class Traced(NamedTuple):
    """A function traced for arguments of certain types.

    Attributes:
      program: its jaxpr, from the arrays among the leaves of the arguments to those of the result.
      result: makes the result of the outputs of the program.
    """

    program: Any
    result: Callable[[Sequence], Any]

    def evaluate(self, args: tuple, kwargs: Mapping[str, Any], hook: Hook) -> Any:
        """Evaluate the function again, for arguments of the same types."""
        inputs = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_array(leaf)]
        return self.result(evaluate(self.program, inputs, hook))


def trace(fun: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Traced:
    """Trace a function.

    JAX and NumPy arrays are traced; all other leaves (Python numbers, strings, functions) are
    handed to the function as they are, and those that it returns are kept as they are.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays, others = partition(leaves, is_array)
    returned = []

    def run(arrays):
        args, kwargs = structure.unflatten(combine(arrays, others))
        results, out_structure = jax.tree.flatten(fun(*args, **kwargs))
        traced, fixed = partition(results, lambda leaf: isinstance(leaf, jax.Array))
        returned[:] = out_structure, jax.tree.structure(traced), fixed
        return traced

    program = jax.make_jaxpr(run)(arrays)
    out_structure, places, fixed = returned

    def result(outputs):
        return out_structure.unflatten(combine(places.unflatten(outputs), fixed))

    return Traced(program, result)
