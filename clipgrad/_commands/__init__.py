"""The command line: each command calls one public function.

A command finds the function that the user names, makes its arguments, and prints the result. Its
exit code is 0 if nothing is wrong, 1 if something is, and 2 for a wrong command.
"""

from clipgrad._commands.cli import main as main
