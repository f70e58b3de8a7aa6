"""The record of a run: a table of the arrays that were seen, and the edges between them."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

FIRST_STEP, NEXT_STEP, LAST_STEP = "first", "next", "last"
ENTERS = "enters"  # the view of a value that enters a module
THE_LOSS = "the loss"
JAX, TORCH = "jax", "torch"

Instance = tuple[int, tuple[int, ...]]  # a row, at the steps of the scans around it


@dataclasses.dataclass
class Row:
    """An array that was seen; one inside of a scan is one row for all steps.

    Steps are in the order of time, also those of a scan in reverse.

    Attributes:
      kind: "argument", "value", "output", "cotangent" or "gradient".
      name: the tag or module of a value and of its cotangent; the path of others.
      shape: the shape at one step and on one device.
      dtype: the name of the type; "text" for what is no array.
      node: the number of the row that edges lead to: the value of a cotangent, the argument of a
        gradient, or the row itself.
      view: "tag", "module" for what leaves one, or "enters"; of torch's arguments "parameter",
        "buffer" or "argument".
      position: where it is computed: the numbers of operations and programs around, then those of
        its operation and result, and the depth of its module. Of an output it is its age.
      around: for each operation around the number of steps of a scan, negative in reverse; or 0.
      line: the line of the user that computes it, as "file:line".
      owner: the class of torch's module.
      turned: "all" if it has a sketch for each order of its axes, "stack" if for each but the
        first axis.
      exact: a hash of the values of integers, keys and text; "" for floating numbers.
      sketch: shape (..., copies, 515), steps first; a copy is a device or an order of axes. None
        for keys and text, and where no numbers are known.
      moved: how far rounding moves the sketch; None where this was not measured.
      whole: the numbers on the host, for other orders of axes; not in a file.
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
    owner: str = ""
    turned: str = ""
    exact: str = ""
    sketch: np.ndarray | None = None
    moved: np.ndarray | None = None
    whole: np.ndarray | None = None

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
    def label(self) -> str:
        """The name in a message."""
        return self.name or ("what the scan carries" if self.kind == "value" else "the argument")

    def indices(self, steps: tuple[int, ...]) -> tuple[int, ...]:
        """The indices in the scans at some steps, which are in the order of time."""
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
      source, target: the rows.
      when: for depths of scans: ("first", d), to the first step of a scan around the target;
        ("next", d), from a step to the next; ("last", d), from the last step.
      scopes: the numbers of the scopes of the operations on the way.
    """

    source: int
    target: int
    when: tuple[tuple[str, int], ...]
    scopes: tuple[int, ...]


@dataclasses.dataclass
class Record:
    """The record of a run.

    Attributes:
      rows: the arrays that were seen.
      edges: what is computed from what.
      scopes: the names of the scopes of operations.
      framework: "jax" or "torch".
      devices: the numbers of devices along the axes of meshes, and in all.
      circumstances: versions and devices.
      notes: what else there is to know of the run.
    """

    rows: list[Row]
    edges: list[Edge] = dataclasses.field(default_factory=list)
    scopes: list[str] = dataclasses.field(default_factory=list)
    framework: str = JAX
    devices: tuple[int, ...] = ()
    circumstances: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def of(self, kind: str) -> list[int]:
        """The numbers of the rows of a kind."""
        return [i for i, row in enumerate(self.rows) if row.kind == kind]

    @property
    def is_loss(self) -> bool:
        return any(row.kind == "gradient" for row in self.rows)


class Graph:
    """The edges of a record by their ends, and the instances that they connect."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._into: dict[int, list[tuple[Edge, int]]] = {}
        self._out_of: dict[int, list[tuple[Edge, int]]] = {}
        for edge in record.edges:
            known = edge, self._shared(edge)
            self._into.setdefault(edge.target, []).append(known)
            self._out_of.setdefault(edge.source, []).append(known)

    def node(self, at: Instance) -> Instance:
        return self.record.rows[at[0]].node, at[1]

    def before(self, at: Instance) -> list[tuple[Edge, Instance]]:
        """The instances that one is computed from; of all steps of a scan the last stands there."""
        row, found = self.record.rows, []
        for edge, shared in self._into.get(at[0], []):
            steps = list(at[1])
            starts = [d for what, d in edge.when if what == FIRST_STEP]
            if any(steps[d] for d in starts if shared <= d < len(steps)):
                continue  # it reaches the first step alone
            if _goes_on(steps, edge, shared, -1, row[edge.source].steps):
                lengths = row[edge.source].steps[shared:]
                source = (*steps[:shared], *(n - 1 for n in lengths))
                found.append((edge, (edge.source, source)))
        return found

    def after(self, at: Instance) -> list[tuple[Edge, Instance]]:
        """The instances that are computed from one; of all steps the first stands there."""
        rows, found = self.record.rows, []
        for edge, shared in self._out_of.get(at[0], []):
            steps, lengths = list(at[1]), rows[edge.source].steps
            ends = [d for what, d in edge.when if what == LAST_STEP]
            if any(steps[d] != lengths[d] - 1 for d in ends if shared <= d < len(steps)):
                continue
            if _goes_on(steps, edge, shared, 1, rows[edge.target].steps):
                target = (*steps[:shared], *(0 for _ in rows[edge.target].steps[shared:]))
                found.append((edge, (edge.target, target)))
        return found

    def _shared(self, edge: Edge) -> int:
        """The number of scans around both ends."""
        source, target = self.record.rows[edge.source], self.record.rows[edge.target]
        pairs = zip(source.position[:-3:2], target.position[:-3:2], source.around, strict=False)
        shared = 0
        for own, other, steps in pairs:
            if own != other:
                break
            shared += bool(steps)
        return shared


def _goes_on(steps: list[int], edge: Edge, shared: int, way: int, lengths: Any) -> bool:
    """Go to the next step, or the one before, where an edge does; whether there is one."""
    for d in (d for what, d in edge.when if what == NEXT_STEP and d < shared):
        steps[d] += way
        if not 0 <= steps[d] < lengths[d]:
            return False
    return True
