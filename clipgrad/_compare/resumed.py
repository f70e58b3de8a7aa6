"""A run that goes on from a checkpoint beside the run that was not stopped."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from clipgrad._compare.compare import compare
from clipgrad._compare.comparison import GradientComparison
from clipgrad._compare.records import ComparisonFinding
from clipgrad._error_clip import check_function
from clipgrad._trees import donated_leaf, with_paths


def compare_resumed(
    step: Callable[[Any, Any], Any],
    straight: tuple[Any, Sequence[Any]],
    resumed: tuple[Any, Sequence[Any]],
    *,
    rtol: float | None = None,
) -> GradientComparison:
    """Finds the first thing that a resumed run has otherwise than the run that was not stopped.

    Give the state at the moment of saving and the batches that follow, and the state that was
    restored and the batches that the restored loader gives.

    Guarantees:
      * First both states and batches are compared by path: every number exactly, each dtype and
        each layout. So what the checkpoint lost is named, and not what follows from it.
      * If they are the same, both runs take a step for each batch, and its outputs are compared in
        the order of computation: what differs then is not in the state.
      * The arrays are copied, so the step may donate them.

    Args:
      step: a training step, ``step(state, batch)``, which returns ``(state, metrics)`` or the
        state.
      straight: the state of the run that goes straight on, and a list of batches.
      resumed: the state that was restored, and a list of as many batches.
      rtol: a relative tolerance of the outputs, in place of the measured rounding.

    Returns:
      A `GradientComparison`; its findings are of kind "output", with the path of what differs.

    Raises:
      TypeError: ``step`` is not a function, or the others are not pairs of a state and a list.
      ValueError: an array was donated, or the runs have other numbers of batches.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> def step(state, batch):
      ...     speed = 0.9 * state["speed"] + batch
      ...     return {"w": state["w"] - 0.1 * speed, "speed": speed}
      >>> state, batches = {"w": jnp.ones(2), "speed": jnp.ones(2)}, [jnp.ones(2)]
      >>> lost = {**state, "speed": jnp.zeros(2)}
      >>> cg.compare_resumed(step, (state, batches), (lost, batches)).findings[0].path
      'state/speed'
    """
    check_function(step)
    _check_runs(straight, resumed)
    types = _other_types(straight, resumed)
    restored = compare(_restart, _restart, straight, other_args=resumed, argnums=None, rtol=0.0)
    if types or restored.unmatched or not restored.ok:
        differing = {finding.path for finding in types}
        rest = [finding for finding in restored.findings if finding.path not in differing]
        return dataclasses.replace(restored, ok=False, findings=(*types, *rest), notes=())

    def run(state: Any, batches: Sequence[Any]) -> dict[str, Any]:
        found = {}
        for i, batch in enumerate(batches):
            found[f"step {i + 1}"] = out = step(state, batch)
            state = out[0] if type(out) is tuple else out
        return found

    return compare(run, run, straight, other_args=resumed, argnums=None, rtol=rtol)


def _restart(state: Any, batches: Sequence[Any]) -> dict[str, Any]:
    return {"state": state, "batches": list(batches)}


def _check_runs(*runs: Any) -> None:
    for name, run in zip(("straight", "resumed"), runs, strict=True):
        if type(run) is not tuple or len(run) != 2 or not isinstance(run[1], list | tuple):
            raise TypeError(
                f"{name}: got {type(run).__name__}, expected (state, batches), with a list of the "
                "batches that follow"
            )
        if (path := donated_leaf(run)) is not None:
            raise ValueError(
                f"{name}: got an array that a step has overwritten, at {name}{path}, expected one "
                "that was not donated; copy the state before the next step"
            )
    counts = [len(run[1]) for run in runs]
    if counts[0] != counts[1] or not counts[0]:
        raise ValueError(
            f"resumed: got {counts[1]} batches beside {counts[0]}, expected as many, at least one"
        )


def _other_types(straight: Any, resumed: Any) -> list[ComparisonFinding]:
    """The findings of arrays whose dtype or layout is another."""
    there, found = dict(with_paths(_restart(*resumed))), []
    for path, own in with_paths(_restart(*straight)):
        other: Any = there.get(path)
        text = ""
        if not (isinstance(own, jax.Array) and hasattr(other, "dtype")):
            continue
        if own.dtype != other.dtype:
            text = f"{own.dtype} in the straight run, {other.dtype} in the resumed one"
        elif isinstance(other, jax.Array) and own.shape == other.shape:
            same = own.sharding.is_equivalent_to(other.sharding, own.ndim)
            text = "" if same else f"its layout was {own.sharding}, and is {other.sharding}"
        if text:
            found.append(ComparisonFinding("output", f"{path}: {text}", path=path))
    return found
