"""The record of a run: a table of the arrays that were seen, and the edges between them."""

import collections
import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from clipgrad._names import OF_LINES

ENTERS = "enters"  # the view of a value that enters a module
THE_LOSS = "the loss"
TEXT = "text"  # the dtype of what is no array
# A framework writes a `Record` with its name, as `clipgrad/torch.py` does. Beside JAX it is matched
# by numbers, and nothing else here knows it. Its rows are, in any order of kinds:
#   "argument": each argument and parameter;
#   "value": what leaves each module, with view "module" and the class of the module as `owner`;
#   "cotangent": that of a value, with the number of the value's row as `node`;
#   "output": one, with the name `THE_LOSS`;
#   "gradient": that of a parameter, with the number of the parameter's row as `node`.
# Each has `turned="all"`, the sketches that `turned_sketches` makes, and as `position` its number
# in the order of computation and two zeros. Edges are only for arrays made of parameters.
JAX, TORCH = "jax", "torch"
LAYERS = "layers"  # as `Row.turned`
PART = "part"  # the view of elements of a leaf that are a leaf, or a part of one, elsewhere

Instance = tuple[int, tuple[int, ...]]  # a row, at the steps of the scans around it


class Numbers(NamedTuple):
    """What was seen of an array.

    Attributes:
      exact: a hash of the values of integers, keys and text; "" for floating numbers.
      sketch: shape (..., orders, 515), steps first. None for keys and text, and where no numbers
        are known. Of what is not the same on each device shape (..., devices, 515).
      moved: how far rounding moves the sketch; None where this was not measured.
      whole: the array itself, for other orders of axes; not in a file.
    """

    exact: str = ""
    sketch: np.ndarray | None = None
    moved: np.ndarray | None = None
    whole: Any = None


NO_NUMBERS = Numbers()


@dataclasses.dataclass
class Row:
    """What an array is that was seen; one inside of a scan is one row for all steps.

    Steps are in the order of time, also those of a scan in reverse.

    Attributes:
      kind: "argument", "value", "output", "cotangent" or "gradient".
      name: the tag or module of a value and of its cotangent; the path of others.
      shape: the shape at one step and on one device.
      dtype: the name of the type; "text" for what is no array.
      leaf: the argument that an argument or a gradient is in, as "args[0]", and its path there.
      node: the number of the row that edges lead to: the value of a cotangent, the argument of a
        gradient, or the row itself.
      view: "tag", "module" for what leaves one, "enters", or "line", "call" and "backward" of a
        user's line, see `LineValue`; of torch's arguments "parameter", "buffer" or "argument";
        `PART` of an argument or a gradient that is a part of another one.
      position: where it is computed: the numbers of operations and programs around, then those of
        its operation and result, and the depth of its module. Of an output it is its age.
      around: for each operation around the number of steps of a scan, negative in reverse; or 0.
      line: the line of the user that computes it, as "file:line".
      calls: of a line the calls that led there, outermost first, such as "loss:16".
      words: of a line what it is, such as "model.py:8, h in layer, the second of 4 runs".
      statement: of a line its file, its function and its text, by which it is known in another
        version of the file.
      is_copy: of a line whether it only moves numbers, as an index or a transpose does.
      owner: the class of torch's module.
      turned: "all" if it has a sketch for each order of its axes, "stack" if for each but the
        first axis; `LAYERS` if it is a stack that has a sketch for each layer, and one's shape.
      numbers: what was seen of it.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    node: int = -1
    view: str = ""
    position: tuple[int, ...] = (-1, 0, 0)
    around: tuple[int, ...] = ()
    line: str = ""
    calls: tuple[str, ...] = ()
    words: str = ""
    statement: str = ""
    is_copy: bool = False
    owner: str = ""
    turned: str = ""
    leaf: tuple[str, str] = ("", "")
    numbers: Numbers = NO_NUMBERS

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(abs(n) for n in self.around if n)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def eps(self) -> float:
        """One rounding of its type; 0 for what is exact."""
        try:
            return float(jnp.finfo(self.dtype).eps)
        except (TypeError, ValueError):  # integers, keys, text, types that JAX lacks
            return 0.0

    @property
    def is_line(self) -> bool:
        """Whether it is the value of a user's line, or its cotangent."""
        return self.view in OF_LINES

    @property
    def label(self) -> str:
        """The name in a message."""
        if self.words:
            return self.words
        is_inside = self.kind in ("value", "cotangent")
        return self.name or ("what the scan carries" if is_inside else "the argument")

    def indices(self, steps: tuple[int, ...]) -> tuple[int, ...]:
        """The indices in the scans at some steps, which are in the order of time; or the layer."""
        if self.turned == LAYERS:
            return steps
        lengths = (n for n in self.around if n)
        return tuple(-n - 1 - at if n < 0 else at for n, at in zip(lengths, steps, strict=False))

    def step(self, steps: tuple[int, ...]) -> int | None:
        """The index in the innermost scan at some steps, or None."""
        return self.indices(steps)[-1] if steps else None

    def time(self, steps: tuple[int, ...] = ()) -> tuple[float, ...]:
        """When it is computed at these steps; of one array a tag is first, then inner modules."""
        *holders, number, output, depth = self.position
        left, moment = iter(steps), []
        for i, n in enumerate(self.around):
            moment += [holders[2 * i], next(left, 0) if n else 0, holders[2 * i + 1]]
        return (*moment, number, math.inf, output, -math.inf if self.view == "tag" else -depth)


