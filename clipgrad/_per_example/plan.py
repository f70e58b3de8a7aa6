"""The plan for each leaf, and its cost, from shapes alone; and how many examples fit at once."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax

from clipgrad._arrays import is_none, with_paths
from clipgrad._per_example.batches import part_count
from clipgrad._per_example.gradients import ExampleProgram
from clipgrad._per_example.subject import PerExampleSubject, check_params

# Rows, most of which a plain gradient keeps as well, are kept of all examples up to this, on each
# device, or up to the bytes of the parameters and their gradient: a part of the memory of what
# trains a model.
_ROOM = 2**30


class LeafPlan(NamedTuple):
    """The plan for one leaf.

    Attributes:
      path: of the leaf, such as ``"layers/0/kernel"``.
      shape: of the leaf.
      norm: ``"Gram"``: from Gram matrices of its rows; ``"product"``: from the gradient of each
        example, made of its rows; ``"direct"``: from the gradient of each example, as JAX makes
        it; ``"none"``: the loss does not use it.
      uses: in how many places it meets data; those in a scan are one.
      rows: how many rows one example has.
      bytes: what is kept for it until the norms are known.
      reason: why.
    """

    path: str
    shape: tuple[int, ...]
    norm: str
    uses: int
    rows: int
    bytes: int
    reason: str


class Plan(NamedTuple):
    """The plan by which each example is clipped or measured; ``str()`` is a table.

    Attributes:
      method: ``"rows"`` or ``"direct"``.
      reason: why.
      leaves: a `LeafPlan` for each leaf.
      microbatch: how many examples are differentiated at once.
      bytes: what is kept of these until their norms are known.
      direct_bytes: the bytes of their gradients.
    """

    method: str
    reason: str
    leaves: tuple[LeafPlan, ...]
    microbatch: int
    bytes: int
    direct_bytes: int

    def __str__(self) -> str:
        """A table with a line for each leaf."""
        rows = [("leaf", "shape", "norm", "uses", "rows", "MiB", "why")]
        for leaf in self.leaves:
            counts = str(leaf.uses), str(leaf.rows), _mib(leaf.bytes)
            rows.append((leaf.path, str(leaf.shape), leaf.norm, *counts, leaf.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)) for row in rows]
        kept = f"{_mib(self.bytes)} MiB kept, {_mib(self.direct_bytes)} MiB if direct"
        return "\n".join([f"{self.method}: {self.reason}", *(x.rstrip() for x in lines), kept])


def plan_of(subject: PerExampleSubject, params: Any, batch: Any) -> Plan:
    """The plan of a subject for parameters and a batch of these shapes."""
    check_params(params, shapes=True)
    subject, params, batch, *_ = subject.apart(params, batch)
    found: list[ExampleProgram] = []

    def traced(params: Any, batch: Any) -> None:
        found.append(ExampleProgram.of(subject, params, batch))

    why = subject.why_elements
    if why is not None:
        subject = dataclasses.replace(subject, method="direct")
    size, _ = part_count(batch, subject.microbatch)
    jax.eval_shape(traced, params, batch)
    (program,) = found
    count = size // parts_of(subject, program, size)
    paths = [path for path, leaf in with_paths(params) if not is_none(leaf)]
    leaves = [
        LeafPlan(path, s.shape, c.norm, len(c.uses), c.rows, count * program.bytes_of(i), c.reason)
        for i, (path, s, c) in enumerate(zip(paths, program.leaves, program.courses, strict=True))
    ]
    method = "direct" if subject.method == "direct" else "rows"
    kept, direct = sum(leaf.bytes for leaf in leaves), sum(map(_bytes, program.leaves))
    reason = why or _how_many(subject, size // count)
    return Plan(method, reason, tuple(leaves), count, kept, count * direct)


def _how_many(subject: PerExampleSubject, parts: int) -> str:
    if subject.microbatch is not None:
        return f"of {parts} microbatches, as asked"
    if parts == 1:
        return "of all examples at once"
    return f"of one of {parts} parts of the examples at a time, since all need more memory"


def parts_of(subject: PerExampleSubject, program: ExampleProgram, size: int) -> int:
    """In how many parts the examples are taken, so that what is kept of one fits into memory."""
    if subject.microbatch is not None or subject.method == "direct":
        return size // (subject.microbatch or size)
    kept = size * sum(map(program.bytes_of, range(len(program.leaves))))
    devices = jax.device_count()
    room = devices * max(_ROOM, 2 * sum(map(_bytes, program.leaves)))
    least = min(math.ceil(kept / room), size) or 1
    fitting = [n for n in range(least, size + 1) if size % n == 0]
    spread = [n for n in fitting if size // n % devices == 0]  # each device has as many examples
    return (spread or fitting)[0]


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _mib(count: Any) -> str:
    return f"{count / 2**20:.3g}"
