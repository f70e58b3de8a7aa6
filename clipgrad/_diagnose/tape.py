"""A tape: a program that was run on values, with an entry for each operation, and the cotangents.

An entry holds what an operation read and made, and after the backward pass the cotangents of both.
An entry that holds a program runs as one; `Entry.inside` opens it.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

from clipgrad._diagnose.runs import OnDevices, Runs
from clipgrad._diagnose.segments import as_program, segments_to_run
from clipgrad._names import STOPPING, Place, active_results
from clipgrad._programs import (
    CALLS,
    Kind,
    Numeric,
    Use,
    bind,
    called_program,
    calls_python,
    chooses_by_platform,
    equations,
    evaluate,
    held_programs,
    holds_floats,
    kind_of,
    numeric_of,
    opened,
    use_of,
    watched,
)


class OperationRaised(Exception):
    """Carries the entry whose operation raised an error out of a tape."""

    def __init__(self, entry: "Entry", error: Exception, is_backward: bool):
        super().__init__(str(error))
        self.entry, self.error, self.is_backward = entry, error, is_backward


def is_of_callback(error: Exception) -> bool:
    """Whether a program was ended by an error in a callback; JAX has no type of its own for it."""
    return isinstance(error, RuntimeError | ValueError) and "callback" in str(error).lower()


class Within(NamedTuple):
    """The place of a program inside of an entry."""

    entry: "Entry"
    shift: int = 0  # the operand that the first input is
    step: int | None = None  # of a scan: its index
    time: int = 0  # the number of the step, or of the iteration of a loop, as they run


@dataclasses.dataclass(eq=False)
class Entry:
    """An operation that ran."""

    equation: JaxprEqn
    tape: "Tape"
    number: int
    ins: list  # what the operation read
    outs: list = dataclasses.field(default_factory=list)
    out_cotangents: list = dataclasses.field(default_factory=list)  # None where there is none
    in_cotangents: list = dataclasses.field(default_factory=list)

    @property
    def numeric(self) -> Numeric:
        """What the operation does to numbers and their cotangents."""
        return numeric_of(self.equation)

    @property
    def place(self) -> Place:
        """The place of the operation."""
        return Place(self.equation, self.tape.parent)

    @property
    def order(self) -> tuple[int, ...]:
        """The place in time among all entries."""
        return (*self.tape.order, self.number)

    @property
    def active(self) -> list[bool]:
        """For each operand whether it depends on what the loss is differentiated by."""
        return [type(a) is not Literal and a in self.tape.active for a in self.equation.invars]

    @functools.cached_property
    def inside(self) -> Any:
        """The object of a class of `openings.py` that opens the entry; None for one operation."""
        if chooses_by_platform(self.equation):
            return None
        opening = self.tape.openings.get(kind_of(self.equation))
        return opening(self) if opening and opening.opens(self) else None

    @functools.cached_property
    def alive(self) -> bool:
        """Whether a result has a cotangent that is not zero."""
        return any(g is not None and bool(jnp.any(g != 0)) for g in self.out_cotangents)

    @property
    def holds_programs(self) -> bool:
        """Whether there are programs inside, that are opened or not."""
        return bool(held_programs(self.equation))

    def run(self, *inputs: Any) -> list:
        """The results, for the operands of one device."""
        runs = self.tape.runs
        if kind_of(self.equation) is CALLS:
            return evaluate(called_program(self.equation), inputs, runs.hook)
        if isinstance(runs, OnDevices) and runs.is_checked:
            pairs = zip(inputs, self.equation.invars, strict=True)
            operands = [x for x, atom in pairs if type(atom) is not Literal]
            program = as_program([self.equation], self.tape.jaxpr, self.equation.outvars)
            return evaluate(program, operands, runs.hook)
        with self.equation.ctx.manager:
            return bind(self.equation, inputs)

    def forward(self) -> list:
        """The results, run as one."""
        fun = self.tape.runs.mapped(self.run)
        if self.holds_programs or self.tape.runs.axes:
            return self.tape.runs.compiled(fun, *self.ins)
        return fun(*self.ins)

    def backward(self) -> None:
        """Fill in the cotangents of the operands."""
        which = [i for i, x in enumerate(self.ins) if holds_floats(x) and self.active[i]]
        outs = [
            j
            for j, y in enumerate(self.outs)
            if holds_floats(y) and self.out_cotangents[j] is not None
        ]
        if not which or not outs or self.equation.primitive in STOPPING:
            return
        reached: set[int] = set()

        def pull(moved: list, others: dict, cotangents: list) -> Sequence:
            def run(*moved: Any) -> list:
                ins = others | dict(zip(which, marked(which, moved, reached), strict=True))
                results = self.tape.runs.mapped(self.run)(*(ins[i] for i in range(len(self.ins))))
                return [results[j] for j in outs]

            return jax.vjp(run, *moved)[1](cotangents)

        others = {i: x for i, x in enumerate(self.ins) if i not in which}
        inputs = [self.ins[i] for i in which], others, [self.out_cotangents[j] for j in outs]
        is_whole = self.holds_programs or self.tape.runs.axes
        pulled = self.tape.runs.compiled(pull, *inputs) if is_whole else pull(*inputs)
        for i, cotangent in zip(which, pulled, strict=True):
            self.in_cotangents[i] = cotangent if i in reached else None


class Inside:
    """The tape inside of an entry, and the ways between it and the one around.

    Where a variable is on the other side is said by a tape and the variable there. In this class
    the program runs once, on the operands.

    Attributes:
      shift: the operand that the first input is.
      is_differentiated: whether the cotangents inside are those of the operations there.
    """

    shift = 0
    is_differentiated = True

    def __init__(self, entry: Entry):
        self.entry = entry

    @classmethod
    def opens(cls, entry: Entry) -> bool:
        """Whether an entry can be opened; an operation on a reference, discharged, can't."""
        inside = opened(called_program(entry.equation))[0].eqns
        return not any(use_of(e) is Use.MAKES_REFERENCE for e in inside)

    @property
    def program(self) -> Any:
        """The program."""
        return called_program(self.entry.equation)

    @functools.cached_property
    def tape(self) -> "Tape":
        """The program inside, with its cotangents if there are any."""
        tape = self._run()
        if self.is_differentiated and any(g is not None for g in self.entry.out_cotangents):
            tape.backward(self._cotangents(tape))
        return tape

    def forward(self) -> list:
        """The results of the entry; keeps what its tapes need."""
        return self.entry.forward()

    def backward(self) -> None:
        """Fill in the cotangents of the operands; keeps what its tapes need."""
        self.entry.backward()

    def result(self, number: int, wanted: int) -> tuple["Tape", Any]:
        """The variable inside that a result is, where it has become as bad as is ``wanted``."""
        return self.tape, self.tape.jaxpr.outvars[number]

    def input(self, tape: "Tape", number: int, wanted: int) -> tuple["Tape", Any]:
        """The variable outside that an input of a tape inside is."""
        return tape.outside(number)

    def operand(self, number: int, is_zero: bool) -> tuple["Tape", Any] | None:
        """The variable inside that an operand is, where its cotangent is bad, or is zero."""
        return self.tape, self.tape.jaxpr.invars[number - self.shift]

    def output(self, tape: "Tape", number: int, is_zero: bool) -> tuple["Tape", Any]:
        """The variable outside that a result of a tape inside is."""
        return self.entry.tape, self.entry.equation.outvars[number]

    def rerun(self) -> None:
        """Run it operation by operation until one raises, backward too if there are cotangents."""
        self.__dict__.pop("tape", None)
        _ = self.tape

    def _run(self) -> "Tape":
        entry, first = self.entry, self.shift
        return Tape(self.program, entry.ins[first:], entry.active[first:], Within(entry, first))

    def _cotangents(self, tape: "Tape") -> list:
        return self.entry.out_cotangents


