"""The plan for each leaf, and its cost, from shapes alone."""

import dataclasses
from typing import Any, NamedTuple

import jax

from clipgrad._arrays import is_none, with_paths
from clipgrad._per_example.batches import batch_size, check_divides
from clipgrad._per_example.gradients import ExampleProgram
from clipgrad._per_example.prepare import of_arrays
from clipgrad._per_example.request import Request, check_params

# Leaves above this whose gradient of each example is made for no reason of size are worth a line.
_LARGE = 2**20


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
      warnings: a sentence for each leaf above 1 MiB whose gradient is made for each example because
        of what the loss does with it.
    """

    method: str
    reason: str
    leaves: tuple[LeafPlan, ...]
    microbatch: int
    bytes: int
    direct_bytes: int
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A table with a line for each leaf."""
        rows = [("leaf", "shape", "norm", "uses", "rows", "MiB", "why")]
        for leaf in self.leaves:
            counts = str(leaf.uses), str(leaf.rows), _mib(leaf.bytes)
            rows.append((leaf.path, str(leaf.shape), leaf.norm, *counts, leaf.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)) for row in rows]
        kept = f"{_mib(self.bytes)} MiB kept, {_mib(self.direct_bytes)} MiB if direct"
        lines = [f"{self.method}: {self.reason}", *(x.rstrip() for x in lines), kept]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


def plan_of(request: Request, params: Any, batch: Any) -> Plan:
    """The plan of a request for parameters and a batch of these shapes."""
    check_params(params, shapes=True)
    request, params, batch, *_ = of_arrays(request, params, batch)
    why = request.why_elements
    if why is not None:
        request = dataclasses.replace(request, method="direct")
    size = batch_size(batch)
    check_divides(request.microbatch, size)
    program = _traced(request, params, batch)
    count = size // program.microbatch_count(request, size)
    paths = [path for path, leaf in with_paths(params) if not is_none(leaf)]
    leaves = [
        LeafPlan(path, s.shape, m.norm, len(m.uses), m.rows, count * program.bytes_of(i), m.reason)
        for i, (path, s, m) in enumerate(zip(paths, program.leaves, program.methods, strict=True))
    ]
    method = "direct" if request.method == "direct" else "rows"
    kept, direct = sum(leaf.bytes for leaf in leaves), count * program.bytes
    reason = why or _how_many(request, size // count)
    warnings = _warnings(program, leaves)
    return Plan(method, reason, tuple(leaves), count, kept, direct, warnings)


def _traced(request: Request, params: Any, batch: Any) -> ExampleProgram:
    """The program of the loss, whose arguments may be shapes."""
    programs: list[ExampleProgram] = []

    def trace(params: Any, batch: Any) -> None:
        programs.append(ExampleProgram.of(request, params, batch))

    jax.eval_shape(trace, params, batch)
    return programs[0]


def _warnings(program: ExampleProgram, leaves: list[LeafPlan]) -> tuple[str, ...]:
    """What is said of large leaves that are direct for another reason than their size."""
    triples = zip(leaves, program.leaves, program.methods, strict=True)
    return tuple(
        f"{leaf.path} takes {_mib(leaf.bytes)} MiB, the gradient of each example, since it is "
        f"{leaf.reason}; it has rows where it meets data in a product, a convolution or a lookup, "
        "transposed, reshaped, cast or cut before"
        for leaf, array, method in triples
        if method.is_unfollowed and array.size * array.dtype.itemsize > _LARGE
    )


def _how_many(request: Request, parts: int) -> str:
    if request.microbatch is not None:
        return f"of {parts} microbatches, as asked"
    if parts == 1:
        return "of all examples at once"
    return f"of one of {parts} parts of the examples at a time, since all need more memory"


def _mib(count: Any) -> str:
    return f"{count / 2**20:.3g}"
