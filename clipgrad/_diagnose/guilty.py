"""The entry of a tape that makes good into bad: three questions that go along it.

Where a value is from that is not finite leads from the loss to the arguments (`origin`). Where a
cotangent is from that is not finite, and where one ends that is zero, lead from an argument to the
loss (`faults`, `cuts`). A question goes inside of an entry only where it is about that entry.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax.extend.core import Literal

from clipgrad._diagnose.levels import INF, NAN, holds_zeros, level, levels, wide
from clipgrad._diagnose.opened_calls import InBranch
from clipgrad._diagnose.opened_loops import InScan, InWhile
from clipgrad._diagnose.origins import (
    Argument,
    Carry,
    Constant,
    Cut,
    Fault,
    Operation,
    Origin,
    Raised,
    Sum,
    TapeVariable,
    Way,
)
from clipgrad._diagnose.tape import Entry, Tape
from clipgrad._names import STOPPING, data_results, is_users
from clipgrad._programs import (
    Back,
    function_file,
    has_custom_rule,
    holds_floats,
    is_bad_at,
    scan_length,
)

# Packages of functions that a mask of -inf is for: the log of 0 that one adds is meant.
MASKING = ("softmax", "log_softmax", "logsumexp", "softmax_cross_entropy")


# -- Where a value is from.


def origin(tape: Tape, atom: Any, wanted: int, reader: Entry | None = None) -> Origin:
    """The argument, constant or operation that made a value as bad as it is ``wanted``."""
    while True:
        if tape.is_constant(atom):
            return Constant(reader)
        entry = tape.made.get(atom)
        if entry is None:
            number = tape.jaxpr.invars.index(atom)
            if tape.within is None:
                return Argument(number)
            holder = tape.within.entry
            reader = reader or holder
            tape, atom = holder.inside.input(tape, number, wanted)
        elif entry.inside:
            reader = entry
            tape, atom = entry.inside.result(entry.equation.outvars.index(atom), wanted)
        else:
            bad = _bad_operands(entry, atom, wanted)
            computed = [a for a in bad if not tape.is_constant(a)]
            if not computed:
                return Constant(entry) if bad else Operation(entry)
            atom, reader = computed[0], entry


def _bad_operands(entry: Entry, result: Any, wanted: int) -> list:
    """Those that are as bad; of a choice, those that are bad where they are chosen."""
    pairs = list(zip(entry.equation.invars, entry.ins, strict=True))
    bad = [(a, x) for a, x in pairs if level(x) >= wanted]
    if entry.numeric.back is Back.CHOSEN:
        y = entry.tape.values[result]
        is_bad = levels(y, np.ndim(y)) > 0
        same = [(a, x) for a, x in bad if np.shape(x) == np.shape(y)]
        chosen = [(a, x) for a, x in same if np.any((levels(x, np.ndim(x)) >= wanted) & is_bad)]
        bad = chosen or bad
    return [a for a, _ in bad]


def value_at(tape: Tape, atom: Any, wanted: int) -> tuple[Origin, Operation | None]:
    """The origin of a value; of a NaN that is made of infinities, what made the first of these.

    Second is then the operation that makes NaN of it.
    """
    source = origin(tape, atom, wanted)
    if not isinstance(source, Operation):
        return source, None
    entry = source.entry
    pairs = zip(entry.equation.invars, entry.ins, strict=True)
    infinite = [a for a, x in pairs if level(x) == INF and not entry.tape.is_constant(a)]
    every = [origin(entry.tape, a, INF) for a in infinite]
    roots = [root for root in every if isinstance(root, Operation)]
    if not roots or max(map(level, entry.outs)) < NAN:
        return source, None
    root = min(roots, key=lambda r: r.entry.order)
    package = (entry.place.location.package or "").partition(" ")[0]
    if package in MASKING and is_bad_at("log of zero")(root.entry.equation):
        return source, None
    return root, source


def infinite_argument(operation: Operation) -> Argument | None:
    """The argument whose inf an operation makes a NaN of, if it is one's."""
    entry = operation.entry
    for atom, x in zip(entry.equation.invars, entry.ins, strict=True):
        if level(x) == INF and not entry.tape.is_constant(atom):
            root = origin(entry.tape, atom, INF)
            if isinstance(root, Argument):
                return root
    return None


