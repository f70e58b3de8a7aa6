"""The README's program that proves a VJP wrong prints what the README says."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_report_in_the_readme_is_the_one_its_program_prints(capsys):
    section = README.read_text().split("## Proving a VJP")[1]
    program = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    shown = re.search(r"```text\n(.*?)```", section, re.DOTALL)[1]
    exec(compile(program, "README.md", "exec"), {})
    times = re.compile(r"\(\d+ evaluations, [\d.]+ s,|\+- \S+")
    assert times.sub("", capsys.readouterr().out) == times.sub("", shown)
