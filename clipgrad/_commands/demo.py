"""The subcommand ``demo``: trains, and shows a table, a figure and a report."""

import argparse
import dataclasses
import importlib.util
import time
from typing import Any

from clipgrad._commands.function import PASSED, UsageError, add_command
from clipgrad._commands.result import write_result
from clipgrad._demo import TASKS, Result, Run, Task, demo_figure, head, report, row, train
from clipgrad._folders import mounted_folder

DEMO_EPILOG = """\
Most models train on real data, for several seeds at once. The demo prints a table, and writes a
figure (PNG) and all numbers (JSON).
"""
_EXTRAS = {"matplotlib": "matplotlib", "sklearn": "scikit-learn", "tqdm": "tqdm"}


def add_demo_parser(subparsers: Any) -> None:
    about = "Train small models without clipping, with gradient clips and with error clips."
    parser = add_command(subparsers, "demo", about, DEMO_EPILOG, run_demo)
    parser.add_argument(
        "--task",
        nargs="+",
        action="extend",
        choices=TASKS,
        metavar="NAME",
        help=f"tasks to train, of {', '.join(TASKS)} (default: all)",
    )
    parser.add_argument("--all", action="store_true", help="train in every way, with all steps")
    parser.add_argument(
        "--seeds",
        type=_positive_integer,
        metavar="N",
        help="number of seeds (default: 3; with --all: 5)",
    )
    parser.add_argument(
        "--steps",
        type=_positive_integer,
        metavar="N",
        help="number of training steps (default: set by the task)",
    )
    parser.add_argument(
        "--out",
        default="clipgrad-demo",
        metavar="DIR",
        help="folder for demo.png and demo.json (default: clipgrad-demo)",
    )


def run_demo(arguments: argparse.Namespace) -> int:
    missing = [package for name, package in _EXTRAS.items() if not importlib.util.find_spec(name)]
    if missing:
        instead = 'install it with: pip install "clipgrad[demo]"'
        raise UsageError(f"needs {', '.join(missing)}; {instead}")
    folder = mounted_folder("--out", arguments.out)
    start = time.perf_counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results = _train_all(arguments)
        content = report(results) | {"seconds": time.perf_counter() - start}
        paths = write_result(folder / "demo", content, lambda: demo_figure(results))
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"can't write to {arguments.out}: {why}") from error
    print(*paths, sep="\n")
    return PASSED


def _train_all(arguments: argparse.Namespace) -> list[Result]:
    from tqdm import tqdm

    names = arguments.task or TASKS
    tasks = [TASKS[name] if arguments.all else TASKS[name].story() for name in dict.fromkeys(names)]
    tasks = [dataclasses.replace(task, steps=arguments.steps or task.steps) for task in tasks]
    seeds = arguments.seeds or (5 if arguments.all else 3)
    with tqdm(total=sum(len(task.arms) * task.steps for task in tasks), unit="step") as bar:
        return train(tasks, seeds, bar.update, lambda task, run: _show(task, run, bar))


def _show(task: Task, run: Run, bar: Any) -> None:
    if run.arm is task.arms[0]:
        bar.write(head(task, run))
    bar.write(row(run))
    if run.arm is task.arms[-1]:
        bar.write(f"note: {task.note}\n")


def _positive_integer(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive integer")
    return number
