"""The entry of a tape that makes good into bad: three questions that go along it.

Where a value is from that is not finite leads from the loss to the arguments (`origin`). Where a
cotangent is from that is not finite, and where one ends that is zero, lead from an argument to the
loss (`faults`, `cuts`). A question goes inside of an entry only where it is about that entry.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from clipgrad._diagnose.calls import InBranch
from clipgrad._diagnose.levels import INF, NAN, holds_zeros, level, levels, wide
from clipgrad._diagnose.loops import InScan, InWhile
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

# Of a cut what is not in the entry: the branch, the next step, the uses of a value, a result that
# has no elements, and one that only chooses a branch or ends a loop.
BRANCH, CARRY, CANCELS, EMPTY, CONTROL = "branch", "carry", "cancels", "empty", "control"
DATA = "data"  # a use of a value that is not `CONTROL`


class Found(NamedTuple):
    """An entry that makes good into bad, or an argument of the loss.

    Attributes:
      kind: the kind of its finding.
      entry: the entry; None for an argument.
      number: of the operand, or of the argument.
      is_constant: whether the entry reads a constant that is not finite.
      steps: of a sum in the carry of a scan, the steps of it.
      is_backward: whether an operation raises in the backward pass.
      way: of a cut how it is one, if not by its entry: `BRANCH`, `CARRY`, `CANCELS`, `EMPTY` or
        `CONTROL`.
      is_everywhere: of a cut whether it is one at every step of the scan around.
    """

    kind: str
    entry: Any = None
    number: int = 0
    is_constant: bool = False
    steps: tuple[int, ...] = ()
    way: str = ""
    is_backward: bool = False
    is_everywhere: bool = False

    @property
    def step(self) -> int | None:
        """The step of the innermost scan; None for all of them."""
        if self.is_everywhere:
            return None
        steps = self.steps or (self.entry.tape.steps if self.entry else ())
        return steps[-1] if steps else None

    @property
    def device(self) -> str | None:
        """The coordinates of the devices whose values or cotangents are bad."""
        if self.entry is None or self.kind == "zero" or not self.entry.tape.runs.axes:
            return None
        xs = self.entry.outs if self.kind == "value" else self.entry.back
        bad = np.max([levels(x, 1) for x in xs if x is not None and holds_floats(x)], axis=0)
        return self.entry.place.device([(int(d),) for d in np.flatnonzero(bad == bad.max())])


# -- Where a value is from.


def origin(tape: Tape, atom: Any, wanted: int, reader: Entry | None = None) -> Found:
    """The entry or argument that made a value as bad as it is ``wanted``."""
    while True:
        if tape.is_constant(atom):
            return Found("value", reader, is_constant=True)
        entry = tape.made.get(atom)
        if entry is None:
            number = tape.jaxpr.invars.index(atom)
            if tape.within is None:
                return Found("value", None, number)
            holder = tape.within.entry
            reader = reader or holder
            tape, atom = holder.inside.input(tape, number, wanted)
        elif entry.inside:
            reader = entry
            tape, atom = entry.inside.result(entry.equation.outvars.index(atom), wanted)
        else:
            bad = _bad_operands(entry, atom, wanted)
            moving = [a for a in bad if not tape.is_constant(a)]
            if not moving:
                return Found("value", entry, is_constant=bool(bad))
            atom, reader = moving[0], entry


def _bad_operands(entry: Entry, result: Any, wanted: int) -> list:
    """Those that are as bad; of a choice, those that are bad where they are chosen."""
    pairs = list(zip(entry.equation.invars, entry.ins, strict=True))
    found = [(a, x) for a, x in pairs if level(x) >= wanted]
    if entry.numeric.back is Back.CHOSEN:
        y = entry.tape.values[result]
        bad = levels(y, np.ndim(y)) > 0
        same = [(a, x) for a, x in found if np.shape(x) == np.shape(y)]
        chosen = [(a, x) for a, x in same if np.any((levels(x, np.ndim(x)) >= wanted) & bad)]
        found = chosen or found
    return [a for a, _ in found]


def value_at(tape: Tape, atom: Any, wanted: int) -> tuple[Found, Found | None]:
    """The origin of a value; of a NaN that is made of infinities, what made the first of these.

    Second is then the operation that makes NaN of it.
    """
    found = origin(tape, atom, wanted)
    entry = found.entry
    if entry is None or found.is_constant:
        return found, None
    pairs = zip(entry.equation.invars, entry.ins, strict=True)
    infinite = [a for a, x in pairs if level(x) == INF and not entry.tape.is_constant(a)]
    roots = [origin(entry.tape, a, INF) for a in infinite]
    roots = [r for r in roots if r.entry and not r.is_constant]
    if not roots or max(map(level, entry.outs)) < NAN:
        return found, None
    root = min(roots, key=lambda r: r.entry.order)
    package = (entry.place.location.package or "").partition(" ")[0]
    if package in MASKING and is_bad_at("log of zero")(root.entry.equation):
        return found, None
    return root, found


def infinite_argument(found: Found) -> Found | None:
    """The argument whose inf an operation makes a NaN of, if it is one's."""
    entry = found.entry
    for atom, x in zip(entry.equation.invars, entry.ins, strict=True):
        if level(x) == INF and not entry.tape.is_constant(atom):
            root = origin(entry.tape, atom, INF)
            if root.entry is None and not root.is_constant:
                return root
    return None


