"""Recording a program: its rows, and the compiled programs that give their numbers."""

import collections
import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._compare.edges import Walk
from clipgrad._compare.hook import seen_values
from clipgrad._compare.judge import RUNS, floor_of
from clipgrad._compare.numbers import (
    by_steps,
    host_array,
    is_key,
    plain_row,
    sketched,
    with_numbers,
    with_one_copy,
)
from clipgrad._compare.record import Record, Row
from clipgrad._compare.sketches import LENGTH, sketch_dtype
from clipgrad._diagnose import (
    DiagnosisSubject,
    is_of_callback,
    raised_finding,
    raised_in,
    told_error,
)
from clipgrad._jaxpr import (
    Hook,
    Traced,
    Widen,
    device_count,
    dtype_of,
    equations,
    evaluate,
    jit_by_size,
    on_host,
    opened,
)
from clipgrad._names import Place
from clipgrad._program import rounded

Numbers = dict[int, np.ndarray]  # the sketches of rows


@dataclasses.dataclass
class Recording:
    """A function that was traced once, and whose record can be made.

    Attributes:
      record: its record, without numbers.
      traced: returns the arrays of some rows, and the sketches of values and cotangents by their
        positions.
      leaves: the inputs of the traced program.
      returned: the rows of the arrays that it returns.
      sketched: for values and for cotangents the row of each position.
      axes: of each position the axes before a sketch; see `by_steps`.
      given: the loss, if it is one.
    """

    record: Record
    traced: Traced
    leaves: list[Any]
    returned: list[int]
    sketched: tuple[dict[Any, int], dict[Any, int]]
    axes: dict[Any, list[tuple[bool, bool]]]
    given: DiagnosisSubject | None = None

    def run(self, dtype: Any = None, floor: bool = False) -> Record:
        """The record with its numbers, evaluated in a wider type if there is one.

        The gradient is traced before it is widened, so that custom rules stay. With a floor, also
        how far rounding moves the numbers: in eight runs of one compiled program.
        """
        run = self._compiled if dtype is None else self._jitted(Widen(dtype))
        found, hashes, whole = self._numbers(self._called(run))
        rows = [dataclasses.replace(row) for row in self.record.rows]
        for i in {*found, *hashes}:
            rows[i].sketch, rows[i].exact = found.get(i), hashes.get(i, "")
            rows[i].whole = whole.get(i) if self.record.is_loss else None
        record = dataclasses.replace(self.record, rows=rows)
        if floor:
            self.measure(record, found)
        for row in rows:
            with_one_copy(row)
        return record

    def _called(self, run: Callable[[list], list]) -> list:
        """The arrays of a run; `ValueError` with the operation whose callback raises an error."""
        try:
            return run(self.leaves)
        except Exception as error:
            if self.given is None or not is_of_callback(error):
                raise
            finding = raised_finding(raised_in(self.given), told_error(error), self.given)
            raise ValueError(
                f"{finding.message}; clipgrad.diagnose follows its operands back"
            ) from error

    def measure(self, record: Record, own: Numbers | None = None) -> None:
        """Add how far rounding moves numbers of a record to it; by default those of arrays."""
        program, rows = self.traced.program, record.rows
        if own is None:
            own = {i: x for i in self.returned if (x := rows[i].sketch) is not None}
        run = jit_by_size(program)(lambda leaves, seed: rounded(program, leaves, seed))
        runs = (self._numbers(run(self.leaves, jnp.uint32(i)))[0] for i in range(1, 1 + RUNS))
        for i, x in floor_of(own, runs).items():
            rows[i].moved = x

    @functools.cached_property
    def _compiled(self) -> Callable[[list], list]:
        return self._jitted(Hook())

    def _jitted(self, hook: Hook) -> Callable[[list], list]:
        program = self.traced.program
        return jax.jit(
            lambda leaves: evaluate(program, [hook.constant(x, None) for x in leaves], hook)
        )

    def _numbers(self, outputs: Sequence) -> tuple[Numbers, dict[int, str], dict[int, Any]]:
        """The sketches of rows, the hashes of those that are exact, and arrays on the host."""
        results, *notes = self.traced.result(outputs)
        found, hashes = {}, {}
        whole = {i: host_array(x) for i, x in zip(self.returned, results, strict=True)}
        for i, x in zip(self.returned, results, strict=True):
            own, text = sketched(whole[i], is_key(x))
            found |= {} if own is None else {i: own}
            hashes |= {i: text} if text else {}
        for rows, own in zip(self.sketched, notes, strict=True):
            for position, x in on_host({k: own[k] for k in rows}).items():
                found[rows[position]] = by_steps(x, self.axes[position])
        return found, hashes, whole


