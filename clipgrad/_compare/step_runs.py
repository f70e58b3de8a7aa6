"""A run of a whole training step: its outputs, by path; now, or from a file."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

import clipgrad._jaxpr as _jaxpr
from clipgrad._compare.differences import RUNS, Exact, floor_of, host_values, plain_numbers
from clipgrad._compare.ratios import Counts, part_counts, repeats
from clipgrad._compare.run_facts import RunFacts, facts_file, run_facts, saved_facts
from clipgrad._compare.run_file import RunFile, checked
from clipgrad._compare.signatures import signature
from clipgrad._compare.sketches import LENGTH, host_sketch
from clipgrad._compare.versions import copied
from clipgrad._errors import first_line
from clipgrad._frameworks import with_models
from clipgrad._program import moved_by_rounding, rounded
from clipgrad._trees import argument_name, check_concrete, is_array, with_paths

STEP = "step"  # the kind of such a file
WHOLE_OUTPUT = "the output"  # the path of an output that is one array


class Output(NamedTuple):
    """An output of a step: its value on the host, and the type that it had.

    Attributes:
      value: its numbers, `Exact` or any other object; if it is signed their sketch, or the bytes of
        their hash as `Exact`.
      shape: its shape.
      dtype: its type.
      signed: whether its numbers are not kept.
    """

    value: Any
    shape: tuple[int, ...]
    dtype: Any
    signed: bool = False


class StepProgram(NamedTuple):
    """A step as one program: its inputs, and the path of each of its outputs."""

    program: Any
    inputs: list[Any]
    paths: list[str]


class StepRun(NamedTuple):
    """A run of a step.

    Attributes:
      outputs: its outputs, by path.
      floor: gives the movement of the outputs by rounding, by path.
      ages: when each output is computed, see `ages`; empty if it is no program.
      counts: the parts of its work.
      notes: what else there is to know.
      repeats: gives notes of arguments whose parts on all devices are the same.
      facts: its arguments and circumstances, if they are compared.
    """

    outputs: dict[str, Output]
    floor: Callable[[], dict[str, Any]]
    ages: dict[str, int]
    counts: Counts
    notes: list[str]
    repeats: Callable[[Counts], list[str]] = lambda counts: []
    facts: RunFacts | None = None


def run_step(
    name: str, fun: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], signed: bool
) -> StepRun:
    """Run a step; its outputs are signed beside a run from a file."""
    outputs, notes = _outputs_of(fun, args, kwargs), []
    step = None
    try:
        step = _program(fun, args, kwargs)
    except Exception as error:  # a step may be a loop of Python that reads numbers
        notes.append(f"{name} can't be traced as one program ({first_line(error)})")
    kept = {path: _signed(x) for path, x in outputs.items()} if signed else outputs

    def floor() -> dict[str, Any]:
        paths = step.paths if step else outputs
        own = {p: kept[p].value for p in paths if isinstance(outputs[p].value, np.ndarray | Exact)}
        runs = _moved_by_program(step) if step else _moved_by_arguments(fun, args, kwargs)
        view = _as_signed if signed else lambda value: value
        return floor_of(own, ({path: view(run[path]) for path in own} for run in runs))

    found = dict(zip(step.paths, ages(step.program), strict=True)) if step else {}
    counts = part_counts(args, [step.program] if step else [])
    repeated, facts = functools.partial(_repeats, args, outputs), None
    if signed:
        given = with_paths({"args": args, "kwargs": kwargs})
        is_number = lambda x: is_array(x) or isinstance(x, int | float | complex)  # noqa: E731
        facts = run_facts({}, {path: x for path, x in given if is_number(x)})
    return StepRun(kept, floor, found, counts, notes, repeated, facts)


def _signed(output: Output) -> Output:
    """An output without its numbers, but for a single one."""
    is_kept = isinstance(output.value, np.ndarray) and not output.value.ndim
    return output._replace(value=_as_signed(output.value), signed=not is_kept)


def _as_signed(value: Any) -> Any:
    """The part of a value that a file keeps: a sketch or a single number, a hash, or text."""
    if isinstance(value, np.ndarray):
        return host_sketch(value) if value.ndim else value
    return _hashed(signature(value.values).digests[0]) if isinstance(value, Exact) else repr(value)


def _hashed(digest: str) -> Exact:
    return Exact(np.frombuffer(bytes.fromhex(digest), np.uint8))


def _outputs_of(
    fun: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]
) -> dict[str, Output]:
    """The outputs by path; of models among the arguments what changes in them, too."""
    found: list[Any] = []
    check_concrete("args", (args, kwargs))

    def run(function: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        found.append(function(*copied(args), **copied(kwargs)))

    with_models(run, fun, args, dict(kwargs))
    check_concrete("fun", found[0])
    outputs = {}
    leaves = {path: leaf for path, leaf in _named_outputs(found[0]).items() if leaf is not None}
    for path, value in zip(leaves, host_values(list(leaves.values())), strict=True):
        leaf = leaves[path]
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        outputs[path] = Output(value, np.shape(leaf), dtype)
    return outputs


def _named_outputs(tree: Any) -> dict[str, Any]:
    return {path or WHOLE_OUTPUT: leaf for path, leaf in with_paths(tree)}


def _program(fun: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> StepProgram:
    found: list[StepProgram] = []

    def run(function: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        paths: list[str] = []

        def outputs(*args: Any, **kwargs: Any) -> Any:
            results = _named_outputs(function(*args, **kwargs)).items()
            kept = {path: leaf for path, leaf in results if isinstance(leaf, jax.Array)}
            paths[:] = kept
            return list(kept.values())

        inputs = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_array(leaf)]
        found.append(StepProgram(_jaxpr.trace(outputs, args, kwargs).program, inputs, paths))

    with_models(run, fun, args, dict(kwargs))
    return found[0]


def ages(program: Any, given: Sequence[int] = ()) -> list[int]:
    """For each output the length of the longest chain of operations from an input to it.

    An output that is computed from another one is older. A scan is as old as one step of it, and
    other operations with programs inside are one operation. The inputs may have ages, too.
    """
    jaxpr, _ = _jaxpr.opened(program)
    known: dict[Var, int] = dict(zip(jaxpr.invars, given, strict=False))

    def age(atom: Any) -> int:
        return 0 if isinstance(atom, Literal) else known.get(atom, 0)

    for equation in jaxpr.eqns:
        inputs = [age(atom) for atom in equation.invars]
        inner = _jaxpr.differentiated_programs(equation)
        if inner and equation.primitive.name != "cond":
            found = ages(inner[0], inputs)
        else:
            found = [max(inputs, default=0) + 1] * len(equation.outvars)
        known.update(zip(equation.outvars, found, strict=True))
    return [age(atom) for atom in jaxpr.outvars]


def _moved_by_program(step: StepProgram) -> Iterator[dict[str, Any]]:
    """The outputs of a step, each time with other roundings."""
    run = _jaxpr.jit_for_one_call(step.program)(lambda *given: rounded(step.program, *given))
    for i in range(1, 1 + RUNS):
        yield dict(zip(step.paths, host_values(run(step.inputs, jnp.uint32(i))), strict=True))


def _moved_by_arguments(
    fun: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The outputs of a step that is no program, with arguments that are moved by roundings."""
    for i in range(1, 1 + RUNS):
        move = functools.partial(moved_by_rounding, seed=i)
        found = _outputs_of(fun, *jax.tree.map(move, (args, kwargs)))
        yield {path: output.value for path, output in found.items()}