# -- Where a cotangent is from.

Way = tuple[Tape, Any]  # a tape, and a variable of it
LookedAt = tuple[list[Way], list[Found]]  # where a question leads to, and what it has found


def _followed(look: Callable[[Tape, Any], LookedAt], start: Iterable[Way]) -> list[Found]:
    """All that a question finds on the ways from some values on."""
    todo, seen, found = list(start), set(), []
    while todo:
        way = todo.pop()
        if way not in seen:
            seen.add(way)
            ways, own = look(*way)
            todo += ways
            found += own
    return found


def faults(tape: Tape, atoms: Iterable[Any]) -> list[Found]:
    """The entries that made the cotangents of some values not finite."""
    return _followed(_faults_at, [(tape, atom) for atom in atoms])


def _faults_at(tape: Tape, atom: Any) -> LookedAt:
    if not level(tape.cotangents.get(atom)):
        return [], []
    ways = [
        _outside_of(tape, j, False) for j in results_of(tape, atom) if level(tape.of_results[j])
    ]
    ways, found = [way for way in ways if way], []
    bad = [(entry, k) for entry, k in tape.uses[atom] if level(entry.back[k])]
    if not bad and not ways:
        return [], [_sum_of(tape, atom)]
    for entry, k in bad:
        later = [v for v, g in zip(entry.equation.outvars, entry.got, strict=True) if level(g)]
        inside = entry.inside and entry.inside.is_differentiated
        way = entry.inside.operand(k, is_zero=False) if inside else None
        if later:
            ways += [(tape, v) for v in later]
        elif way and level(way[0].cotangents.get(way[1])):
            ways.append(way)
        else:
            is_sum = isinstance(entry.inside, InScan)
            found.append(_sum_of(tape, atom) if is_sum else Found("vjp", entry, k))
    return ways, found


def _outside_of(tape: Tape, result: int, is_zero: bool) -> Way | None:
    """The variable outside of a program that a result of it is; None for the loss."""
    return tape.within and tape.within.entry.inside.output(tape, result, is_zero)


def runs_once(entry: Entry) -> bool:
    """Whether an entry holds a program that runs once."""
    return bool(entry.inside) and not isinstance(entry.inside, InScan | InWhile)


def results_of(tape: Tape, atom: Any) -> list[int]:
    """The results of a program that a value is."""
    return [j for j, a in enumerate(tape.jaxpr.outvars) if a is atom]


def _sum_of(tape: Tape, atom: Any) -> Found:
    """A sum of cotangents, of the value outside of the programs around."""
    while atom not in tape.made and tape.within:
        holder, number = tape.within.entry, tape.jaxpr.invars.index(atom)
        if isinstance(holder.inside, InScan) and holder.inside.is_carry(number):
            return Found("sum", holder, steps=tape.steps)
        tape, atom = tape.outside(number)
    made = tape.made.get(atom)
    return Found("sum", made, 0 if made else tape.jaxpr.invars.index(atom))


# -- Where a cotangent ends.


def cuts(tape: Tape, atom: Any) -> list[Found]:
    """The entries with a cotangent, and an operand without, on all ways from a value on."""
    return _followed(_cuts_at, [(tape, atom)])


def _cuts_at(tape: Tape, atom: Any) -> LookedAt:
    live = [(e, k) for e, k in tape.uses[atom] if not holds_zeros(e.back[k])]
    if live and holds_zeros(tape.cotangents.get(atom)):
        return [], [Found("zero", *live[0], way=CANCELS)]
    seen = [_cuts_at_operand(entry, k) for entry, k in tape.uses[atom] if (entry, k) not in live]
    seen += [_cuts_behind(tape, j) for j in results_of(tape, atom)]
    return [way for ways, _ in seen for way in ways], [own for _, found in seen for own in found]


def _cuts_behind(tape: Tape, result: int) -> LookedAt:
    """The way on from a result of a program inside; a cut if nobody reads this carry."""
    behind = _outside_of(tape, result, True)
    if behind is None or tape.within is None:
        return [], []
    is_next = behind[0] is not tape.within.entry.tape
    made = _maker(tape, tape.jaxpr.outvars[result])
    if is_next and made and not _is_read(*behind):
        return [], [Found("zero", made, way=CARRY)]
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


def _cuts_at_operand(entry: Entry, k: int) -> LookedAt:
    """The cut of an operand without a cotangent, or where to look for it."""
    if not holds_floats(entry.ins[k]):
        return [], []
    if isinstance(entry.inside, InWhile):
        return _cuts_at_loop(entry, entry.inside, k)
    if entry.equation.primitive in STOPPING:
        return [], _used("", entry, k, entry.equation.outvars)
    if _is_emptied(entry, k):
        return [], _used(EMPTY, entry, k, entry.equation.outvars)
    results, active = entry.equation.outvars, entry.tape.active
    ways = _used("", entry, k, [v for v in results if v not in active])
    inside = entry.inside
    if (entry.alive or ways) and inside and inside.is_differentiated:
        way = inside.operand(k, is_zero=True)
        if way and isinstance(inside, InBranch) and not _is_read(*way):
            return [], [Found("zero", entry, k, way=BRANCH)]
        if way:
            return [way], []
    if entry.alive:
        return [], [Found("zero", entry, k)]
    return [(entry.tape, v) for v in results if v in active], ways