# -- Where a cotangent is from.

Answer = TypeVar("Answer")
Onward = tuple[Sequence[TapeVariable], Sequence[Answer]]  # where to look next, and what is there


def _followed(
    look: Callable[[Tape, Any], Onward[Answer]], start: Iterable[TapeVariable]
) -> list[Answer]:
    """Depth-first from some variables on: all answers of ``look``, which says where to go on."""
    todo, seen, answers = list(start), set(), []
    while todo:
        variable = todo.pop()
        if variable not in seen:
            seen.add(variable)
            onward, there = look(*variable)
            todo += onward
            answers += there
    return answers


def faults(tape: Tape, atoms: Iterable[Any]) -> list[Fault]:
    """The operations and sums that made the cotangents of some values not finite."""
    return _followed(_faults_at, [(tape, atom) for atom in atoms])


def _faults_at(tape: Tape, atom: Any) -> Onward[Fault]:
    if not level(tape.cotangents.get(atom)):
        return [], []
    bad_results = [j for j in results_of(tape, atom) if level(tape.of_results[j])]
    outside = [_outside_of(tape, j, False) for j in bad_results]
    onward, there = [variable for variable in outside if variable], []
    bad = [(entry, k) for entry, k in tape.uses[atom] if level(entry.in_cotangents[k])]
    if not bad and not onward:
        return [], [_sum_of(tape, atom)]
    for entry, k in bad:
        later = [
            v for v, g in zip(entry.equation.outvars, entry.out_cotangents, strict=True) if level(g)
        ]
        is_opened = entry.inside and entry.inside.is_differentiated
        inner = entry.inside.operand(k, is_zero=False) if is_opened else None
        if later:
            onward += [(tape, v) for v in later]
        elif inner and level(inner[0].cotangents.get(inner[1])):
            onward.append(inner)
        else:
            is_sum = isinstance(entry.inside, InScan)
            there.append(_sum_of(tape, atom) if is_sum else Operation(entry))
    return onward, there


def _outside_of(tape: Tape, result: int, is_zero: bool) -> TapeVariable | None:
    """The variable outside of a program that a result of it is; None for the loss."""
    return tape.within and tape.within.entry.inside.output(tape, result, is_zero)


def runs_once(entry: Entry) -> bool:
    """Whether an entry holds a program that runs once."""
    return bool(entry.inside) and not isinstance(entry.inside, InScan | InWhile)


def results_of(tape: Tape, atom: Any) -> list[int]:
    """The results of a program that a value is."""
    return [j for j, a in enumerate(tape.jaxpr.outvars) if a is atom]


def _sum_of(tape: Tape, atom: Any) -> Sum:
    """A sum of cotangents, of the value outside of the programs around."""
    while atom not in tape.made and tape.within:
        holder, number = tape.within.entry, tape.jaxpr.invars.index(atom)
        if isinstance(holder.inside, InScan) and holder.inside.is_carry(number):
            return Sum(Carry(holder, tape.steps[-1]))
        tape, atom = tape.outside(number)
    made = tape.made.get(atom)
    return Sum(Operation(made) if made else Argument(tape.jaxpr.invars.index(atom)))


# -- Where a cotangent ends.


def cuts(tape: Tape, atom: Any) -> list[Cut]:
    """The entries with a cotangent, and an operand without, on all ways from a value on."""
    return _followed(_cuts_at, [(tape, atom)])


