"""Arrays in pytrees: which leaves there are, and how large they are.

1. `trees` lists the leaves, each with a path, such as ``layers/0/kernel``. A leaf is clipped if it
   is floating or complex; all others pass through.
2. `selectors` selects leaves: by a tree of booleans, a function, or path patterns (`patterns`).
3. `norms` and `sums` add up groups of leaves, without overflow or underflow, on any device and
   sharding. A norm is a root divided by a power of two. In the ordinary range the power is 1, and
   the root is that of a plain sum of squares, as in optax; out of that range elements are scaled
   before they are squared (`ranges`). Squares are summed in float32, in float64 if a leaf is.
4. `calls` and `user_functions` check what users pass to public functions, and answer the keywords
   of other libraries with those of this one.
"""

from clipgrad._arrays.by_leaf import for_each as for_each
from clipgrad._arrays.by_leaf import in_one_kernel as in_one_kernel
from clipgrad._arrays.by_leaf import looped as looped
from clipgrad._arrays.calls import explain_call as explain_call
from clipgrad._arrays.lookups import Findings as Findings
from clipgrad._arrays.lookups import answers_lookups as answers_lookups
from clipgrad._arrays.lookups import nearest_word as nearest_word
from clipgrad._arrays.losses import check_scalar as check_scalar
from clipgrad._arrays.losses import loss_and_aux as loss_and_aux
from clipgrad._arrays.norms import AxisName as AxisName
from clipgrad._arrays.norms import Norm as Norm
from clipgrad._arrays.norms import check_order as check_order
from clipgrad._arrays.norms import count_nonfinite as count_nonfinite
from clipgrad._arrays.norms import count_true as count_true
from clipgrad._arrays.norms import count_unless as count_unless
from clipgrad._arrays.norms import global_norm as global_norm
from clipgrad._arrays.norms import group_norms as group_norms
from clipgrad._arrays.norms import mapped_names as mapped_names
from clipgrad._arrays.norms import slice_norms as slice_norms
from clipgrad._arrays.norms import sums_of_groups as sums_of_groups
from clipgrad._arrays.norms import total_over_devices as total_over_devices
from clipgrad._arrays.norms import tree_norm as tree_norm
from clipgrad._arrays.norms import tree_size as tree_size
from clipgrad._arrays.norms import warn_of_parts as warn_of_parts
from clipgrad._arrays.norms import whole_along as whole_along
from clipgrad._arrays.numbers import accumulator as accumulator
from clipgrad._arrays.numbers import at_least as at_least
from clipgrad._arrays.numbers import at_least_float32 as at_least_float32
from clipgrad._arrays.numbers import finite_product as finite_product
from clipgrad._arrays.numbers import flags_of_bits as flags_of_bits
from clipgrad._arrays.numbers import from_bits as from_bits
from clipgrad._arrays.numbers import if_else as if_else
from clipgrad._arrays.numbers import in_one_program as in_one_program
from clipgrad._arrays.numbers import increment_if as increment_if
from clipgrad._arrays.numbers import larger as larger
from clipgrad._arrays.numbers import largest as largest
from clipgrad._arrays.numbers import one_program_if_eager as one_program_if_eager
from clipgrad._arrays.numbers import over as over
from clipgrad._arrays.numbers import quotient as quotient
from clipgrad._arrays.numbers import real_or_absolute as real_or_absolute
from clipgrad._arrays.numbers import scaled_to as scaled_to
from clipgrad._arrays.numbers import times as times
from clipgrad._arrays.numbers import to_bits as to_bits
from clipgrad._arrays.numbers import widest as widest
from clipgrad._arrays.numbers import with_real_dtype as with_real_dtype
from clipgrad._arrays.overwritten import overwrite as overwrite
from clipgrad._arrays.overwritten import split_overwritten as split_overwritten
from clipgrad._arrays.overwritten import zeros_for as zeros_for
from clipgrad._arrays.patterns import Pattern as Pattern
from clipgrad._arrays.patterns import Patterns as Patterns
from clipgrad._arrays.patterns import check_pattern as check_pattern
from clipgrad._arrays.patterns import decided as decided
from clipgrad._arrays.patterns import is_pattern as is_pattern
from clipgrad._arrays.patterns import leaves_out as leaves_out
from clipgrad._arrays.patterns import matches as matches
from clipgrad._arrays.patterns import pattern_text as pattern_text
from clipgrad._arrays.patterns import prefix_of as prefix_of
from clipgrad._arrays.patterns import without_sign as without_sign
from clipgrad._arrays.ranges import from_plain as from_plain
from clipgrad._arrays.ranges import root_of_sums as root_of_sums
from clipgrad._arrays.ranges import stacked_sums as stacked_sums
from clipgrad._arrays.ranges import sums_of_norm as sums_of_norm
from clipgrad._arrays.ranges import three_squares as three_squares
from clipgrad._arrays.selectors import Where as Where
from clipgrad._arrays.selectors import leaves_selected as leaves_selected
from clipgrad._arrays.selectors import nearest as nearest
from clipgrad._arrays.selectors import selected as selected
from clipgrad._arrays.selectors import unboxed as unboxed
from clipgrad._arrays.sums import Axes as Axes
from clipgrad._arrays.sums import Groups as Groups
from clipgrad._arrays.sums import added_up as added_up
from clipgrad._arrays.sums import added_up_apart as added_up_apart
from clipgrad._arrays.sums import fit_one_reduction as fit_one_reduction
from clipgrad._arrays.sums import reduced_together as reduced_together
from clipgrad._arrays.sums import unless_out_of_range as unless_out_of_range
from clipgrad._arrays.trees import check_concrete as check_concrete
from clipgrad._arrays.trees import check_gradients as check_gradients
from clipgrad._arrays.trees import check_is_tree as check_is_tree
from clipgrad._arrays.trees import check_leaves as check_leaves
from clipgrad._arrays.trees import check_tree as check_tree
from clipgrad._arrays.trees import clippable_leaves as clippable_leaves
from clipgrad._arrays.trees import clippable_paths as clippable_paths
from clipgrad._arrays.trees import combine as combine
from clipgrad._arrays.trees import described as described
from clipgrad._arrays.trees import donated_leaf as donated_leaf
from clipgrad._arrays.trees import instances as instances
from clipgrad._arrays.trees import is_array as is_array
from clipgrad._arrays.trees import is_clippable as is_clippable
from clipgrad._arrays.trees import is_complex as is_complex
from clipgrad._arrays.trees import is_float_array as is_float_array
from clipgrad._arrays.trees import is_none as is_none
from clipgrad._arrays.trees import is_tracing as is_tracing
from clipgrad._arrays.trees import leaf_names as leaf_names
from clipgrad._arrays.trees import leaf_paths as leaf_paths
from clipgrad._arrays.trees import leaves_with_keys as leaves_with_keys
from clipgrad._arrays.trees import map_clippable as map_clippable
from clipgrad._arrays.trees import parameters_like as parameters_like
from clipgrad._arrays.trees import partition as partition
from clipgrad._arrays.trees import parts_below as parts_below
from clipgrad._arrays.trees import parts_that as parts_that
from clipgrad._arrays.trees import path_string as path_string
from clipgrad._arrays.trees import shown as shown
from clipgrad._arrays.trees import wide_dtype as wide_dtype
from clipgrad._arrays.trees import widened_leaf as widened_leaf
from clipgrad._arrays.trees import with_clippable as with_clippable
from clipgrad._arrays.trees import with_paths as with_paths
from clipgrad._arrays.user_functions import argument_name as argument_name
from clipgrad._arrays.user_functions import check_arguments as check_arguments
from clipgrad._arrays.user_functions import check_is_function as check_is_function
from clipgrad._arrays.user_functions import check_takes as check_takes
from clipgrad._arrays.user_functions import parameter_names as parameter_names
