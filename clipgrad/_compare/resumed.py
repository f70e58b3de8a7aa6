"""A run that goes on from a checkpoint beside the run that was not stopped."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from clipgrad._compare.compare import compare
from clipgrad._compare.comparison import ComparisonFinding, GradientComparison
from clipgrad._compare.versions import copied
from clipgrad._error_clip import check_function
from clipgrad._trees import donated_leaf, with_paths


def compare_resumed(
    step: Callable[[Any, Any], Any],
    straight: tuple[Any, Sequence[Any]],
    resumed: tuple[Any, Sequence[Any]],
    *,
    rtol: float | None = None,
) -> GradientComparison:
    """Finds the first thing that a resumed run has otherwise.

    Guarantees:
      * First states and batches are compared by path: every number exactly, each dtype and layout.
        So what the checkpoint lost is named, and not what follows from it.
      * If all is the same, both take a step for each batch, and its outputs are compared in the
        order of computation: what differs then is not in the state.
      * Each step gets copies of the arrays, so it may donate them, or change a model in place.

    Args:
      step: a training step, ``step(state, batch)``, that returns the state or (state, metrics).
      straight: the state when it was saved, and a list of the batches that followed.
      resumed: the state that was restored, and a list of as many batches of the restored loader.
      rtol: a relative tolerance of the outputs, in place of the measured rounding.

    Returns:
      A `GradientComparison`; its findings are of kind "output", with the path of what differs.

    Raises:
      TypeError: ``step`` is not a function, or the others are not pairs of a state and a list.
      ValueError: an array was donated, or the runs have other numbers of batches.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> step = lambda state, x: {"w": state["w"] - state["speed"], "speed": x}
      >>> x = jnp.ones(2)
      >>> state, lost = {"w": x, "speed": x}, {"w": x, "speed": 0 * x}
      >>> cg.compare_resumed(step, (state, [x]), (lost, [x])).findings[0].path
      'state/speed'
    """
    check_function(step)
    runs = _checked_run("straight", straight), _checked_run("resumed", resumed)
    count, there = len(straight[1]), len(resumed[1])
    if count != there or not count:
        raise ValueError(f"resumed: got {there} batches beside {count}, expected as many, not 0")
    own, other = (dict(with_paths(run)) for run in runs)
    restored = compare(dict, dict, (own,), other_args=(other,), argnums=None, rtol=0.0)
    types = [found for path in own if (found := _other_type(path, own[path], other.get(path)))]
    if types or restored.unmatched or not restored.ok:
        paths = {finding.path for finding in types}
        rest = [finding for finding in restored.findings if finding.path not in paths]
        return dataclasses.replace(restored, ok=False, findings=(*types, *rest), notes=())
    fun, resumed_fun = (_by_steps(step, jax.tree.structure(run)) for run in runs)
    args, theirs = (tuple(jax.tree.leaves(run)) for run in runs)
    return compare(fun, resumed_fun, args, other_args=theirs, argnums=None, rtol=rtol)


def _checked_run(name: str, run: Any) -> dict[str, Any]:
    if type(run) is not tuple or len(run) != 2 or not isinstance(run[1], list | tuple):
        got = type(run).__name__
        raise TypeError(f"{name}: got {got}, expected (state, batches), with a list of batches")
    if (path := donated_leaf(run)) is not None:
        raise ValueError(
            f"{name}: got an array that a step has overwritten, at {name}{path}, expected one that "
            "was not donated; copy the state before the next step"
        )
    return {"state": run[0], "batches": list(run[1])}


def _by_steps(step: Callable[[Any, Any], Any], structure: Any) -> Callable[..., dict[str, Any]]:
    """The steps as a function of plain leaves, whose outputs are named by their paths."""

    def steps(*leaves: Any) -> dict[str, Any]:
        run, found = structure.unflatten(leaves), {}
        for i, batch in enumerate(run["batches"]):
            out = step(*copied((run["state"], batch)))
            found |= dict(with_paths({f"step {i + 1}": out}))
            run["state"] = out[0] if type(out) is tuple else out
        return found

    return steps


def _other_type(path: str, own: Any, other: Any) -> ComparisonFinding | None:
    """The finding of an array whose dtype or layout is another."""
    if not isinstance(own, jax.Array) or not hasattr(other, "dtype"):
        return None
    text = f"{path}: {own.dtype} in the straight run, {other.dtype} in the resumed one"
    if own.dtype == other.dtype:
        is_whole = not isinstance(other, jax.Array) or own.shape != other.shape
        if is_whole or own.sharding.is_equivalent_to(other.sharding, own.ndim):
            return None
        text = f"{path}: its layout was {own.sharding}, and is {other.sharding}"
    return ComparisonFinding("output", text, path=path)
