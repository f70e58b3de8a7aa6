"""Scans that run some steps at a time: what is taken of each step is not stacked."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from clipgrad._programs.elements import byte_count, dtype_of
from clipgrad._programs.evaluate import bind
from clipgrad._programs.kinds import called_program, is_reversed, scan_counts, scan_length
from clipgrad._programs.programs import opened
from clipgrad._programs.rebind import scan_again

AT_ONCE = 2**23  # the bytes that are taken at once of short steps: a call of each has costs

Take = Callable[[Any], np.ndarray]  # from arrays with a leading axis to others with that axis


class OpenedScan:
    """A scan of which some steps are one compiled program, which runs again and again.

    What it carries, and what it stacks for the program around, is in the same arrays all the time.

    Args:
      equation: the scan.
      jit: compiles some steps.
      taken: what becomes of results that it stacks.
      outputs: the results that the program around reads.
      constants: the equations that make operands of nothing: some steps make their own part.
    """

    def __init__(
        self,
        equation: JaxprEqn,
        jit: Callable[..., Callable],
        taken: Mapping[Var, Take],
        outputs: Sequence[Var],
        constants: Mapping[Var, JaxprEqn],
    ) -> None:
        self._equation, self._jit, self._constants = equation, jit, constants
        self._taken, self._outputs = taken, outputs
        self._fixed, carried = scan_counts(equation)
        self._carry, self._stacks = equation.outvars[:carried], equation.outvars[carried:]
        self._kept = [v for v in self._stacks if v in outputs]
        self._compiled: dict[int, Callable] = {}
        length = scan_length(equation) or 1
        of_step = sum(map(byte_count, taken)) // length
        self._starts = _starts(length, max(1, AT_ONCE // max(1, of_step)))
        self.bytes_at_once = of_step * self._starts[1]

    @property
    def operands(self) -> Sequence[Any]:
        """What it reads."""
        return self._equation.invars

    def __call__(self, *inputs: Any) -> tuple[list, dict[Var, np.ndarray]]:
        """The outputs, and what has become of results that are taken."""
        fixed, carry, elements = self._split(inputs)
        types: list[Any] = [v.aval for v in self._kept]
        stacks = [jnp.zeros(x.shape, x.dtype) for x in types]
        spans = list(itertools.pairwise(self._starts))
        notes = []
        for start, end in reversed(spans) if is_reversed(self._equation) else spans:
            run = self._steps(end - start)
            carry, stacks, taken = run(stacks, fixed, carry, elements, np.int32(start))
            # A CPU would allocate the results of many parts before it has computed the first.
            jax.block_until_ready(carry)
            notes.append([take(x) for take, x in zip(self._taken.values(), taken, strict=True)])
        notes = notes[::-1] if is_reversed(self._equation) else notes
        joined = map(np.concatenate, zip(*notes, strict=True))
        results = dict(zip([*self._carry, *self._kept], [*carry, *stacks], strict=True))
        return [results[v] for v in self._outputs], dict(zip(self._taken, joined, strict=True))

    def _split(self, inputs: Sequence[Any]) -> tuple[list, list, list]:
        """The operands that each step has, that are carried, and that are of one step each."""
        arrays = iter(inputs)
        operands = [
            np.asarray(v.val, dtype_of(v))
            if type(v) is Literal
            else None
            if v in self._constants
            else next(arrays)
            for v in self.operands
        ]
        split = self._fixed + len(self._carry)
        return operands[: self._fixed], operands[self._fixed : split], operands[split:]

    def _steps(self, length: int) -> Callable:
        """The compiled program of so many steps."""
        if length not in self._compiled:
            self._compiled[length] = self._jit(self._runner(length), donate_argnums=0)
        return self._compiled[length]

    def _runner(self, length: int) -> Callable[..., tuple[list, list, list]]:
        params = self._equation.params | {"length": length}
        equation, step = self._equation.replace(params=params), self._step()
        sliced = self.operands[self._fixed + len(self._carry) :]

        def run(
            stacks: list, fixed: list, carry: list, elements: list, start: Any
        ) -> tuple[list, list, list]:
            def body(carry: tuple, elements: tuple) -> tuple[tuple, tuple]:
                outputs = step(*fixed, *carry, *elements)
                return tuple(outputs[: len(carry)]), tuple(outputs[len(carry) :])

            whole = map(self._whole, sliced, elements)
            parts = (lax.dynamic_slice_in_dim(x, start, length) for x in whole)
            carry, outputs = scan_again(equation, body, tuple(carry), tuple(parts))
            by_variable = dict(zip(self._stacks, outputs, strict=True))
            for i, v in enumerate(self._kept):
                stacks[i] = lax.dynamic_update_slice_in_dim(stacks[i], by_variable[v], start, 0)
            return list(carry), stacks, [by_variable[v] for v in self._taken]

        return run

    def _step(self) -> Callable[..., list]:
        program = called_program(self._equation)
        jaxpr, constants = opened(program)
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, constants))

    def _whole(self, v: Any, x: Any) -> Any:
        """All of an operand, of which XLA makes only what is read if it is made of nothing."""
        if (made := self._constants.get(v)) is None:
            return x
        literals: Any = made.invars
        return bind(made, [literal.val for literal in literals])[0]


def _starts(length: int, most: int) -> list[int]:
    """Where parts of a scan start, of so many steps at most, and its end.

    In parts of one length, where at most twice as many are so: another length is another program.
    """
    count = -(-length // most)
    count = next((n for n in range(count, 2 * count) if length % n == 0), count)
    return [*range(0, length, -(-length // count)), length]