def _cuts_at(tape: Tape, atom: Any) -> Onward[Cut]:
    live = [(e, k) for e, k in tape.uses[atom] if not holds_zeros(e.in_cotangents[k])]
    if live and holds_zeros(tape.cotangents.get(atom)):
        return [], [Cut(*live[0], Way.CANCELS)]
    looks = [_cuts_at_operand(entry, k) for entry, k in tape.uses[atom] if (entry, k) not in live]
    looks += [_cuts_behind(tape, j) for j in results_of(tape, atom)]
    onward = [variable for variables, _ in looks for variable in variables]
    return onward, [cut for _, there in looks for cut in there]


def _cuts_behind(tape: Tape, result: int) -> Onward[Cut]:
    """The way on from a result of a program inside; a cut if nobody reads this carry."""
    behind = _outside_of(tape, result, True)
    if behind is None or tape.within is None:
        return [], []
    is_next = behind[0] is not tape.within.entry.tape
    made = _maker(tape, tape.jaxpr.outvars[result])
    if is_next and made and not _is_read(*behind):
        return [], [Cut(made, 0, Way.CARRY)]
    return [behind], []


def _is_read(tape: Tape, atom: Any) -> bool:
    return bool(tape.uses[atom] or results_of(tape, atom))


def _maker(tape: Tape, atom: Any) -> Entry | None:
    """The operation that makes a value, inside of calls and before moves."""
    entry = tape.made.get(atom)
    deeper = None
    if entry and runs_once(entry):
        deeper = _maker(*entry.inside.result(entry.equation.outvars.index(atom), 0))
    elif entry and entry.numeric.back is Back.MOVED:
        deeper = _maker(tape, entry.equation.invars[0])
    return deeper or entry


def _cuts_at_operand(entry: Entry, k: int) -> Onward[Cut]:
    """The cut of an operand without a cotangent, or where to look for it."""
    if not holds_floats(entry.ins[k]):
        return [], []
    if isinstance(entry.inside, InWhile):
        return _cuts_at_loop(entry, entry.inside, k)
    if entry.equation.primitive in STOPPING:
        return [], _used(Way.OPERATION, entry, k, entry.equation.outvars)
    if _is_emptied(entry, k):
        return [], _used(Way.EMPTY, entry, k, entry.equation.outvars)
    results, active, inside = entry.equation.outvars, entry.tape.active, entry.inside
    there = _used(Way.OPERATION, entry, k, [v for v in results if v not in active])
    if (entry.alive or there) and inside and inside.is_differentiated:
        inner = inside.operand(k, is_zero=True)
        if inner and isinstance(inside, InBranch) and not _is_read(*inner):
            return [], [Cut(entry, k, Way.BRANCH)]
        if inner:
            return [inner], []
    if entry.alive:
        return [], [Cut(entry, k)]
    return [(entry.tape, v) for v in results if v in active], there


def _is_emptied(entry: Entry, k: int) -> bool:
    """Whether an operation takes no element of an operand, or a scan takes no step."""
    has_no_step = scan_length(entry.equation) == 0
    has_no_result = bool(entry.outs) and not any(map(np.size, entry.outs))
    return bool(np.size(entry.ins[k])) and (has_no_step or has_no_result)


def _used(way: Way, entry: Entry, k: int, results: Iterable[Any]) -> list[Cut]:
    """The cut at an operation without a derivative, if one of some results of it is used."""
    use = max((reached(entry.tape, v) for v in results), default=Reach.NOTHING)
    if use is Reach.NOTHING:
        return []
    is_control = use is Reach.CONTROL and way is Way.OPERATION
    return [Cut(entry, k, Way.CONTROL if is_control else way)]


def _cuts_at_loop(entry: Entry, inside: InWhile, k: int) -> Onward[Cut]:
    """The cut at a loop of unknown length, or where to look for it in its first iteration.

    What only its condition reads, ends it.
    """
    is_used = bool(_used(Way.OPERATION, entry, k, entry.equation.outvars))
    if is_used and k < inside.first:
        return [], [Cut(*_in_condition(inside, k), Way.CONTROL)]
    body = inside.begun if is_used else None
    return ([(body, body.jaxpr.invars[k - inside.first])], []) if body else ([], [])


