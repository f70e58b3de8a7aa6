"""The page on checking a gradient: its program that finds a wrong VJP prints what the page says."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "check.md"


def test_the_report_on_the_page_is_the_one_its_program_prints(capsys):
    text = PAGE.read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    shown = re.search(r"```text\n(.*?)```", text, re.DOTALL)[1]
    exec(compile(program, "check.md", "exec"), {})
    times = re.compile(r"\(\d+ evaluations, [\d.]+ s,|\+- \S+")
    assert times.sub("", capsys.readouterr().out) == times.sub("", shown)
