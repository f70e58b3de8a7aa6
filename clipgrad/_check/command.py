"""`clipgrad check module:function`: the gradient check on the command line."""

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax

from clipgrad._check.check_grads import check_grads
from clipgrad._check.options import MODES
from clipgrad._check.report import GradCheckReport
from clipgrad._check.shapes import random_arguments

PASSED, FAILED, WRONG_USAGE = 0, 1, 2


class UsageError(Exception):
    """The command line asks for something that is not there."""


def add_check_parser(subparsers: Any) -> None:
    """Add `check` to the subcommands of a parser."""
    parser = subparsers.add_parser(
        "check",
        help="check the gradient of a function against finite differences",
        description="Check the gradient of a function against finite differences.",
        epilog="Exit code 0: passed; 1: failed; 2: wrong usage.",
    )
    add = parser.add_argument
    add("function", metavar="module:function", help="what to check; the current folder counts")
    add(
        "--args",
        required=True,
        metavar="ARGS",
        help="module:make_args, a function that returns "
        'the tuple of arguments, or shapes such as "f32[8,16], f32[16]"',
    )
    add("--wrt", action="append", help="input to check: position, name or path; repeatable")
    add("--no-grad", action="append", help="input to leave out, written the same way; repeatable")
    add("--output", help="output to check: position, key or path")
    add("--order", type=int, default=1, help="2 to check the VJP's own VJP too")
    add("--mode", default="auto", choices=MODES)
    add("--device", help="kinds of device, such as cpu,gpu; default: all there are")
    add("--delta", type=float, help="absolute step, for Paddle's formula")
    add("--max-relative-error", type=float, help="Paddle's tolerance")
    add("--points", type=int, default=2, help="how many points to check")
    add("--seed", type=int, default=0)
    add("--skip", action="append", default=[], help="check to switch off; repeatable")
    add("--x64", action="store_true", help="enable 64-bit types first")
    add("--json", metavar="FILE", help="write the report to a file as well")
    parser.set_defaults(run=run_check)


def run_check(options: argparse.Namespace) -> int:
    """Run the check and print its report; return the exit code."""
    try:
        report = _report(options)
    except (UsageError, ValueError, TypeError) as error:
        print(f"clipgrad check: {error}", file=sys.stderr)
        return WRONG_USAGE
    print(report)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(as_json(report), file, indent=2)
    return PASSED if report.ok else FAILED


def _report(options: argparse.Namespace) -> GradCheckReport:
    with jax.enable_x64(True) if options.x64 else contextlib.nullcontext():
        function = load(options.function)
        return check_grads(
            function,
            arguments(options.args, options.seed),
            wrt=_selectors(options.wrt),
            no_grad=_selectors(options.no_grad),
            output=_selector(options.output),
            order=options.order,
            mode=options.mode,
            delta=options.delta,
            max_relative_error=options.max_relative_error,
            devices=options.device.split(",") if options.device else None,
            points=options.points,
            seed=options.seed,
            skip=options.skip,
            raise_on_failure=False,
        )


def arguments(text: str, seed: int) -> tuple:
    """The arguments that `--args` means."""
    if "[" in text:
        return random_arguments(text, seed)
    made = load(text)()
    if not isinstance(made, tuple):
        raise UsageError(f"{text} returned a {type(made).__name__}; expected a tuple of arguments")
    return made


def load(path: str) -> Callable:
    """Import `module:function`, with the current folder on the path."""
    module_name, colon, name = path.partition(":")
    if not colon or not name:
        raise UsageError(f"got {path!r}; expected module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"cannot import {module_name!r} ({error})") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"module {module_name!r} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{path} is a {type(found).__name__}; expected a function")
    return found


def as_json(report: GradCheckReport) -> dict[str, Any]:
    """The report as plain data."""
    failures = [
        {
            "check": failure.check,
            "where": failure.where,
            "detail": failure.detail,
            "numeric": _number(failure.numeric),
            "error": _number(failure.error),
            "analytic": _number(failure.analytic),
            "indices": failure.indices.tolist(),
        }
        for failure in report.failures
    ]
    names = ("ok", "notes", "not_run", "evaluations", "seconds", "precision", "devices", "verified")
    return {"failures": failures} | {name: getattr(report, name) for name in names}


def _number(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def _selectors(texts: list[str] | None) -> list[int | str] | None:
    return [_selector(text) for text in texts] if texts else None


def _selector(text: str | None) -> Any:
    return int(text) if text is not None and text.isdigit() else text
