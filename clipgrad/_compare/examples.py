"""Whether what is computed of an example depends on the other examples of its batch.

Examples are exchanged among the places of the batch: no shape changes, so one program serves all.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._compare.comparison import (
    ComparisonFinding,
    ComparisonRow,
    GradientComparison,
    unjudged,
)
from clipgrad._compare.differences import Judgment, plain_numbers
from clipgrad._compare.gradients import find, judged_runs, undecided_leaves
from clipgrad._compare.matching import Instance, Pair, match
from clipgrad._compare.places import ComparedPlace, JudgedRuns
from clipgrad._compare.ratios import repeats
from clipgrad._compare.sketches import (
    LENGTH,
    MASKED,
    NUMBERS,
    Sketches,
    judge_sketches,
    sketch,
    sketch_dtype,
)
from clipgrad._compare.versions import Version, VersionProgram, VersionRun, version
from clipgrad._diagnose import DiagnosisSubject
from clipgrad._error_clip import check_function
from clipgrad._errors import first_few
from clipgrad._jaxpr import settings_of_runs
from clipgrad._trees import is_array, loss_and_aux, nearest, with_paths
from clipgrad._values import value_hook

IN_BATCH = "args[1]"  # the name of the inputs that are in the batch begins so
MAGNITUDES, LINEAR, SQUARED, REAL = range(4)  # the rows of the notes
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
    size = _example_count(batch)
    chosen = _chosen_examples(examples, size)
    padded = None if padding is None else _padded_places(batch, padding)
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
    """The runs of a loss that are compared, with its `ExampleSketches`.

    Attributes:
      version: the loss.
      pairs: its values, each with itself.
      exchanged: its runs with examples a beside b, c beside b, a beside d, and c beside d.
      floor: the movement of the first of them by rounding.
      others: a run with the batch in another order ("place"), or with other padding ("padding").
      padded: the shape of the array that says what is padded.
    """

    version: Version
    pairs: list[Pair]
    exchanged: list[VersionRun]
    floor: VersionRun
    others: dict[str, VersionRun]
    padded: tuple[int, ...]

    def judged(self, own: VersionRun, other: VersionRun, floor: VersionRun, row: int) -> JudgedRuns:
        """Two runs compared by a row of the notes of values."""
        versions = self.version, self.version
        first, second, moved = (_seen(run, row) for run in (own, other, floor))
        return judged_runs(versions, self.pairs, first, second, moved, judge_sketches, None)

    def is_used(self, instance: Instance) -> bool:
        """Whether the loss may depend on a value: it has no cotangent, or one that is not zero."""
        found = [run.cotangents.get(instance.value.position) for run in self.exchanged]
        return any(x is None or np.any(x[instance.at][..., :-1]) for x in found)


def _seen(run: VersionRun, row: int) -> VersionRun:
    """A run with a row of the notes of values, without sizes and codes of what is not finite."""
    kept = np.arange(LENGTH) < 2 * NUMBERS
    values = {at: notes[..., row, :] * kept for at, notes in run.values.items()}
    cotangents = {at: sketches * kept for at, sketches in run.cotangents.items()}
    return run._replace(values=values, cotangents=cotangents)


def _run_all(own: Version, chosen: np.ndarray, padding: Any, padded: Any) -> ExampleRuns:
    assert own.subject is not None  # it runs now
    size, given = len(chosen), own.subject
    _check_examples_differ(given, size)
    real = None if padded is None else jnp.asarray(~padded)
    sketches = functools.partial(ExampleSketches, real=real)
    program = VersionProgram(own, signed=True, sketches=sketches)
    here = np.arange(size)
    there = np.roll(here, -1)
    orders = here, np.where(chosen, there, here), np.where(chosen, here, there), there
    orders = *orders, np.random.default_rng(1).permutation(size)
    *runs, other = (program(_with_examples_at(given, order)) for order in orders)
    others = {"place": other}
    if padding is not None:
        others["padding"] = program(_with_batch(given, padding))
    floor = program.floor(runs[0])
    pairs = match(own, own, None).pairs
    return ExampleRuns(own, pairs, runs, floor, others, () if padded is None else padded.shape)


def _of_runs(runs: ExampleRuns) -> GradientComparison:
    first = _beside_neighbors(runs)
    if problem := _nothing_to_judge(runs, first):
        return GradientComparison(False, (unjudged(problem),), ())
    judged = {"neighbors": first} | {kind: _changed(runs, kind) for kind in runs.others}
    findings = (_finding(runs.version, kind, own) for kind, own in judged.items())
    found = tuple(finding for finding in findings if finding)
    rows = [place.row for place in first.places]
    for leaf in first.leaves:
        numbers = leaf.judgment.difference, None, leaf.judgment.tolerance
        rows.append(ComparisonRow(leaf.name, None, *numbers, kind="gradient"))
    notes = undecided_leaves(first.leaves)
    return GradientComparison(not found, found, tuple(rows), (), tuple(notes))


def _nothing_to_judge(runs: ExampleRuns, judged: JudgedRuns) -> str:
    """Why no gradient says anything."""
    first, second = runs.exchanged[:2]
    codes = [x[-1] for run in runs.exchanged for x in run.grads]
    if any(codes) or not all(np.isfinite(run.loss) for run in runs.exchanged):
        return "the loss or its gradient is not finite; diagnose(fun, args) says where that begins"
    if all(map(np.array_equal, first.grads, second.grads)):
        return "no gradient depends on the examples, so none can depend on their neighbors"
    if not any(leaf.judgment.is_judged for leaf in judged.leaves):
        return "rounding decides each gradient; compare in a wider type"
    return ""


def _beside_neighbors(runs: ExampleRuns) -> JudgedRuns:
    """The change of what the first examples add by other neighbors.

    A value depends on several examples at once if it or its square does. A sum over examples is no
    dependence where its cotangent is the same for all examples.
    """
    a, b, c, d = runs.exchanged
    less = functools.partial(jax.tree.map, lambda x, y: np.subtract(x, y, dtype=np.float64))
    pair, floor = (less(a, b), less(c, d)), jax.tree.map(lambda x: 2 * x, runs.floor)  # of four
    found, squares = (runs.judged(*pair, floor, row) for row in (LINEAR, SQUARED))
    others = [runs.judged(a, run, runs.floor, LINEAR).places for run in (b, c, d)]
    places = []
    for place, square, *same in zip(found.places, squares.places, *others, strict=True):
        varies = any(each.cotangent and each.cotangent.differs for each in same)
        if not runs.is_used(place.pair.own):
            place = place._replace(value=UNUSED)
        elif not place.value.differs and (place.cotangent is None or varies):
            place = place._replace(value=square.value)
        places.append(place)
    return found._replace(places=places)


def _changed(runs: ExampleRuns, kind: str) -> JudgedRuns:
    """The change with another order or padding, of values where it is known what is padded."""
    row = MAGNITUDES if kind == "place" else REAL
    found = runs.judged(runs.exchanged[0], runs.others[kind], runs.floor, row)
    places = []
    for place in found.places:
        value = place.pair.own.value
        if kind == "padding" and not _has_places(value.shape, runs.padded):
            if value.holders or {*runs.padded[1:]} & {*value.shape[1:]}:
                continue
        judged = place.value if runs.is_used(place.pair.own) else UNUSED
        places.append(ComparedPlace(place.pair, judged, None))
    return found._replace(places=places)


def _finding(own: Version, kind: str, judged: JudgedRuns) -> ComparisonFinding | None:
    """The first place of a kind of dependence, with the leaves whose gradient has it."""
    found = find(own, own, judged)
    if not found:
        return None
    bad = {x.name: x.judgment.difference for x in judged.leaves if x.judgment.differs}
    shown = [f"{name} ({bad[name]:.2g})" for name in sorted(bad, key=lambda x: -bad[x])]
    more = f"; so does the gradient of {first_few(shown, MOST_LEAVES)}" if bad else ""
    message = f"{found[0].message}{more}; {POSSIBLE_REASONS[kind]}"
    # Operations before, outside of all modules, keep to one example: the value leaves its module.
    left = next((place.name for place in judged.places if place.value.differs), "")
    return dataclasses.replace(found[0], kind=kind, message=message, module=found[0].module or left)


def _example_count(batch: Any) -> int:
    """The number of examples: the one leading axis of all arrays."""
    shapes = {path: np.shape(x) for path, x in with_paths(batch) if is_array(x) and np.ndim(x)}
    sizes = {shape[0] for shape in shapes.values()}
    if len(sizes) != 1 or min(sizes) < 2:
        raise ValueError(
            f"batch: got arrays of shapes {list(shapes.values())}, expected one leading axis for "
            "all, of at least two examples"
        )
    return sizes.pop()


def _chosen_examples(examples: int | Sequence[int] | None, size: int) -> np.ndarray:
    """Whether each example is one of those that are held beside others; by default half of them."""
    half = np.random.default_rng(0).permutation(size)[: size // 2].tolist()
    wanted = half if examples is None else examples
    numbers = [wanted] if isinstance(wanted, int) else list(wanted)
    known = all(isinstance(i, int | np.integer) and -size <= i < size for i in numbers)
    if not known or not 0 < len({i % size for i in numbers}) < size:
        raise ValueError(
            f"examples: got {examples!r} of {size} examples, expected some of their positions, and "
            "not all"
        )
    chosen = np.zeros(size, bool)
    chosen[numbers] = True
    return chosen


def _with_examples_at(given: DiagnosisSubject, numbers: np.ndarray) -> list[Any]:
    """The inputs of a loss with these examples in the places of the batch."""
    found = list(given.inputs)
    for i, x in enumerate(found):
        if _is_cut(given.names[i], x):
            rows = x[numbers]
            found[i] = jax.device_put(rows, x.sharding) if isinstance(x, jax.Array) else rows
    return found


def _with_batch(given: DiagnosisSubject, batch: Any) -> list[Any]:
    """The inputs of a loss with another batch of the same types; the weights stay."""
    left = iter([x for x in jax.tree.leaves(batch) if is_array(x)])
    pairs = zip(given.names, given.inputs, strict=True)
    return [next(left) if name.startswith(f"{IN_BATCH}[0]") else x for name, x in pairs]


def _check_examples_differ(given: DiagnosisSubject, size: int) -> None:
    """Raise `ValueError` if all examples are equal."""
    pairs = zip(given.names[:-1], given.inputs[:-1], strict=True)  # the last are weights
    if repeats(plain_numbers([x for name, x in pairs if _is_cut(name, x)]), size):
        raise ValueError("batch: got examples that are all equal, expected ones that differ")


def _is_cut(name: str, x: Any) -> bool:
    return name.startswith(IN_BATCH) and np.ndim(x) > 0


def _padded_places(batch: Any, other: Any) -> np.ndarray:
    """The places where batches differ, as (examples, positions) of the first array that does."""
    arrays, there = (dict(with_paths(x)) for x in (batch, other))
    types = [{p: (np.shape(x), str(getattr(x, "dtype", ""))) for p, x in t.items()}
             for t in (arrays, there)]  # fmt: skip
    if types[0] != types[1]:
        wrong = next((p for p in there if types[1][p] != types[0].get(p)), "")
        raise ValueError(
            f"padding: got {wrong or 'nothing'} of type {types[1].get(wrong)}, expected the batch "
            f"with other numbers where it is padded; {nearest(wrong, arrays)}; for other shapes "
            "write compare(fun, fun, (params, batch), other_args=(params, longer))"
        )
    for path, x in arrays.items():
        if is_array(x) and np.ndim(x):
            differs = np.not_equal(*plain_numbers([x, there[path]]))
            if np.any(differs):
                return np.asarray(differs.any(axis=tuple(range(2, differs.ndim))))
    raise ValueError("padding: got the batch itself, expected other numbers where it is padded")


@value_hook(data=("real",), choices=("carried",))
class ExampleSketches(Sketches):
    """Notes of each value sketches of it, of its squares, and of its part that is not padded.

    If an element of a value is of one example alone, so is its square. Of a sum over examples the
    square is not. So both say whether an element depends on several examples. The first row has the
    mean magnitude and the mean square, which no order of the examples changes.

    Attributes:
      real: where the batch is not padded, or None.
    """

    carried: int = 0
    real: Any = None

    def sketch_of(self, x: jax.Array) -> jax.Array:
        """The notes of a value, shape (3 or 4, 515)."""
        x = jnp.stack([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x
        wide = x.astype(sketch_dtype(x.dtype))
        sizes = jnp.where(jnp.abs(wide) < MASKED, jnp.abs(wide), 0)
        means = [jnp.sum(sizes**power) / max(1, x.size) for power in (1, 2)]
        first = jnp.pad(jnp.stack(means), (0, LENGTH - 2))
        parts = [wide, wide * wide]
        if (real := self.real) is not None:
            is_in = _has_places(wide.shape, real.shape)
            real = jnp.reshape(real, real.shape + (1,) * (wide.ndim - real.ndim)) if is_in else True
            parts.append(jnp.where(real, wide, 0))
        return jnp.concatenate([first[None], jax.vmap(sketch)(jnp.stack(parts))])


def _has_places(shape: tuple[int, ...], places: tuple[int, ...]) -> bool:
    """Whether a value of a shape has a part for each place of a batch."""
    return shape[: len(places)] == places
