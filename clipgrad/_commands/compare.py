"""`clipgrad compare module:f module:g`: two versions of a loss on the command line."""

import argparse
import functools
import os
from typing import Any

from clipgrad._commands.function import (
    UsageError,
    add_command,
    add_function,
    arguments,
    load,
    made_arguments,
)
from clipgrad._commands.result import show_result
from clipgrad._compare import WIDER_DTYPES, GradientComparison, compare

COMPARE_EPILOG = """\
examples:
  clipgrad compare models:loss kernels:loss --args models:example_args
  clipgrad compare models:loss float32 --args models:example_args --out comparison
  clipgrad compare before.npz models:loss --args models:example_args
  clipgrad compare models:step models:sharded_step --args models:state_and_batch --steps

exit code:
  0  the versions agree; with a dtype, no leaf of the gradient has lost its precision
  1  they differ, or nothing could be judged
  2  the comparison could not run; one line says why
"""


def add_compare_parser(subparsers: Any) -> None:
    about = "Find the first place where two versions of a loss, or of a training step, differ."
    parser = add_command(subparsers, "compare", about, COMPARE_EPILOG, run_compare)
    add = parser.add_argument
    add_function(add, "loss")
    add(
        "other",
        metavar="module:other",
        help=f"the other version, a file of save_run, or a dtype: {' or '.join(WIDER_DTYPES)}",
    )
    add(
        "--other-args",
        metavar="module:make_args",
        help="a function that returns the tuple of arguments of the other version, if they differ",
    )
    how = parser.add_mutually_exclusive_group().add_argument
    how("--argnums", metavar="N", type=int, nargs="+", help="positions to differentiate (0)")
    how("--steps", action="store_true", help="the functions are whole steps: compare their outputs")
    add("--has-aux", action="store_true", help="the losses return (loss, aux)")
    add(
        "--name",
        metavar="FUN=OTHER",
        action="append",
        help="a name, or pattern, in fun and in other; you can repeat it: 'layers_*=layers'",
    )
    add("--rtol", metavar="ERROR", type=float, help="a tolerance in place of the measured one")
    add("--out", metavar="DIR", help="write comparison.png and comparison.json into this folder")


def run_compare(options: argparse.Namespace) -> int:
    find = functools.partial(_command_comparison, options)
    return show_result(options, "comparison", find, ("ok", "findings", "rows", "notes"))


def _command_comparison(options: argparse.Namespace) -> GradientComparison:
    texts = options.function, options.other
    if not (_is_run(options.other) or ":" in options.other or options.other in WIDER_DTYPES):
        raise UsageError(
            f"other: got {options.other!r}, expected module:function, or one of "
            f"{', '.join(WIDER_DTYPES)}, or a file of save_run"
        )
    versions = [text if _is_run(text) or text in WIDER_DTYPES else load(text) for text in texts]
    functions = [text for text, version in zip(texts, versions, strict=True) if callable(version)]
    args = _command_arguments(options, functions)
    other_args = made_arguments(options.other_args) if options.other_args else None
    argnums = options.argnums or [0]
    return compare(
        versions[0],
        versions[1],
        args,
        other_args=other_args,
        argnums=None if options.steps else tuple(argnums) if argnums[1:] else argnums[0],
        has_aux=options.has_aux,
        names=_renamed_pairs(options.name),
        rtol=options.rtol,
    )


def _is_run(text: str) -> bool:
    """Whether a version is a file: its name ends in .npz, or it is there."""
    return text.endswith(".npz") or os.path.isfile(text)


def _command_arguments(options: argparse.Namespace, functions: list[str]) -> tuple | None:
    if not functions:
        if options.args:
            raise UsageError(
                f"--args: got {options.args!r} with two runs from files, expected none"
            )
        return None
    if options.steps and ":" in (options.args or ""):
        return made_arguments(options.args)  # to call a step may delete its arguments
    return arguments(functions[0], load(functions[0]), options.args, 0)


def _renamed_pairs(texts: list[str] | None) -> dict[str, str] | None:
    pairs = [text.split("=") for text in texts or []]
    wrong = [text for text, pair in zip(texts or [], pairs, strict=True) if len(pair) != 2]
    if wrong:
        raise UsageError(f"--name: got {wrong[0]!r}, expected FUN=OTHER, such as 'layers_*=layers'")
    return dict(pairs) or None
