"""The command line: ``clipgrad``, or ``python -m clipgrad``."""

import argparse
import os
import sys
from collections.abc import Sequence

import clipgrad
from clipgrad._commands.check import add_check_parser
from clipgrad._commands.compare import add_compare_parser
from clipgrad._commands.demo import add_demo_parser
from clipgrad._commands.diagnose import add_diagnose_parser
from clipgrad._commands.function import WRONG_USAGE, UsageError, complain
from clipgrad._commands.help import add_help_parser
from clipgrad._commands.names import add_names_parser
from clipgrad._commands.selftest import add_selftest_parser

# Each adds its own parser, which sets ``run``: a function from the arguments to the exit code. An
# error of it is shown in one line.
_COMMANDS = (
    add_demo_parser,
    add_check_parser,
    add_names_parser,
    add_diagnose_parser,
    add_compare_parser,
    add_selftest_parser,
    add_help_parser,
)

_RUN_OTHERS = ("check", "names", "diagnose", "compare")  # of which any error may be the user's


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the arguments; ``None``: the arguments of the process.

    Returns:
      The exit code: 0 for success, 2 for wrong usage, 130 if interrupted, 141 if nobody reads the
      output any more, others by command.

    Raises:
      SystemExit: after ``--help`` and ``--version``, and with 2 for arguments that are wrong.
    """
    parser = argparse.ArgumentParser(
        prog="clipgrad", description="Clip, diagnose and check gradients in JAX."
    )
    parser.add_argument("--version", action="version", version=f"clipgrad {clipgrad.__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add_to in _COMMANDS:
        add_to(commands)
    arguments = parser.parse_args(argv)
    if arguments.run is None:
        parser.print_help(sys.stderr)
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
        is_wrong_usage = isinstance(error, UsageError | ValueError | ImportError)
        if not is_wrong_usage and arguments.command not in _RUN_OTHERS:
            raise
        complain(arguments.command, error)
        return WRONG_USAGE
