"""One version of a loss: its program, its named values, and what a run of it computes."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._compare.differences import RUNS, floor_of, host_values
from clipgrad._compare.program_record import (
    OperationRecord,
    ProgramRecord,
    point_at,
    program_record,
)
from clipgrad._compare.sketches import (
    LENGTH,
    Sketches,
    carried_values,
    entering_values,
    host_sketch,
    sketch_dtype,
)
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
    computed_types,
    evaluate,
    jit_for_one_call,
    kept_run,
    on_host,
    quick_jit,
    trace,
)
from clipgrad._program import active_variables, rounded
from clipgrad._trees import is_array
from clipgrad._values import named_values


class VersionValue(NamedTuple):
    """A value with a name, at its position in the program of a version.

    Attributes:
      position: see `NamedValue`.
      name: the tag, or the path of the module.
      kind: ``"tag"``, ``"module"``, or ``"enters"`` for what enters a module.
      dtype: its type.
      shape: its shape at one step and on one device.
      tapped: whether it has a cotangent that can be reached.
      variable: its number in the program.
      maker: the operation that computes it.
      holders: the operations around, outermost first.
      programs: the program and those inside of the holders, outermost first.
    """

    position: tuple[int, ...]
    name: str
    kind: str
    dtype: Any
    shape: tuple[int, ...]
    tapped: bool
    variable: int
    maker: OperationRecord
    holders: tuple[OperationRecord, ...]
    programs: tuple[ProgramRecord, ...]

    @property
    def program(self) -> ProgramRecord:
        return self.programs[-1]

    @property
    def place(self) -> tuple[OperationRecord, ...]:
        """The operation that computes it and those around, innermost first."""
        return (self.maker, *self.holders[::-1])

    @property
    def axes(self) -> list[tuple[int, bool]]:
        """The axes before a sketch, outermost first: their lengths, and whether each is of a scan.

        There is one for each scan and each `shard_map` around.
        """
        found = []
        for holder in self.holders:
            found += [(holder.loop.length, True)] if holder.loop else []
            found += [(holder.devices, False)] if holder.devices else []
        return found

    @property
    def sketches(self) -> tuple[int, ...]:
        return (*(size for size, _ in self.axes), LENGTH)

    def time(self, steps: tuple[int, ...] = ()) -> tuple[float, ...]:
        """When it is computed, at these steps of the scans around; a tag is before its module."""
        *around, number, output, depth = self.position
        left = iter(steps)
        moment: list[float] = []
        for i, holder in enumerate(self.holders):
            own, program = around[2 * i : 2 * i + 2]
            step = next(left, 0) if holder.loop else 0
            moment += [own, -step if holder.loop and holder.loop.reverse else step, program]
        return (*moment, number, math.inf, output, -math.inf if self.kind == "tag" else -depth)


class VersionLeaf(NamedTuple):
    """An array that a loss is differentiated by: its path in the gradient, and its input."""

    path: str
    position: int
    dtype: Any
    shape: tuple[int, ...]


class Version(NamedTuple):
    """A version of a loss, as a program.

    Attributes:
      program: its operations.
      values: its values with names, in the order of computation.
      leaves: the arrays that it is differentiated by.
      loss_dtype: the type of the loss.
      types: the names of the floating types that it computes in.
      subject: the loss, traced, and its arguments; None if it comes from a file.
    """

    program: ProgramRecord
    values: list[VersionValue]
    leaves: list[VersionLeaf]
    loss_dtype: Any
    types: frozenset[str]
    subject: DiagnosisSubject | None = None


class VersionRun(NamedTuple):
    """The results of a run, on the host.

    Attributes:
      loss: its value.
      grads: the gradient of each array that is differentiated, or its sketch.
      values: the sketch of each value, by its position, with leading axes for scans and devices.
      cotangents: the same of the cotangents that there are.
    """

    loss: np.ndarray
    grads: list[np.ndarray]
    values: dict[Any, np.ndarray]
    cotangents: dict[Any, np.ndarray]


def copied(tree: Any) -> Any:
    """The tree with copies of its arrays, which a function may donate, of the same layouts."""
    return jax.tree.map(lambda x: x.copy() if is_array(x) else x, tree)


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
    program = program_record(found.program)
    active = active_variables(found.program, found.chosen)
    values = []
    for value in (*named, *carried, *entering_values(found.program)):
        aval: Any = value.variable.aval
        tapped = not value.in_while and value.variable in active
        own = value.position, value.name, value.kind, aval.dtype, tuple(aval.shape), tapped
        values.append(VersionValue(*own, *point_at(program, value.position)))
    leaves = [
        VersionLeaf(path, i, found.inputs[i].dtype, found.inputs[i].shape)
        for path, i in zip(_paths(found, argnums), found.chosen, strict=True)
    ]
    return Version(
        program,
        sorted(values, key=lambda value: value.time()),
        leaves,
        found.program.jaxpr.outvars[0].aval.dtype,
        frozenset(computed_types(found.program)),
        found,
    )


def _paths(given: DiagnosisSubject, argnums: int | Sequence[int]) -> list[str]:
    """The path of each array that is differentiated, in the tree of the gradient."""
    is_one = not isinstance(argnums, Sequence)
    order = [] if is_one else [i % len(given.names) for i in argnums]
    found = []
    for i in given.chosen:
        number, path = given.paths[i]
        first = [] if is_one else [str(order.index(int(number)))]
        # NNX puts more around the attributes of a model that it takes apart.
        path = re.sub(r"^states/\d+/(.*)/value$|^(.*)/states/\d+/value$", r"\1\2", path)
        found.append("/".join([*first, path]).rstrip("/"))
    return found


class VersionProgram:
    """The compiled program of a version and of its gradient, with sketches.

    Args:
      own: the version.
      wide: the dtype in which the value and the gradient are evaluated, or None.
      signed: whether its results have sketches in place of gradients.
      sketches: makes the hook that notes the values, of taps.
    """

    def __init__(
        self,
        own: Version,
        wide: Any = None,
        signed: bool = False,
        sketches: Callable[..., Sketches] = Sketches,
    ) -> None:
        assert own.subject is not None  # it has not run yet
        self._given, self._sketches, self._signed = own.subject, sketches, signed
        self._taps = {
            value.position: jnp.zeros(value.sketches, sketch_dtype(value.dtype))
            for value in own.values
            if value.tapped  # it has a cotangent that can be reached
        }
        self.traced = trace(self._both, (own.subject.inputs, self._taps), {})
        program = self.traced.program
        self._run = kept_run(program, jax.jit) if wide is None else _widened(program, wide)

    def __call__(self, inputs: list | None = None) -> VersionRun:
        """Run it, with other inputs of the same types if there are any.

        Raises:
          ValueError: a callback in it raises an error; the message names the operation.
        """
        try:
            return self._on_host(self._run(self._leaves(inputs)))
        except Exception as error:
            if not is_of_callback(error):
                raise
            raised = raised_finding(raised_in(self._given), told_error(error), self._given)
            raise ValueError(
                f"{raised.message}; clipgrad.diagnose follows its operands back"
            ) from error

    def floor(self, own: VersionRun) -> VersionRun:
        """The movement of the results of a run by rounding."""
        leaves = self._leaves()
        runs = (self._rounded(leaves, jnp.uint32(i)) for i in range(1, 1 + RUNS))
        return floor_of(own, map(self._on_host, runs))

    @functools.cached_property
    def _rounded(self) -> Callable[[list, jax.Array], list]:
        program = self.traced.program
        return jit_for_one_call(program)(lambda *given: rounded(program, *given))

    def _leaves(self, inputs: list | None = None) -> list:
        given = self._given.inputs if inputs is None else inputs
        return jax.tree.leaves((copied(given), self._taps))

    def _on_host(self, outputs: Sequence) -> VersionRun:
        (value, notes), (grads, cotangents) = self.traced.result(outputs)
        (loss, *gradients) = host_values([value, *grads])
        gradients = [host_sketch(x) for x in gradients] if self._signed else gradients
        return VersionRun(loss, gradients, on_host(notes), on_host(cotangents))

    def _both(self, inputs: list, taps: dict) -> Any:
        moving = [inputs[i] for i in self._given.chosen]
        run_both = jax.value_and_grad(self._loss, argnums=(0, 1), has_aux=True)
        return run_both(moving, taps, inputs)

    def _loss(self, moving: list, taps: dict, inputs: list) -> tuple[jax.Array, dict]:
        every = list(inputs)
        for i, x in zip(self._given.chosen, moving, strict=True):
            every[i] = x
        hook = self._sketches(taps=taps)
        (value,) = evaluate(self._given.program, every, hook)
        return value, hook.noted()


def _widened(program: Any, dtype: Any) -> Callable[[list], list]:
    """A gradient in a wider type: after its derivatives are taken, so that rules stay."""
    hook = Widen(dtype)

    def run(leaves: list) -> list:
        return evaluate(program, [hook.constant(x, None) for x in leaves], hook)

    return quick_jit(run, jax.jit)
