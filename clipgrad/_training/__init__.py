"""A training step with clips, and its metrics.

`train_step` makes one compiled function of a loss and an optimizer, from a state and a batch to the
next state and metrics. The metrics are what the clips, the watched values and `skip_spikes` found.
`watch_updates` measures what an optimizer does to each module, in any loop.
`scalars` makes one flat dictionary of them, which loggers take.
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
