"""Opening what holds a program that runs once: a branch, a custom rule, the devices of a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._diagnose.runs import OnDevices
from clipgrad._diagnose.tape import Entry, Inside, Tape, Within
from clipgrad._programs import holds_floats


class InBranch(Inside):
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


class InRule(Inside):
    """The function that a rule was written for; the cotangents are those of the rule."""

    is_differentiated = False


class InMesh(Inside):
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
        runs, outs = tape.runs, self.entry.outs
        assert isinstance(runs, OnDevices)
        which = [j for j, y in enumerate(outs) if holds_floats(y)]
        pairs = [(outs[j], self.entry.out_cotangents[j]) for j in which]
        full = [jnp.zeros_like(y) if g is None else g for y, g in pairs]

        def spread(results: list, cotangents: list) -> Any:
            return jax.vjp(lambda *parts: runs.collect(which, parts), *results)[1](cotangents)

        parts = runs.compiled(spread, [tape.results[j] for j in which], full)
        by_number = dict(zip(which, parts, strict=True))
        return [by_number.get(j) for j in range(len(outs))]
