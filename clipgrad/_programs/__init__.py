"""Evaluate a jaxpr again with a hook at each equation, nested programs included.

1. `kinds` and `numeric` are the two tables of JAX's primitives: which of them hold programs, and
   what all others do to numbers. No other room knows a primitive by name.
2. `evaluate` runs a program: a hook sees each equation first, and `entrances` enters the programs
   inside; `rebind` then applies their primitive again.
3. `flow` carries facts along a program without running it, around loops to a fixed point.
4. `widen` and `rounded` are two hooks that others read: a program in a wider type, and a program
   whose numbers are each moved by one rounding. How far the results move says whether a difference
   can be rounding.
"""

from clipgrad._programs import entrances as entrances  # registers how programs are entered
from clipgrad._programs.closures import closing_functions as closing_functions
from clipgrad._programs.closures import watched as watched
from clipgrad._programs.closures import with_explicit_closures as with_explicit_closures
from clipgrad._programs.compiled import jit_by_size as jit_by_size
from clipgrad._programs.compiled import low_jit as low_jit
from clipgrad._programs.compiled import settings_of_runs as settings_of_runs
from clipgrad._programs.elements import at_first as at_first
from clipgrad._programs.elements import dtype_of as dtype_of
from clipgrad._programs.elements import holds_floats as holds_floats
from clipgrad._programs.elements import is_reference as is_reference
from clipgrad._programs.elements import on_host as on_host
from clipgrad._programs.evaluate import ENTRANCES as ENTRANCES
from clipgrad._programs.evaluate import Hook as Hook
from clipgrad._programs.evaluate import NotingHook as NotingHook
from clipgrad._programs.evaluate import Part as Part
from clipgrad._programs.evaluate import ProgramValues as ProgramValues
from clipgrad._programs.evaluate import bind as bind
from clipgrad._programs.evaluate import evaluate as evaluate
from clipgrad._programs.evaluate import is_entered as is_entered
from clipgrad._programs.evaluate import retrace as retrace
from clipgrad._programs.flow import Chain as Chain
from clipgrad._programs.flow import chain_key as chain_key
from clipgrad._programs.flow import flow as flow
from clipgrad._programs.flow import flow_through as flow_through
from clipgrad._programs.hijax import high_operation as high_operation
from clipgrad._programs.kinds import CALLS as CALLS
from clipgrad._programs.kinds import CONDS as CONDS
from clipgrad._programs.kinds import CUSTOM_RULES as CUSTOM_RULES
from clipgrad._programs.kinds import JIT as JIT
from clipgrad._programs.kinds import KINDS as KINDS
from clipgrad._programs.kinds import REMAT as REMAT
from clipgrad._programs.kinds import SCANS as SCANS
from clipgrad._programs.kinds import SHARD_MAPS as SHARD_MAPS
from clipgrad._programs.kinds import WHILES as WHILES
from clipgrad._programs.kinds import Feed as Feed
from clipgrad._programs.kinds import Kind as Kind
from clipgrad._programs.kinds import called_program as called_program
from clipgrad._programs.kinds import chooses_by_platform as chooses_by_platform
from clipgrad._programs.kinds import detaches as detaches
from clipgrad._programs.kinds import has_custom_rule as has_custom_rule
from clipgrad._programs.kinds import has_custom_vjp as has_custom_vjp
from clipgrad._programs.kinds import has_own_derivative as has_own_derivative
from clipgrad._programs.kinds import held_programs as held_programs
from clipgrad._programs.kinds import is_cond as is_cond
from clipgrad._programs.kinds import is_jit as is_jit
from clipgrad._programs.kinds import is_linear_solve as is_linear_solve
from clipgrad._programs.kinds import is_reversed as is_reversed
from clipgrad._programs.kinds import is_scan as is_scan
from clipgrad._programs.kinds import is_shard_map as is_shard_map
from clipgrad._programs.kinds import is_tag as is_tag
from clipgrad._programs.kinds import is_while as is_while
from clipgrad._programs.kinds import kind_of as kind_of
from clipgrad._programs.kinds import noun_of as noun_of
from clipgrad._programs.kinds import operation_name as operation_name
from clipgrad._programs.kinds import scan_counts as scan_counts
from clipgrad._programs.kinds import scan_length as scan_length
from clipgrad._programs.kinds import tag_of as tag_of
from clipgrad._programs.kinds import tracks_devices as tracks_devices
from clipgrad._programs.kinds import while_counts as while_counts
from clipgrad._programs.numeric import BACK_AT_ANY_SIZE as BACK_AT_ANY_SIZE
from clipgrad._programs.numeric import BACK_BY_FACTORS as BACK_BY_FACTORS
from clipgrad._programs.numeric import BACK_IN_SUMS as BACK_IN_SUMS
from clipgrad._programs.numeric import NUMERIC as NUMERIC
from clipgrad._programs.numeric import Back as Back
from clipgrad._programs.numeric import Does as Does
from clipgrad._programs.numeric import Numeric as Numeric
from clipgrad._programs.numeric import Use as Use
from clipgrad._programs.numeric import calls_python as calls_python
from clipgrad._programs.numeric import does as does
from clipgrad._programs.numeric import is_bad_at as is_bad_at
from clipgrad._programs.numeric import is_move as is_move
from clipgrad._programs.numeric import is_print as is_print
from clipgrad._programs.numeric import numeric_of as numeric_of
from clipgrad._programs.numeric import use_of as use_of
from clipgrad._programs.pieces import ByPieces as ByPieces
from clipgrad._programs.pieces import Inlined as Inlined
from clipgrad._programs.pieces import can_be_cut as can_be_cut
from clipgrad._programs.pieces import has_repeated_operations as has_repeated_operations
from clipgrad._programs.pieces import is_repetitive as is_repetitive
from clipgrad._programs.programs import axis_lengths as axis_lengths
from clipgrad._programs.programs import device_count as device_count
from clipgrad._programs.programs import differentiated_programs as differentiated_programs
from clipgrad._programs.programs import entered_programs as entered_programs
from clipgrad._programs.programs import equations as equations
from clipgrad._programs.programs import function_file as function_file
from clipgrad._programs.programs import function_name as function_name
from clipgrad._programs.programs import is_foreign as is_foreign
from clipgrad._programs.programs import manual_axes as manual_axes
from clipgrad._programs.programs import opened as opened
from clipgrad._programs.programs import read_once as read_once
from clipgrad._programs.programs import side_effects as side_effects
from clipgrad._programs.programs import tracked_programs as tracked_programs
from clipgrad._programs.programs import value_programs as value_programs
from clipgrad._programs.rounded import Parts as Parts
from clipgrad._programs.rounded import measuring as measuring
from clipgrad._programs.rounded import mixed as mixed
from clipgrad._programs.rounded import one_promotion as one_promotion
from clipgrad._programs.rounded import rounded as rounded
from clipgrad._programs.rounded import rounded_in_float64 as rounded_in_float64
from clipgrad._programs.trace import Traced as Traced
from clipgrad._programs.trace import trace as trace
from clipgrad._programs.widen import NoRules as NoRules
from clipgrad._programs.widen import Widen as Widen
from clipgrad._programs.widen import computed_types as computed_types
from clipgrad._programs.widen import is_stopped as is_stopped
