"""The gradient of one example as a program, evaluated for all examples at once."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from clipgrad._jaxpr import Traced, evaluate, opened, trace
from clipgrad._per_example import convolutions, linear, products, scans  # noqa: F401  how they are followed
from clipgrad._per_example.course import Attempted, Course, attempted, following
from clipgrad._per_example.delay import Delay
from clipgrad._per_example.follow import Follow, Reduction
from clipgrad._per_example.measured import waiting_leaves
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.terms import Products, apart, rejoined
from clipgrad._per_example.wanted import WantedGradient, wanted
from clipgrad._program import dependent_variables
from clipgrad._trees import is_array


class Examples(NamedTuple):
    """The results of the examples of a batch; each array has an axis for them in front."""

    gradients: list[Any]  # of each leaf: an array, `Products` or `Squares`
    value: Any  # what the loss function returned


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleGradient:
    """The program of the gradient of one example, traced once for all examples and passes."""

    traced: Traced
    count: int  # of the leaves of the gradient
    varying: frozenset[Var]  # the variables that differ between examples
    course: Course = dataclasses.field(default_factory=lambda: Course({}))

    @classmethod
    def of(
        cls, loss_fn: Callable[..., Any], has_aux: bool, params: Any, batch: Any
    ) -> "ExampleGradient":
        """The program for the first example of a batch."""

        def run(params: Any, example: Any) -> Any:
            value, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(params, example)
            return jax.tree.leaves(grads), value

        example = jax.tree.map(lambda x: jnp.asarray(x)[0], batch)
        traced = trace(run, (params, example), {})
        inputs = range(_array_count(params), _array_count((params, example)))
        varying = dependent_variables(traced.program, inputs)
        return cls(traced, len(jax.tree.leaves(params)), varying)

    @property
    def wants(self) -> list[WantedGradient | None]:
        """The want of each output: first the gradients leaf by leaf."""
        rest = len(opened(self.traced.program)[0].outvars) - self.count
        own = [None if i in self.course.direct else _all_of(i) for i in range(self.count)]
        return own + [None] * rest

    def settled(
        self, params: Any, batch: Any, direct: Mapping[int, str]
    ) -> tuple["ExampleGradient", list[Any]]:
        """The gradient with its course, and the gradients of one example as shapes.

        A gradient is the shape of an array, or `Products` of shapes.
        """
        course = Course(direct)
        gradient = dataclasses.replace(self, course=course)

        def of_first(batch: Any) -> list[Any]:
            return gradient(params, jax.tree.map(lambda x: jnp.asarray(x)[0], batch), None)[0]

        found = jax.eval_shape(of_first, batch)
        arrays = {i: value for i, value in enumerate(found) if not isinstance(value, Products)}
        course.arrays = frozenset(arrays)
        course.waiting = waiting_leaves(arrays, sum(x.size for x in jax.tree.leaves(found)))
        course.size = sum(math.prod(value.shape) for value in found)
        course.is_settled = True
        return gradient, found

    def __call__(
        self,
        params: Any,
        example: Any,
        reduction: Reduction | None,
        flag: jax.Array | None = None,
    ) -> tuple[list[Any], Any]:
        """The gradient of one example leaf by leaf, and what the loss function returned.

        It is evaluated when the ``flag`` of `delay_flag` is known.
        """
        program = self.traced.program
        varying = self.varying
        found = wanted(program, self.wants, varying)
        hook: Any = Follow(found, reduction, self.course, varying)
        if flag is not None:
            hook = Delay.of(program, _array_count(params), hook, flag)
        inputs = [leaf for leaf in jax.tree.leaves((params, example)) if is_array(leaf)]
        with following(range(self.count)):
            outputs = evaluate(program, inputs, hook)
        _, value = self.traced.result([jnp.zeros(())] * self.count + outputs[self.count :])
        return outputs[: self.count], value

    def each(self, params: Any, batch: Any, reduction: Reduction) -> Examples:
        """The gradients of the examples, as products or as their ``reduction``."""

        def of_one(params: Any, example: Any) -> Any:
            gradients, value = self(params, example, reduction)
            return *apart(gradients), value

        mapped = jax.vmap(of_one, in_axes=(None, 0), out_axes=(0, None, 0))
        own, shared, value = mapped(params, batch)
        return Examples(rejoined(own, shared), value)


def followed(
    subject: PerExampleSubject, params: Any, examples: Any, run: Callable[..., Attempted]
) -> tuple[Attempted, Course, list[Any]]:
    """The result of ``run`` for a settled gradient, its shapes, parameters and examples.

    Beside it the course, and the shapes. Where something goes wrong it runs again, with the leaves
    that were followed there direct; the loss function is traced once.
    """
    whole = ExampleGradient.of(subject.loss_fn, subject.has_aux, params, examples)

    def attempt(direct: Mapping[int, str]) -> tuple[Attempted, Course, list[Any]]:
        gradient, shapes = whole.settled(params, examples, direct)
        return run(gradient, shapes, params, examples), gradient.course, shapes

    return attempted(attempt)


def _all_of(leaf: int) -> WantedGradient:
    return WantedGradient(frozenset([leaf]), True, True, 1)


def _array_count(tree: Any) -> int:
    return sum(map(is_array, jax.tree.leaves(tree)))