def is_of_users_rule(entry: Entry) -> bool:
    """Whether an entry is a function with a custom rule of the user's."""
    if not has_custom_rule(entry.equation):
        return False
    return is_users(function_file(entry.equation) or "<frozen")


class Reach(enum.IntEnum):
    """What a value gets to; of several uses the largest counts."""

    NOTHING = 0
    CONTROL = 1  # it chooses the branch of what has a cotangent, or ends its loop
    DATA = 2  # what has a cotangent, or the loss, is computed from it


class Use(NamedTuple):
    """A variable that a value has come to, and as what."""

    tape: Tape
    atom: Any
    reach: Reach


def reached(tape: Tape, atom: Any) -> Reach:
    """The use of a value on all ways to what has a cotangent, and to the loss."""
    todo, seen, most = [Use(tape, atom, Reach.DATA)], set(), Reach.NOTHING
    while todo:
        use = todo.pop()
        if use in seen:
            continue
        seen.add(use)
        for entry, k in use.tape.uses[use.atom]:
            here, further = _use(entry, k, use.reach)
            most = max(most, here)
            todo += further
        for result in results_of(use.tape, use.atom):
            behind = _behind(use.tape, result)
            most = most if behind else max(most, use.reach)
            todo += [Use(*variable, use.reach) for variable in behind]
    return most


def _use(entry: Entry, k: int, reach: Reach) -> tuple[Reach, list[Use]]:
    """The use of an operand by an operation with a cotangent, or where to look for uses."""
    inside = entry.inside if entry.alive else None
    if inside and inside.is_differentiated and (variable := inside.operand(k, is_zero=True)):
        return Reach.NOTHING, [Use(variable[0], variable[1], reach)]
    is_choice = k == 0 and chooses_derivative(entry)
    results = data_results(entry.equation, k)
    passed = [reach if is_data and not is_choice else Reach.CONTROL for is_data in results]
    if entry.alive:
        return max(passed, default=Reach.CONTROL), []
    pairs = zip(entry.equation.outvars, passed, strict=True)
    return Reach.NOTHING, [Use(entry.tape, v, way) for v, way in pairs]


def chooses_derivative(entry: Entry) -> bool:
    """Whether an operation chooses among equal numbers, of which some are detached."""
    if entry.numeric.back is not Back.CHOSEN:
        return False
    first, *others = map(wide, entry.ins[1:])
    return all(np.array_equal(first, x) for x in others)


def _behind(tape: Tape, result: int) -> list[TapeVariable]:
    """The variables that a result of a program is: outside, and in the next step."""
    if tape.within is None:
        return []
    entry = tape.within.entry
    behind = [(entry.tape, entry.equation.outvars[result])]
    if isinstance(entry.inside, InScan) and result < entry.inside.carried:
        behind.append((tape, tape.jaxpr.invars[entry.inside.fixed + result]))
    return behind


def _in_condition(inside: InWhile, operand: int) -> tuple[Entry, int]:
    """The operation in the condition of a loop that has no derivative; else the loop."""
    tape = inside.tested()
    read = {tape.jaxpr.invars[operand]}
    for entry in tape.entries:
        operands = enumerate(entry.equation.invars)
        reads = [k for k, a in operands if type(a) is not Literal and a in read]
        if reads and not any(map(holds_floats, entry.outs)):
            return entry, reads[0]
        if reads:
            read |= set(entry.equation.outvars)
    return inside.entry, operand


# -- What raises.


def raised_from(raised: Raised) -> Origin | None:
    """The origin of what is not finite in the operands of an operation that raises, if any is."""
    entry = raised.entry
    if raised.is_backward:
        return None
    for atom, x in zip(entry.equation.invars, entry.ins, strict=True):
        if level(x) and not entry.tape.is_constant(atom):
            return value_at(entry.tape, atom, level(x))[0]
    return None
