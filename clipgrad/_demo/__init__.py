"""``clipgrad demo``: what clipping does to training, on real data."""

from clipgrad._demo.files import write_demo as write_demo
from clipgrad._demo.table import foot as foot
from clipgrad._demo.table import head as head
from clipgrad._demo.table import row as row
from clipgrad._demo.task import Task as Task
from clipgrad._demo.tasks import DEFAULT as DEFAULT
from clipgrad._demo.tasks import TASKS as TASKS
from clipgrad._demo.train import Result as Result
from clipgrad._demo.train import Run as Run
from clipgrad._demo.train import train as train