class Tape:
    """A program that was run on values.

    Args:
      program: the program.
      inputs: its inputs.
      active: which of them depend on what the loss is differentiated by.
      within: where it is inside of an entry.
      runs: how its parts run, if not as those around.
      openings: the class that opens entries of a kind, if not those of the tape around.
    """

    def __init__(
        self,
        program: Any,
        inputs: Sequence[Any],
        active: Sequence[bool],
        within: Within | None = None,
        runs: Runs | None = None,
        openings: Mapping[Kind, type["Inside"]] | None = None,
    ):
        self.jaxpr, constants = opened(program)
        self.within = within
        around = within.entry.tape if within else None
        self.runs = runs or (around.runs if around else Runs())
        self.openings: Any = openings or (around.openings if around else {})
        holder = (within.entry.number, within.time) if within else ()
        self.order = (*within.entry.tape.order, *holder) if within else ()
        self.has_callbacks = any(map(calls_python, equations(program)))
        self.values = dict(zip(self.jaxpr.invars, inputs, strict=True))
        pairs = zip(self.jaxpr.constvars, constants, strict=True)
        self.values |= {v: self.runs.constant(c) for v, c in pairs}
        flags = zip(self.jaxpr.invars, active, strict=True)
        self.active = {v for v, is_active in flags if is_active}
        self.entries: list[Entry] = []
        self.made: dict[Any, Entry] = {}
        self.uses: dict[Any, list[tuple[Entry, int]]] = collections.defaultdict(list)
        self.cotangents: dict[Any, Any] = {}
        self.of_results: list = [None] * len(self.jaxpr.outvars)
        for equation in segments_to_run(self.jaxpr):
            self._forward(equation)

    @property
    def parent(self) -> Place | None:
        """The place of the entry that it is inside of."""
        return self.within.entry.place if self.within else None

    @property
    def steps(self) -> tuple[int, ...]:
        """The indices in the scans around, the outermost first."""
        if self.within is None:
            return ()
        step = () if self.within.step is None else (self.within.step,)
        return (*self.within.entry.tape.steps, *step)

    def outside(self, number: int) -> tuple["Tape", Any]:
        """The tape around and the variable of it that an input is."""
        assert self.within is not None
        entry = self.within.entry
        return entry.tape, entry.equation.invars[number + self.within.shift]

    def read(self, atom: Any) -> Any:
        """The value of an operand, or of a result of the program."""
        if type(atom) is Literal:
            aval: Any = atom.aval
            return self.runs.constant(jnp.asarray(atom.val, aval.dtype))
        return self.values[atom]

    @property
    def results(self) -> list:
        """The results of the program."""
        return [self.read(atom) for atom in self.jaxpr.outvars]

    def is_constant(self, atom: Any) -> bool:
        """Whether the program has a value from nowhere else."""
        return type(atom) is Literal or atom in self.jaxpr.constvars

    def backward(self, cotangents: Sequence[Any]) -> None:
        """Fill in the cotangents of all values; ``cotangents`` are those of the results."""
        self.of_results = list(cotangents)
        for atom, cotangent in zip(self.jaxpr.outvars, cotangents, strict=True):
            self._add(atom, cotangent)
        for entry in reversed(self.entries):
            entry.out_cotangents = [self.cotangents.get(v) for v in entry.equation.outvars]
            if any(g is not None for g in entry.out_cotangents):
                self._run(entry, (entry.inside or entry).backward, is_backward=True)
            for atom, cotangent in zip(entry.equation.invars, entry.in_cotangents, strict=True):
                self._add(atom, cotangent)

    def _forward(self, equation: Any) -> None:
        entry = Entry(equation, self, len(self.entries), [self.read(a) for a in equation.invars])
        self.entries.append(entry)
        for k, atom in enumerate(equation.invars):
            if type(atom) is not Literal:
                self.uses[atom].append((entry, k))
        results = zip(equation.outvars, active_results(equation, entry.active), strict=True)
        self.active.update(v for v, is_active in results if is_active)
        entry.outs = list(self._run(entry, (entry.inside or entry).forward, is_backward=False))
        entry.out_cotangents, entry.in_cotangents = (
            [None] * len(entry.outs),
            [None] * len(entry.ins),
        )
        self.values.update(zip(equation.outvars, entry.outs, strict=True))
        self.made.update(dict.fromkeys(equation.outvars, entry))

    def _run(self, entry: Entry, run: Callable[[], Any], is_backward: bool) -> Any:
        """Run an entry; if its operation raises, it is opened to find the one that does."""
        try:
            results = run()
            return jax.block_until_ready(results) if self.has_callbacks else results
        except Exception as error:
            if not is_of_callback(error):
                raise
            if entry.inside:
                entry.inside.rerun()
            raise OperationRaised(entry, error, is_backward) from error

    def _add(self, atom: Any, cotangent: Any) -> None:
        if cotangent is not None and type(atom) is not Literal:
            known = self.cotangents.get(atom)
            self.cotangents[atom] = cotangent if known is None else known + cotangent


def marked(numbers: Sequence[int], values: Sequence[Any], reached: set[int]) -> list:
    """Some values; ``reached`` gets the numbers whose cotangents are not zero by their type."""
    return [
        watched(functools.partial(reached.add, i), x) for i, x in zip(numbers, values, strict=True)
    ]
