"""The tasks by name."""

from clipgrad._demo import _blank_patches, _char_rnn, _pendulum
from clipgrad._demo._task import Task

TASKS: dict[str, Task] = {
    module.TASK.name: module.TASK for module in (_blank_patches, _char_rnn, _pendulum)
}
DEFAULT = ("blank-patches", "char-rnn")
