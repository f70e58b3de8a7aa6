"""Lines of the user's as names: the value of a line is the last floating one that a run computes.

JAX keeps with each operation the calls that made it, with the instruction of each. A **run** of a
line lasts from its first operation to the last one before the function goes on to another line, or
comes back to an instruction that it has passed, as in a loop. What is called from the line is part
of its run. Where a loop repeats one instruction, its runs are the repetitions in its operations.

A statement of several lines is one line, its first, and so is a lambda. A lambda or a comprehension
on the line that calls it is part of this line. A function of JAX, of an installed package or of
this one has no lines, and an operation of it counts for the line that called it.
"""

import dataclasses
import dis
import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple, TypeGuard, TypeVar

from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._arrays import matches
from clipgrad._names.modules import without_added
from clipgrad._names.places import Place, is_foreign, is_users
from clipgrad._names.scopes import transforms
from clipgrad._names.statements import statement_at
from clipgrad._programs import (
    CALLS,
    JIT,
    REMAT,
    Does,
    called_program,
    does,
    held_programs,
    holds_floats,
    kind_of,
    opened,
    read_once,
    value_programs,
)

LINE = "line"  # the kind of the name of a line that computes
CALL = "call"  # of one whose value a function computes that it calls
BACKWARD = "backward"  # of one in the backward pass of a gradient that the program computes
OF_LINES = frozenset({LINE, CALL, BACKWARD})
DEPTH = -2  # the last number of the position of a line's value; one less for the line that called
_INLINE = frozenset({"<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_CALLS = (CALLS, JIT, REMAT)
_PATTERN = re.compile(r"!?(?P<file>.*(?:\.py|>)):(?P<line>\d+|\*)", re.DOTALL)
Depth = TypeVar("Depth", int, None)
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()


class Line(NamedTuple):
    """A line of the user's files.

    Attributes:
      file: with its folder.
      number: the first line of the statement.
      last: the last line of the statement.
      function: the function that it is in, such as ``"layer"`` or ``"Block.__call__"``.
      variable: what the statement assigns, as far as the source can be read, or "".
    """

    file: str
    number: int
    last: int
    function: str
    variable: str

    @property
    def key(self) -> str:
        """A name that is equal for the same line only."""
        return f"{self.file}:{self.number}"

    @property
    def call(self) -> str:
        """The line as one of the calls that lead to another, such as ``"loss:16"``."""
        return f"{self.function}:{self.number}"


class LineValue(NamedTuple):
    """A value that one run of a line computes.

    Attributes:
      position: the key of its notes in a `ValueHook`.
      line: the line.
      kind: ``LINE``, ``CALL`` if a function that the line calls computes it, or ``BACKWARD``.
      calls: the lines that led there, outermost first, the line itself the last.
      run: which time the line ran, from 1 on, in the order of the program.
      runs: how often it ran; a scan's steps are one run.
      place: the equation that computes it, and those around.
      variable: the result of the equation.
      is_copy: whether the run only moves numbers, as an index or a transpose does.
    """

    position: tuple[int, ...]
    line: Line
    kind: str
    calls: tuple[Line, ...]
    run: int
    runs: int
    place: Place
    variable: Var
    is_copy: bool

    @property
    def led_by(self) -> str:
        """The calls, such as ``"loss:16 > layer:8"``."""
        return shown_calls(self.calls)

    def __str__(self) -> str:
        return self.named(os.path.basename(self.line.file))

    def named(self, file: str) -> str:
        """The line in words: ``"model.py:8, h in layer, the second of 4 runs"``."""
        what = f"{self.line.variable} in " if self.line.variable else "in "
        words = f"{file}:{self.line.number}, {what}{self.line.function}"
        return words if self.runs == 1 else f"{words}, {_nth(self.run)} of {self.runs} runs"


def shown_calls(calls: Iterable[Line]) -> str:
    return " > ".join(line.call for line in calls)


def _nth(number: int) -> str:
    return f"the {_ORDINALS[number - 1]}" if number <= len(_ORDINALS) else f"number {number}"


# Patterns and names


def is_line_pattern(pattern: Any) -> TypeGuard[str]:
    """Whether a text means lines: ``"model.py:14"``, ``"model.py:*"``, ``"nn/model.py:14"``."""
    return isinstance(pattern, str) and _PATTERN.fullmatch(pattern) is not None


def lines_matched(pattern: str, lines: Iterable[Line]) -> list[Line]:
    """The lines that a pattern means: statements that begin at the number, or else that include it.

    The file is the end of a path, in which ``*`` and ``**`` are as elsewhere.
    """
    match = _PATTERN.fullmatch(pattern)
    if match is None:
        return []
    there = lines_of_file(match["file"], lines)
    if match["line"] == "*":
        return there
    number = int(match["line"])
    exact = [line for line in there if line.number == number]
    return exact or [line for line in there if line.number <= number <= line.last]


def lines_of_file(file: str, lines: Iterable[Line]) -> list[Line]:
    """The lines of the files that a pattern of a file matches."""
    end = "**/" + file.removeprefix("./").strip("/")
    return [line for line in lines if matches(end, _path(line.file))]


def nearest_lines(pattern: str, lines: Sequence[Line], most: int = 5) -> list[Line]:
    """The lines nearest to a pattern's number in the same file; if there are none, in all files."""
    match = _PATTERN.fullmatch(pattern)
    if match is None:
        return []
    there = lines_of_file(match["file"], lines) or list(lines)
    number = 0 if match["line"] == "*" else int(match["line"])
    near = sorted(there, key=lambda line: abs(line.number - number))[:most]
    return sorted(near, key=lambda line: (line.file, line.number))


def names_of_lines(lines: Iterable[Line]) -> dict[str, str]:
    """The name of each line, by key: the shortest end of the file's path that is unique."""
    lines = list(lines)
    files = {line.file for line in lines}
    short = {file: _shortest(file, files) for file in files}
    return {line.key: f"{short[line.file]}:{line.number}" for line in lines}


def _shortest(file: str, files: Iterable[str]) -> str:
    segments = _path(file).split("/")
    others = [_path(other).split("/") for other in files if other != file]
    ends = (segments[-count:] for count in range(1, len(segments)))
    alone = (end for end in ends if all(other[-len(end) :] != end for other in others))
    return "/".join(next(alone, segments))


def _path(file: str) -> str:
    return file.replace(os.sep, "/").strip("/")


# Runs


class _Frame(NamedTuple):
    """A call of the user's, with the lambdas and comprehensions of its line that it is in."""

    codes: tuple[CodeType, ...]
    instructions: tuple[int, ...]
    line: Line
    is_called_back: bool  # whether a package calls the function, in a call of the user's

    def joined(self, inside: "_Frame") -> "_Frame":
        """This call with a lambda or a comprehension on its line."""
        codes, instructions = self.codes + inside.codes, self.instructions + inside.instructions
        is_called_back = self.is_called_back or inside.is_called_back
        return _Frame(codes, instructions, self.line, is_called_back)

    @property
    def is_in_loop(self) -> bool:
        pairs = zip(self.codes, self.instructions, strict=True)
        return any(a <= i <= b for code, i in pairs for a, b in _loops(code))

    def may_come_to(self, other: "_Frame") -> bool:
        """Whether one call of the function may come from here to another place in it."""
        if self.codes[0] is not other.codes[0]:
            return False
        first, then = self.instructions[0], other.instructions[0]
        loops = _loops(self.codes[0])
        return first <= then or any(
            a <= min(first, then) and max(first, then) <= b for a, b in loops
        )


@dataclasses.dataclass(eq=False)
class Run:
    """A run of a line within one program.

    Attributes:
      frame: where it is.
      calls: the lines that led there, the line itself the last.
      is_backward: whether it is of the backward pass of a gradient that the program computes.
      last: the number of its last equation.
      floats: the floating values that it computes, and the kinds of the line by each.
      is_copy: whether it only moves numbers.
    """

    frame: _Frame
    calls: tuple[Line, ...]
    is_backward: bool = False
    last: int = -1
    floats: list[tuple[Var, str]] = dataclasses.field(default_factory=list)
    is_copy: bool = True

    @property
    def line(self) -> Line:
        return self.calls[-1]

    def goes_on(self, frame: _Frame) -> bool:
        """Whether an operation of this frame may be of this run, by the frame alone."""
        same = self.frame.codes[0] is frame.codes[0] and self.frame.line == frame.line
        # A generator on the line runs in turns with the line: only what both are in counts.
        pairs = zip(self.frame.instructions, frame.instructions, strict=False)
        before, now = zip(*pairs, strict=True)
        return same and now >= before

    def value(self, last_uses: dict[Var, int]) -> tuple[Var, str]:
        """The last value that something reads after the run, or else the last one; its kind."""
        read = [pair for pair in self.floats if last_uses.get(pair[0], -1) > self.last]
        variable, kind = (read or self.floats)[-1]
        return variable, BACKWARD if self.is_backward else kind


class LinesOfProgram(NamedTuple):
    """The lines of the equations of one program, and the runs whose value each variable is."""

    calls: dict[int, tuple[Line, ...]]  # of each equation by its id, outermost first
    runs: dict[Var, list[tuple[Run, str]]]  # innermost first, with the kind of the line

    def key(self, equation: JaxprEqn) -> str:
        """The line of an equation, which lambdas of the same line in its programs are part of."""
        calls = self.calls[id(equation)]
        return calls[-1].key if calls else ""


@read_once
def lines_of_program(jaxpr: Any) -> LinesOfProgram:
    """Return the lines of a program, without those of the programs inside of it."""
    stacks = _stacks(jaxpr)
    restarts = _restarts(jaxpr, stacks)
    values = without_added(jaxpr)
    present: list[Run] = []
    runs: list[Run] = []
    for number, (equation, stack) in enumerate(zip(jaxpr.eqns, stacks, strict=True)):
        if not stack:
            continue
        is_backward = "transpose" in transforms(equation)
        go_on = _begun_backward if is_backward else _begun
        runs += go_on(present, stack, restarts.get(number))
        floats = [v for v in equation.outvars if v in values and holds_floats(v)]
        kind = CALL if _is_call_of_lines(equation, stack[-1].line) else LINE
        for run in reversed(present):
            run.last = number
            run.floats += [(v, kind) for v in floats]
            run.is_copy = run.is_copy and _only_copies(equation)
            kind = CALL
    pairs = zip(jaxpr.eqns, stacks, strict=True)
    calls = {id(equation): tuple(frame.line for frame in stack) for equation, stack in pairs}
    return LinesOfProgram(calls, _by_value(runs, _last_uses(jaxpr)))


def _only_copies(equation: JaxprEqn) -> bool:
    """Whether an equation computes no floating numbers from others, but moves or makes them."""
    read = [v for v in equation.invars if not isinstance(v, Literal)]
    if not (any(map(holds_floats, read)) and any(map(holds_floats, equation.outvars))):
        return True
    if programs := held_programs(equation):
        return all(_only_copies(e) for program in programs for e in opened(program)[0].eqns)
    return does(equation) is Does.COPIES


def _by_value(runs: Sequence[Run], last_uses: dict[Var, int]) -> dict[Var, list[tuple[Run, str]]]:
    """The runs whose value each variable is, innermost first."""
    runs_of: dict[Var, list[tuple[Run, str]]] = {}
    for run in reversed(runs):
        if run.floats:
            variable, kind = run.value(last_uses)
            runs_of.setdefault(variable, []).append((run, kind))
    return runs_of


def _last_uses(jaxpr: Any) -> dict[Var, int]:
    """For each variable the number of the last equation that reads it; returned ones are last."""
    uses = {a: i for i, e in enumerate(jaxpr.eqns) for a in e.invars if not isinstance(a, Literal)}
    return uses | {a: len(jaxpr.eqns) for a in jaxpr.outvars if not isinstance(a, Literal)}


def _begun_backward(present: list[Run], stack: Sequence[_Frame], _: int | None) -> list[Run]:
    """The run of the backward pass that begins, which goes through the lines in another order."""
    calls = tuple(frame.line for frame in stack)
    if present and present[-1].is_backward and present[-1].calls == calls:
        return []
    present[:] = [Run(stack[-1], calls, is_backward=True)]
    return present[:]


def _begun(present: list[Run], stack: Sequence[_Frame], restart: int | None) -> list[Run]:
    """The runs that an operation is the first of, which are present now; those before may end."""
    kept = _kept(present, stack, restart)
    lines = tuple(frame.line for frame in stack)
    begun = [Run(stack[depth], lines[: depth + 1]) for depth in range(kept, len(stack))]
    present[kept:] = begun
    return begun


def _kept(present: list[Run], stack: Sequence[_Frame], restart: int | None) -> int:
    """The number of runs that an operation with these calls goes on with."""
    kept = 0
    if present and present[-1].is_backward:
        return 0
    for run, frame in zip(present, stack, strict=False):
        if kept == restart:
            return kept
        if not run.goes_on(frame):
            return kept if run.frame.may_come_to(frame) else _depth_of_loop(stack[: kept + 1], kept)
        is_further = frame.instructions > run.frame.instructions
        run.frame = frame
        kept += 1
        if is_further:
            return kept
    return kept


def _is_call_of_lines(equation: JaxprEqn, line: Line) -> bool:
    """Whether an equation is a function that this line calls, and that has other lines."""
    is_call = kind_of(equation) in _CALLS
    return is_call and bool(_lines_inside(called_program(equation)).keys() - {line.key})


@read_once
def _lines_inside(jaxpr: Any) -> dict[str, Line]:
    """Return the lines of a program, and of all programs inside it, by their keys."""
    lines: dict[str, Line] = {}
    for run, kind in itertools.chain(*lines_of_program(jaxpr).runs.values()):
        lines |= {} if kind == BACKWARD else {run.line.key: run.line}
    for inner in (program for equation in jaxpr.eqns for program in held_programs(equation)):
        lines = _lines_inside(inner) | lines
    return lines


def lines_inside(program: Any) -> list[Line]:
    """The lines of a program and of all programs inside it that compute a value."""
    return list(_lines_inside(program).values())


def _restarts(jaxpr: Any, stacks: Sequence[tuple[_Frame, ...]]) -> dict[int, int]:
    """The equations with which a line runs again at one instruction, and the depth of its call."""
    restarts = {}
    numbers = [number for number, stack in enumerate(stacks) if stack]
    first = 0
    for end in range(1, len(numbers) + 1):
        if end < len(numbers) and _is_same(stacks[numbers[end]], stacks[numbers[first]]):
            continue
        group, first = numbers[first:end], end
        depth = _depth_of_loop(stacks[group[0]], None) if len(group) > 1 else None
        period = len(group) if depth is None else _period([_token(jaxpr.eqns[i]) for i in group])
        restarts |= dict.fromkeys(group[period::period], depth)
    return restarts


def _is_same(stack: tuple[_Frame, ...], other: tuple[_Frame, ...]) -> bool:
    return [frame[:2] for frame in stack] == [frame[:2] for frame in other]


def _depth_of_loop(stack: Sequence[_Frame], otherwise: Depth) -> int | Depth:
    """The depth of the innermost call in a loop, or else of one that a package may repeat."""
    loops = [depth for depth, frame in enumerate(stack) if frame.is_in_loop]
    back = [depth for depth, frame in enumerate(stack) if frame.is_called_back]
    return (loops or back or [otherwise])[-1]


def _token(equation: JaxprEqn) -> Any:
    traceback = equation.source_info.traceback
    return equation.primitive, traceback and traceback.raw_frames()[1]


def _period(tokens: Sequence[Any]) -> int:
    """The length of the shortest part that the whole repeats."""
    count = len(tokens)
    lengths = (n for n in range(1, count) if count % n == 0)
    return next((n for n in lengths if tokens[n:] == tokens[:-n]), count)


@functools.lru_cache(maxsize=1024)
def _loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """The instructions of a function between which it jumps back."""
    jumps = (i for i in dis.get_instructions(code) if i.opcode in (*dis.hasjrel, *dis.hasjabs))
    return tuple((jump.argval, jump.offset) for jump in jumps if jump.argval <= jump.offset)


def _stacks(jaxpr: Any) -> list[tuple[_Frame, ...]]:
    """The calls of the user's that made each equation of a program, outermost first."""
    file = getattr(getattr(jaxpr, "debug_info", None), "func_filename", None)
    return [() if is_foreign(equation, file) else _stack(equation) for equation in jaxpr.eqns]


def _stack(equation: JaxprEqn) -> tuple[_Frame, ...]:
    traceback = equation.source_info.traceback
    codes, instructions = traceback.raw_frames() if traceback is not None else ((), ())
    stack: list[_Frame] = []
    is_called_back = False
    for code, instruction in zip(reversed(codes), reversed(instructions), strict=True):
        if not is_users(code.co_filename):
            is_called_back = bool(stack)
            continue
        line = _line(code, code.co_filename, instruction)
        frame = _Frame((code,), (instruction,), line, is_called_back)
        is_inside = code.co_name in _INLINE and stack and stack[-1].line.key == frame.line.key
        stack.append(stack.pop().joined(frame) if is_inside else frame)
        is_called_back = False
    return tuple(stack)


@functools.lru_cache(maxsize=4096)
def _line(code: CodeType, file: str, instruction: int) -> Line:
    """The line of an instruction; codes of two files may be equal."""
    positions = list(code.co_positions())
    number = positions[instruction // 2][0] or code.co_firstlineno
    statement = statement_at(file, number, code.co_name == "<lambda>")
    function = code.co_qualname.rpartition("<locals>.")[2]
    return Line(file, statement.first, statement.last, function, statement.variable)


# The values of lines in a whole program


def line_values(
    program: Any, programs: Callable[[JaxprEqn], list[Any]] = value_programs
) -> list[LineValue]:
    """The value of each run of each line, in the order of the program.

    ``programs`` are those inside of an equation that are entered.
    """
    values = list(_line_values(program, programs))
    key = lambda value: (value.line.key, value.kind == BACKWARD)  # noqa: E731
    runs = Counter(map(key, values))
    ran: Counter[Any] = Counter()
    numbered = []
    for value in values:
        ran[key(value)] += 1
        numbered.append(value._replace(run=ran[key(value)], runs=runs[key(value)]))
    return numbered


def _line_values(
    program: Any,
    programs: Callable[[JaxprEqn], list[Any]],
    around: tuple[int, ...] = (),
    parent: Place | None = None,
    calls: tuple[Line, ...] = (),
) -> Iterator[LineValue]:
    jaxpr = opened(program)[0]
    lines = lines_of_program(jaxpr)
    for number, equation in enumerate(jaxpr.eqns):
        place, inside = Place(equation, parent), (*calls, *lines.calls[id(equation)])
        for i, inner in enumerate(programs(equation)):
            values = _line_values(inner, programs, (*around, number, i), place, inside)
            yield from (value for value in values if value.line.key != lines.key(equation))
        for output, variable in enumerate(equation.outvars):
            for i, (run, kind) in enumerate(lines.runs.get(variable, ())):
                position = (*around, number, output, DEPTH - i)
                whole = (*calls, *run.calls)
                yield LineValue(position, run.line, kind, whole, 1, 1, place, variable, run.is_copy)
