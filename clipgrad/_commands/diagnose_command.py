"""`clipgrad diagnose module:loss`: a diagnosis on the command line."""

import argparse
from typing import Any

from clipgrad._commands.arguments import position_or_name
from clipgrad._commands.command_output import show_result
from clipgrad._commands.function import (
    UsageError,
    add_command,
    add_function,
    arguments,
    load,
    made_arguments,
)
from clipgrad._diagnose import GradientDiagnosis, diagnose
from clipgrad._errors import first_line
from clipgrad._recorder import load_capture

DIAGNOSE_EXAMPLES = (
    "models:loss --args models:example_args --out diagnosis",
    "models:loss --capture captures/step_4000",
)
DIAGNOSE_CODES = "nothing is wrong", "there are findings"
_OF_MODELS = (
    "; a capture has dictionaries instead of models: write --args module:restored, a function of "
    "the capture that returns (capture.restore(model), capture.batch)"
)
DIAGNOSIS_FIELDS = ("ok", "message", "findings", "rows", "notes", "examples")


def add_diagnose_parser(subparsers: Any) -> None:
    about = "Find the operation that makes a gradient NaN, explode, vanish, underflow or zero."
    parser = add_command(
        subparsers, "diagnose", about, run_diagnose, DIAGNOSE_EXAMPLES, DIAGNOSE_CODES
    )
    add = parser.add_argument
    add_function(add, "loss")
    words = (
        "a capture of FlightRecorder; the arguments are its (params, batch), or the result of the "
        "function in --args, called with the capture"
    )
    add("--capture", metavar="PATH", help=words)
    words = "positions of the arguments to differentiate (default: 0)"
    add("--argnums", metavar="N", type=int, nargs="+", default=[0], help=words)
    words = "list the bad examples in these arguments, which have the axis of the batch"
    add("--examples", metavar="ARG", type=position_or_name, nargs="+", help=words)
    add("--has-aux", action="store_true", help="the loss returns (loss, aux)")
    add("--out", metavar="DIR", help="write diagnosis.png and diagnosis.json into this folder")
    add("--json", metavar="FILE", help="write the result to this file")


def run_diagnose(options: argparse.Namespace) -> int:
    return show_result(options, "diagnosis", _command_diagnosis, DIAGNOSIS_FIELDS)


def _command_diagnosis(options: argparse.Namespace) -> GradientDiagnosis:
    function, examples = load(options.function), options.examples
    if options.capture:
        args = _captured(options.capture, options.args)
        if options.args is None:
            examples = examples or (1,)  # the whole batch of the capture
    else:
        args = arguments(options.function, function, options.args, 0)
    more = {"argnums": tuple(options.argnums), "has_aux": options.has_aux, "examples": examples}
    try:
        return diagnose(function, args, **more)
    except Exception as error:
        if options.capture and options.args is None and not isinstance(error, ValueError):
            raise UsageError(
                f"{options.function} raises {first_line(error)}{_OF_MODELS}"
            ) from error
        raise


def _captured(path: str, make_args: str | None) -> tuple:
    """The arguments of a capture, or what the function of `--args` makes of it."""
    try:
        capture = load_capture(path)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from None
    without = "; it has no batch" if "no_batch" in capture.meta else ""
    print(f"capture of step {capture.step}: {capture.path}{without}")
    return capture.args if make_args is None else made_arguments(make_args, capture)
