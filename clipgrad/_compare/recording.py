"""Recording a program: its rows, and the compiled programs that give their numbers."""

import collections
import dataclasses
import functools
import importlib.metadata
import linecache
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._compare.edges import Walk
from clipgrad._compare.judge import RUNS, floor_of
from clipgrad._compare.record import LAYERS, NO_NUMBERS, PART, Numbers, Record, Row
from clipgrad._compare.row_numbers import (
    by_steps,
    host_array,
    numbers_of,
    of_devices,
    one_copy,
    plain_row,
)
from clipgrad._compare.sketch_hook import Sketches, in_order, note_key, seen_values, values_of_lines
from clipgrad._compare.sketches import LENGTH, host_sketches, sketch_dtype
from clipgrad._diagnose import (
    error_text,
    is_of_callback,
    raised_finding,
    raised_in,
)
from clipgrad._losses import TracedLoss
from clipgrad._names import Line, LineKeys, LineValue, Place, active_variables
from clipgrad._programs import (
    SHARD_MAPS,
    ByPieces,
    Hook,
    Inlined,
    Traced,
    Widen,
    can_be_cut,
    equations,
    evaluate,
    has_repeated_operations,
    is_repetitive,
    is_reversed,
    jit_by_size,
    on_host,
    opened,
    rounded,
    scan_length,
    trace,
)
from clipgrad._values import NamedValue

NOTED = "value", "cotangent"  # the kinds of rows that the hook notes
MEASURED = "value", "cotangent", "output", "gradient"  # the kinds of rows that rounding moves
# The bytes of values and cotangents that always leave a program as they are: a sketch in it takes
# longer to compile than the operation that it follows.
MOST_WHOLE = 2**25


