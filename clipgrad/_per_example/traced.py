"""The gradient of one example as a program, evaluated for all examples at once."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from clipgrad._compat import to_varying, varying_axes
from clipgrad._jaxpr import Traced, evaluate, opened, trace
from clipgrad._per_example import convolutions, linear, products, scans  # noqa: F401  how they are followed
from clipgrad._per_example.batches import axes_of
from clipgrad._per_example.course import Attempted, Course, attempted, following
from clipgrad._per_example.follow import Follow, Reduction
from clipgrad._per_example.split import BackwardPass, ForwardPass, SplitProgram
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.terms import Products, apart, rejoined
from clipgrad._per_example.wanted import WantedGradient, wanted
from clipgrad._program import dependent_variables
from clipgrad._trees import is_array


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleGradient:
    """The program of the gradient of one example, traced once for all examples and passes."""

    traced: Traced
    count: int  # of the leaves of the gradient
    varying: frozenset[Var]  # the variables that differ between examples
    late: frozenset[Var]  # those of the backward pass
    axes: frozenset[str]  # the mapped axes that the loss varies over
    course: Course = dataclasses.field(default_factory=lambda: Course({}))

    @classmethod
    def of(
        cls, loss_fn: Callable[..., Any], has_aux: bool, params: Any, batch: Any
    ) -> "ExampleGradient":
        """The program for the first example of a batch."""
        example = jax.tree.map(lambda x: jnp.asarray(x)[0], batch)
        args = loss_fn, has_aux, params, example
        traced, axes = _traced(*args, given := axes_of(batch))
        if axes != given:  # the loss varies over other axes than the examples do
            traced, axes = _traced(*args, axes)
        first, last = _array_count(params), _array_count((params, example))
        varying = dependent_variables(traced.program, range(first, last + 1))
        late = dependent_variables(traced.program, [last])
        return cls(traced, len(jax.tree.leaves(params)), varying, late, axes)

    @property
    def one(self) -> jax.Array:
        """The seed of a plain gradient."""
        return _one_over(self.axes)

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
        course.size = sum(math.prod(value.shape) for value in found)
        course.is_settled = True
        return gradient, found

    def __call__(self, params: Any, example: Any, reduction: Reduction | None) -> tuple:
        """The gradient of one example leaf by leaf, and what the loss function returned."""
        outputs = self._evaluated(params, example, self.one, self._follow(reduction))
        return outputs[: self.count], self._value(outputs)

    def forward(self, params: Any, batch: Any) -> tuple[Any, list[Any]]:
        """The results of the loss function for each example, and the values kept for it."""
        split = self._split

        def of_one(params: Any, example: Any) -> Any:
            hook = ForwardPass(split)
            outputs = self._evaluated(params, example, self.one, hook)
            return self._value(outputs), hook.residuals

        return jax.vmap(of_one, in_axes=(None, 0), out_axes=(0, self.kept_axes))(params, batch)

    def backward(
        self, params: Any, example: Any, kept: Sequence[Any], seed: Any, reduction: Reduction
    ) -> list[Any]:
        """The gradient of one example leaf by leaf, from what its forward pass has kept."""
        split = self._split
        own = dict(zip(split.kept, kept, strict=True))
        hook = BackwardPass(self._follow(reduction), split, own)
        return self._evaluated(params, example, seed, hook)[: self.count]

    @property
    def kept_axes(self) -> list[int | None]:
        """The axes of the examples in what a forward pass keeps."""
        return [0 if v in self.varying else None for v in self._split.kept]

    @property
    def kept_bytes(self) -> int:
        """The bytes that a forward pass keeps of one example."""
        own: list[Any] = [v.aval for v in self._split.kept if v in self.varying]
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in own)

    @functools.cached_property
    def _wanted(self) -> dict[Var, WantedGradient]:
        return wanted(self.traced.program, self.wants, self.varying)

    @functools.cached_property
    def _split(self) -> SplitProgram:
        return SplitProgram.of(self.traced.program, self.count, self.late, self._wanted)

    def _follow(self, reduction: Reduction | None) -> Follow:
        return Follow(self._wanted, reduction, self.course, self.varying)

    def _evaluated(self, params: Any, example: Any, seed: Any, hook: Any) -> list:
        inputs = [leaf for leaf in jax.tree.leaves((params, example)) if is_array(leaf)]
        with following(range(self.count)):
            return evaluate(self.traced.program, [*inputs, seed], hook)

    def _value(self, outputs: list) -> Any:
        return self.traced.result([jnp.zeros(())] * self.count + outputs[self.count :])[1]

    def each(self, params: Any, batch: Any, reduction: Reduction) -> tuple[list[Any], Any]:
        """The gradients of the examples, and what the loss function returned.

        Of each leaf it is an array, `Products` or `Squares`; arrays have the examples in front.
        """

        def of_one(params: Any, example: Any) -> Any:
            gradients, value = self(params, example, reduction)
            return *apart(gradients), value

        mapped = jax.vmap(of_one, in_axes=(None, 0), out_axes=(0, None, 0))
        own, shared, value = mapped(params, batch)
        return rejoined(own, shared), value


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


def _traced(
    loss_fn: Callable[..., Any], has_aux: bool, params: Any, example: Any, axes: frozenset[str]
) -> tuple[Traced, frozenset[str]]:
    """The program of a gradient by a seed that varies over ``axes``; those of the loss."""
    found: list[frozenset[str]] = []

    def run(params: Any, example: Any, seed: Any) -> Any:
        value, pull, *aux = jax.vjp(lambda p: loss_fn(p, example), params, has_aux=has_aux)
        found.append(varying_axes(value))
        (grads,) = pull(seed.astype(value.dtype) if found[-1] == axes else jnp.ones_like(value))
        return jax.tree.leaves(grads), (value, *aux) if has_aux else value

    return trace(run, (params, example, _one_over(axes)), {}), found[-1]


def _one_over(axes: frozenset[str]) -> jax.Array:
    return to_varying(jnp.ones((), "float32"), axes)


def _array_count(tree: Any) -> int:
    return sum(map(is_array, jax.tree.leaves(tree)))
