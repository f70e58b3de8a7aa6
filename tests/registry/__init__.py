"""Each public function: how it is called, with which arguments, and another value of each.

A row is `name: (call, arguments, *changes)`. `call(function, **arguments)` returns what is
compared: arrays, texts, numbers. The first key of a change is the argument that the change is
about. The other keys are there in both calls, with the argument and without it; `call` among them
takes the place of the row's. `WITHOUT` has what the call without the argument needs instead.
"""

from tests.registry import analysis, clips, training

ROWS = clips.ROWS | analysis.ROWS | training.ROWS
WITHOUT = clips.WITHOUT | analysis.WITHOUT | training.WITHOUT
