"""The values with names inside of a function."""

from clipgrad._values.hook import KeyedNotes as KeyedNotes
from clipgrad._values.hook import Seen as Seen
from clipgrad._values.hook import ValueHook as ValueHook
from clipgrad._values.hook import value_hook as value_hook
from clipgrad._values.places import NamedValue as NamedValue
from clipgrad._values.places import named_values as named_values
