"""Sums, norms and dtypes, exact where float16 and float32 overflow."""

from clipgrad._numerics.norms import AxisName as AxisName
from clipgrad._numerics.norms import Norm as Norm
from clipgrad._numerics.norms import bounded_square as bounded_square
from clipgrad._numerics.norms import check_order as check_order
from clipgrad._numerics.norms import from_plain as from_plain
from clipgrad._numerics.norms import global_norm as global_norm
from clipgrad._numerics.norms import if_needed as if_needed
from clipgrad._numerics.norms import in_range as in_range
from clipgrad._numerics.norms import is_in_range as is_in_range
from clipgrad._numerics.norms import scaled_squares as scaled_squares
from clipgrad._numerics.norms import slice_norms as slice_norms
from clipgrad._numerics.norms import total_over_devices as total_over_devices
from clipgrad._numerics.norms import tree_norm as tree_norm
from clipgrad._numerics.norms import tree_size as tree_size
from clipgrad._numerics.norms import widest as widest
from clipgrad._numerics.numbers import accumulator as accumulator
from clipgrad._numerics.numbers import at_least as at_least
from clipgrad._numerics.numbers import at_least_float32 as at_least_float32
from clipgrad._numerics.numbers import finite_product as finite_product
from clipgrad._numerics.numbers import increment_if as increment_if
from clipgrad._numerics.numbers import largest as largest
from clipgrad._numerics.numbers import over as over
from clipgrad._numerics.numbers import real_or_absolute as real_or_absolute
from clipgrad._numerics.numbers import times as times
from clipgrad._numerics.numbers import with_real_dtype as with_real_dtype
from clipgrad._numerics.reductions import Axes as Axes
