"""Opening what holds a program that runs once: a call, a branch, the devices of a mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._diagnose.runs import OnDevices
from clipgrad._diagnose.tape import Entry, Inside, Tape, Within, opening
from clipgrad._jaxpr import CALLS, CUSTOM_RULES, JIT, REMAT, called_program, holds_floats, opened


@opening(*JIT, *REMAT, *CALLS)
class InCall(Inside):
    """A program that runs once, on the operands."""

    shift = 0
    is_differentiated = True

    @classmethod
    def opens(cls, entry: Entry) -> bool:
        """An operation on a reference, discharged, is one."""
        inside = opened(called_program(entry.equation))[0].eqns
        return not any(e.primitive.name == "new_ref" for e in inside)

    @property
    def program(self) -> Any:
        """The program."""
        return called_program(self.entry.equation)

    @functools.cached_property
    def tape(self) -> Tape:
        """The program inside, with its cotangents if there are any."""
        tape = self._run()
        if self.is_differentiated and any(g is not None for g in self.entry.got):
            tape.backward(self._cotangents(tape))
        return tape

    def result(self, number: int, wanted: int) -> tuple[Tape, Any]:
        """The result of the program."""
        return self.tape, self.tape.jaxpr.outvars[number]

    def operand(self, number: int, is_zero: bool) -> tuple[Tape, Any]:
        """The input of the program."""
        return self.tape, self.tape.jaxpr.invars[number - self.shift]

    def rerun(self) -> None:
        """Run it operation by operation, forward, and backward if there are cotangents."""
        self.__dict__.pop("tape", None)
        _ = self.tape

    def _run(self) -> Tape:
        entry, first = self.entry, self.shift
        return Tape(self.program, entry.ins[first:], entry.active[first:], Within(entry, first))

    def _cotangents(self, tape: Tape) -> list:
        return self.entry.got


@opening("cond")
class InBranch(InCall):
    """The branch that was taken."""

    shift = 1

    @classmethod
    def opens(cls, entry: Entry) -> bool:
        """A cond on a device chooses one of its own there, and stays whole."""
        return entry.tape.runs.axes == 0 and np.ndim(entry.ins[0]) == 0

    @property
    def program(self) -> Any:
        """The program of the branch."""
        branches = self.entry.equation.params["branches"]
        return branches[min(max(int(self.entry.ins[0]), 0), len(branches) - 1)]

    def operand(self, number: int, is_zero: bool) -> tuple[Tape, Any] | None:
        """The input of the branch; None for what chooses it."""
        return super().operand(number, is_zero) if number else None


@opening(*CUSTOM_RULES)
class InRule(InCall):
    """The function that a rule was written for; the cotangents are those of the rule."""

    is_differentiated = False


@opening("shard_map")
class InMesh(InCall):
    """The program of a `shard_map`, with an axis of devices in front of each array."""

    @classmethod
    def opens(cls, entry: Entry) -> bool:
        """One inside of another stays whole."""
        return entry.tape.runs.axes == 0

    def _run(self) -> Tape:
        entry = self.entry
        runs = OnDevices(entry.equation, entry.tape.runs.programs)
        inputs = runs.compiled(runs.spread, *entry.ins)
        return Tape(self.program, inputs, entry.active, Within(entry), runs)

    def _cotangents(self, tape: Tape) -> list:
        """The cotangents of what each device has."""
        runs, outs, got = tape.runs, tape.results, self.entry.got
        assert isinstance(runs, OnDevices)
        which = [j for j, y in enumerate(outs) if holds_floats(y)]

        def spread(outs: list, got: list) -> Any:
            def collected(*moved: Any) -> list:
                own = dict(enumerate(outs)) | dict(zip(which, moved, strict=True))
                results = runs.collect(*(own[j] for j in range(len(outs))))
                return [results[j] for j in which]

            return jax.vjp(collected, *(outs[j] for j in which))[1](got)

        pairs = [(self.entry.outs[j], got[j]) for j in which]
        full = [jnp.zeros_like(y) if g is None else g for y, g in pairs]
        own = dict(zip(which, runs.compiled(spread, outs, full), strict=True))
        return [own.get(j) for j in range(len(outs))]
