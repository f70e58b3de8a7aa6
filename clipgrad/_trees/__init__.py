"""Leaves of pytrees: paths, patterns, and which of them a clip acts on."""

from clipgrad._trees.overwritten import overwrite as overwrite
from clipgrad._trees.overwritten import split_overwritten as split_overwritten
from clipgrad._trees.overwritten import zeros_for as zeros_for
from clipgrad._trees.selectors import matches as matches
from clipgrad._trees.selectors import nearest as nearest
from clipgrad._trees.selectors import selects as selects
from clipgrad._trees.selectors import unboxed as unboxed
from clipgrad._trees.trees import check_leaves as check_leaves
from clipgrad._trees.trees import check_tree as check_tree
from clipgrad._trees.trees import clippable_leaves as clippable_leaves
from clipgrad._trees.trees import clippable_paths as clippable_paths
from clipgrad._trees.trees import combine as combine
from clipgrad._trees.trees import instances as instances
from clipgrad._trees.trees import is_array as is_array
from clipgrad._trees.trees import is_clippable as is_clippable
from clipgrad._trees.trees import is_none as is_none
from clipgrad._trees.trees import map_clippable as map_clippable
from clipgrad._trees.trees import parameters_like as parameters_like
from clipgrad._trees.trees import partition as partition
from clipgrad._trees.trees import path_string as path_string
from clipgrad._trees.trees import with_paths as with_paths
from clipgrad._trees.where import Where as Where
from clipgrad._trees.where import selected as selected
