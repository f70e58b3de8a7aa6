"""Two versions of a whole training step: their outputs, by path."""

import functools
from collections.abc import Callable, Mapping, Sequence
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
from clipgrad._compare.records import ComparisonFinding, ComparisonRow, unjudged
from clipgrad._errors import first_line
from clipgrad._frameworks import with_models
from clipgrad._program import moved_by_rounding, rounded
from clipgrad._trees import argument_name, check_concrete, is_array, nearest, with_paths

WHOLE_OUTPUT = "the output"  # the path of an output that is one array


class Output(NamedTuple):
    """An output of a step: its value on the host, and the type that it had."""

    value: Any
    shape: tuple[int, ...]
    dtype: Any


class StepProgram(NamedTuple):
    """A step as one program: its inputs, and the path of each of its outputs."""

    program: Any
    inputs: list[Any]
    paths: list[str]


def compare_steps(
    fun: Callable[..., Any],
    other: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    other_args: tuple,
    rtol: float | None,
) -> GradientComparison:
    """Run two versions of a step, and compare their outputs by path."""
    own, theirs = _outputs_of(fun, args, kwargs), _outputs_of(other, other_args, kwargs)
    steps, notes = [], []
    for name, function, given in (("fun", fun, args), ("other", other, other_args)):
        try:
            steps.append(_program(function, given, kwargs))
        except Exception as error:  # a step may be a loop of Python that reads numbers
            steps.append(None)
            notes.append(f"{name} can't be traced as one program ({first_line(error)})")
    traced = [step for step in steps if step is not None]
    if not traced:
        notes.append("so outputs are in the order of their paths, not of their computation")
    order = dict(zip(traced[0].paths, ages(traced[0].program), strict=True)) if traced else {}
    floor: dict[str, Any] = {}
    if rtol is None:
        floor = _floor(steps[0], own) if steps[0] else _floor_of_arguments(fun, args, kwargs, own)
    known = part_counts((args, other_args), [step.program for step in traced])
    notes += _repeats(args, own, known)
    return _compared_outputs(own, theirs, floor, order, known, rtol, notes)


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
    entries = [
        (path or WHOLE_OUTPUT, leaf) for path, leaf in with_paths(found[0]) if leaf is not None
    ]
    values = host_values([leaf for _, leaf in entries])
    return {
        path: Output(value, np.shape(leaf), _dtype_of_output(leaf))
        for (path, leaf), value in zip(entries, values, strict=True)
    }


def _dtype_of_output(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _program(fun: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> StepProgram:
    """The program of a step."""
    found: list[StepProgram] = []

    def run(function: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        paths: list[str] = []

        def outputs(*args: Any, **kwargs: Any) -> Any:
            results = with_paths(function(*args, **kwargs))
            kept = [
                (path or WHOLE_OUTPUT, leaf)
                for path, leaf in results
                if isinstance(leaf, jax.Array)
            ]
            paths[:] = [path for path, _ in kept]
            return [leaf for _, leaf in kept]

        inputs = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_array(leaf)]
        found.append(StepProgram(_jaxpr.trace(outputs, args, kwargs).program, inputs, paths))

    with_models(run, fun, args, dict(kwargs))
    return found[0]


def _floor(step: StepProgram, outputs: Mapping[str, Output]) -> dict[str, Any]:
    """The movement of the outputs of a step by its rounding, by path."""
    own = [outputs[path].value for path in step.paths]
    run = _jaxpr.jit_for_one_call(step.program)(lambda *given: rounded(step.program, *given))
    runs = (host_values(run(step.inputs, jnp.uint32(i))) for i in range(1, 1 + RUNS))
    return dict(zip(step.paths, floor_of(own, runs), strict=True))


def _floor_of_arguments(
    fun: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], outputs: Mapping[str, Output]
) -> dict[str, Any]:
    """The movement of the outputs by roundings of the arguments, for a step that is no program."""

    def numbers(found: Mapping[str, Output]) -> dict[str, Any]:
        kinds = np.ndarray | Exact
        return {path: x.value for path, x in found.items() if isinstance(x.value, kinds)}

    own = numbers(outputs)
    runs = (
        numbers(
            _outputs_of(
                fun, *jax.tree.map(functools.partial(moved_by_rounding, seed=i), (args, kwargs))
            )
        )
        for i in range(1, 1 + RUNS)
    )
    return floor_of(own, runs)


def _compared_outputs(
    own: dict[str, Output],
    theirs: dict[str, Output],
    floor: Mapping[str, Any],
    order: Mapping[str, int],
    known: Counts,
    rtol: float | None,
    notes: list[str],
) -> GradientComparison:
    both = sorted((path for path in own if path in theirs), key=lambda path: order.get(path, 0))
    if not both:
        raise ValueError(
            f"other: got outputs {list(theirs)[:5]}, expected the outputs of fun; "
            f"{nearest('', own)}; return trees with the same paths"
        )
    findings, judged = [], {}
    for path in both:
        found = _output_judgment(own[path], theirs[path], floor.get(path), rtol)
        judged[path] = found
        if not found.is_judged:
            notes.append(f"{path}: rounding decides here, so it is not judged")
        elif found.differs:
            findings.append(_output_finding(path, own[path], theirs[path], found, known))
    rows = [
        ComparisonRow(path, None, found.difference, None, found.tolerance, kind="output")
        for path, found in judged.items()
    ]
    findings += [] if findings else _no_output_judged(own, judged)
    unmatched = [f"output {p}, only in fun" for p in own if p not in theirs]
    unmatched += [f"output {p}, only in other" for p in theirs if p not in own]
    notes += [
        f"{path}: {own[path].dtype} in fun, {theirs[path].dtype} in other"
        for path in both
        if own[path].dtype != theirs[path].dtype
    ]
    return GradientComparison(
        not findings, tuple(findings), tuple(rows), tuple(unmatched), tuple(notes)
    )


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
        return judge(*values, floor, rounding(own.dtype, other.dtype), rtol)
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
        factor = ratio(own.value, other.value, found.tolerance)
        if own.shape == ():
            text += f"; it is {own.value:.6g} in fun, {other.value:.6g} in other"
    else:
        text = f"{path}: {found.difference:.2g} of its numbers differ, which are compared exactly"
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
