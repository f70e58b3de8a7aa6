"""Evaluate a jaxpr again with a hook at each equation, nested programs included.

Only this package knows how JAX's higher-order primitives store their programs, and how their
parameters differ between versions of JAX.
"""

from clipgrad._jaxpr import entrances as entrances  # registers how programs are entered
from clipgrad._jaxpr.activity import active_variables as active_variables
from clipgrad._jaxpr.activity import has_fixed_factors as has_fixed_factors
from clipgrad._jaxpr.blocks import Block as Block
from clipgrad._jaxpr.closures import closing_functions as closing_functions
from clipgrad._jaxpr.closures import with_explicit_closures as with_explicit_closures
from clipgrad._jaxpr.compiled import kept_by_key as kept_by_key
from clipgrad._jaxpr.compiled import low_jit as low_jit
from clipgrad._jaxpr.compiled import program_text as program_text
from clipgrad._jaxpr.compiled import quick_jit as quick_jit
from clipgrad._jaxpr.compiled import with_constants as with_constants
from clipgrad._jaxpr.elements import at_first as at_first
from clipgrad._jaxpr.elements import dtype_of as dtype_of
from clipgrad._jaxpr.elements import holds_floats as holds_floats
from clipgrad._jaxpr.elements import on_host as on_host
from clipgrad._jaxpr.evaluate import Hook as Hook
from clipgrad._jaxpr.evaluate import ProgramValues as ProgramValues
from clipgrad._jaxpr.evaluate import bind as bind
from clipgrad._jaxpr.evaluate import evaluate as evaluate
from clipgrad._jaxpr.evaluate import retrace as retrace
from clipgrad._jaxpr.hold import Hold as Hold
from clipgrad._jaxpr.loops import found_by_loops as found_by_loops
from clipgrad._jaxpr.modules import ModuleValues as ModuleValues
from clipgrad._jaxpr.modules import variables_of_modules as variables_of_modules
from clipgrad._jaxpr.origins import CONSTANT as CONSTANT
from clipgrad._jaxpr.origins import Birth as Birth
from clipgrad._jaxpr.origins import operands_of as operands_of
from clipgrad._jaxpr.origins import origins as origins
from clipgrad._jaxpr.places import Location as Location
from clipgrad._jaxpr.places import Place as Place
from clipgrad._jaxpr.probe import OPERAND as OPERAND
from clipgrad._jaxpr.probe import RESULT as RESULT
from clipgrad._jaxpr.probe import STATE as STATE
from clipgrad._jaxpr.probe import Probe as Probe
from clipgrad._jaxpr.probe import Site as Site
from clipgrad._jaxpr.programs import CALLS as CALLS
from clipgrad._jaxpr.programs import JIT as JIT
from clipgrad._jaxpr.programs import PRINTS as PRINTS
from clipgrad._jaxpr.programs import REMAT as REMAT
from clipgrad._jaxpr.programs import called_program as called_program
from clipgrad._jaxpr.programs import crossed_axes as crossed_axes
from clipgrad._jaxpr.programs import device_count as device_count
from clipgrad._jaxpr.programs import entered_programs as entered_programs
from clipgrad._jaxpr.programs import equations as equations
from clipgrad._jaxpr.programs import has_side_effects as has_side_effects
from clipgrad._jaxpr.programs import map_programs as map_programs
from clipgrad._jaxpr.programs import opened as opened
from clipgrad._jaxpr.programs import scan_counts as scan_counts
from clipgrad._jaxpr.rebind import scan_again as scan_again
from clipgrad._jaxpr.scopes import ScopePath as ScopePath
from clipgrad._jaxpr.scopes import path as path
from clipgrad._jaxpr.scopes import scope_around as scope_around
from clipgrad._jaxpr.sites import NamedSite as NamedSite
from clipgrad._jaxpr.sites import sites as sites
from clipgrad._jaxpr.trace import Traced as Traced
from clipgrad._jaxpr.trace import trace as trace
from clipgrad._jaxpr.widen import FOREIGN_PROGRAMS as FOREIGN_PROGRAMS
from clipgrad._jaxpr.widen import OWN_TYPES as OWN_TYPES
from clipgrad._jaxpr.widen import Strip as Strip
from clipgrad._jaxpr.widen import Widen as Widen
from clipgrad._jaxpr.widen import computed_types as computed_types
