"""`clipgrad compare module:f module:g`: two versions of a loss on the command line."""

import argparse
import os
from typing import Any

from clipgrad._commands.command_output import show_result
from clipgrad._commands.function import (
    UsageError,
    add_command,
    add_function,
    arguments,
    load,
    made_arguments,
)
from clipgrad._compare import WIDER_DTYPES, GradientComparison, compare

COMPARE_EXAMPLES = (
    "models:loss kernels:loss --args models:example_args",
    "models:loss float32 --args models:example_args --out comparison",
    "before.npz models:loss --args models:example_args",
    "models:step models:sharded_step --args models:state_and_batch --steps",
)
COMPARE_CODES = (
    "the versions agree; with a dtype, no leaf of the gradient has lost its precision",
    "they differ, or rounding decides too much to say",
)
COMPARISON_FIELDS = ("ok", "message", "findings", "rows", "notes")


def add_compare_parser(subparsers: Any) -> None:
    about = "Find the first place where two versions of a loss, or of a training step, differ."
    parser = add_command(subparsers, "compare", about, run_compare, COMPARE_EXAMPLES, COMPARE_CODES)
    add = parser.add_argument
    add_function(add, "loss")
    words = f"the other version, a file of save_run, or a dtype: {' or '.join(WIDER_DTYPES)}"
    add("other", metavar="module:other", help=words)
    words = "a function that returns the tuple of arguments of the other version, if they differ"
    add("--other-args", metavar="module:make_args", help=words)
    how = parser.add_mutually_exclusive_group().add_argument
    words = "positions to differentiate (default: all arguments that hold floats)"
    how("--argnums", metavar="N", type=int, nargs="+", help=words)
    how("--steps", action="store_true", help="the functions are whole steps: compare their outputs")
    add("--has-aux", action="store_true", help="the losses return (loss, aux)")
    words = "a name, or pattern, in fun and in other; you can repeat it: 'layers_*=layers'"
    add("--name", metavar="FUN=OTHER", action="append", default=[], help=words)
    add("--rtol", metavar="ERROR", type=float, help="a tolerance instead of the measured one")
    add("--out", metavar="DIR", help="write comparison.png and comparison.json into this folder")
    add("--json", metavar="FILE", help="write the result to this file")


def run_compare(options: argparse.Namespace) -> int:
    return show_result(options, "comparison", _command_comparison, COMPARISON_FIELDS)


def _command_comparison(options: argparse.Namespace) -> GradientComparison:
    texts = options.function, options.other
    other = _command_version(options.other, is_other=True)
    versions = _command_version(options.function), other
    functions = [text for text, version in zip(texts, versions, strict=True) if callable(version)]
    argnums: Any = options.argnums or "all"
    return compare(
        *versions,
        _command_arguments(options, functions),
        other_args=made_arguments(options.other_args) if options.other_args else None,
        argnums=None if options.steps else argnums[0] if len(argnums) == 1 else argnums,
        has_aux=options.has_aux,
        names=_renamed_pairs(options.name),
        rtol=options.rtol,
    )


def _command_version(text: str, is_other: bool = False) -> Any:
    """A function, or the text itself if that is a file or a dtype."""
    if text.endswith(".npz") and not os.path.exists(text):
        raise UsageError(f"run: got {text!r}, no such file, expected one that save_run wrote")
    if text.endswith(".npz") or os.path.isfile(text) or text in WIDER_DTYPES:
        return text
    if is_other and ":" not in text:
        raise UsageError(
            f"other: got {text!r}, expected module:function, or one of {', '.join(WIDER_DTYPES)}, "
            "or a file of save_run"
        )
    return load(text)


def _command_arguments(options: argparse.Namespace, functions: list[str]) -> tuple | None:
    if not functions:
        if options.args:
            got = f"--args: got {options.args!r} with two runs from files, expected none"
            raise UsageError(got)
        return None
    if options.steps and ":" in (options.args or ""):
        return made_arguments(options.args)  # to call a step may delete its arguments
    return arguments(functions[0], load(functions[0]), options.args, 0)


def _renamed_pairs(texts: list[str]) -> dict[str, str] | None:
    if wrong := [text for text in texts if text.count("=") != 1]:
        raise UsageError(f"--name: got {wrong[0]!r}, expected FUN=OTHER, such as 'layers_*=layers'")
    return dict(text.split("=") for text in texts) or None
