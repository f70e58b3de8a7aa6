"""Two versions of a whole training step: their outputs, by path."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad._jaxpr as _jaxpr
from clipgrad._compare.arguments import copied
from clipgrad._compare.comparison import GradientComparison
from clipgrad._compare.differences import (
    RUNS,
    Exact,
    Judgment,
    floor_of,
    host_values,
    judge,
    judge_exactly,
    rounding,
)
from clipgrad._compare.order import ages
from clipgrad._compare.ratios import Counts, meaning, part_counts, ratio, repeats
from clipgrad._compare.records import ComparisonFinding, ComparisonRow, undecided, unjudged
from clipgrad._compare.run_facts import RunFacts, run_facts, with_facts
from clipgrad._compare.signatures import signature
from clipgrad._compare.sketches import NUMBERS, host_sketch, judge_sketches
from clipgrad._errors import first_line
from clipgrad._frameworks import with_models
from clipgrad._program import moved_by_rounding, rounded
from clipgrad._trees import argument_name, check_concrete, is_array, nearest, with_paths

WHOLE_OUTPUT = "the output"  # the path of an output that is one array


class Output(NamedTuple):
    """An output of a step: its value on the host, and the type that it had.

    Attributes:
      value: its numbers, `Exact` or any other object; if it is signed their sketch, or a `digest`.
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


def compare_steps(first: StepRun, second: StepRun, rtol: float | None) -> GradientComparison:
    """Compare the outputs of two runs of a step by path."""
    own, theirs = first.outputs, second.outputs
    order, floor = first.ages or second.ages, first.floor() if rtol is None else {}
    both = sorted((path for path in own if path in theirs), key=lambda path: order.get(path, 0))
    if not both:
        raise ValueError(
            f"other: got outputs {list(theirs)[:5]}, expected the outputs of fun; "
            f"{nearest('', own)}; return trees with the same paths"
        )
    judged = {p: _output_judgment(own[p], theirs[p], floor.get(p), rtol) for p in both}
    known = first.counts.beside(second.counts)
    findings = [
        _output_finding(path, own[path], theirs[path], found, known)
        for path, found in judged.items()
        if found.differs
    ]
    findings += [] if findings else _no_output_judged(own, judged)
    unmatched = [f"output {p}, only in fun" for p in own if p not in theirs]
    unmatched += [f"output {p}, only in other" for p in theirs if p not in own]
    rows = [
        ComparisonRow(path, None, found.difference, None, found.tolerance, kind="output")
        for path, found in judged.items()
    ]
    notes = _notes_of_runs(first, second, judged, known)
    parts = tuple(findings), tuple(rows), tuple(unmatched), tuple(notes)
    return with_facts(GradientComparison(not findings, *parts), first.facts, second.facts)


def _notes_of_runs(
    first: StepRun, second: StepRun, judged: Mapping[str, Judgment], known: Counts
) -> list[str]:
    notes = [*first.notes, *second.notes]
    if not first.ages and not second.ages:
        notes.append("so outputs are in the order of their paths, not of their computation")
    notes += first.repeats(known)
    notes += [undecided(path) for path, found in judged.items() if not found.is_judged]
    types = {p: (first.outputs[p].dtype, second.outputs[p].dtype) for p in judged}
    return notes + [
        f"{path}: {own} in fun, {other} in other"
        for path, (own, other) in types.items()
        if str(own) != str(other)
    ]


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
    repeats = functools.partial(_repeats, args, outputs)
    facts = run_facts({}, _given_arrays(args, kwargs)) if signed else None
    return StepRun(kept, floor, found, counts, notes, repeats, facts)


