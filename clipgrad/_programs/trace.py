"""Tracing a function, to evaluate its jaxpr again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from clipgrad._arrays import check_tree, combine, is_array, partition
from clipgrad._programs.closures import with_explicit_closures
from clipgrad._programs.evaluate import Hook, evaluate


class Traced(NamedTuple):
    """A function traced for arguments of certain types."""

    program: Any  # its jaxpr, from the arrays among the arguments to the arrays of the result
    result: Callable[[Sequence], Any]  # from the outputs of the program to the result

    def evaluate(self, args: tuple, kwargs: Mapping[str, Any], hook: Hook) -> Any:
        """Evaluate the function again, for arguments of the same types."""
        inputs = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_array(leaf)]
        return self.result(evaluate(self.program, inputs, hook))


def trace(
    fun: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], *, only_read: bool = False
) -> Traced:
    """Trace a function.

    With ``only_read`` the program is not to be evaluated: what custom rules close over stays
    inside. To find it, their derivatives would be traced, for a loop in a loop again and again.

    JAX and NumPy arrays are traced, and `jax.ShapeDtypeStruct` as one; all other leaves (Python
    numbers, strings, functions) reach the function as they are, and those that it returns are kept.
    """
    check_tree("args", (args, kwargs))
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_traced = lambda x: is_array(x) or isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    arrays, others = partition(leaves, is_traced)
    returned = []

    def run(arrays):
        args, kwargs = structure.unflatten(combine(arrays, others))
        results, out_structure = jax.tree.flatten(fun(*args, **kwargs))
        traced, fixed = partition(results, lambda leaf: isinstance(leaf, jax.Array))
        returned[:] = out_structure, jax.tree.structure(traced), fixed
        return traced

    program = jax.make_jaxpr(run)(arrays)
    if not only_read:
        program = with_explicit_closures(program, jax.tree.leaves(arrays))
    out_structure, places, fixed = returned

    def result(outputs):
        return out_structure.unflatten(combine(places.unflatten(outputs), fixed))

    return Traced(program, result)
