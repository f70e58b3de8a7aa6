"""What a page of the site shows below its first program is what the program prints."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
TIMES = re.compile(r"\(\d+ evaluations, [\d.]+ s,|\+- \S+")


@pytest.mark.parametrize("page", ["check", "names"])
def test_the_output_on_the_page_is_what_its_first_program_prints(page, capsys):
    text = (DOCS / f"{page}.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    shown = re.search(r"```text\n(.*?)```", text, re.DOTALL)[1]
    exec(compile(program, f"{page}.md", "exec"), {})
    assert TIMES.sub("", capsys.readouterr().out) == TIMES.sub("", shown)
