"""Each option of each command changes what is printed, what is written, or the exit code."""

import os
import re

import jax
import pytest

from clipgrad._commands import main
from tests.registry import commands, training

ROWS = [
    # A comparison, or a picture, costs more than .3 CPU seconds.
    pytest.param(
        command,
        option,
        marks=[pytest.mark.slow] * (command == "compare" or option in ("--out", "--capture")),
    )
    for command, rows in commands.COMMANDS.items()
    for option in rows
]
# Commands without options of their own, and those that train or check for minutes.
ELSEWHERE = {"help": "test_help", "demo": "test_demo", "selftest": "test_check_command"}


@pytest.fixture(autouse=True)
def same_types():
    """`--x64` is for the rest of a process."""
    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)


# What a call without the option gives: several rows have it.
WITHOUT: dict[str, object] = {}


def ran(words, tmp_path, capsys):
    """The exit code, the files, and what was printed, without times."""
    folder = tmp_path / "written"
    folder.mkdir(exist_ok=True)
    places = {"FOLDER": folder, "HERE": commands.__name__}
    if "CAPTURE" in words:
        places["CAPTURE"] = training.a_capture(1.0)
    for name, place in places.items():
        words = words.replace(name, str(place))
    code = main(words.split())
    printed = re.sub(r"\d+\.\d+ s\b", "", "".join(capsys.readouterr()))
    return code, sorted(os.listdir(folder)), printed


@pytest.mark.parametrize(("command", "option"), ROWS)
def test_each_option_changes_the_command(command, option, tmp_path, capsys):
    added, call = commands.COMMANDS[command][option]
    words = f"{command} {call}"
    if words not in WITHOUT:
        WITHOUT[words] = ran(words, tmp_path, capsys)
    assert ran(f"{words} {added}", tmp_path, capsys) != WITHOUT[words]


def helped(words, capsys):
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    return capsys.readouterr().out


def test_each_option_has_a_row(capsys):
    names = set(re.findall(r"^    (\w+) ", helped([], capsys), re.MULTILINE))
    assert names == {*commands.COMMANDS, *ELSEWHERE}
    for command, rows in commands.COMMANDS.items():
        options = set(re.findall(r"--[a-z]\w[\w-]*", helped([command], capsys)))
        assert options - {"--help"} == set(rows), command