def _repeats(args: tuple, outputs: Mapping[str, Output], known: Counts) -> list[str]:
    """Notes of the arguments, but for state, whose parts on all devices are the same."""
    parts, found = max(known.devices, default=1), []
    for i, arg in enumerate(args if parts > 1 else ()):
        leaves = [x for x in jax.tree.leaves(arg) if is_array(x)]
        if _is_state(leaves, outputs):
            continue
        if repeats(plain_numbers(leaves), parts):
            found.append(
                f"{argument_name(i)}: the rows repeat over the {parts} devices, which hides "
                "averages that are missing; compare with rows that differ"
            )
    return found


def _is_state(leaves: Sequence[Any], outputs: Mapping[str, Output]) -> bool:
    """Whether a step returns an argument: an output has the shape of each of its arrays."""
    shapes = [(out.shape, out.dtype) for out in outputs.values()]
    for x in leaves:
        if (x.shape, x.dtype) not in shapes:
            return False
        shapes.remove((x.shape, x.dtype))
    return True


def step_file(run: StepRun) -> RunFile:
    assert run.facts is not None  # it is signed
    header, arrays = facts_file(run.facts)
    floor, rows = run.floor(), []
    for i, (path, output) in enumerate(run.outputs.items()):
        row = {"path": path, "shape": output.shape, "dtype": str(output.dtype)}
        if isinstance(output.value, np.ndarray):
            arrays[f"output {i}"] = output.value
            if path in floor:
                arrays[f"floor {i}"] = floor[path]
        elif isinstance(output.value, Exact):
            moves = path in floor and bool(np.any(floor[path].values))
            row |= {"digest": output.value.values.tobytes().hex(), "moves": moves}
        else:
            row["text"] = output.value
        rows.append(row)
    notes = {"notes": run.notes, "ages": run.ages, "counts": run.counts}
    return RunFile({"kind": STEP, "outputs": rows, **notes, **header}, arrays)


def saved_step(file: RunFile) -> StepRun:
    header, outputs, floor = file.header, {}, {}
    for i, row in enumerate(header["outputs"]):
        path, shape, value = row["path"], tuple(row["shape"]), row.get("text")
        if "digest" in row:
            value, floor[path] = _hashed(row["digest"]), Exact(np.asarray(float(row["moves"])))
        elif "text" not in row:
            own = (LENGTH,) if shape else ()
            value = checked(file.arrays[f"output {i}"], own)
            if f"floor {i}" in file.arrays:
                floor[path] = checked(file.arrays[f"floor {i}"], own)
        dtype = row["dtype"] if row["dtype"].startswith("key<") else jnp.dtype(row["dtype"])
        outputs[path] = Output(value, shape, dtype, "digest" in row or bool(shape))
    counts = Counts(*map(tuple, header["counts"]))
    notes, facts = list(header["notes"]), saved_facts(file)
    return StepRun(outputs, lambda: floor, dict(header["ages"]), counts, notes, facts=facts)
