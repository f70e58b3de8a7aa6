"""The tolerances of the checker, and the reason for each.

Names in brackets are the tests that fail without the number, or with one much smaller or larger.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

PRECISIONS = ("bfloat16", "float16", "float32", "float64")

# --- An element of the gradient against a slope: |numeric - analytic| <= relative * larger + ...
# Of the gradient as it was computed, by the narrowest type inside. A rule that is right loses
# about the square root of its operations in roundings; 5e-4 is 4,000 of float32, 5e-2 six of
# bfloat16 (test_rounding_by_half_the_tolerance_passes_and_by_twice_fails). The rule itself,
# evaluated in float64, has float64's tolerance: the error of Richardson's two steps
# (test_a_rule_written_wrong_fails_however_little_of_the_tolerance_it_is_off).
RELATIVE = {"float64": 1e-6, "float32": 5e-4, "float16": 1e-2, "bfloat16": 5e-2}
# Along a dense direction, relative to |v * gradient|: roundings cancel in a sum, and one wrong
# element among n weighs 1/sqrt(n)
# (test_one_element_among_many_is_found_along_a_random_direction; smaller also:
# test_forward_mode_may_differ_from_reverse_by_ten_times_the_tolerance_along).
ALONG = {"float64": 1e-8, "float32": 3e-5, "float16": 5e-3, "bfloat16": 3e-2}
# Roundings of the leaf's typical gradient that any element may be off: sums of products of both
# signs cancel (test_an_element_may_be_off_by_some_roundings_of_its_leaf).
ROUNDINGS = {"float64": 50.0, "float32": 50.0, "float16": 8.0, "bfloat16": 4.0}
# The least number that arithmetic keeps: XLA's float32 and bfloat16 have no subnormal numbers,
# float16 has (test_what_underflows_is_not_wrong_but_a_number_that_does_not_is).
SMALLEST = {
    name: float(jnp.finfo(name).smallest_subnormal if name == "float16" else jnp.finfo(name).tiny)
    for name in PRECISIONS
}
# A leaf whose gradient is this many roundings of the others' effects or less vanishes beside them,
# and keeps what these leave there when they cancel; another leaf's small gradient counts as it is
# (smaller: test_an_offset_common_to_all_outputs_does_not_move_them; larger:
# test_a_small_gradient_beside_outputs_of_another_magnitude_is_judged_by_plain_ad).
VANISHING = 50.0
# Times as far: slopes of a function that can only be evaluated in its own narrow type, forward mode
# from reverse, tied elements together
# (test_a_callback_is_evaluated_natively_where_its_thread_has_no_64_bit_types,
# test_forward_mode_may_differ_from_reverse_by_ten_times_the_tolerance_along,
# test_both_arguments_of_a_tie_cannot_have_the_whole_gradient).
LOOSER = 10.0
# Paddle's error is absolute below this magnitude, as its operator tests publish it
# (test_paddles_rule_is_absolute_for_slopes_below_a_thousandth_alone).
PADDLE_NEARLY_ZERO = 1e-3

# What is precise, as a part of itself: plain AD along dense directions (larger:
# test_a_reference_that_is_wrong_itself_is_found_from_a_millionth_on; smaller, it costs evaluations:
# test_auto_takes_under_a_hundred_evaluations_for_many_leaves), a slope that needs no closer look
# (larger, it is wrong near a kink: test_beside_a_kink_the_slope_is_that_of_its_own_side), and a
# gradient that `stop_gradient` does not change (test_a_stopped_gradient_that_matters_is_noted).
PRECISE = 1e-6

# --- Slopes
# Roundings of the outputs in a difference, divided by the step (smaller or larger:
# test_a_slope_beside_large_values_is_verified_to_what_their_noise_leaves,
# test_ties_beside_large_values_are_verified_to_what_their_noise_leaves).
NOISE = 4.0
# One-sided slopes further apart than this part of them are a kink's; a smooth function's differ by
# the step, 2 ** -32 at best (test_slopes_that_differ_by_a_fiftieth_are_those_of_a_kink).
KINK_GAP = 0.02
# Slopes that grow so much at each of the last steps have no limit: a jump's
# (test_slopes_are_told_apart).
GROWTH = 1.5
# Error relative to the typical slope from which nothing can be said
# (test_a_slope_lost_in_the_noise_of_large_values_is_not_verified), unless it is as small a multiple
# of the floor: of a leaf that vanishes beside the others, nothing but noise is left
# (test_a_leaf_that_vanishes_is_verified_without_a_reference).
NOISY, NEGLIGIBLE = 0.1, 1e4
# A change that is this part of itself at the next smaller step, or more, is the change of a jump;
# of a root it would be a third (test_a_jump_has_the_slopes_beside_it).
JUMP = 0.85

# --- What rounding explains: so many times what moving each number by one rounding moves an element
# by, and its leaf in the median (`_program/rounded.py`). A right rule needs 1.33 at most in the
# rows of the tables that were tried (smaller or larger:
# test_a_rule_may_lose_a_few_times_as_much_to_rounding_as_plain_ad).
TIMES_MOVED = 3.0
# Of more than so many elements one is moved little by chance in all eight runs, and is off by much:
# the tail of eight runs falls as the eighth power (smaller:
# test_rounding_explains_each_of_a_million_elements_of_any_size, and an MLP of 10 million).
FEW_ELEMENTS, TAIL = 64, 1 / 8
# A gradient of fewer than so many of its own roundings is nothing that a slope could see: outputs
# are rounded too, and their rounding is divided by a step (smaller: cosine similarity at ones).
LEAST_SEEN = 512.0
# What is off by more than this part of the element and its leaf is explained, but not verified
# (larger: test_what_cancels_in_half_precision_is_a_note).
MOST_EXCUSED = 0.25
# Nor is more than this part of a formula, or of a gradient whose formula could not be judged in
# float64 (a saturated tanh is off by less).
SLIGHT = 0.01

# --- Two computations of the same gradient, eager and compiled, say: times what one may be off
# (test_a_compiled_gradient_may_differ_by_a_thousand_roundings_of_its_leaf).
SAME = 20.0
# Of a function and its widened program: told from one that looks at bits (larger:
# test_a_function_that_looks_at_its_own_rounding_is_evaluated_natively; smaller:
# test_values_may_be_off_by_a_few_percent_of_those_in_float64).
SAME_VALUES = 0.1
# Parts of `RELATIVE`, of a value and of the typical one, for values called and differentiated
# (test_values_are_the_same_to_a_tenth_of_the_tolerance).
CALLED_ALIKE = 0.1, 0.01
# A gradient that comes from a loop which stops when it is near enough is as near as that. How it is
# computed, in the function's own types, may be off by this part of the element and its leaf.
SOLVED = 1e-3
# The formula may be off by so many times what one more iteration of its loops changes, there and in
# the leaf: a loop is so far from its end if each leaves nine tenths of the error or less (smaller:
# the case deep_equilibrium). Where that is more than `SOLVED`, loops do not converge, or not so:
# the formula may be off by this part of the element alone (the case odeint).
NEXT = 10.0
# A leaf whose gradient is this part of that around the point vanishes there, as at a minimum: then
# the tolerance is relative to a part of that around it
# (smaller: the case divergence_of_equal_distributions; larger: a wrong rule may pass there).
STATIONARY, AROUND = 0.01, 0.1

BLOCK = 2**16  # elements


class Allowed(NamedTuple):
    """Arrays that broadcast against slopes.

    A numeric slope may be off by `relative` of the larger of it and the analytic one, and by
    `floor`; `typical` is the magnitude below which a slope counts as small, `unit` the slope of an
    element whose derivative is 1. With `paddle`, Paddle's rule stands in for both: relative to
    the numeric slope, absolute where that is nearly zero.
    """

    relative: Any
    floor: Any
    typical: Any
    unit: Any
    paddle: float | None = None

    def slack(self, numeric: np.ndarray, analytic: np.ndarray) -> np.ndarray:
        """The allowed error of a slope, but for the numeric error."""
        if self.paddle is None:
            return self.relative * np.fmax(np.abs(numeric), np.abs(analytic)) + self.floor
        size = np.abs(numeric) / self.unit
        return self.paddle * np.where(size < PADDLE_NEARLY_ZERO, 1.0, size) * self.unit

    def part(self, rows: np.ndarray) -> "Allowed":
        """The allowed errors of some of the rows."""
        columns: Any = (c[rows] if isinstance(c, np.ndarray) else c for c in self)
        return Allowed(*columns)


class Excuse(NamedTuple):
    """By how much more elements may be off, each as far as was measured for itself.

    What is off no more than `measure(indices)` gives for it is of this `kind`, and `verified` if it
    is off by that part of the element and its leaf or less, or, with `of_zero`, if the gradient is
    zero there.
    """

    verified: float
    kind: int
    measure: Callable[[np.ndarray], np.ndarray]
    of_zero: bool = False


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Tolerances of each leaf, by the narrowest type that it is computed in.

    Attributes:
      ranges: where each leaf lies in the vector of inputs.
      names: the type of each leaf.
      own: relative tolerances in place of those of the type, 0 for none.
      paddle: Paddle's relative error, which stands in for all others.
      times: how many times the type's.
      loops: the leaves whose gradients are found by loops that stop when they are near enough.
    """

    ranges: Sequence[tuple[int, int]]
    names: Sequence[str]
    own: np.ndarray
    paddle: float | None = None
    times: float = 1.0
    loops: Any = False

    def _by_type(self, table: dict[str, float]) -> np.ndarray:
        return np.asarray([table[name] for name in self.names])

    @functools.cached_property
    def relative(self) -> np.ndarray:
        """The allowed error of an element, relative to the larger number."""
        known = np.where(self.own > 0, self.own, self.times * self._by_type(RELATIVE))
        return np.fmax(known, self._own)

    @functools.cached_property
    def along(self) -> np.ndarray:
        """The allowed error of a slope along a dense direction."""
        return np.fmax(self._own, self.times * self._by_type(ALONG))

    @property
    def _own(self) -> np.ndarray:
        return np.where(self.own > 0, self.own, SOLVED * np.asarray(self.loops))

    @functools.cached_property
    def eps(self) -> np.ndarray:
        """The rounding unit of each leaf."""
        return np.asarray([float(jnp.finfo(name).eps) for name in self.names])

    def of_slopes_in(self, evaluation_dtype: Any) -> "Tolerance":
        """The tolerances where slopes can only be had in the function's own narrow type."""
        is_wide = evaluation_dtype == np.float64
        return self if is_wide else dataclasses.replace(self, times=LOOSER)

    def in_float64(self) -> "Tolerance":
        """The tolerances of the rule evaluated in float64, whatever its own types or loops."""
        names = ["float64"] * len(self.names)
        return dataclasses.replace(self, names=names, times=1.0, loops=False)

    def leaves_of(self, indices: np.ndarray) -> np.ndarray:
        """The leaf that each element of the input vector lies in."""
        starts = [start for start, _ in self.ranges]
        return np.searchsorted(starts, indices, "right") - 1

    def elements(
        self, sizes: "Sizes", leaf: Any, scale: np.ndarray, beside: bool = True
    ) -> Allowed:
        """For elements of a gradient, of one leaf or of one leaf each.

        What rounding alone may do is relative to the leaf's typical size. A leaf whose gradient
        vanishes gets what the other leaves' effects leave there when they cancel; `beside=False`
        gives it nothing.
        """
        typical = sizes.typical[:, leaf] if np.ndim(leaf) else sizes.typical[:, [leaf]]
        others = sizes.overall[:, None] / scale
        others = np.where((typical > sizes.vanishing * others) | (not beside), 0.0, others)
        roundings, smallest = self._by_type(ROUNDINGS)[leaf], self._by_type(SMALLEST)[leaf]
        floor = roundings * (self.eps[leaf] * (typical + others) + smallest)
        floor = floor + self._own[leaf] * typical + self.relative[leaf] * sizes.around[leaf]
        return Allowed(self.relative[leaf], floor, typical, 1.0, self.paddle)

    def explained(self, moved: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Gives the errors of elements that rounding explains, where it moves each so far.

        It may move one element little by chance, so that the median of the leaf is added (without:
        soft_targets_by_their_largest of check_history).
        """
        middle = np.asarray([np.median(moved[a:b]) if b > a else 0.0 for a, b in self.ranges])
        times = TIMES_MOVED * max(1.0, moved.size / FEW_ELEMENTS) ** TAIL
        return lambda indices: times * (moved[indices] + middle[self.leaves_of(indices)])

    def cancelled(self, largest: float, value: float) -> np.ndarray:
        """The effect on the output that vanishes beside the largest effect of any leaf, by leaf.

        Or beside the `value` itself, where the largest vanishes beside it.
        """
        vanishes = largest <= VANISHING * self.eps.max() * value
        return VANISHING * self.eps * (value if vanishes else largest)

    def ranges_along(self, norms, overall, starts: np.ndarray, exact: bool) -> Allowed:
        """For slopes along a dense direction: `norms` is |v * gradient| over each range."""
        leaves = self.leaves_of(starts)
        relative, eps = self.along[leaves][:, None], self.eps[leaves][:, None]
        if exact:
            relative, eps = np.full_like(relative, PRECISE), np.finfo(np.float64).eps
        floor = np.broadcast_to(eps / 2 * overall, norms.shape)
        return Allowed(relative, floor, norms, np.ones((len(starts), 1)))

    def unconverged(self, change: np.ndarray, exact: np.ndarray) -> np.ndarray:
        """The allowed error of each element, given the `change` from loops that ran on.

        Arrays of shape (inputs,) and (cotangents, inputs). Where the loops have not converged, that
        is nothing, or a part of the element if they are to stop when they are near enough.
        """
        allowed, size = np.zeros_like(change), np.abs(exact).max(axis=0)
        for leaf, (start, stop) in enumerate(self.ranges):
            part, own = change[start:stop], size[start:stop]
            typical = np.sqrt(np.mean(part**2))
            part = np.where(part > 0, NEXT * (part + typical), 0.0)
            near = part <= SOLVED * (own + np.sqrt(np.mean(own**2)))
            stops = np.broadcast_to(self.loops, len(self.ranges))[leaf]
            allowed[start:stop] = np.where(near, part, SOLVED * own * stops)
        return allowed

    def sizes(
        self, gradient: Any, scale: Any, exact: bool = True, around: "NearbySizes | None" = None
    ) -> "Sizes":
        """The size of a gradient of shape (cotangents, inputs), leaf by leaf.

        Where it vanishes at the point, it is measured by a part of the one `around` the point.
        """
        typical, effects = [], []
        for start, stop in self.ranges:
            along = scale if scale.size == 1 else scale[start:stop]
            for found, by in ((typical, np.ones(1)), (effects, along)):
                found.append(mean_along(gradient[:, start:stop], by))
        stacked, eps = np.stack(typical, axis=1), np.finfo(np.float64).eps
        vanishing = VANISHING * (eps if exact else self.eps.max())
        part = np.zeros(stacked.shape[1])
        if around is not None:
            size = around.typical
            part = np.where(stacked.max(axis=0) < STATIONARY * size, AROUND * size, 0.0)
        return Sizes(np.fmax(stacked, part), np.max(effects, axis=0), part, vanishing)


class NearbySizes(NamedTuple):
    """The sizes of the gradient around a point, the most of several cotangents.

    The root mean square over each leaf, the largest effect of any leaf on the output, and of each
    leaf a bit for each element that has a gradient there.
    """

    typical: np.ndarray
    largest: float
    bits: list[np.ndarray]

    def is_there(self, leaves: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Whether elements have a gradient there, by their leaves and their places in them."""
        pairs = zip(leaves, places, strict=True)
        found = [self.bits[leaf][place // 8] >> (7 - place % 8) & 1 for leaf, place in pairs]
        return np.array(found, bool)


class Sizes(NamedTuple):
    """The root mean square over each leaf, and the largest effect of any leaf on the output.

    Arrays of shape (cotangents, leaves) and (cotangents,). `around` is a part of the root mean
    square around the point, for leaves whose gradient vanishes at the point itself; `vanishing` is
    the part of the largest effect below which a leaf's gradient is nothing but rounding.
    """

    typical: np.ndarray
    overall: np.ndarray
    around: np.ndarray
    vanishing: float


def pieces(start: int, stop: int) -> Iterator[slice]:
    """The parts of a range that are worked on at once, so that they stay in a cache."""
    yield from (slice(k, min(k + BLOCK, stop)) for k in range(start, stop, BLOCK))


def distance(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """|got - expected|; 0 where both are the same non-finite value, infinite where one is."""
    with np.errstate(invalid="ignore"):
        off = np.abs(got - expected)
        if np.isfinite(off.sum()):
            return off
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    return np.where(same, 0.0, np.where(np.isnan(off), np.inf, off))


def off_by_more(pair, area: tuple[int, int], least: Any, slack: Callable) -> np.ndarray:
    """The elements of an area where two gradients are further apart than the slack of a slice.

    They are found block by block; where all of a block are within the `least` slack, none is.
    """
    found = [np.zeros(0, int)]
    for where in pieces(*area):
        off = distance(*(gradient[:, where] for gradient in pair))
        if not (off <= least).all():
            found.append(np.flatnonzero((off > slack(where)).any(axis=0)) + where.start)
    return np.concatenate(found)


def length_along(gradient: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """|v * gradient| for each row."""
    return sum_along(gradient, direction)[1]


def mean_along(gradient: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """The root mean square of v * gradient for each row."""
    return length_along(gradient, direction) / np.sqrt(max(gradient.shape[1], 1))


def sum_along(gradient: np.ndarray, direction: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """<v, gradient> and |v * gradient| for each row, with no copy but of blocks."""
    sums, squares = np.zeros((2, len(gradient)))
    for where in pieces(0, gradient.shape[1]):
        part = direction[where] if direction.size > 1 else direction
        terms = np.multiply(gradient[:, where], part, dtype=np.float64)
        sums += terms.sum(axis=1)
        squares += np.einsum("ki,ki->k", terms, terms)
    return sums, np.sqrt(squares)


def narrowest(dtypes: Iterable[str]) -> str:
    """The least precise of some dtypes; an unknown one counts as bfloat16."""
    known = [name if name in PRECISIONS else "bfloat16" for name in dtypes]
    return min(known, key=PRECISIONS.index)


def make_tolerance(
    ranges: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    inner: Iterable[str] = (),
    max_relative_error: float | None = None,
    own: float | None = None,
) -> Tolerance:
    """Tolerances for leaves of the given dtypes in a function that computes in `inner` ones."""
    inner = list(inner)
    names = [narrowest([dtype, *inner]) for dtype in dtypes]
    return Tolerance(ranges, names, np.full(len(names), own or 0.0), max_relative_error)
