"""The gradient of one example as a program, evaluated for all examples at once."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._jaxpr import Traced, evaluate, opened, trace
from clipgrad._per_example import convolutions, linear, products, scans  # noqa: F401  how they are followed
from clipgrad._per_example.after import After
from clipgrad._per_example.follow import End, Follow, Notes
from clipgrad._per_example.wanted import Want, wanted
from clipgrad._trees import is_array


class Examples(NamedTuple):
    """What the examples of a batch gave; each array has an axis for them in front."""

    gradients: list[Any]  # of each leaf: an array, `Products` or `Squares`
    value: Any  # what the loss function returned


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleGradient:
    """The program of the gradient of one example, traced once for all examples and passes."""

    traced: Traced
    count: int  # of the leaves of the gradient

    @classmethod
    def of(
        cls, loss_fn: Callable[..., Any], has_aux: bool, params: Any, batch: Any
    ) -> "ExampleGradient":
        """The program for the first example of a batch."""

        def run(params: Any, example: Any) -> Any:
            value, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(params, example)
            return jax.tree.leaves(grads), value

        example = jax.tree.map(lambda x: jnp.asarray(x)[0], batch)
        return cls(trace(run, (params, example), {}), len(jax.tree.leaves(params)))

    @property
    def wants(self) -> list[Want | None]:
        """What each output is for: first the gradients leaf by leaf."""
        rest = len(opened(self.traced.program)[0].outvars) - self.count
        return [Want(frozenset([i]), True, True, 1) for i in range(self.count)] + [None] * rest

    def __call__(
        self,
        params: Any,
        example: Any,
        end: End | None,
        notes: Notes,
        after: jax.Array | None = None,
    ) -> tuple[list[Any], Any]:
        """The gradient of one example leaf by leaf, and what the loss function returned.

        It is evaluated when ``after``, from `never`, is known.
        """
        program = self.traced.program
        hook: Any = Follow(wanted(program, self.wants), end, notes)
        if after is not None:
            hook = After.of(program, _array_count(params), hook, after)
        inputs = [leaf for leaf in jax.tree.leaves((params, example)) if is_array(leaf)]
        outputs = evaluate(program, inputs, hook)
        _, value = self.traced.result([jnp.zeros(())] * self.count + outputs[self.count :])
        return outputs[: self.count], value

    def each(self, params: Any, batch: Any, end: End | None, notes: Notes) -> Examples:
        """The gradients of the examples, as products or as what ``end`` makes of them."""
        of_one = functools.partial(self, end=end, notes=notes)
        return Examples(*jax.vmap(of_one, in_axes=(None, 0))(params, batch))


def _array_count(tree: Any) -> int:
    return sum(map(is_array, jax.tree.leaves(tree)))