class Table:
    """The rows of a program, and the edges between them.

    Args:
      program: the program.
      inputs: its inputs, with their names.
      with_arguments: whether the numbers of the arguments are recorded.
      taps: whether a value has a cotangent that can be reached.
    """

    def __init__(
        self, program: Any, inputs: Sequence[tuple[str, Any]], with_arguments: bool,
        taps: Callable[[Any], bool] = lambda value: False,
    ) -> None:  # fmt: skip
        self.rows: list[Row] = []
        self.seen = seen_values(program)
        self._jaxpr = opened(program)[0]
        self.arguments = [self.add(plain_row("argument", name, x)) for name, x in inputs]
        for i, (_, x) in zip(self.arguments, inputs, strict=True):
            if with_arguments:
                self.rows[i] = with_numbers(self.rows[i], x)
                self.rows[i].whole = x
        places, self.values = collections.defaultdict(list), {}
        for v in self.seen:
            self.values[v.position] = row = self.add(_value_row("value", v))
            places[v.position[:-1]].append(row)
        self.cotangents = {
            v.position: self.add(_value_row("cotangent", v), self.values[v.position])
            for v in self.seen
            if taps(v)
        }
        self.walk = Walk(program, self.arguments, places, self.rows)

    def add(self, row: Row, node: int | None = None) -> int:
        self.rows.append(row)
        row.node = len(self.rows) - 1 if node is None else node
        return len(self.rows) - 1

    def add_output(self, row: Row, result: int) -> int:
        """Add a row for a result of the program."""
        variable = self._jaxpr.outvars[result]
        makers = (e for e in self._jaxpr.eqns if any(v is variable for v in e.outvars))
        row.line = _line_of(next(map(Place, makers), None))
        row.position = (self.walk.ages[result], 0, 0)
        number = self.add(row)
        self.walk.lead(self.walk.results[result], number)
        return number

    def taps(self) -> dict[Any, jax.Array]:
        """Zeros for each cotangent, whose own cotangents are sketches."""
        return {
            v.position: jnp.zeros((*_sketch_axes(v)[0], LENGTH), sketch_dtype(dtype_of(v.variable)))
            for v in self.seen
            if v.position in self.cotangents
        }

    def record(self, program: Any, inputs: Sequence[Any], notes: Sequence[str] = ()) -> Record:
        edges, scopes = self.walk.edges()
        more = {"devices": device_counts(inputs, program), "circumstances": circumstances()}
        return Record(self.rows, edges, scopes, notes=list(notes), **more)

    def recording(self, record: Record, traced: Traced, given: Any, returned: list) -> Recording:
        axes = {v.position: _sketch_axes(v)[1] for v in self.seen}
        rows = self.values, self.cotangents
        return Recording(record, traced, jax.tree.leaves(given), returned, rows, axes)


def _value_row(kind: str, v: Any) -> Row:
    aval, around = v.variable.aval, []
    for e in reversed(v.place.chain[1:]):
        length = e.params["length"] if e.primitive.name == "scan" else 0
        around.append(-length if length and e.params["reverse"] else length)
    line = _line_of(v.place)
    more = {"view": v.kind, "position": v.position, "around": tuple(around), "line": line}
    return plain_row(kind, v.name, aval, **more)


def _line_of(place: Place | None) -> str:
    """The line of the user that computes something, or else that of what is around."""
    while place is not None:
        if place.location.file is not None:
            return f"{place.location.file}:{place.location.line}"
        place = place.parent
    return ""


def _sketch_axes(v: Any) -> tuple[list[int], list[tuple[bool, bool]]]:
    """The lengths of the axes before a sketch, and what they are; see `by_steps`."""
    around = [e for e in reversed(v.place.chain[1:]) if e.primitive.name in ("scan", "shard_map")]
    lengths = [e.params["length"] if "length" in e.params else device_count(e) for e in around]
    return lengths, [(e.primitive.name == "scan", bool(e.params.get("reverse"))) for e in around]


def circumstances() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "clipgrad": importlib.metadata.version("clipgrad"),
        "jax": jax.__version__,
        "device": device.device_kind,
        "platform": device.platform,
        "processes": jax.process_count(),
    }


def device_counts(inputs: Sequence[Any], program: Any = None) -> tuple[int, ...]:
    """The numbers of devices, along each axis of a mesh and in all."""
    every = list(equations(program)) if program else []
    shardings = [x.sharding for x in inputs if isinstance(x, jax.Array)]
    found = {len(sharding.device_set) for sharding in shardings}
    holders = [*shardings, *(e.params.get("sharding") for e in every)]
    meshes = [getattr(x, "mesh", None) for x in holders] + [e.params.get("mesh") for e in every]
    for mesh in meshes:
        if sizes := dict(getattr(mesh, "shape", None) or {}).values():
            found |= {math.prod(sizes), *sizes}
    return tuple(sorted(n for n in found if n > 1))
