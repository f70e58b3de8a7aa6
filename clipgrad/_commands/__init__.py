"""The command line."""

from clipgrad._commands.cli import main as main
