"""The command line: ``clipgrad``, or ``python -m clipgrad``."""

import argparse
import os
import re
import sys
from collections.abc import Sequence

import clipgrad
from clipgrad._arrays import nearest
from clipgrad._commands.check_command import add_check_parser
from clipgrad._commands.compare_command import add_compare_parser
from clipgrad._commands.demo_command import add_demo_parser
from clipgrad._commands.diagnose_command import add_diagnose_parser
from clipgrad._commands.function import WRONG_USAGE, complain
from clipgrad._commands.help import add_help_parser
from clipgrad._commands.selftest import add_selftest_parser

# Each adds its own parser, which sets ``run``: a function from the arguments to the exit code.
_COMMANDS = (
    add_demo_parser,
    add_check_parser,
    add_diagnose_parser,
    add_compare_parser,
    add_selftest_parser,
    add_help_parser,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command with these arguments, or those of the process.

    An error is one line. If a function of the user or this library has raised it, the line says
    that ``--traceback`` shows where.

    Returns:
      The exit code: 0 for success, 2 for an error, 130 if interrupted, 141 if nobody reads the
      output any more, others by command. For ``--help``, ``--version`` and wrong arguments
      `SystemExit` has it.
    """
    arguments = _parsed(argv)
    if arguments is None:
        return WRONG_USAGE
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as `| head` leaves it; Python would complain again at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        complain(arguments, error)
        return WRONG_USAGE


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace | None:
    """The arguments; None if there is no command, after the help is printed."""
    parser = argparse.ArgumentParser(
        prog="clipgrad", description="Clip, diagnose and check gradients in JAX."
    )
    parser.add_argument("--version", action="version", version=f"clipgrad {clipgrad.__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add_to in _COMMANDS:
        add_to(commands)
    arguments, unknown = parser.parse_known_args(argv)
    if arguments.run is None:
        parser.print_help(sys.stderr)
        return None
    if unknown:
        command = commands.choices[arguments.command]
        there = dict.fromkeys(re.findall(r"--[a-z][\w-]*", command.format_help()))
        command.error(f"got {unknown[0]!r}, which is no argument; {nearest(unknown[0], there, 3)}")
    return arguments
