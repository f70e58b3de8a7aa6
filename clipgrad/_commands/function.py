"""The function that a command runs, its arguments, and how a command ends."""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from clipgrad._arrays import nearest
from clipgrad._commands.arguments import random_arguments
from clipgrad._errors import first_line

PASSED, FAILED, WRONG_USAGE = 0, 1, 2
_INSTEAD_OF_SHAPES = (
    "; shapes are arrays: for a dictionary, a model or other objects write --args "
    "module:make_args, a function that returns the tuple of arguments"
)


class UsageError(Exception):
    """The command line asks for something that does not exist, or a function raises (the cause).

    Without a cause, one line says everything.
    """


def add_command(
    subparsers: Any,
    name: str,
    about: str,
    run: Callable[[Any], int],
    examples: Sequence[str] = (),
    codes: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """Add a subcommand, which one sentence describes; `codes` are the meanings of 0 and 1."""
    lines = [f"  clipgrad {name} {example}" for example in examples]
    ends = [f"  {code}  {meaning}" for code, meaning in enumerate(codes)]
    could_not = f"  {WRONG_USAGE}  the command could not run; one line says why"
    parser = subparsers.add_parser(
        name,
        help=about[:1].lower() + about[1:].rstrip("."),
        description=about,
        epilog="\n".join(["examples:", *lines, "", "exit code:", *ends, could_not])
        if codes
        else "",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    parser.set_defaults(run=run, command=name)
    return parser


def add_function(add: Callable[..., Any], kind: str = "function") -> None:
    """Add the function to look at, and its arguments, by `add_argument` of a parser or a group."""
    words = f"the {kind}; the module may be in the current folder"
    add("function", metavar=f"module:{kind}", help=words)
    words = 'shapes such as "f32[8,16], f32[16]", or module:make_args, a function that returns the '
    add("--args", metavar="ARGS", help=f"{words}tuple of arguments")


def complain(arguments: argparse.Namespace, error: Exception) -> None:
    """Say in one line why a command could not be run, or with ``--traceback`` where as well."""
    is_of_user = isinstance(error, UsageError | ValueError | TypeError | ImportError)
    text = str(error).strip().partition("\n")[0] if is_of_user else first_line(error)
    fault = error.__cause__ if isinstance(error, UsageError) else error
    if fault is not None and arguments.traceback:
        traceback.print_exception(fault)
    elif fault is not None:
        text += " (--traceback shows where)"
    print(f"clipgrad {arguments.command}: {text}", file=sys.stderr)


def arguments(path: str, function: Callable, text: str | None, seed: int) -> tuple:
    """The arguments of `--args`, with which the function is called once.

    Raises:
      UsageError: there are none, or the function raises.
    """
    if not text:
        raise UsageError(
            f'--args: got nothing, expected the arguments of {path}; write --args "f32[8,16]", the '
            "shape of each, or --args module:make_args"
        )
    is_path = ":" in text and "[" not in text
    args = made_arguments(text) if is_path else random_arguments(text, seed)
    instead = "" if is_path else _INSTEAD_OF_SHAPES
    _called(path, function, *args, instead=instead)
    return args


def made_arguments(path: str, *args: Any) -> tuple:
    """The arguments that a function such as `module:make_args` makes; `UsageError` as above."""
    made = _called(path, load(path), *args)
    if not isinstance(made, tuple):
        kind = type(made).__name__
        raise UsageError(f"{path}: got a {kind} from it, expected the tuple of arguments")
    return made


def _called(path: str, function: Callable, *args: Any, instead: str = "") -> Any:
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path} raises {first_line(error)}{instead}") from error


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
        value = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"cannot import {module_name!r}: {first_line(error)}") from error
    for part in name.split("."):
        if not hasattr(value, part):
            there = nearest(part, [key for key in dir(value) if not key.startswith("_")], 3)
            raise UsageError(f"module {module_name!r} has no {name!r}; {there}")
        value = getattr(value, part)
    if not callable(value):
        raise UsageError(f"{path}: got a {type(value).__name__}, expected a function")
    return value


def _as_module(path: str) -> str:
    """`pkg/layer.py:dense` and `layer.dense` as they are written here: `pkg.layer:dense`."""
    file, colon, name = path.replace("::", ":").rpartition(":")
    if not colon:
        file, name = (path, "function") if path.endswith(".py") else path.rpartition(".")[::2]
    module = file.removeprefix("./").removesuffix(".py").replace("/", ".")
    return f"{module}:{name}" if module else path
