"""Names for values inside a program, which nobody has to edit for this.

1. `scopes` reads the named scopes around an operation. Modules of flax Linen, Haiku and Keras push
   scopes by themselves; for NNX and Equinox models `_frameworks.attribute_names` does.
2. `sites` lists the values with names: a value has a name if `checkpoint_name` tagged the value, if
   the value leaves a module (`modules`) or, on request, if it is the last that a line computes
   (`lines`).
3. `wanted` chooses among these names, by patterns, and says which choice matches nothing.
4. `named_hook` calls a function on each chosen value while a program is evaluated again.

An operation has a place, too (`places`): a module, and a line in the user's files.
"""

from clipgrad._names.custom_rules import custom_rule as custom_rule
from clipgrad._names.custom_rules import is_rule_of_jax as is_rule_of_jax
from clipgrad._names.custom_rules import rule_key as rule_key
from clipgrad._names.custom_rules import rule_source as rule_source
from clipgrad._names.custom_rules import rules_in as rules_in
from clipgrad._names.dependence import STOPPING as STOPPING
from clipgrad._names.dependence import active_results as active_results
from clipgrad._names.dependence import active_variables as active_variables
from clipgrad._names.dependence import data_results as data_results
from clipgrad._names.dependence import dependence as dependence
from clipgrad._names.dependence import sources_of_results as sources_of_results
from clipgrad._names.line_names import LineKeys as LineKeys
from clipgrad._names.line_names import LineNames as LineNames
from clipgrad._names.line_names import keys_of_lines as keys_of_lines
from clipgrad._names.lines import BACKWARD as BACKWARD
from clipgrad._names.lines import CALL as CALL
from clipgrad._names.lines import DEPTH as DEPTH
from clipgrad._names.lines import LINE as LINE
from clipgrad._names.lines import OF_LINES as OF_LINES
from clipgrad._names.lines import Line as Line
from clipgrad._names.lines import LineValue as LineValue
from clipgrad._names.lines import is_line_pattern as is_line_pattern
from clipgrad._names.lines import line_values as line_values
from clipgrad._names.lines import lines_of_program as lines_of_program
from clipgrad._names.modules import aside as aside
from clipgrad._names.modules import exits as exits
from clipgrad._names.modules import is_mark as is_mark
from clipgrad._names.modules import is_used as is_used
from clipgrad._names.modules import left_unused as left_unused
from clipgrad._names.modules import look as look
from clipgrad._names.modules import module_entries as module_entries
from clipgrad._names.modules import users_tag as users_tag
from clipgrad._names.modules import variables_of_modules as variables_of_modules
from clipgrad._names.name_patterns import CLIPPED as CLIPPED
from clipgrad._names.name_patterns import CLIPPED_IF_DIFFERENTIATED as CLIPPED_IF_DIFFERENTIATED
from clipgrad._names.name_patterns import VALUES as VALUES
from clipgrad._names.name_patterns import Matches as Matches
from clipgrad._names.name_patterns import checked_watch as checked_watch
from clipgrad._names.name_patterns import common_nest as common_nest
from clipgrad._names.name_patterns import line_keys as line_keys
from clipgrad._names.name_patterns import resolved as resolved
from clipgrad._names.name_patterns import sites_of as sites_of
from clipgrad._names.name_patterns import watched_names as watched_names
from clipgrad._names.named_hook import NamedHook as NamedHook
from clipgrad._names.named_hook import NamedValues as NamedValues
from clipgrad._names.named_hook import Seen as Seen
from clipgrad._names.names import Names as Names
from clipgrad._names.names import names_of as names_of
from clipgrad._names.operations import names_inside as names_inside
from clipgrad._names.operations import names_of_variables as names_of_variables
from clipgrad._names.operations import operations as operations
from clipgrad._names.places import Location as Location
from clipgrad._names.places import Place as Place
from clipgrad._names.places import is_users as is_users
from clipgrad._names.places import placed_equations as placed_equations
from clipgrad._names.scopes import ScopePath as ScopePath
from clipgrad._names.scopes import common_start as common_start
from clipgrad._names.scopes import path as path
from clipgrad._names.scopes import scope_around as scope_around
from clipgrad._names.scopes import transforms as transforms
from clipgrad._names.sites import NamedSite as NamedSite
from clipgrad._names.sites import sites as sites
