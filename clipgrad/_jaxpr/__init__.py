"""Evaluate a jaxpr again with a hook at each equation, nested programs included.

Only this room knows how JAX's higher-order primitives store their programs, and how their
parameters differ between versions of JAX. An evaluation enters these programs, and applies their
primitive again to what becomes of them. A program can also be evaluated in a wider floating type.
"""

from clipgrad._jaxpr import entrances as entrances  # registers how programs are entered
from clipgrad._jaxpr.closures import closing_functions as closing_functions
from clipgrad._jaxpr.closures import watched as watched
from clipgrad._jaxpr.closures import with_explicit_closures as with_explicit_closures
from clipgrad._jaxpr.compiled import jit_by_size as jit_by_size
from clipgrad._jaxpr.compiled import low_jit as low_jit
from clipgrad._jaxpr.compiled import settings_of_runs as settings_of_runs
from clipgrad._jaxpr.elements import at_first as at_first
from clipgrad._jaxpr.elements import dtype_of as dtype_of
from clipgrad._jaxpr.elements import holds_floats as holds_floats
from clipgrad._jaxpr.elements import is_reference as is_reference
from clipgrad._jaxpr.elements import on_host as on_host
from clipgrad._jaxpr.evaluate import ENTRANCES as ENTRANCES
from clipgrad._jaxpr.evaluate import Hook as Hook
from clipgrad._jaxpr.evaluate import ProgramValues as ProgramValues
from clipgrad._jaxpr.evaluate import bind as bind
from clipgrad._jaxpr.evaluate import evaluate as evaluate
from clipgrad._jaxpr.evaluate import is_entered as is_entered
from clipgrad._jaxpr.evaluate import retrace as retrace
from clipgrad._jaxpr.programs import CALLS as CALLS
from clipgrad._jaxpr.programs import CUSTOM_RULES as CUSTOM_RULES
from clipgrad._jaxpr.programs import JIT as JIT
from clipgrad._jaxpr.programs import PRINTS as PRINTS
from clipgrad._jaxpr.programs import REMAT as REMAT
from clipgrad._jaxpr.programs import called_program as called_program
from clipgrad._jaxpr.programs import chooses_by_platform as chooses_by_platform
from clipgrad._jaxpr.programs import device_count as device_count
from clipgrad._jaxpr.programs import differentiated_programs as differentiated_programs
from clipgrad._jaxpr.programs import entered_programs as entered_programs
from clipgrad._jaxpr.programs import equations as equations
from clipgrad._jaxpr.programs import held_programs as held_programs
from clipgrad._jaxpr.programs import manual_axes as manual_axes
from clipgrad._jaxpr.programs import opened as opened
from clipgrad._jaxpr.programs import read_once as read_once
from clipgrad._jaxpr.programs import scan_counts as scan_counts
from clipgrad._jaxpr.programs import side_effects as side_effects
from clipgrad._jaxpr.programs import tracked_programs as tracked_programs
from clipgrad._jaxpr.programs import value_programs as value_programs
from clipgrad._jaxpr.trace import Traced as Traced
from clipgrad._jaxpr.trace import trace as trace
from clipgrad._jaxpr.widen import FOREIGN_PROGRAMS as FOREIGN_PROGRAMS
from clipgrad._jaxpr.widen import OWN_TYPES as OWN_TYPES
from clipgrad._jaxpr.widen import PRODUCTS as PRODUCTS
from clipgrad._jaxpr.widen import NoRules as NoRules
from clipgrad._jaxpr.widen import Widen as Widen
from clipgrad._jaxpr.widen import computed_types as computed_types
