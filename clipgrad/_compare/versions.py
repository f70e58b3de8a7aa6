"""One version of a loss: its program, its named values, and what a run of it computes."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._compare.arguments import copied
from clipgrad._compare.differences import RUNS, floor_of, host_values
from clipgrad._compare.sketches import LENGTH, Sketches, carried_values, sketch_dtype
from clipgrad._diagnose import (
    DiagnosisSubject,
    is_of_callback,
    raised_finding,
    raised_in,
    subject,
    told_error,
)
from clipgrad._jaxpr import (
    Widen,
    evaluate,
    jit_for_one_call,
    kept_run,
    on_host,
    quick_jit,
    trace,
)
from clipgrad._program import active_variables, rounded
from clipgrad._values import NamedValue, named_values

SketchedNames = frozenset[tuple[str, str]]


class Version(NamedTuple):
    """A version of a loss, as a program.

    Attributes:
      subject: the loss, traced, and its arguments.
      values: its values with names, in the order of computation.
      paths: the path in the tree of the gradient of each array that it is differentiated by.
    """

    subject: DiagnosisSubject
    values: list[NamedValue]
    paths: list[str]


class VersionRun(NamedTuple):
    """The results of a run, on the host.

    Attributes:
      loss: its value.
      grads: the gradient of each array that is differentiated.
      values: the sketch of each value, by its position, with leading axes for scans and devices.
      cotangents: the same of the cotangents that there are.
    """

    loss: np.ndarray
    grads: list[np.ndarray]
    values: dict[Any, np.ndarray]
    cotangents: dict[Any, np.ndarray]


def version(
    fun: Callable[..., Any], args: tuple, kwargs: Any, argnums: int | Sequence[int], has_aux: bool
) -> Version:
    """Trace a loss once."""
    found = subject(fun, args, kwargs, argnums, has_aux)
    carried = list(carried_values(found.program))
    ends = {(value.position[:-4], value.position[-2], value.name) for value in carried}
    named = [
        value
        for value in named_values(found.program)
        if (value.position[:-2], value.position[-2], value.name) not in ends
    ]  # what a scan returns is what its last step carries on
    values = sorted([*named, *carried], key=lambda value: value.time())
    return Version(found, values, _paths(found, argnums))


def _paths(given: DiagnosisSubject, argnums: int | Sequence[int]) -> list[str]:
    """The path of each array that is differentiated, in the tree of the gradient."""
    is_one = not isinstance(argnums, Sequence)
    order = [] if is_one else [i % len(given.names) for i in argnums]
    found = []
    for i in given.chosen:
        number, path = given.paths[i]
        first = [] if is_one else [str(order.index(int(number)))]
        found.append("/".join([*first, _of_model(path)]).rstrip("/"))
    return found


def _of_model(path: str) -> str:
    """A path without what NNX puts around the attributes of a model that it takes apart."""
    return re.sub(r"^states/\d+/(.*)/value$", r"\1", path)


class VersionProgram:
    """The compiled program of a version and of its gradient, with sketches.

    Args:
      own: the version.
      names: the names, with kinds, whose values are sketched.
      wide: the dtype in which the value and the gradient are evaluated, or None.
    """

    def __init__(self, own: Version, names: SketchedNames, wide: Any = None) -> None:
        self._given, self._names = own.subject, names
        self._taps = _taps(own, names)
        self.traced = trace(self._both, (own.subject.inputs, self._taps), {})
        program = self.traced.program
        self._run = kept_run(program, jax.jit) if wide is None else _widened(program, wide)

    def __call__(self) -> VersionRun:
        """Run it.

        Raises:
          ValueError: a callback in it raises an error; the message names the operation.
        """
        try:
            return self._on_host(self._run(self._leaves()))
        except Exception as error:
            if not is_of_callback(error):
                raise
            raised = raised_finding(raised_in(self._given), told_error(error), self._given)
            raise ValueError(
                f"{raised.message}; clipgrad.diagnose follows its operands back"
            ) from error

    def floor(self, own: VersionRun) -> VersionRun:
        """The movement of the results of a run by the rounding of its program."""
        program, leaves = self.traced.program, self._leaves()
        run = jit_for_one_call(program)(lambda *given: rounded(program, *given))
        runs = (run(leaves, jnp.uint32(i)) for i in range(1, 1 + RUNS))
        return floor_of(own, map(self._on_host, runs))

    def _leaves(self) -> list:
        return jax.tree.leaves((copied(self._given.inputs), self._taps))

    def _on_host(self, outputs: Sequence) -> VersionRun:
        (value, notes), (grads, cotangents) = self.traced.result(outputs)
        return VersionRun(
            host_values([value])[0], host_values(grads), on_host(notes), on_host(cotangents)
        )

    def _both(self, inputs: list, taps: dict) -> Any:
        moving = [inputs[i] for i in self._given.chosen]
        run_both = jax.value_and_grad(self._loss, argnums=(0, 1), has_aux=True)
        return run_both(moving, taps, inputs)

    def _loss(self, moving: list, taps: dict, inputs: list) -> tuple[jax.Array, dict]:
        every = list(inputs)
        for i, x in zip(self._given.chosen, moving, strict=True):
            every[i] = x
        hook = Sketches(taps=taps, names=self._names)
        (value,) = evaluate(self._given.program, every, hook)
        return value, hook.noted()


def _widened(program: Any, dtype: Any) -> Callable[[list], list]:
    """A gradient in a wider type: after its derivatives are taken, so that rules stay."""
    hook = Widen(dtype)

    def run(leaves: list) -> list:
        return evaluate(program, [hook.constant(x, None) for x in leaves], hook)

    return quick_jit(run, jax.jit)


def _taps(own: Version, names: SketchedNames) -> dict[Any, jax.Array]:
    """A tap for each value that has a cotangent to be reached."""
    active = active_variables(own.subject.program, own.subject.chosen)
    return {
        value.position: jnp.zeros(
            (*(length for _, length in leading_axes(value)), LENGTH),
            sketch_dtype(dtype_and_shape(value)[0]),
        )
        for value in own.values
        if (value.name, value.kind) in names and not value.in_while and value.variable in active
    }


def dtype_and_shape(value: NamedValue) -> tuple[Any, tuple[int, ...]]:
    """The type of a value."""
    aval: Any = value.variable.aval
    return aval.dtype, tuple(aval.shape)


def leading_axes(value: NamedValue) -> tuple[tuple[str, int], ...]:
    """The axes before a sketch: each scan and `shard_map` around, outermost first, with lengths."""
    return value.place.parent.axes if value.place.parent else ()
