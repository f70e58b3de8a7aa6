"""A training step with clips, and its metrics.

1. `train_step` makes one compiled function of a loss and an optimizer, from a state and a batch to
   the next state and metrics; `accumulate` adds up gradients over microbatches.
2. `optimizer_states` finds the states of clips, `skip_spikes` and `watch_updates` in the state of
   an optimizer, and `metrics` makes the metrics from these.
3. `watch_updates` measures gradient, parameters and update of each module, in any loop.
4. `scalars` makes one flat dictionary of all this, for loggers.
"""

from clipgrad._training.accumulate import microbatches as microbatches
from clipgrad._training.accumulate import scan_sums as scan_sums
from clipgrad._training.accumulate import wide_zeros as wide_zeros
from clipgrad._training.optimizer_states import found_in as found_in
from clipgrad._training.scalars import scalars as scalars
from clipgrad._training.train_state import TrainState as TrainState
from clipgrad._training.train_step import TrainStep as TrainStep
from clipgrad._training.train_step import train_step as train_step
from clipgrad._training.watch_updates import UpdateNorms as UpdateNorms
from clipgrad._training.watch_updates import WatchUpdatesState as WatchUpdatesState
from clipgrad._training.watch_updates import watch_updates as watch_updates