def _given_arrays(args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays and numbers among the arguments, by their names."""
    return {
        path: x
        for path, x in with_paths({"args": args, "kwargs": kwargs})
        if is_array(x) or isinstance(x, int | float | complex)
    }


def _signed(output: Output) -> Output:
    """An output without its numbers, but for a single one."""
    is_kept = isinstance(output.value, np.ndarray) and not output.value.ndim
    return output._replace(value=_as_signed(output.value), signed=not is_kept)


def _as_signed(value: Any) -> Any:
    """The part of a value that a file keeps: a sketch or a single number, a digest, or text."""
    if isinstance(value, np.ndarray):
        return host_sketch(value) if value.ndim else value
    return digest(signature(value.values).digest) if isinstance(value, Exact) else repr(value)


def digest(text: str) -> Exact:
    """The bytes of a hash of what is compared exactly."""
    return Exact(np.frombuffer(bytes.fromhex(text), np.uint8))


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
    entries = [(path, leaf) for path, leaf in _named_outputs(found[0]) if leaf is not None]
    values = host_values([leaf for _, leaf in entries])
    return {
        path: Output(value, np.shape(leaf), _dtype_of_output(leaf))
        for (path, leaf), value in zip(entries, values, strict=True)
    }


def _named_outputs(tree: Any) -> list[tuple[str, Any]]:
    return [(path or WHOLE_OUTPUT, leaf) for path, leaf in with_paths(tree)]


def _dtype_of_output(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _program(fun: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> StepProgram:
    """The program of a step."""
    found: list[StepProgram] = []

    def run(function: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        paths: list[str] = []

        def outputs(*args: Any, **kwargs: Any) -> Any:
            results = _named_outputs(function(*args, **kwargs))
            kept = [(path, leaf) for path, leaf in results if isinstance(leaf, jax.Array)]
            paths[:] = [path for path, _ in kept]
            return [leaf for _, leaf in kept]

        inputs = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_array(leaf)]
        found.append(StepProgram(_jaxpr.trace(outputs, args, kwargs).program, inputs, paths))

    with_models(run, fun, args, dict(kwargs))
    return found[0]


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


def _no_output_judged(
    own: Mapping[str, Output], judged: Mapping[str, Judgment]
) -> list[ComparisonFinding]:
    """The finding that no output could be judged; where some are floating, none of these."""
    floating = [found for path, found in judged.items() if isinstance(own[path].value, np.ndarray)]
    outputs = floating or list(judged.values())
    if any(found.is_judged for found in outputs):
        return []
    kind = "floating outputs" if floating else "outputs"
    text = f"rounding decides each of {len(outputs)} {kind}, so none is judged; compare "
    text += "with wider arguments and types, or give rtol=, a tolerance of your own"
    return [unjudged(text)]


def _output_judgment(own: Output, other: Output, floor: Any, rtol: float | None) -> Judgment:
    if own.shape != other.shape:
        return Judgment(float("inf"), 0.0)
    values = own.value, other.value
    if all(isinstance(x, np.ndarray) for x in values):
        floor = np.zeros(np.shape(own.value)) if floor is None else floor
        judging = judge_sketches if own.signed else judge
        return judging(*values, floor, rounding(own.dtype, other.dtype), rtol)
    if all(isinstance(x, Exact) for x in values):
        return judge_exactly(values[0].values, values[1].values, floor and floor.values)
    return Judgment(0.0 if values[0] == values[1] else 1.0, 0.0)


def _output_finding(
    path: str, own: Output, other: Output, found: Judgment, known: Counts
) -> ComparisonFinding:
    if own.shape != other.shape:
        text = f"the shape is {list(own.shape)} in fun, {list(other.shape)} in other"
        return ComparisonFinding("output", f"{path}: {text}", path=path)
    factor, text = None, f"{path}: the relative difference is {found.difference:.2g}"
    if isinstance(own.value, np.ndarray) and isinstance(other.value, np.ndarray):
        text += f", of which rounding explains {found.tolerance:.1g}"
        mine, its = (x.value[: 2 * NUMBERS] if x.signed else x.value for x in (own, other))
        factor = ratio(mine, its, found.tolerance)
        if own.shape == ():
            text += f"; it is {own.value:.6g} in fun, {other.value:.6g} in other"
    else:
        share = "some" if own.signed else f"{found.difference:.2g}"
        text = f"{path}: {share} of its numbers differ, which are compared exactly"
    if factor is not None:
        means = meaning(factor, known)
        shown = f"{factor:.2f}" if abs(factor) >= 1 else f"{factor:.3g}"
        text += f"; fun is {shown} times other" + (f": {means}" if means else "")
    return ComparisonFinding("output", text, path=path, ratio=factor)


def _repeats(args: tuple, outputs: Mapping[str, Output], known: Counts) -> list[str]:
    """Notes of the arguments, but for state, whose parts on all devices are the same."""
    parts, found = max(known.devices, default=1), []
    for i, arg in enumerate(args if parts > 1 else ()):
        leaves = [x for x in jax.tree.leaves(arg) if is_array(x)]
        if _is_state(leaves, outputs):
            continue
        host = [x.values if isinstance(x, Exact) else x for x in host_values(leaves)]
        if repeats(host, parts):
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
