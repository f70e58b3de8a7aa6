"""`clipgrad diagnose module:loss`: a diagnosis on the command line."""

import argparse
import functools
from typing import Any

from clipgrad._commands.arguments import Arguments
from clipgrad._commands.function import (
    UsageError,
    add_command,
    add_function,
    arguments,
    load,
    made_arguments,
)
from clipgrad._commands.result import show_result
from clipgrad._diagnose import GradientDiagnosis, diagnose
from clipgrad._recorder import load_capture

DIAGNOSE_EPILOG = """\
examples:
  clipgrad diagnose models:loss --args models:example_args --out diagnosis
  clipgrad diagnose models:loss --capture captures/step_4000

exit code:
  0  nothing is wrong
  1  there are findings
  2  the diagnosis could not run, or could not be written and has no findings; one line says why
"""


def add_diagnose_parser(subparsers: Any) -> None:
    about = "Find the operation that makes a gradient NaN, explode, vanish, underflow or zero."
    parser = add_command(subparsers, "diagnose", about, DIAGNOSE_EPILOG, run_diagnose)
    add = parser.add_argument
    add_function(add, "loss")
    add(
        "--capture",
        metavar="PATH",
        help="a capture of FlightRecorder; the arguments are its (params, batch), or the result "
        "of the function in --args, called with the capture",
    )
    add(
        "--argnums",
        metavar="N",
        type=int,
        nargs="+",
        default=[0],
        help="positions of the arguments to differentiate (default: 0)",
    )
    add(
        "--examples",
        metavar="ARG",
        nargs="+",
        help="list the bad examples in these arguments, which have the axis of the batch",
    )
    add("--has-aux", action="store_true", help="the loss returns (loss, aux)")
    add("--out", metavar="DIR", help="write diagnosis.png and diagnosis.json into this folder")


def run_diagnose(options: argparse.Namespace) -> int:
    find = functools.partial(_command_diagnosis, options)
    fields = ("ok", "findings", "rows", "notes", "examples")
    return show_result("diagnose", "diagnosis", find, fields, options.out)


def _command_diagnosis(options: argparse.Namespace) -> GradientDiagnosis:
    function = load(options.function)
    if options.capture:
        args, kwargs = _captured(options.capture, options.args)
    else:
        args, kwargs = arguments("diagnose", options.function, function, options.args, 0)
    examples = _named_arguments(options.examples)
    if options.capture and options.args is None and examples is None:
        examples = (1,)  # the whole batch of the capture
    chosen = {"argnums": tuple(options.argnums), "has_aux": options.has_aux}
    return diagnose(function, args, kwargs, **chosen, examples=examples)


def _named_arguments(arguments: list[str] | None) -> Any:
    """The arguments of a function, by position or name; None if there are none."""
    return arguments and [int(name) if name.isdigit() else name for name in arguments]


def _captured(path: str, make_args: str | None) -> Arguments:
    """The arguments of a capture.

    Raises:
      UsageError: there is no capture, or the function of `--args` raises or makes no tuple.
    """
    try:
        capture = load_capture(path)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    without = "; it has no batch" if "no_batch" in capture.meta else ""
    print(f"capture of step {capture.step}: {capture.path}{without}")
    if make_args is None:
        return Arguments(capture.args, {})
    return Arguments(made_arguments(make_args, capture), {})
