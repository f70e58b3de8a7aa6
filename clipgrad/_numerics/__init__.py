"""Sums and norms that neither overflow nor underflow, on any device and sharding.

A norm is a root divided by a power of two. In the ordinary range the power is 1, and the root is
that of a plain sum of squares, as in optax. Out of that range the elements are scaled before they
are squared. Squares are summed in float32, in float64 if a leaf is float64.
"""

from clipgrad._numerics.calls import for_each as for_each
from clipgrad._numerics.norms import AxisName as AxisName
from clipgrad._numerics.norms import Norm as Norm
from clipgrad._numerics.norms import check_order as check_order
from clipgrad._numerics.norms import global_norm as global_norm
from clipgrad._numerics.norms import slice_norms as slice_norms
from clipgrad._numerics.norms import total_over_devices as total_over_devices
from clipgrad._numerics.norms import tree_norm as tree_norm
from clipgrad._numerics.norms import tree_size as tree_size
from clipgrad._numerics.norms import warn_of_parts as warn_of_parts
from clipgrad._numerics.norms import whole_along as whole_along
from clipgrad._numerics.numbers import accumulator as accumulator
from clipgrad._numerics.numbers import at_least as at_least
from clipgrad._numerics.numbers import at_least_float32 as at_least_float32
from clipgrad._numerics.numbers import finite_product as finite_product
from clipgrad._numerics.numbers import flags_of_bits as flags_of_bits
from clipgrad._numerics.numbers import from_bits as from_bits
from clipgrad._numerics.numbers import if_else as if_else
from clipgrad._numerics.numbers import increment_if as increment_if
from clipgrad._numerics.numbers import larger as larger
from clipgrad._numerics.numbers import largest as largest
from clipgrad._numerics.numbers import over as over
from clipgrad._numerics.numbers import real_or_absolute as real_or_absolute
from clipgrad._numerics.numbers import times as times
from clipgrad._numerics.numbers import to_bits as to_bits
from clipgrad._numerics.numbers import widest as widest
from clipgrad._numerics.numbers import with_real_dtype as with_real_dtype
from clipgrad._numerics.ranges import root_of_sums as root_of_sums
from clipgrad._numerics.ranges import stacked_sums as stacked_sums
from clipgrad._numerics.ranges import sums_of_norm as sums_of_norm
from clipgrad._numerics.ranges import three_squares as three_squares
from clipgrad._numerics.reductions import Axes as Axes
from clipgrad._numerics.reductions import reduced_together as reduced_together
from clipgrad._numerics.sums_in_range import sums_and_nonfinite as sums_and_nonfinite
