"""The tasks by name."""

from clipgrad._demo import blank_patches, char_rnn, pendulum
from clipgrad._demo.task import Task

TASKS: dict[str, Task] = {
    module.TASK.name: module.TASK for module in (blank_patches, char_rnn, pendulum)
}
DEFAULT = ("blank-patches", "char-rnn")
