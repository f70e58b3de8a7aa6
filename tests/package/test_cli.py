import subprocess
import sys

import pytest

import clipgrad as cg
from clipgrad._commands import cli
from clipgrad._demo import TASKS

DEMO = ["demo", "--task", "blank-patches"]


def exit_code(*argv):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    return stopped.value.code


def test_version_is_that_of_the_package(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"clipgrad {cg.__version__}\n"


def test_no_command_shows_the_help_as_wrong_usage(capsys):
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("usage: clipgrad")


def test_help_lists_the_pages_and_prints_one(capsys):
    assert cli.main(["help"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed["nan"] == "Why is my gradient NaN?"
    assert cli.main(["help", "nan"]) == 0
    assert capsys.readouterr().out.startswith("# Why is my gradient NaN?\n")


def test_an_unknown_page_is_refused_with_the_pages_there_are(capsys):
    assert cli.main(["help", "namse"]) == 2
    assert (
        "page: got 'namse', which is not a page; the nearest are ['names',"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_command_in_silence():
    command = [sys.executable, "-m", "clipgrad", "help", "my_run_blew_up"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141


def test_an_unknown_task_is_refused_with_the_tasks_there_are(capsys):
    assert exit_code("demo", "--task", "sorting") == 2
    message = capsys.readouterr().err
    assert "argument --task: invalid choice: 'sorting'" in message
    assert all(name in message for name in TASKS)


@pytest.mark.parametrize("option, number", [("--seeds", "0"), ("--steps", "2.5")])
def test_a_number_that_is_none_is_refused(option, number, capsys):
    assert exit_code(*DEMO, f"{option}={number}") == 2
    expected = f"argument {option}: got '{number}', expected a positive integer"
    assert expected in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules, packages",
    [
        (["sklearn"], "scikit-learn"),
        (["matplotlib", "tqdm"], "matplotlib, tqdm"),
    ],
)
def test_missing_extras_are_one_clear_line(modules, packages, monkeypatch, capsys, tmp_path):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    assert cli.main([*DEMO, "--out", str(tmp_path / "out")]) == 2
    expected = f'clipgrad demo: needs {packages}; install it with: pip install "clipgrad[demo]"\n'
    assert capsys.readouterr() == ("", expected)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_is_refused_before_training(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert cli.main([*DEMO, "--out", str(tmp_path / "file")]) == 2
    message = capsys.readouterr().err
    assert message == f"clipgrad demo: can't write to {tmp_path / 'file'}: File exists\n"


def test_an_interrupted_command_has_the_exit_code_of_the_shell(monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    def add_to(commands):
        commands.add_parser("wait").set_defaults(run=interrupted)

    monkeypatch.setattr(cli, "_COMMANDS", (add_to,))
    assert cli.main(["wait"]) == 130


@pytest.mark.slow
def test_the_module_runs_and_does_not_load_what_only_the_demo_needs():
    script = (
        "import sys, runpy; sys.argv = ['clipgrad', '--help']\n"
        "try: runpy.run_module('clipgrad', run_name='__main__')\n"
        "finally: print(*({'matplotlib', 'sklearn', 'tqdm'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: clipgrad")
    assert done.stderr.strip() == ""