class Edge(NamedTuple):
    """From a row to a row that is computed from it without a row between.

    Attributes:
      source, target: the rows; of an array made of parameters of torch, such as a stack, its parts
        and itself.
      carried: the depths of scans that carry it on, once for each step: to a later step of a scan
        around both, or from one of the last steps of a scan around the source alone.
      scopes: the numbers of the scopes of the operations on the way.
      rules: the numbers of the custom rules on the way.
      is_stopped: whether a `stop_gradient` is on the way, so that no cotangent goes back.
    """

    source: int
    target: int
    carried: tuple[int, ...] = ()
    scopes: tuple[int, ...] = ()
    rules: tuple[int, ...] = ()
    is_stopped: bool = False


@dataclasses.dataclass
class Record:
    """The record of a run.

    Attributes:
      rows: the arrays that were seen.
      edges: what is computed from what.
      scopes: the names of the scopes of operations.
      rules: the functions with custom rules, with the lines of both.
      argnums: the arguments that the loss is differentiated by, by position or name.
      framework: "jax", or the name of another one that wrote the record, such as "torch".
      devices: the numbers of devices along the axes of meshes, and in all.
      circumstances: versions and devices.
      notes: what else there is to know of the run.
    """

    rows: list[Row] = dataclasses.field(default_factory=list)
    edges: list[Edge] = dataclasses.field(default_factory=list)
    scopes: list[str] = dataclasses.field(default_factory=list)
    rules: list[str] = dataclasses.field(default_factory=list)
    argnums: tuple[int | str, ...] = ()
    framework: str = JAX
    devices: tuple[int, ...] = ()
    circumstances: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, row: Row, node: int | None = None) -> int:
        """Add a row, with the number of its value or argument if it has one; return its own."""
        self.rows.append(row)
        row.node = len(self.rows) - 1 if node is None else node
        return len(self.rows) - 1

    def of(self, kind: str) -> list[int]:
        """The numbers of the rows of a kind."""
        return [i for i, row in enumerate(self.rows) if row.kind == kind]

    @property
    def has_lines(self) -> bool:
        """Whether it has values of lines."""
        return any(row.is_line for row in self.rows)

    @property
    def has_arrays(self) -> bool:
        """Whether the arrays of its arguments are known, and their numbers; not so from a file."""
        numbers = [self.rows[i].numbers for i in self.of("argument")]
        return all(x.whole is not None and (x.exact or x.sketch is not None) for x in numbers)

    @property
    def is_loss(self) -> bool:
        return any(row.kind == "gradient" for row in self.rows)


class Graph:
    """The edges of a record by their ends, and the instances that they connect."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._into: dict[int, list[Edge]] = collections.defaultdict(list)
        self._out_of: dict[int, list[Edge]] = collections.defaultdict(list)
        for edge in record.edges:
            self._into[edge.target].append(edge)
            self._out_of[edge.source].append(edge)

    def node(self, at: Instance) -> Instance:
        return self.record.rows[at[0]].node, at[1]

    def before(self, at: Instance) -> list[tuple[Edge, Instance]]:
        """The instances that one is computed from; of all steps of a scan the last stands there."""
        return self._followed(at, -1)

    def after(self, at: Instance) -> list[tuple[Edge, Instance]]:
        """The instances that are computed from one; of all steps the first stands there."""
        return self._followed(at, 1)

    def _followed(self, at: Instance, way: int) -> list[tuple[Edge, Instance]]:
        reached = []
        for edge in (self._into if way < 0 else self._out_of)[at[0]]:
            end = edge.source if way < 0 else edge.target
            if (steps := self._moved(edge, at[1], way)) is None:
                continue
            lengths = self.record.rows[end].steps
            for depth in range(len(steps), len(lengths)):
                last = lengths[depth] - max(1, edge.carried.count(depth))
                steps.append(last if way < 0 else 0)
            if all(step >= 0 for step in steps):
                reached.append((edge, (end, tuple(steps))))
        return reached

    def _moved(self, edge: Edge, steps: tuple[int, ...], way: int) -> list[int] | None:
        """The steps of the scans around both ends, at the other one; None if it is not reached."""
        shared, lengths = self.shared(edge), self.record.rows[edge.source].steps
        count = edge.carried.count
        left = {d for d in edge.carried if d >= shared}
        if way > 0 and any(steps[d] != lengths[d] - count(d) for d in left):
            return None
        moved = [at + way * count(d) for d, at in enumerate(steps[:shared])]
        is_there = all(0 <= at < n for at, n in zip(moved, lengths, strict=False))
        return moved if is_there else None

    def shared(self, edge: Edge) -> int:
        """The number of scans around both ends."""
        source, target = self.record.rows[edge.source], self.record.rows[edge.target]
        pairs = zip(source.position[:-3:2], target.position[:-3:2], source.around, strict=False)
        same = itertools.takewhile(lambda both: both[0] == both[1], pairs)
        return sum(bool(steps) for *_, steps in same)
