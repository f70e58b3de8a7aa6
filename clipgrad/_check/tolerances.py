"""All numbers that a check decides by: tolerances first, then steps, then how much it looks at.

Two numbers agree where they are apart by no more than a stated part, or than three times what one
measured rounding moves them by. The stated part is that of a type, a row of `PRECISIONS`.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp

# --- What agrees -------------------------------------------------------------------------------


class Precision(NamedTuple):
    """The numbers of a floating type.

    Attributes:
      relative: the stated part of an element that two numbers may be apart by. A right rule loses
        about the square root of its operations in roundings.
      roundings: so many of the leaf's typical gradient any element may be off by: sums of products
        of both signs cancel.
      exponents: binary exponents of the steps, in units of the scale of each element: from steps
        that no rounding spoils to steps within which no kink lies.
      first_look: the two of these steps that may be enough.
      factor: the power of two that `linearity` multiplies a cotangent by.
      range_of: the type whose range scaled cotangents must not leave.
      spare: below so many times its smallest number a scaled gradient says nothing, since what is
        computed on the way may be smaller.
      is_coarse: whether slopes in it judge no single element, but leaves along directions.
      has_subnormals: whether XLA keeps its subnormal numbers.
    """

    relative: float
    roundings: float
    exponents: range
    first_look: slice
    factor: float
    range_of: str
    spare: float = 1e3
    is_coarse: bool = False
    has_subnormals: bool = False


# A further type is a row here, with the fields that `precision` gives it without one, a row of
# `OFF` in the tests of tolerances, and its tolerance in the docstring of `check_grads`.
# The rule in float64 has the error of two extrapolated steps; 5e-4 is 4,000 roundings of float32,
# 5e-2 is six of bfloat16. Half precision has no room for factors above 2 ** 4.
PRECISIONS = {
    "float64": Precision(1e-6, 50.0, range(4, 33, 4), slice(3, 5), 2.0**20, "float32"),
    "float32": Precision(5e-4, 50.0, range(2, 11), slice(2, 4), 2.0**20, "float32"),
    "float16": Precision(
        1e-2, 8.0, range(1, 5), slice(1, 3), 2.0**4, "float16", is_coarse=True, has_subnormals=True
    ),
    "bfloat16": Precision(5e-2, 4.0, range(1, 5), slice(1, 3), 2.0**4, "float16", is_coarse=True),
}
# A result in a type of 8 bits and fewer may be off by two of its roundings.
FEW_ROUNDINGS = 2.0
# What the user states a tolerance for, such as a loop that stops when it is near enough, and a type
# of 8 bits have no room for a larger factor of a cotangent.
LOOSE = 2.0


def precision(name: str) -> Precision:
    """The numbers of a floating type; of one of 8 bits and fewer, which has no row, by its bits."""
    if name in PRECISIONS:
        return PRECISIONS[name]
    return PRECISIONS["float16"]._replace(
        relative=FEW_ROUNDINGS * float(jnp.finfo(name).eps),
        roundings=FEW_ROUNDINGS,
        factor=LOOSE,
        range_of=name,
        spare=1.0,
    )


def narrowest(names: Iterable[str]) -> str:
    """The narrowest of some floating types: the one of the fewest digits."""
    return max(names, key=lambda name: float(jnp.finfo(name).eps))


class Tolerance(NamedTuple):
    """The most that an element may be off by, in parts of itself and of its leaf's gradient.

    And by the least number that the type's arithmetic keeps.
    """

    relative: float
    floor: float
    least: float = 0.0

    def __call__(self, larger: Any, typical: Any = 0.0) -> Any:
        """The tolerance of an element, of the larger of two numbers for it."""
        return self.relative * larger + self.floor * typical + self.least


def tolerance_of(name: str, stated: float | None = None, times: float = 1.0) -> Tolerance:
    """The tolerance of a type, or the one that the user states."""
    row, limits = precision(name), jnp.finfo(name)
    least = float(limits.smallest_subnormal if row.has_subnormals else limits.tiny)
    floor = row.roundings * float(limits.eps)
    if stated is None:
        return Tolerance(times * row.relative, times * floor, least)
    return Tolerance(stated, stated + floor, least)


# The measured part: so many times what moving each number by one rounding moves a result by, since
# the root mean square of some runs is neither the largest nor known to better than a quarter.
TIMES = 3.0
RUNS_OF_FUNCTION, RUNS_OF_GRADIENT = 4, 6  # with other roundings
# So often slopes evaluate a right function at two points, of small and of large leaves.
EVALUATIONS = 64
GRADIENTS = 4  # and so often its gradient: by two cotangents at two points
VJPS = 16  # and so often the gradient as it is computed: of scaled, masked and added cotangents too
# Of more than so many elements one is moved little by chance in all runs, and is off by much.
FEW, TAIL = 64, 1 / 8
# A gradient below so many of its own roundings in float64 is zero: outputs are rounded too, and
# their rounding is divided by a step.
BELOW_ROUNDING = 200.0
# What rounding explains is verified if it is this part of the element and its leaf, or less.
TRUSTED = 0.25
# Slopes of what can only be evaluated in its own narrow type, and of tied elements moved together,
# may be so many times further apart.
LOOSER = 10.0
# Along a dense direction one wrong element among n weighs 1 / sqrt(n): the tolerance of plain AD in
# float64, and of a gradient in float32 without plain AD.
TIGHT, TIGHT_FLOAT32 = 1e-6, 3e-5
# A slope along many elements may be off by these parts of the largest effect of any element; the
# second where elements at kinks are moved together.
LEAST_ALONG, LEAST_TOGETHER = 1e-16, 1e-12
# Along several directions errors are three standard deviations of one; of their root mean square
# it is this part.
SPREAD_OF_ERRORS = 0.6
# Of the directions so many must show a kink for a leaf to be at one.
HALF = 0.5
# Two ways to compile one gradient add in other orders: so many times the roundings of its leaf.
ORDERS = 20.0
# One-sided slopes that are further apart than this part of them are a kink's.
KINK_GAP = 0.02
# An error above this part of the slope, and of the leaf's typical one, tells nothing; if it is also
# above so many times what the leaf alone allows.
NOISY, NOISY_FLOORS = 0.1, 100.0
# The error of an extrapolated slope, in parts of what it and the slopes that make it moved by.
EXTRAPOLATED = 0.1
# Slopes that grow so much at each of the last steps, and are so many times their noise, have no
# limit: a jump's.
GROWTH, ABOVE_NOISE = 1.5, 10.0
# A function's values in float64 are those as computed up to this part, or so many roundings.
SAME_VALUES, SAME_ROUNDINGS = 0.1, 10.0
# Two calls of a function have the same value: to this part of a gradient's tolerance as compiled,
# and to this part of themselves where a device adds in any order.
VALUE_PART, ANY_ORDER = 0.1, 1e-3
# An output that nothing moves, and that is so many times as large as what moves, is a mask.
MASK = 2.0**10
# Of the elements that are not at kinks, if `min_verified` is not given.
LEAST_VERIFIED = 0.5
# Paddle's relative error is absolute where the slope is less.
THOUSANDTH = 1e-3
# Ratios that spread this much, relative to what sets them apart from 1 and from 0, are one number:
# results rounded to bfloat16 spread by 0.4 %, so a missing factor of 2 is still seen there.
SAME_RATIO = 0.01
# Roundings that constants which are rounded apart may make of a formula in half precision.
CONSTANT = 8.0
# The part of what is wrong that leaving out a rule must change, for that rule to be to blame.
BLAME = 0.1
# --- The steps and the points ------------------------------------------------------------------

# Every other step is this multiple of a power of two, so that no period divides them all; it has 17
# binary digits, which leave room for those of a float32 beside a step of 2 ** -32.
ODD = round(1.37 * 2**16) / 2**16
# Numbers so much larger than the median of their leaf are the garbage of a padding: a step of a
# part of them would be larger than the others.
GARBAGE = 2.0**24
# By which part of themselves elements of a further point are nearer to zero, at least and at most.
LEAST, MOST = 0.02, 0.08

# --- How much is looked at ---------------------------------------------------------------------

WORST, SPREAD, SINGLES = 8, 16, 64  # elements that are moved one by one
GROUPS = 40  # at most, before the rest is left unseen
FEW_GROUPS = 24  # with more, thirds of them are moved first
FEW_ELEMENTS = 16  # elements of a group that is looked at one by one
DIRECTIONS = 4  # of a leaf in half precision
# At most so many moves are measured by one call, and so many numbers come back.
SLOPE_MOVES, OUTPUTS_AT_ONCE = 128, 2**23
LONG = 5000  # moves that get a progress bar, where tqdm is installed
