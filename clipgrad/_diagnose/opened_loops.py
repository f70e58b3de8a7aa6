"""Opening loops: a scan runs as one and keeps its carries, and each step can become a tape."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipgrad._diagnose.levels import level, levels, wide
from clipgrad._diagnose.tape import Entry, Inside, Tape, Within, marked
from clipgrad._programs import evaluate, holds_floats, scan_counts, while_counts


class InScan(Inside):
    """The steps of a scan.

    The forward pass keeps what each step begins with, and the backward pass the cotangent of what
    it ends with, so that any one step can be run again alone.
    """

    def __init__(self, entry: Entry):
        super().__init__(entry)
        params = entry.equation.params
        self.length = params["length"]
        self.is_reverse = params["reverse"]
        self.fixed, carried = scan_counts(entry.equation)
        self.carried = carried
        self.split = self.fixed + carried  # the first operand with an element for each step
        self.carries: list = []  # with an axis of steps in front, behind the axes of devices
        self.of_carries: dict[int, Any] = {}  # the cotangents of the carry behind each step
        self.bad_steps: dict[int, Any] = {}  # of fixed operands, by their cotangents
        self._steps: dict[int, Tape] = {}

    @classmethod
    def opens(cls, entry: Entry) -> bool:
        """One without steps has nothing inside."""
        return entry.equation.params["length"] > 0

    @property
    def times(self) -> list[int]:
        """The steps in the order in which they run."""
        steps = list(range(self.length))
        return steps[::-1] if self.is_reverse else steps

    def is_carry(self, number: int) -> bool:
        """Whether an operand, or an input of a step, is carried."""
        return self.fixed <= number < self.split

    @property
    def _active_inputs(self) -> list[bool]:
        """For each input of a step whether it depends on what the loss is differentiated by.

        A carry may do so from some step on.
        """
        entry = self.entry
        active = list(entry.active)
        last = [v in entry.tape.active for v in entry.equation.outvars[: self.carried]]
        first = active[self.fixed : self.split]
        active[self.fixed : self.split] = [a or b for a, b in zip(first, last, strict=True)]
        return active

    def forward(self) -> list:
        """The results; keeps what each step begins with."""
        entry, hook = self.entry, self.entry.tape.runs.hook

        def run(*xs: Any) -> list:
            def step(carry: list, elements: list) -> Any:
                results = evaluate(self.program, [*xs[: self.fixed], *carry, *elements], hook)
                return results[: self.carried], (results[self.carried :], carry)

            start, stacks = list(xs[self.fixed : self.split]), list(xs[self.split :])
            last, (stacked, carries) = lax.scan(step, start, stacks, self.length, self.is_reverse)
            return [*last, *stacked, *carries]

        runs = entry.tape.runs
        results = list(runs.compiled(runs.mapped(run), *entry.ins))
        count = len(entry.equation.outvars)
        self.carries = results[count:]
        return results[:count]

    def backward(self) -> None:
        """Fill in the cotangents; keeps those of what each step ends with."""
        entry, runs, reached = self.entry, self.entry.tape.runs, set()
        active = self._active_inputs
        ways = [i for i, x in enumerate(entry.ins) if holds_floats(x) and active[i]]
        outs = zip(entry.outs, entry.equation.outvars, strict=True)
        has_cotangent = [holds_floats(y) and v in entry.tape.active for y, v in outs]
        has_cotangent[: self.carried] = active[self.fixed : self.split]
        which = [j for j, is_active in enumerate(has_cotangent) if is_active]
        if not ways or not which:
            return
        pairs = [(entry.outs[j], entry.out_cotangents[j]) for j in which]
        full = [jnp.zeros_like(y) if g is None else g for y, g in pairs]
        fun = self._backward(ways, which, reached)
        flat = runs.compiled(runs.mapped(fun), *entry.ins, *self.carries, *full)
        of_operands, bad, of_carries = flat
        for i, cotangent in zip(ways, of_operands, strict=True):
            entry.in_cotangents[i] = cotangent if i in reached and entry.active[i] else None
        self.of_carries = dict(zip([j for j in which if j < self.carried], of_carries, strict=True))
        flags = [np.any(wide(x), axis=tuple(range(runs.axes))) for x in bad]
        self.bad_steps = dict(zip([i for i in ways if i < self.fixed], flags, strict=True))

    def _backward(self, ways: list[int], which: list[int], reached: set[int]) -> Callable:
        """The backward pass: of the operands, of the carries, of the results their cotangents."""
        hook, count = self.entry.tape.runs.hook, len(self.entry.ins)
        fixed = [i for i in ways if i < self.fixed]
        moved = [i for i in ways if self.is_carry(i)]
        each = [i for i in ways if i >= self.split]

        def step_of(ins: Sequence[Any]) -> Callable:
            def step(state: Any, at_step: Any) -> Any:
                (of_carry, totals), (carry, elements, of_stacked) = state, at_step
                every = [*ins[: self.fixed], *carry, *elements]

                def run(*moved: Any) -> list:
                    new = dict(zip(ways, marked(ways, moved, reached), strict=True))
                    inputs = [new.get(i, x) for i, x in enumerate(every)]
                    results = evaluate(self.program, inputs, hook)
                    return [results[j] for j in which]

                pull = jax.vjp(run, *(every[i] for i in ways))[1]
                pulled = dict(zip(ways, pull([*of_carry, *of_stacked]), strict=True))
                totals = [t + pulled[i] for t, i in zip(totals, fixed, strict=True)]
                bad = [~jnp.all(jnp.isfinite(pulled[i])) for i in fixed]
                new = [pulled[i] for i in moved], totals
                return new, ([pulled[i] for i in each], bad, of_carry)

            return step

        def backward(*flat: Any) -> Any:
            ins, others = flat[:count], flat[count:]
            carries, cotangents = list(others[: self.carried]), others[self.carried :]
            start = [g for j, g in zip(which, cotangents, strict=True) if j < self.carried]
            stacked = [g for j, g in zip(which, cotangents, strict=True) if j >= self.carried]
            state = start, [jnp.zeros_like(ins[i]) for i in fixed]
            by_step = carries, list(ins[self.split :]), stacked
            (first, totals), (of_elements, bad, of_carries) = lax.scan(
                step_of(ins), state, by_step, self.length, reverse=not self.is_reverse
            )
            return [*totals, *first, *of_elements], bad, of_carries

        return backward

    def step(self, t: int) -> Tape:
        """The tape of one step, with its cotangents if there are any."""
        if t not in self._steps:
            entry = self.entry
            at = lambda x: entry.tape.runs.at(x, t)  # noqa: E731
            elements = map(at, [*self.carries, *entry.ins[self.split :]])
            self._steps[t] = tape = self._tape([*entry.ins[: self.fixed], *elements], t)
            if self.of_carries or any(g is not None for g in entry.out_cotangents):
                of = {j: at(x) for j, x in self.of_carries.items()}
                of |= {
                    j: at(g)
                    for j, g in enumerate(entry.out_cotangents)
                    if j >= self.carried and g is not None
                }
                tape.backward([of.get(j) for j in range(len(entry.outs))])
        return self._steps[t]

    def _tape(self, inputs: list, t: int) -> Tape:
        within = Within(self.entry, 0, t, self.times.index(t))
        return Tape(self.program, inputs, self._active_inputs, within)

    def result(self, number: int, wanted: int) -> tuple[Tape, Any]:
        """The result at the step that makes it as bad."""
        if number < self.carried:
            t = self._first(number, self.length - 1, wanted)
        else:
            bad = self._by_step(self.entry.outs[number])
            t = next(t for t in self.times if bad[t] >= wanted)
        return self.step(t), self.step(t).jaxpr.outvars[number]

    def input(self, tape: Tape, number: int, wanted: int) -> tuple[Tape, Any]:
        """The result of the step before, or an operand."""
        now = tape.within.time if tape.within else 0
        if not self.is_carry(number) or not now:
            return super().input(tape, number, wanted)
        t = self._first(number - self.fixed, now - 1, wanted)
        return self.step(t), self.step(t).jaxpr.outvars[number - self.fixed]

    def operand(self, number: int, is_zero: bool) -> tuple[Tape, Any] | None:
        """The input at the step in time whose cotangent is bad first, going backward.

        Of what is zero it is a step at which there is a cotangent of a result, if there is one: of
        a carry the first of these, of other operands the last.
        """
        if is_zero:
            steps = self.alive or self.times
            steps = steps[:1] if self.is_carry(number) else steps
        elif self.is_carry(number):
            steps = [self.times[self._bad_until(number - self.fixed)]]
        elif number < self.fixed:
            steps = [t for t in self.times if self.bad_steps[number][t]]
        else:
            bad = self._by_step(self.entry.in_cotangents[number])
            steps = [t for t in self.times if bad[t]]
        tape = self.step(steps[-1]) if steps else None
        return (tape, tape.jaxpr.invars[number]) if tape else None

    def output(self, tape: Tape, number: int, is_zero: bool) -> tuple[Tape, Any]:
        """The input of the next step, or a result.

        Of what is not zero it is the step whose cotangent is bad first, going backward.
        """
        assert tape.within is not None
        later = self.times[tape.within.time + 1 :]
        alive = [t for t in self.alive if t in later] if is_zero else []
        if number >= self.carried or not later or (is_zero and not self.alive):
            return super().output(tape, number, is_zero)
        last = self.times[self._bad_until(number)]
        t = alive[0] if alive else last if last in later and not is_zero else later[0]
        return self.step(t), self.step(t).jaxpr.invars[self.fixed + number]

    def _bad_until(self, carry: int) -> int:
        """The time of the last step that begins with a carry whose cotangent is bad."""
        cotangents = self.of_carries.get(carry)
        bad = [] if cotangents is None else self._by_step(cotangents)[self.times]
        return min(int(np.max(np.flatnonzero(bad), initial=-1)) + 1, self.length - 1)

    @property
    def alive(self) -> list[int]:
        """The steps at which a result has a cotangent, in the order in which they run."""
        stacked = [g for g in self.entry.out_cotangents[self.carried :] if g is not None]
        axes = self.entry.tape.runs.axes
        alive = [wide(x) != 0 for x in [*self.of_carries.values(), *stacked]]
        masks = [x.any(tuple(a for a in range(x.ndim) if a != axes)) for x in alive]
        return [t for t in self.times if any(mask[t] for mask in masks)]

    def rerun(self) -> None:
        """Run the steps one by one."""
        entry = self.entry
        carry = entry.ins[self.fixed : self.split]
        for t in self.times:
            elements = [entry.tape.runs.at(x, t) for x in entry.ins[self.split :]]
            inputs = [*entry.ins[: self.fixed], *carry, *elements]
            carry = self._tape(inputs, t).results[: self.carried]

    def _by_step(self, x: Any) -> np.ndarray:
        """The level of an array at each step, on any device."""
        axes = self.entry.tape.runs.axes
        by_device = levels(x, axes + 1)
        return by_device.max(0) if axes else by_device

    def _first(self, carry: int, now: int, wanted: int) -> int:
        """The step that makes a carry as bad as it is behind another step."""
        bad = self._by_step(self.carries[carry])
        while now and bad[self.times[now]] >= wanted:
            now -= 1
        return self.times[now]


class InWhile(Inside):
    """The iterations of a loop of unknown length, which has no derivative."""

    is_differentiated = False

    @classmethod
    def opens(cls, entry: Entry) -> bool:
        """Always."""
        return True

    def __init__(self, entry: Entry):
        super().__init__(entry)
        params = entry.equation.params
        self.condition, self.body = params["cond_jaxpr"], params["body_jaxpr"]
        self.first, constants = while_counts(entry.equation)
        self.split = self.first + constants  # the first operand that is carried

    def result(self, number: int, wanted: int) -> tuple[Tape, Any]:
        """The result at the iteration that makes it as bad, or what the loop begins with."""
        tape = self._iteration(number, wanted)
        if tape is None:
            return self.entry.tape, self.entry.equation.invars[self.split + number]
        return tape, tape.jaxpr.outvars[number]

    def input(self, tape: Tape, number: int, wanted: int) -> tuple[Tape, Any]:
        """The result of the iteration before, or an operand."""
        carry = number - (self.split - self.first)
        if carry >= 0 and tape.within:
            before = self._iteration(carry, wanted, tape.within.time)
            if before is not None:
                return before, before.jaxpr.outvars[carry]
        return super().input(tape, number, wanted)

    def rerun(self) -> None:
        """Run the iterations one by one."""
        carry = self.entry.ins[self.split :]
        while bool(np.any(self._test(carry).results[0])):
            carry = self._tape(carry, 0).results

    @functools.cached_property
    def begun(self) -> Tape:
        """The tape of the first iteration."""
        return self._tape(self.entry.ins[self.split :], 0)

    def tested(self) -> Tape:
        """The tape of the condition before the first iteration."""
        return self._test(self.entry.ins[self.split :])

    def _test(self, carry: Sequence[Any]) -> Tape:
        active = self.entry.active
        inputs = [*self.entry.ins[: self.first], *carry]
        is_active = [*active[: self.first], *active[self.split :]]
        return Tape(self.condition, inputs, is_active, Within(self.entry))

    def _iteration(self, number: int, wanted: int, limit: int | None = None) -> Tape | None:
        """The iteration that makes a value as bad, before a limit; None if it begins so."""
        ins, carry, t = self.entry.ins, self.entry.ins[self.split :], 0
        if level(carry[number]) >= wanted:
            return None
        of_test, of_body = ins[: self.first], ins[self.first : self.split]
        test, body = self._compiled(self.condition, of_test), self._compiled(self.body, of_body)
        while (limit is None or t < limit) and bool(np.any(test(*of_test, *carry)[0])):
            new = body(*of_body, *carry)
            if level(new[number]) >= wanted:
                break
            carry, t = new, t + 1
        return self._tape(carry, t)

    def _compiled(self, program: Any, fixed: Sequence[Any]) -> Callable:
        """The condition or the body, compiled."""
        runs = self.entry.tape.runs
        run = runs.mapped(lambda *xs: evaluate(program, xs, runs.hook))
        return runs.executable(run, *fixed, *self.entry.ins[self.split :])

    def _tape(self, carry: Sequence[Any], t: int) -> Tape:
        inputs = [*self.entry.ins[self.first : self.split], *carry]
        active = [any(self.entry.active)] * len(inputs)
        return Tape(self.body, inputs, active, Within(self.entry, self.first, None, t))
