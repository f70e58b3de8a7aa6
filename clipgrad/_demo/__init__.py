"""``clipgrad demo``: what clipping does to training, on real data."""

from clipgrad._demo import blank_patches, char_rnn
from clipgrad._demo.figure import demo_figure as demo_figure
from clipgrad._demo.results import head as head
from clipgrad._demo.results import report as report
from clipgrad._demo.results import row as row
from clipgrad._demo.task import Task as Task
from clipgrad._demo.train import Result as Result
from clipgrad._demo.train import Run as Run
from clipgrad._demo.train import train as train

TASKS = {module.TASK.name: module.TASK for module in (blank_patches, char_rnn)}
