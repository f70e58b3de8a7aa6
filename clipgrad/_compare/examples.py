"""Whether what is computed of an example depends on the other examples of its batch."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from clipgrad._compare.comparison import GradientComparison
from clipgrad._compare.differences import Judgment, judge, rounding
from clipgrad._compare.example_sketches import (
    LINEAR,
    MAGNITUDES,
    REAL,
    SQUARED,
    ExampleSketches,
    has_places,
)
from clipgrad._compare.exchange import Exchange, chosen_examples, example_count, padded_places
from clipgrad._compare.findings import ONE_ARGUMENT, ComparedLeaf, find
from clipgrad._compare.matching import Pair, match
from clipgrad._compare.places import ComparedPlace
from clipgrad._compare.records import ComparisonFinding, ComparisonRow, unjudged
from clipgrad._compare.sides import with_signatures
from clipgrad._compare.sketches import LENGTH, judge_sketches
from clipgrad._compare.versions import Version, VersionProgram, VersionRun, version
from clipgrad._error_clip import check_function
from clipgrad._errors import first_few
from clipgrad._jaxpr import settings_of_runs
from clipgrad._trees import loss_and_aux

View = Callable[[VersionRun], np.ndarray]
MOST_LEAVES = 5
UNUSED = Judgment(0.0, 0.0)
POSSIBLE_REASONS = {
    "neighbors": "this is meant of a BatchNorm in training, of negatives in the batch and of the "
    "capacity of experts; else look there for an axis, a mask or a mean that takes in other "
    "examples",
    "place": "this is meant of random numbers that are drawn for places, such as a dropout's; else "
    "look there for a shift, a cumulative sum or a weight along the axis of the batch",
    "padding": "look there for a mask that is missing, or a mean that counts what is padded",
}


def compare_examples(
    fun: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    *,
    examples: int | Sequence[int] | None = None,
    padding: Any = None,
    has_aux: bool = False,
) -> GradientComparison:
    r"""Finds where an example's values and gradient depend on its neighbors, place or padding.

    The gradient of a loss of independent examples is a sum, with one term for each: what one
    example adds is the same beside any others. So examples are exchanged among the places of the
    batch. With :math:`g(a, b)` the gradient of some examples a beside others b, and c and d other
    examples, it is compared whether :math:`g(a, b) - g(c, b)` and :math:`g(a, d) - g(c, d)` are
    equal, and so for the loss and all named values. All runs have the same shapes and one compiled
    program. What differs by more than rounding is found.

    Guarantees:
      * A "neighbors" finding names the module of the first value of which an element depends on
        several examples; if there is none, the first cotangent in backward order, or the leaf.
        Sums over examples that go into the loss as they are, such as its mean, are none.
      * A "place" finding names the first value that is not the same, in another order, if the
        batch is in another order.
      * A "padding" finding names the first value whose part that is not padded depends on what is.
      * A loss without such dependence can be accumulated over parts of a batch, and clipped by
        `clip_per_example`. Whether a dependence is meant is not in the program: ``ok`` is false.
      * Only what the batch shows is seen: of examples of equal lengths no weights by length.

    Args:
      fun: a loss of a whole batch, ``fun(params, batch)``: its mean, its sum, or the losses of all
        examples, shape (B,).
      params: what it is differentiated by.
      batch: a tree of arrays whose leading axis is that of the examples, which must differ.
      examples: the positions of the examples that are held beside others; half of them by default.
      padding: the batch with other numbers where it is padded, to see whether these count.
      has_aux: whether the function returns ``(loss, aux)``; aux is not compared.

    Returns:
      A `GradientComparison`, with at most one finding of each kind; its rows have the values by
      module and the leaves of the gradient (kind "gradient"), with the dependence on neighbors.

    Raises:
      TypeError: ``fun`` is not a function, or it is called inside of `jax.jit`.
      ValueError: the batch has no one leading axis, ``examples`` are none of its positions, or
        ``padding`` is not the batch with other numbers.

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp
      >>> def loss(w, x):
      ...     with jax.named_scope("center"):
      ...         h = x - jnp.mean(x, axis=0, keepdims=True)
      ...     return jnp.mean((h @ w) ** 2)
      >>> found = cg.compare_examples(loss, jnp.ones(3), jnp.arange(12.0).reshape(4, 3) ** 2)
      >>> found.ok, found.findings[0].kind, found.findings[0].module
      (False, 'neighbors', 'center')
    """
    check_function(fun)
    size = example_count(batch)
    chosen = chosen_examples(examples, size)
    padded = None if padding is None else padded_places(batch, padding)
    with settings_of_runs():
        weights = jnp.linspace(0.5, 1.5, size)
        own = version(_weighted_total(fun, has_aux, size), (params, (batch, weights)), {}, 0, False)
        return _of_runs(_run_all(own, chosen, padding, padded))


def _weighted_total(
    fun: Callable[[Any, Any], Any], has_aux: bool, size: int
) -> Callable[[Any, Any], Any]:
    """The loss as one number; those of all examples with weights that stay with the examples."""

    @functools.wraps(fun)
    def total(params: Any, batch: tuple[Any, Any]) -> Any:
        value, _ = loss_and_aux("fun", fun(params, batch[0]), has_aux)
        is_of_each = jnp.shape(value) == (size,)
        return jnp.sum(value * batch[1].astype(value.dtype)) if is_of_each else value

    return total


class ExampleRuns(NamedTuple):
    """The runs of a loss, of which floors and pairs are compared.

    Attributes:
      version: the loss.
      exchanged: its runs with examples a beside b, c beside b, a beside d, and c beside d.
      floor: the movement of the first of them by rounding.
      others: a run with the batch in another order ("place"), or with other padding ("padding").
      places: the shape of the array that says what is padded.
    """

    version: Version
    exchanged: list[VersionRun]
    floor: VersionRun
    others: dict[str, VersionRun]
    places: tuple[int, ...]

    def dependence(self, view: View) -> Judgment:
        """The change of what the first examples add by other neighbors."""
        a, b, c, d = (np.asarray(view(run), np.float64) for run in self.exchanged)
        floor = 2 * np.asarray(view(self.floor))  # of four runs
        return _judged(a - b, c - d, floor, self._eps)

    def change(self, kind: str, view: View) -> Judgment:
        """The difference of a run with another order or padding."""
        runs = self.exchanged[0], self.others[kind], self.floor
        own, other, floor = (np.asarray(view(run), np.float64) for run in runs)
        return _judged(own, other, floor, self._eps)

    def varies(self, view: View) -> bool:
        """Whether what is seen depends on the examples at all."""
        first, *others = (np.asarray(view(run), np.float64) for run in self.exchanged)
        floor = np.asarray(view(self.floor))
        return any(_judged(first, other, floor, self._eps).differs for other in others)

    @property
    def _eps(self) -> float:
        return rounding(self.version.loss_dtype)


def _judged(own: np.ndarray, other: np.ndarray, floor: np.ndarray, eps: float) -> Judgment:
    if np.shape(own)[-1:] == (LENGTH,):
        return judge_sketches(own, other, floor, eps, None)
    return judge(own, other, floor, eps, None)


def _run_all(own: Version, chosen: np.ndarray, padding: Any, padded: Any) -> ExampleRuns:
    assert own.subject is not None  # it runs now
    size, given = len(chosen), own.subject
    batch = Exchange.of(given.inputs, given.names, size)
    if batch.is_uniform:
        raise ValueError("batch: got examples that are all equal, expected ones that differ")
    real = None if padded is None else jnp.asarray(~padded)
    names = frozenset((value.name, value.kind) for value in own.values)
    hook = functools.partial(ExampleSketches, real=real)
    program = VersionProgram(own, names, sketches=hook)
    here = np.arange(size)
    there = np.roll(here, -1)
    first, *rest = (
        program(batch.with_examples(numbers))
        for numbers in (here, np.where(chosen, there, here), np.where(chosen, here, there), there)
    )
    order = np.random.default_rng(1).permutation(size)
    others = {"place": with_signatures(program(batch.with_examples(order)))}
    if padding is not None:
        others["padding"] = with_signatures(program(batch.with_batch(padding)))
    floor = program.floor(first, with_signatures)
    runs = [with_signatures(run) for run in (first, *rest)]
    return ExampleRuns(own, runs, floor, others, () if padded is None else padded.shape)


def _of_runs(runs: ExampleRuns) -> GradientComparison:
    pairs = match(runs.version, runs.version, None).pairs
    places = [_place_beside_neighbors(runs, pair) for pair in pairs]
    leaves = _judged_leaves(runs, runs.dependence)
    if problem := _nothing_to_judge(runs, leaves):
        return GradientComparison(False, (unjudged(problem),), ())
    findings = [_finding(runs, "neighbors", runs.dependence, places, leaves)]
    for kind in runs.others:
        measure = functools.partial(runs.change, kind)
        own = _places(runs, kind, pairs), _judged_leaves(runs, measure)
        findings.append(_finding(runs, kind, measure, *own))
    found = tuple(finding for finding in findings if finding)
    notes = tuple(
        f"{leaf.path or ONE_ARGUMENT}: rounding decides here, so its gradient is not judged"
        for leaf in leaves
        if not leaf.judgment.is_judged
    )
    rows = (*(place.row for place in places), *map(_leaf_row, leaves))
    return GradientComparison(not found, found, rows, (), notes)


def _leaf_row(leaf: ComparedLeaf) -> ComparisonRow:
    found = leaf.judgment
    own = leaf.path or ONE_ARGUMENT, None, found.difference, None, found.tolerance
    return ComparisonRow(*own, kind="gradient")


def _judged_leaves(runs: ExampleRuns, measure: Callable[[View], Judgment]) -> list[ComparedLeaf]:
    return [
        ComparedLeaf(leaf.path, leaf.position, measure(lambda run, i=i: run.grads[i]))
        for i, leaf in enumerate(runs.version.leaves)
    ]


def _loss(run: VersionRun) -> np.ndarray:
    return run.loss


def _nothing_to_judge(runs: ExampleRuns, leaves: Sequence[ComparedLeaf]) -> str:
    """Why no gradient says anything."""
    first, second = runs.exchanged[:2]
    codes = [run.grads[i][-1] for run in runs.exchanged for i in range(len(leaves))]
    if any(codes) or not all(np.isfinite(run.loss) for run in runs.exchanged):
        return "the loss or its gradient is not finite; diagnose(fun, args) says where that begins"
    if all(map(np.array_equal, first.grads, second.grads)):
        return "no gradient depends on the examples, so none can depend on their neighbors"
    if not any(leaf.judgment.is_judged for leaf in leaves):
        return "rounding decides each gradient; compare in a wider type"
    return ""


def _place_beside_neighbors(runs: ExampleRuns, pair: Pair) -> ComparedPlace:
    """The dependence of a value and its cotangent on several examples at once.

    A sum over examples is no dependence where its cotangent is the same for all examples.
    """
    found, cotangent = runs.dependence(_row_of(pair, LINEAR)), None
    is_sum = False
    if pair.own.value.position in runs.floor.cotangents:
        cotangent = runs.dependence(_cotangent_of(pair))
        is_sum = not found.differs and not runs.varies(_cotangent_of(pair))
    if not _is_used(runs, pair):
        found = UNUSED
    elif not found.differs and not is_sum:
        found = runs.dependence(_row_of(pair, SQUARED))
    return ComparedPlace(pair, found, cotangent)


def _is_used(runs: ExampleRuns, pair: Pair) -> bool:
    """Whether the loss may depend on a value: it has no cotangent, or one that is not zero."""
    has_one = pair.own.value.position in runs.floor.cotangents
    return not has_one or any(np.any(_cotangent_of(pair)(run)) for run in runs.exchanged)


def _places(runs: ExampleRuns, kind: str, pairs: Sequence[Pair]) -> list[ComparedPlace]:
    """The change of each value with another order or padding, where it is known what is padded."""
    row, found = MAGNITUDES if kind == "place" else REAL, []
    for pair in pairs:
        value = pair.own.value
        if kind == "padding" and not has_places(value.shape, runs.places):
            if value.holders or {*runs.places[1:]} & {*value.shape[1:]}:
                continue
        is_used = _is_used(runs, pair)
        judged = runs.change(kind, _row_of(pair, row)) if is_used else UNUSED
        found.append(ComparedPlace(pair, judged, None))
    return found


def _row_of(pair: Pair, row: int) -> View:
    """A row of the notes of a value, without the code of what is not finite."""

    def view(run: VersionRun) -> np.ndarray:
        notes = np.asarray(run.values[pair.own.value.position])[pair.own.at]
        found = notes.reshape(-1, *notes.shape[-2:])[:, row].astype(np.float64)
        found[:, -1] = 0
        return found

    return view


def _cotangent_of(pair: Pair) -> View:
    def view(run: VersionRun) -> np.ndarray:
        notes = np.asarray(run.cotangents[pair.own.value.position])[pair.own.at]
        found = notes.reshape(-1, LENGTH).astype(np.float64)
        found[:, -1] = 0
        return found

    return view


def _finding(
    runs: ExampleRuns,
    kind: str,
    measure: Callable[[View], Judgment],
    places: Sequence[ComparedPlace],
    leaves: Sequence[ComparedLeaf],
) -> ComparisonFinding | None:
    """The first place of a kind of dependence, with the leaves whose gradient has it."""
    found = find(runs.version, runs.version, places, measure(_loss), leaves)
    if not found:
        return None
    bad = sorted(
        (leaf for leaf in leaves if leaf.judgment.differs), key=lambda x: -x.judgment.difference
    )
    shown = [f"{x.path or ONE_ARGUMENT} ({x.judgment.difference:.2g})" for x in bad]
    more = f"; so does the gradient of {first_few(shown, MOST_LEAVES)}" if bad else ""
    message = f"{found[0].message}{more}; {POSSIBLE_REASONS[kind]}"
    # Operations before, outside of all modules, keep to one example: the value leaves its module.
    left = next((place.name for place in places if place.value.differs), "")
    return dataclasses.replace(found[0], kind=kind, message=message, module=found[0].module or left)