def _is_emptied(entry: Entry, k: int) -> bool:
    """Whether an operation takes no element of an operand, or a scan takes no step."""
    has_no_step = scan_length(entry.equation) == 0
    has_no_result = bool(entry.outs) and not any(map(np.size, entry.outs))
    return bool(np.size(entry.ins[k])) and (has_no_step or has_no_result)


def _used(way: str, entry: Entry, k: int, results: Iterable[Any]) -> list[Found]:
    """The cut at an operation without a derivative, if one of some results of it is used."""
    uses = {reached(entry.tape, v) for v in results} - {""}
    if not uses:
        return []
    return [Found("zero", entry, k, way=way or ("" if DATA in uses else CONTROL))]


def _cuts_at_loop(entry: Entry, inside: InWhile, k: int) -> LookedAt:
    """The cut at a loop of unknown length, or where to look for it in its first iteration.

    What only its condition reads, ends it.
    """
    cuts = _used("", entry, k, entry.equation.outvars)
    if cuts and k < inside.first:
        return [], [Found("zero", *_in_condition(inside, k), way=CONTROL)]
    body = inside.begun if cuts else None
    return ([(body, body.jaxpr.invars[k - inside.first])], []) if body else ([], [])


def is_of_users_rule(entry: Entry) -> bool:
    """Whether an entry is a function with a custom rule of the user's."""
    if not has_custom_rule(entry.equation):
        return False
    return is_users(function_file(entry.equation) or "<frozen")


def reached(tape: Tape, atom: Any) -> str:
    """The use of a value: `DATA` if something with a cotangent, or the loss, is computed from it.

    `CONTROL` if it only chooses the branch of such a computation, or ends its loop; "" if neither.
    """
    todo, seen, ways = [(tape, atom, DATA)], set(), set()
    while todo:
        use = todo.pop()
        if use in seen:
            continue
        seen.add(use)
        tape, atom, way = use
        for entry, k in tape.uses[atom]:
            here, further = _use(entry, k, way)
            ways |= here
            todo += further
        for result in results_of(tape, atom):
            behind = _behind(tape, result)
            ways |= set() if behind else {way}
            todo += [(*variable, way) for variable in behind]
    return DATA if DATA in ways else CONTROL if ways else ""


def _use(entry: Entry, k: int, way: str) -> tuple[set[str], list[tuple[Tape, Any, str]]]:
    """The use of an operand by an operation with a cotangent, or where to look for uses."""
    inside = entry.inside if entry.alive else None
    if inside and inside.is_differentiated and (variable := inside.operand(k, is_zero=True)):
        return set(), [(*variable, way)]
    is_choice = k == 0 and chooses_derivative(entry)
    results = data_results(entry.equation, k)
    passed = [way if is_data and not is_choice else CONTROL for is_data in results]
    if entry.alive:
        return {way if way in passed else CONTROL}, []
    return set(), [(entry.tape, v, w) for v, w in zip(entry.equation.outvars, passed, strict=True)]


def chooses_derivative(entry: Entry) -> bool:
    """Whether an operation chooses among equal numbers, of which some are detached."""
    if entry.numeric.back is not Back.CHOSEN:
        return False
    first, *others = map(wide, entry.ins[1:])
    return all(np.array_equal(first, x) for x in others)


def _behind(tape: Tape, result: int) -> list[Way]:
    """The variables that a result of a program is: outside, and in the next step."""
    if tape.within is None:
        return []
    entry = tape.within.entry
    ways = [(entry.tape, entry.equation.outvars[result])]
    if isinstance(entry.inside, InScan) and result < entry.inside.carried:
        ways.append((tape, tape.jaxpr.invars[entry.inside.fixed + result]))
    return ways


def _in_condition(inside: InWhile, operand: int) -> tuple[Entry, int]:
    """The operation in the condition of a loop that has no derivative; else the loop."""
    tape = inside.tested()
    read = {tape.jaxpr.invars[operand]}
    for own in tape.entries:
        operands = enumerate(own.equation.invars)
        reads = [k for k, a in operands if type(a) is not Literal and a in read]
        if reads and not any(map(holds_floats, own.outs)):
            return own, reads[0]
        if reads:
            read |= set(own.equation.outvars)
    return inside.entry, operand


# -- What raises.


def raised_from(found: Found) -> Found | None:
    """The origin of what is not finite in the operands of an operation that raises, if any is."""
    entry = found.entry
    if found.is_backward:
        return None
    for atom, x in zip(entry.equation.invars, entry.ins, strict=True):
        if level(x) and not entry.tape.is_constant(atom):
            return value_at(entry.tape, atom, level(x))[0]
    return None
