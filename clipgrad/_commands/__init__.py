"""The command line: each command calls one public function.

1. `cli` has the parsers of all commands, each of which stands in a file of its own.
2. `function` finds the function that the user names, and `arguments` makes its arguments.
3. `command_output` prints the result. The exit code is 0 if nothing is wrong, 1 if something is,
   and 2 for a wrong command.
"""

from clipgrad._commands.cli import main as main
