"""The subcommand ``demo``: trains, and shows a table, a figure and a report."""

import argparse
import importlib.util
from typing import Any

from clipgrad._commands.command_output import write_result
from clipgrad._commands.function import PASSED, UsageError, add_command
from clipgrad._demo import TASKS, demo_figure, head, report, row, train
from clipgrad._recorder import mounted_folder

_EXTRAS = {"matplotlib": "matplotlib", "sklearn": "scikit-learn", "tqdm": "tqdm"}


def add_demo_parser(subparsers: Any) -> None:
    about = "Train small models without clipping, with gradient clips and with error clips."
    parser = add_command(subparsers, "demo", about, run_demo)
    add = parser.add_argument
    words = f"tasks to train, of {', '.join(TASKS)} (default: all)"
    add("--task", nargs="+", action="extend", choices=TASKS, metavar="NAME", help=words)
    add("--all", action="store_true", help="train in every way, with all steps")
    words = "number of seeds (default: 3; with --all: 5)"
    add("--seeds", type=_positive_integer, metavar="N", help=words)
    words = "number of training steps (default: set by the task)"
    add("--steps", type=_positive_integer, metavar="N", help=words)
    words = "folder for demo.png and demo.json (default: clipgrad-demo)"
    add("--out", default="clipgrad-demo", metavar="DIR", help=words)


def run_demo(options: argparse.Namespace) -> int:
    missing = [package for name, package in _EXTRAS.items() if not importlib.util.find_spec(name)]
    if missing:
        hint = 'install it with: pip install "clipgrad[demo]"'
        raise UsageError(f"needs {', '.join(missing)}; {hint}")
    folder = mounted_folder("--out", options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results = _train_all(options)
        paths = write_result(folder / "demo", report(results), lambda: demo_figure(results))
    except OSError as error:
        raise UsageError(f"can't write to {options.out}: {error.strerror or error}") from None
    print(*paths, sep="\n")
    return PASSED


def _train_all(options: argparse.Namespace) -> list[Any]:
    from tqdm import tqdm

    names = dict.fromkeys(options.task or TASKS)
    tasks = [TASKS[name] if options.all else TASKS[name].story() for name in names]
    tasks = [task._replace(steps=options.steps or task.steps) for task in tasks]
    seeds, results = options.seeds or (5 if options.all else 3), []
    total = sum(len(task.arms) * task.steps for task in tasks)
    with tqdm(total=total, unit="step", disable=None) as bar:  # None: shown on a terminal only
        for task in tasks:
            runs = []
            for run in train(task, seeds, bar.update):
                bar.write(row(run) if runs else f"{head(task, run)}\n{row(run)}")
                runs.append(run)
            bar.write(f"note: {task.note}\n")
            results.append((task, runs))
    return results


def _positive_integer(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive integer")
    return number
