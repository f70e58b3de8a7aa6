"""The tasks by name."""

from clipgrad._demo import _adding, _blank_patches, _char_rnn, _deep_mlp, _pendulum
from clipgrad._demo._task import Task

TASKS: dict[str, Task] = {
    module.TASK.name: module.TASK
    for module in (_blank_patches, _char_rnn, _adding, _deep_mlp, _pendulum)
}
DEFAULT = ("blank-patches", "char-rnn")