@dataclasses.dataclass
class Recording:
    """A function that was traced once, and whose record can be made.

    Attributes:
      record: its record, without numbers.
      traced: returns the arrays of some rows, and by their positions values and cotangents, or the
        sketches of these.
      sketched: whether the program makes these sketches.
      leaves: the inputs of the traced program.
      returned: the rows of the arrays that it returns.
      devices: the axes of a sketch that are over devices, by the row of the value.
      loss: the loss, if it is one.
      remade: makes the recording again, see `recording_of`.
      is_large: whether values and cotangents are too large to be all there.
      parts: for each row that is a part of a gradient that number and the elements of its flat
        array, see `add_part`.
    """

    record: Record
    traced: Traced
    leaves: list[Any]
    returned: list[int]
    devices: dict[int, tuple[int, ...]]
    sketched: bool = False
    loss: TracedLoss | None = None
    remade: Callable[..., "Recording"] | None = None
    is_large: bool = False
    parts: dict[int, tuple[int, np.ndarray]] = dataclasses.field(default_factory=dict)

    @property
    def has_lines(self) -> bool:
        """Whether values of lines are recorded."""
        return self.record.has_lines

    def with_lines(self) -> "Recording":
        """The recording of the same program, with the values of its lines."""
        assert self.remade is not None
        more = self.remade(lines=True)
        more.record.argnums, more.record.notes = self.record.argnums, self.record.notes
        return dataclasses.replace(more, loss=self.loss)

    def with_lines_in(self, scopes: Collection[str], with_gradients: bool) -> "Recording":
        """The recording of the same program, with values of the lines in some scopes."""
        assert self.remade is not None
        more = self.remade(lines=True, scopes=scopes, with_gradients=with_gradients)
        return dataclasses.replace(more, loss=self.loss)

    def run(self, dtype: Any = None, floor: bool = False, whole: bool = False) -> Record:
        """The record with its numbers, evaluated in a wider type if there is one.

        The gradient is traced before it is widened, so that custom rules stay. With a floor, also
        how far rounding moves the numbers: in eight runs of one compiled program. ``whole`` keeps
        the arrays of a loss and of its gradients, too.
        """
        run = self._compiled if dtype is None else self._jitted(Widen(dtype), dtype == jnp.float64)
        record = dataclasses.replace(self.record, rows=self._rows(self._called(run), whole=whole))
        if floor:
            self.measure(record)
        return record

    def add_part(
        self, record: Record, at: int, elements: np.ndarray, shape: tuple[int, ...], words: str
    ) -> int:
        """Add the rows of elements of a gradient and of its argument; return the gradient's.

        To a record of its run, and to its own, so that rounding is measured of them, too.
        """
        gradient, argument = record.rows[at], record.rows[record.rows[at].node]
        parts = []
        for row in (argument, gradient):
            numbers = numbers_of(np.ravel(host_array(row.numbers.whole))[elements].reshape(shape))
            more = {"shape": shape, "words": words, "view": PART, "turned": ""}
            parts.append(dataclasses.replace(row, numbers=numbers, **more))
        for each in (record, self.record):
            copies = [dataclasses.replace(row) for row in parts]
            node = each.add(copies[0])
            number = each.add(copies[1], node)
        uses = [edge for edge in record.edges if edge.source == gradient.node]
        record.edges += [edge._replace(source=node) for edge in uses]
        self.parts[number] = at, elements
        return number

    def _called(self, run: Callable[[list], list]) -> list:
        """The arrays of a run; `ValueError` with the operation whose callback raises an error."""
        try:
            return run(self.leaves)
        except Exception as error:
            if self.loss is None or not is_of_callback(error):
                raise
            finding = raised_finding(raised_in(self.loss), error_text(error), self.loss)
            raise ValueError(
                f"{finding.message}; clipgrad.diagnose follows its operands back"
            ) from error

    def measure(self, record: Record, kinds: Sequence[str] = MEASURED) -> None:
        """Add how far rounding moves numbers of a record to the rows of some kinds."""
        program, rows = self.traced.program, record.rows
        moved = lambda leaves, seed: rounded(program, leaves, seed)  # noqa: E731
        is_cut = not self.is_by_pieces and has_repeated_operations(program)
        run = self._runner(moved, RUNS, is_cut=is_cut)
        runs = (self._rows(run(self.leaves, jnp.uint32(i)), False) for i in range(1, 1 + RUNS))
        sketches = {i: rows[i].numbers.sketch for kind in kinds for i in record.of(kind)}
        known = {i: x for i, x in sketches.items() if x is not None}
        again = ({i: _copies(run[i].numbers.sketch, x) for i, x in known.items()} for run in runs)
        for i, x in floor_of(known, again).items():
            rows[i].numbers = rows[i].numbers._replace(moved=x)

    @functools.cached_property
    def _compiled(self) -> Callable[[list], list]:
        return self._by_pieces if self.is_by_pieces else self._jitted(Hook())

    @functools.cached_property
    def _by_pieces(self) -> ByPieces:
        run = lambda leaves: evaluate(self.traced.program, leaves, Inlined())  # noqa: E731
        return ByPieces(run, self._jit(), self._taken)

    @functools.cached_property
    def is_by_pieces(self) -> bool:
        """Whether it runs piece by piece, so that values and cotangents are never all there."""
        return self.is_large and not self.sketched or is_repetitive(self.traced.program)

    @property
    def is_cut_small(self) -> bool:
        """Whether a run piece by piece has room for what leaves a piece, or a step of a scan."""
        if self.record.devices or not can_be_cut(self.traced.program):
            return False
        most, with_taken = self._by_pieces.sizes(self.leaves)
        return with_taken - most <= max(MOST_WHOLE, most // 2)

    def _jitted(self, hook: Hook, is_wide: bool = False) -> Callable[[list], list]:
        program = self.traced.program
        constant = hook.constant
        run = lambda leaves: evaluate(program, [constant(x, None) for x in leaves], hook)  # noqa: E731
        return self._runner(run, is_wide=is_wide)

    def _runner(
        self,
        run: Callable[..., list],
        runs: int = 1,
        is_wide: bool = False,
        is_cut: bool = False,
    ) -> Callable[..., list]:
        jit = self._jit(runs, is_wide)
        if self.is_by_pieces:
            return ByPieces(run, jit, self._taken)
        return ByPieces(run, jit) if is_cut else jit(run)

    def _jit(self, runs: int = 1, is_wide: bool = False) -> Callable[..., Callable]:
        """`jax.jit`, with little optimization unless that could take much more memory."""
        has_room = self.is_by_pieces or _most_whole(self.record) <= MOST_WHOLE
        is_brief = has_room and not self.sketched
        return jit_by_size(self.traced.program, runs, is_wide) if is_brief else jax.jit

    @functools.cached_property
    def _taken(self) -> dict[int, Callable[[Any], np.ndarray]]:
        """The sketches of values and cotangents that leave the program, by its results."""
        if self.sketched:
            return {}
        count = len(opened(self.traced.program)[0].outvars)
        _, *numbers = self.traced.result(range(count))
        return {
            numbers_of_kind[key]: functools.partial(_sketched, axes=axes)
            for kind, numbers_of_kind in zip(NOTED, numbers, strict=True)
            for key, axes in self._axes(kind).items()
        }

    def _axes(self, kind: str) -> dict[tuple[int, ...], int]:
        """The numbers of axes of values or cotangents at one step, by their keys in notes."""
        rows = (self.record.rows[i] for i in self.record.of(kind))
        return {note_key(row.position): len(row.shape) for row in rows}

    def _rows(self, outputs: Sequence, is_checked: bool = True, whole: bool = False) -> list[Row]:
        """The rows with the numbers of a run.

        Of several devices the numbers on one, if these are checked and the same on each.
        """
        results, *notes = self.traced.result(outputs)
        rows = [dataclasses.replace(row) for row in self.record.rows]
        for i, x in zip(self.returned, results, strict=True):
            rows[i].numbers = numbers_of(x, rows[i].turned == LAYERS)
            if not (whole and self.record.is_loss):
                rows[i].numbers = rows[i].numbers._replace(whole=None)
        by_row = dict(zip(self.returned, results, strict=True))
        for i, (of, elements) in self.parts.items():
            part = np.ravel(host_array(by_row[of]))[elements]
            rows[i].numbers = numbers_of(part.reshape(rows[i].shape))
        for kind, arrays in zip(NOTED, notes, strict=True):
            axes = self._axes(kind)
            if not (self.is_by_pieces and self._taken):
                arrays = on_host(arrays)
                if not self.sketched:
                    arrays = {key: host_sketches(arrays[key], axes[key]) for key in axes}
            for i in self.record.of(kind):
                x = arrays[note_key(rows[i].position)]
                sketch = by_steps(x, rows[i], self.devices.get(i, ()))
                rows[i].numbers = Numbers(sketch=sketch)
        for i in self.devices if is_checked else ():
            sketch = rows[i].numbers.sketch
            assert sketch is not None  # of a value
            rows[i].numbers = Numbers(sketch=of_devices(sketch))
        return rows


def _sketched(x: Any, axes: int) -> np.ndarray:
    return host_sketches(on_host(x), axes)


def _copies(sketch: Any, known: np.ndarray) -> np.ndarray:
    """A sketch on all devices, or on one if that is known of a row."""
    return sketch if sketch.shape == known.shape else one_copy(sketch)


def recording_of(
    program: Any,
    inputs: Sequence[tuple[str, tuple[str, str], Any]],
    outputs: Sequence[Row],
    gradients: Mapping[int, str],
    with_arguments: bool,
    fixed: Sequence[Row] = (),
    lines: bool | None = None,
    scopes: Collection[str] | None = None,
    with_gradients: bool = True,
) -> Recording:
    """The recording of a program.

    Args:
      program: the program.
      inputs: its inputs, with their names and places, as `Row.leaf`.
      outputs: the rows of its outputs, without their places.
      gradients: the paths of the gradients of its first output, by the numbers of inputs.
      with_arguments: whether the numbers of the inputs are recorded.
      fixed: rows of what the program does not compute.
      lines: whether the values of lines are recorded; None: of a loss in which nothing has a name.
      scopes: the modules whose lines these are, or None for all.
      with_gradients: whether there are cotangents, and without scopes gradients.
    """
    more = program, inputs, outputs, gradients, with_arguments, fixed
    gradients = gradients if with_gradients else {}
    returned_gradients = gradients if scopes is None else {}
    arrays = [x for *_, x in inputs]
    record = Record(devices=device_counts(arrays, program), circumstances=circumstances())
    for name, leaf, x in inputs:
        row = plain_row("argument", name, x, leaf=leaf)
        seen = numbers_of(x) if with_arguments else NO_NUMBERS
        row.numbers = seen._replace(whole=x)
        record.add(row)
    active = active_variables(program, gradients) if gradients else frozenset()
    values = seen_values(program)
    named = [v for v in values if not _is_of_formula(v.name)]
    if lines is None and (lines := bool(gradients) and not any(v.name for v in named)):
        values = named
    keys, of_lines = values_of_lines(program, scopes) if lines else ((), [])
    places, devices = _add_values(record, values, of_lines, active)
    walk = Walk(program, range(len(inputs)), places, record.rows)
    copies = map(dataclasses.replace, outputs)
    returned = [_with_output(record, walk, program, i, row) for i, row in enumerate(copies)]
    for i, path in returned_gradients.items():
        row = plain_row("gradient", path, arrays[i], leaf=record.rows[i].leaf)
        returned.append(record.add(row, i))
    record.edges, record.scopes, record.rules = walk.edges()
    is_large = _size_of_notes(record) > _most_whole(record)
    seen_rows = [[record.rows[i] for i in record.of(kind)] for kind in NOTED]
    for row in fixed:
        record.add(row)
    moving, remade = [*returned_gradients], functools.partial(recording_of, *more)
    evaluated = functools.partial(_evaluated, program, moving, keys, *seen_rows)
    traced = trace(functools.partial(evaluated, False), (arrays,), {})
    more = {"remade": remade, "is_large": is_large}
    recording = Recording(record, traced, arrays, returned, devices, **more)
    if not is_large or recording.is_cut_small:
        return recording
    traced = trace(functools.partial(evaluated, True), (arrays,), {})
    return dataclasses.replace(recording, traced=traced, sketched=True)


def _size_of_notes(record: Record) -> int:
    """The bytes of all values and cotangents at all steps."""
    rows = {(row.kind, note_key(row.position)): row for row in record.rows}
    chosen = (row for (kind, _), row in rows.items() if kind in NOTED)
    return sum(math.prod(row.steps) * row.size * jnp.dtype(row.dtype).itemsize for row in chosen)


def _most_whole(record: Record) -> int:
    """The bytes of values that may leave a program: half of what inputs and gradients have anyway.

    So a recording takes at most half more memory than the gradient; of small ones 32 MiB.
    """
    arguments = record.of("argument")
    sizes = {i: getattr(record.rows[i].numbers.whole, "nbytes", 0) for i in arguments}
    gradients = [sizes[record.rows[i].node] for i in record.of("gradient")]
    return max(MOST_WHOLE, (sum(sizes.values()) + sum(gradients)) // 2)


def _tap(row: Row, sketched: bool) -> jax.Array:
    """The tap of a value, whose cotangent is the sketch of the value's, or that itself."""
    if not sketched:
        return jnp.zeros((*row.steps, *row.shape), row.dtype)
    return jnp.zeros((*row.steps, LENGTH), sketch_dtype(row.dtype))


def _add_values(
    record: Record,
    values: Sequence[NamedValue],
    of_lines: Sequence[tuple[NamedValue, LineValue]],
    active: Collection[Any],
) -> tuple[dict[tuple, list[int]], dict[int, tuple[int, ...]]]:
    """Add the rows of values and of cotangents: where they are, and which axes are over devices."""
    places, devices = collections.defaultdict(list), {}
    lines = {v.position: line for v, line in of_lines}
    for v in in_order([*values, *(v for v, _ in of_lines)]):
        at = record.add(_value_row("value", v, lines.get(v.position)))
        places[v.position[:-1]].append(at)
        if over := _axes_of_devices(v):
            devices[at] = over
        elif v.variable in active and not v.in_while:
            record.add(_value_row("cotangent", v, lines.get(v.position)), at)
    return places, devices


def _evaluated(
    program: Any,
    moving: Sequence[int],
    lines: LineKeys,
    values: Sequence[Row],
    cotangents: Sequence[Row],
    sketched: bool,
    inputs: list,
) -> tuple:
    """The outputs, the gradients of the first one, and the notes of values and cotangents."""
    taps = {note_key(row.position): _tap(row, sketched) for row in cotangents}

    def outputs(moved: dict, taps: dict) -> tuple:
        hook = Sketches(taps=taps, lines=lines, sketched=sketched)
        results = evaluate(program, [moved.get(i, x) for i, x in enumerate(inputs)], hook)
        notes = hook.noted()  # among them those of names that no row has
        return results, {key: notes[key] for key in map(note_key, (row.position for row in values))}

    if not (moving or taps):
        return *outputs({}, {}), {}
    moved = {i: inputs[i] for i in moving}
    (loss,), pull_back, notes = jax.vjp(outputs, moved, taps, has_aux=True)
    grads, cotangents = pull_back([jnp.ones_like(loss)])
    return [loss, *(grads[i] for i in moving)], notes, cotangents


def _with_output(record: Record, walk: Walk, program: Any, number: int, row: Row) -> int:
    """Add the row of an output of the program, with its line and its age."""
    jaxpr = opened(program)[0]
    makers = (e for e in jaxpr.eqns if any(v is jaxpr.outvars[number] for v in e.outvars))
    row.line, row.position = _line_of(next(map(Place, makers), None)), (walk.ages[number], 0, 0)
    at = record.add(row)
    walk.lead(walk.results[number], at)
    return at


def _value_row(kind: str, v: NamedValue, line: LineValue | None) -> Row:
    around = []
    for e in reversed(v.place.chain[1:]):
        length = scan_length(e) or 0
        around.append(-length if is_reversed(e) else length)
    more = {"view": v.kind, "position": v.position, "around": tuple(around)}
    if line is not None:
        words, calls = line.named(v.name.rpartition(":")[0]), tuple(c.call for c in line.calls)
        more |= {"words": words, "calls": calls, "statement": _statement(line.line)}
        more["is_copy"] = line.is_copy
    where = _line_of(v.place) if line is None else line.line.key
    return plain_row(kind, v.name, v.variable.aval, line=where, **more)


def _is_of_formula(name: str) -> bool:
    """Whether a name is only the formula that `jnp.einsum` gives its operations."""
    return bool(name) and all("->" in segment for segment in name.split("/"))


def _statement(line: Line) -> str:
    """The file, the function and the text of a line; its number instead of a text that is lost."""
    text = linecache.getline(line.file, line.number).strip() or str(line.number)
    return f"{os.path.basename(line.file)} {line.function} {text}"


def _axes_of_devices(v: NamedValue) -> tuple[int, ...]:
    """The axes before a sketch that are over devices, not over the steps of a scan."""
    axes = v.place.parent.axes if v.place.parent else ()
    return tuple(i for i, (name, _) in enumerate(axes) if name == SHARD_MAPS.noun)


def _line_of(place: Place | None) -> str:
    """The line of the user that computes something, or else that of what is around."""
    while place is not None:
        if place.location.file is not None:
            return f"{place.location.file}:{place.location.line}"
        place = place.parent
    return ""


def circumstances() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "clipgrad": importlib.metadata.version("clipgrad"),
        "jax": jax.__version__,
        "device": device.device_kind,
        "platform": device.platform,
        "processes": jax.process_count(),
    }


def device_counts(inputs: Sequence[Any], program: Any) -> tuple[int, ...]:
    """The numbers of devices, along each axis of a mesh and in all."""
    holders = [e.params.get(kind) for e in equations(program) for kind in ("mesh", "sharding")]
    holders += [x.sharding for x in inputs if isinstance(x, jax.Array)]
    meshes = (getattr(holder, "mesh", holder) for holder in holders)
    shapes = [tuple(dict(getattr(mesh, "shape", None) or {}).values()) for mesh in meshes]
    return tuple(sorted({n for shape in shapes for n in (math.prod(shape), *shape) if n > 1}))
