"""The named values of a program, seen, measured or replaced while it is evaluated again.

1. `hook` gets each value that has a wanted name, and the program goes on with what the hook
   returns. Notes of the hook leave the program as further results.
2. `value_stats` are statistics of a value: sums, which add up over steps, places and devices.
3. `with_value_stats` is both as a public function; the values stay as they are.
"""

from clipgrad._values.hook import KeyedNotes as KeyedNotes
from clipgrad._values.hook import NamedValue as NamedValue
from clipgrad._values.hook import NotedValues as NotedValues
from clipgrad._values.hook import ValueHook as ValueHook
from clipgrad._values.hook import named_values as named_values
from clipgrad._values.hook import value_hook as value_hook
from clipgrad._values.value_stats import ValueStats as ValueStats
from clipgrad._values.with_value_stats import Watch as Watch
from clipgrad._values.with_value_stats import with_value_stats as with_value_stats
