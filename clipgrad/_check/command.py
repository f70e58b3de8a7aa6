"""`clipgrad check module:function`: the gradient check on the command line."""

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax

from clipgrad._check.arguments import (
    Arguments,
    example,
    inferred_arguments,
    parameters_of,
    random_arguments,
)
from clipgrad._check.check_grads import check_grads
from clipgrad._check.devices import PLATFORMS
from clipgrad._check.options import Options
from clipgrad._check.report import GradCheckReport, first_line
from clipgrad._selectors import nearest

PASSED, FAILED, WRONG_USAGE = 0, 1, 2
CHECK_EPILOG = """\
examples:
  clipgrad check models:loss --args models:example_args --order 2
  clipgrad check models:norm --args "f32[8,16], f32[16]" --device cpu,gpu

exit code:
  0  passed
  1  the gradient is wrong, or nothing was verified
  2  the check could not be run; one line says why
"""


class UsageError(Exception):
    """The command line asks for something that is not there, or that raises."""


def add_check_parser(subparsers: Any) -> None:
    """Add `check` to the subcommands of a parser."""
    parser = subparsers.add_parser(
        "check",
        help="check the gradient of a function against finite differences",
        description="Check the gradient of a function against finite differences.",
        epilog=CHECK_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("what to check").add_argument
    add_function(add)
    paths = "by position, name or path; repeatable"
    add("--wrt", metavar="PATH", action="append", help=f"an input to check, {paths}")
    add("--no-grad", metavar="PATH", action="append", help=f"an input to leave out, {paths}")
    add("--output", metavar="PATH", help="the output to check, by position, key or path")
    how = parser.add_argument_group("how to check").add_argument
    for option in dataclasses.fields(Options):
        words = dict(option.metadata)
        if option.default:
            words["help"] += f" (default: {option.default})"
        how(f"--{option.name.replace('_', '-')}", default=argparse.SUPPRESS, **words)
    how("--device", metavar="KINDS", help=f"such as cpu,gpu, of {', '.join(PLATFORMS)} (all)")
    how("--x64", action="store_true", help="enable 64-bit types first")
    parser.add_argument("--json", metavar="FILE", help="write the report to a file as well")
    parser.set_defaults(run=run_check)


def add_function(add: Callable[..., Any], kind: str = "function") -> None:
    """Add the function to look at, and its arguments, by `add_argument` of a parser or a group."""
    add("function", metavar=f"module:{kind}", help=f"the {kind}; the current folder counts")
    add(
        "--args",
        metavar="ARGS",
        help='shapes such as "f32[8,16], f32[16]", or module:make_args, a function that returns '
        "the tuple of arguments; not needed where annotations, docstring or defaults have shapes",
    )


def run_check(options: argparse.Namespace) -> int:
    """Run the check and print its report; return the exit code."""
    try:
        report = _command_report(options)
        print(report)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(report_as_json(report), file, indent=2)
    except Exception as error:
        return complain("check", error)
    return PASSED if report.ok else FAILED


def complain(command: str, error: Exception) -> int:
    """Say in one line why a command could not be run; return its exit code."""
    own = isinstance(error, UsageError | ValueError | TypeError | ImportError)
    text = str(error).strip().partition("\n")[0] if own else first_line(error)
    print(f"clipgrad {command}: {text}", file=sys.stderr)
    return WRONG_USAGE


def _command_report(options: argparse.Namespace) -> GradCheckReport:
    given = {
        f.name: getattr(options, f.name) for f in dataclasses.fields(Options) if f.name in options
    }
    seed = Options(**given).seed
    with jax.enable_x64(True) if options.x64 else contextlib.nullcontext():
        function = load(options.function)
        args, kwargs = arguments("check", options.function, function, options.args, seed)
        return check_grads(
            function,
            args,
            kwargs,
            wrt=_selectors(options.wrt),
            no_grad=_selectors(options.no_grad),
            output=_selector(options.output),
            devices=options.device.split(",") if options.device else None,
            raise_on_failure=False,
            **given,
        )


def arguments(
    command: str, path: str, function: Callable, text: str | None, seed: int
) -> Arguments:
    """The arguments of `--args`, or of the shapes that the function has; it is called with them.

    Raises:
      UsageError: there are none, or the function raises.
    """
    if text:
        found = Arguments(_given(text, seed), {})
        _called(path, function, found)
        return found
    parameters = parameters_of(function)
    instead = f"; write clipgrad {command} {path} {example(parameters)}, or --args module:make_args"
    found = inferred_arguments(parameters, seed)
    if found is None:
        raise UsageError(
            f"--args: got nothing, and not every parameter of {path} has a shape in its "
            f"annotation, docstring or default{instead}"
        )
    _called(path, function, found, f", for {found} as its signature has it{instead}")
    print(f"arguments: {found}")
    return found


def _given(text: str, seed: int) -> tuple:
    if "[" in text:
        return random_arguments(text, seed)
    made = _called(text, load(text), Arguments((), {}))
    if not isinstance(made, tuple):
        raise UsageError(
            f"{text}: got a {type(made).__name__} from it, expected the tuple of arguments"
        )
    return made


def _called(path: str, function: Callable, given: Arguments, why: str = "") -> Any:
    try:
        return function(*given.args, **given.kwargs)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path} raises {first_line(error)}{why}") from error


def load(path: str) -> Callable:
    """Import `module:function`, with the current folder on the path."""
    module_name, _, name = path.partition(":")
    instead = _as_module(path)
    if not module_name or not name or instead != path:
        hint = f"; write {instead}" if instead != path else ""
        raise UsageError(f"function: got {path!r}, expected module:function{hint}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"cannot import {module_name!r}: {first_line(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            there = nearest(part, [key for key in dir(found) if not key.startswith("_")], 3)
            raise UsageError(f"module {module_name!r} has no {name!r}; {there}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{path}: got a {type(found).__name__}, expected a function")
    return found


def _as_module(path: str) -> str:
    """`pkg/layer.py:dense` and `layer.dense` as they are written here: `pkg.layer:dense`."""
    file, colon, name = path.replace("::", ":").rpartition(":")
    if not colon:
        file, name = (path, "function") if path.endswith(".py") else path.rpartition(".")[::2]
    file = os.path.relpath(file) if os.path.isabs(file) else file and os.path.normpath(file)
    if not file or file.startswith(os.pardir):
        return path
    module = file.removesuffix(".py").replace("\\", ".").replace("/", ".")
    return f"{module}:{name}"


def report_as_json(report: GradCheckReport) -> dict[str, Any]:
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
