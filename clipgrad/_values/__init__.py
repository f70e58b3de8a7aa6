"""The values with names inside of a function."""

from clipgrad._values.hook import KeyedNotes as KeyedNotes
from clipgrad._values.hook import NamedValue as NamedValue
from clipgrad._values.hook import Seen as Seen
from clipgrad._values.hook import ValueHook as ValueHook
from clipgrad._values.hook import named_values as named_values
from clipgrad._values.hook import value_hook as value_hook
from clipgrad._values.value_stats import ValueStats as ValueStats
from clipgrad._values.with_value_stats import Watch as Watch
from clipgrad._values.with_value_stats import with_value_stats as with_value_stats
