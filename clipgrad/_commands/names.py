"""`clipgrad names module:function`: what can be clipped and watched, on the command line."""

import argparse
from typing import Any

from clipgrad._commands.function import (
    PASSED,
    UsageError,
    add_command,
    add_function,
    arguments,
    load,
)
from clipgrad._error_clip import list_names

NAMES_EPILOG = """\
example:
  clipgrad names models:loss --args models:example_args

exit code:
  0  the names are printed
  2  there are no names, or they could not be listed; one line says why
"""


def add_names_parser(subparsers: Any) -> None:
    about = "List the values inside a function that can be clipped and watched by name."
    parser = add_command(subparsers, "names", about, NAMES_EPILOG, run_names)
    add_function(parser.add_argument)


def run_names(options: argparse.Namespace) -> int:
    function = load(options.function)
    args, kwargs = arguments("names", options.function, function, options.args, seed=0)
    names = list_names(function, args, kwargs)
    if not names:
        raise UsageError(
            f"{options.function}: got a function without tags or modules; tag a variable with "
            'x = jax.ad_checkpoint.checkpoint_name(x, "x"), or compute it in a module: '
            'with jax.named_scope("x"):'
        )
    print(names)
    return PASSED
