"""Evaluate a jaxpr again with a hook at each equation, nested programs included.

Only this room knows how JAX's higher-order primitives store their programs, and how their
parameters differ between versions of JAX. An evaluation enters these programs, and applies their
primitive again to what becomes of them. A program can also be evaluated in a wider floating
type, or with each number moved by one rounding of its own type: whether a difference could be
rounding, the checker and `compare` read from how far the results move.
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
from clipgrad._programs.evaluate import ProgramValues as ProgramValues
from clipgrad._programs.evaluate import bind as bind
from clipgrad._programs.evaluate import evaluate as evaluate
from clipgrad._programs.evaluate import is_entered as is_entered
from clipgrad._programs.evaluate import retrace as retrace
from clipgrad._programs.programs import CALLS as CALLS
from clipgrad._programs.programs import CUSTOM_RULES as CUSTOM_RULES
from clipgrad._programs.programs import JIT as JIT
from clipgrad._programs.programs import PRINTS as PRINTS
from clipgrad._programs.programs import REMAT as REMAT
from clipgrad._programs.programs import called_program as called_program
from clipgrad._programs.programs import chooses_by_platform as chooses_by_platform
from clipgrad._programs.programs import device_count as device_count
from clipgrad._programs.programs import differentiated_programs as differentiated_programs
from clipgrad._programs.programs import entered_programs as entered_programs
from clipgrad._programs.programs import equations as equations
from clipgrad._programs.programs import held_programs as held_programs
from clipgrad._programs.programs import manual_axes as manual_axes
from clipgrad._programs.programs import opened as opened
from clipgrad._programs.programs import read_once as read_once
from clipgrad._programs.programs import scan_counts as scan_counts
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
from clipgrad._programs.widen import FOREIGN_PROGRAMS as FOREIGN_PROGRAMS
from clipgrad._programs.widen import OWN_TYPES as OWN_TYPES
from clipgrad._programs.widen import PRODUCTS as PRODUCTS
from clipgrad._programs.widen import NoRules as NoRules
from clipgrad._programs.widen import Widen as Widen
from clipgrad._programs.widen import computed_types as computed_types
