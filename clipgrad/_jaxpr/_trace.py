"""Tracing a Python function to a program that can be evaluated again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from clipgrad._jaxpr._evaluate import Hook, evaluate
from clipgrad._jaxpr._split import is_array


class Traced(NamedTuple):
    """A function traced for arguments of certain types.

    Attributes:
      program: its jaxpr, from the arrays among the leaves of the arguments to those of the result.
      arrays: the positions of those leaves.
      result: makes the result of the outputs of the program.
    """

    program: Any
    arrays: tuple[int, ...]
    result: Callable[[Sequence], Any]

    def evaluate(self, args: tuple, kwargs: Mapping[str, Any], hook: Hook) -> Any:
        """Evaluate the function again, for arguments of the same types."""
        leaves = jax.tree.leaves((args, kwargs))
        return self.result(evaluate(self.program, [leaves[i] for i in self.arrays], hook))


def trace(fun: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Traced:
    """Trace a function.

    JAX and NumPy arrays are traced; all other leaves (Python numbers, strings, functions) are
    handed to the function as they are, and those that it returns are kept as they are.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = tuple(i for i, leaf in enumerate(leaves) if is_array(leaf))
    result: list[Callable[[Sequence], Any]] = []

    def flat(*values):
        known = dict(zip(arrays, values, strict=True))
        args, kwargs = structure.unflatten([known.get(i, leaf) for i, leaf in enumerate(leaves)])
        outputs, out_structure = jax.tree.flatten(fun(*args, **kwargs))
        traced = [isinstance(output, jax.Array) for output in outputs]
        fixed = [None if is_traced else x for x, is_traced in zip(outputs, traced, strict=True)]

        def rebuild(values):
            rest = iter(values)
            pairs = zip(fixed, traced, strict=True)
            return out_structure.unflatten([next(rest) if t else x for x, t in pairs])

        result.append(rebuild)
        return [x for x, is_traced in zip(outputs, traced, strict=True) if is_traced]

    program = jax.make_jaxpr(flat)(*(leaves[i] for i in arrays))
    return Traced(program, arrays, result[-1])
