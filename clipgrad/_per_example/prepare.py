"""The road of both public functions: from parameters and a batch to a run over its examples."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._frameworks import Parameters, take_apart
from clipgrad._per_example.batches import (
    accumulate_over_microbatches,
    allow_split_examples,
    batch_size,
    check_axes,
    check_divides,
    on_each_device,
)
from clipgrad._per_example.gradients import ExampleProgram
from clipgrad._per_example.request import Request, check_params


class ArrayRequest(NamedTuple):
    """A request whose loss is of arrays alone, all of which are differentiated.

    Attributes:
      request: whose loss is of ``params`` and an example of ``batch``.
      params: the arrays to differentiate with respect to.
      batch: the examples, with keys of their own where the loss draws random numbers.
      parameters: what the arrays are from: a tree, or a model of a framework.
      is_random: whether the loss draws random numbers by the state of a model.
    """

    request: Request
    params: Any
    batch: Any
    parameters: Parameters
    is_random: bool


def of_arrays(request: Request, params: Any, batch: Any) -> ArrayRequest:
    """The request with arrays alone, for a model of any framework.

    Each example has keys of its own where a model of flax NNX draws random numbers.
    """
    parameters = take_apart(params, request.wrt)
    if not jax.tree.leaves(parameters.trained):
        raise ValueError(
            f"params: got {params!r:.60}, expected a tree with an array to differentiate with "
            "respect to; write (params, batch), in this order"
        )
    if jax.tree.structure(parameters.trained) == jax.tree.structure(params):
        return ArrayRequest(request, params, batch, parameters, False)
    size, loss_fn = batch_size(batch), request.loss_fn
    first = jax.eval_shape(lambda batch: jax.tree.map(lambda x: jnp.asarray(x)[0], batch), batch)
    random = parameters.random_states(loss_fn, first, size)

    def loss(trained: Any, example: Any) -> Any:
        example, keys = example if random else (example, {})
        state = parameters.state and [keys.get(i, x) for i, x in enumerate(parameters.state)]
        return parameters.call(loss_fn, trained, state, example)[0]

    examples = (batch, random) if random else batch
    request = dataclasses.replace(request, loss_fn=loss)
    return ArrayRequest(request, parameters.trained, examples, parameters, bool(random))


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleRun:
    """A request for parameters and a batch that were checked, ready to run.

    Attributes:
      arrays: the loss, the parameters as varying where the batch does, and the examples.
      size: how many examples.
    """

    arrays: ArrayRequest
    size: int

    @property
    def request(self) -> Request:
        """What is asked of the arrays."""
        return self.arrays.request

    @functools.cached_property
    def program(self) -> ExampleProgram:
        """The program of the loss of one example. This traces the loss."""
        return ExampleProgram.of(self.request, self.arrays.params, self.arrays.batch)

    def accumulate(self, of_some: Callable, zeros: Any, *beside: Any) -> tuple[Any, Any]:
        """The sum of the first results over the microbatches, and the second ones in order.

        Args:
          of_some: a function of the parameters, of some of the examples, and of what is beside.
          zeros: what the sum starts from.
          *beside: trees of arrays with an entry for each example; the functions gets its part.
        """
        request, params, batch, *_ = self.arrays
        if request.why_elements is None:
            count = self.program.microbatch_count(request, self.size)
        else:
            count = self.size // (request.microbatch or self.size)
        with allow_split_examples(batch, request.axis_name):
            return accumulate_over_microbatches(of_some, zeros, params, (batch, *beside), count)

    def count_random_state(self) -> None:
        """Advances the counts of random numbers in the models that were given."""
        if self.arrays.is_random:
            self.arrays.parameters.count_random_state()


def prepared(request: Request, params: Any, batch: Any) -> ExampleRun:
    """The run for parameters and a batch, which are checked before anything is traced."""
    check_params(params)
    arrays = of_arrays(request, params, batch)
    request, params, batch, *_ = arrays
    size = batch_size(batch)
    check_divides(request.microbatch, size)
    check_axes((params, batch))
    with allow_split_examples(batch, request.axis_name):
        request.warn_of_split(params)
    return ExampleRun(arrays._replace(params=on_each_device(params, batch)), size)
