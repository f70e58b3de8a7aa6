"""Leaves of pytrees, and arguments of calls.

Each leaf has a path, such as ``layers/0/kernel``. A leaf is clipped if it is floating or complex;
all others pass through. One function selects leaves: by a tree of booleans, a function, or an
expression on paths. Calls such as ``check_grads(fun, args)`` are read here, too, and the keywords
of other libraries are answered with those of this one.
"""

from clipgrad._trees.calls import argument_name as argument_name
from clipgrad._trees.calls import check_arguments as check_arguments
from clipgrad._trees.calls import explain_call as explain_call
from clipgrad._trees.calls import parameter_names as parameter_names
from clipgrad._trees.losses import check_scalar as check_scalar
from clipgrad._trees.losses import loss_and_aux as loss_and_aux
from clipgrad._trees.overwritten import overwrite as overwrite
from clipgrad._trees.overwritten import split_overwritten as split_overwritten
from clipgrad._trees.overwritten import zeros_for as zeros_for
from clipgrad._trees.selectors import Where as Where
from clipgrad._trees.selectors import matches as matches
from clipgrad._trees.selectors import nearest as nearest
from clipgrad._trees.selectors import selected as selected
from clipgrad._trees.selectors import selects as selects
from clipgrad._trees.selectors import unboxed as unboxed
from clipgrad._trees.trees import check_concrete as check_concrete
from clipgrad._trees.trees import check_leaves as check_leaves
from clipgrad._trees.trees import check_tree as check_tree
from clipgrad._trees.trees import clippable_leaves as clippable_leaves
from clipgrad._trees.trees import clippable_paths as clippable_paths
from clipgrad._trees.trees import combine as combine
from clipgrad._trees.trees import described as described
from clipgrad._trees.trees import donated_leaf as donated_leaf
from clipgrad._trees.trees import instances as instances
from clipgrad._trees.trees import is_array as is_array
from clipgrad._trees.trees import is_clippable as is_clippable
from clipgrad._trees.trees import is_complex as is_complex
from clipgrad._trees.trees import is_float_array as is_float_array
from clipgrad._trees.trees import is_none as is_none
from clipgrad._trees.trees import map_clippable as map_clippable
from clipgrad._trees.trees import parameters_like as parameters_like
from clipgrad._trees.trees import partition as partition
from clipgrad._trees.trees import parts_below as parts_below
from clipgrad._trees.trees import path_string as path_string
from clipgrad._trees.trees import wide_dtype as wide_dtype
from clipgrad._trees.trees import widened_leaf as widened_leaf
from clipgrad._trees.trees import with_clippable as with_clippable
from clipgrad._trees.trees import with_paths as with_paths
