"""Everything in the README runs: programs, pictures, commands, links."""

import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
OUTPUTS = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?")


pytestmark = pytest.mark.usefixtures("users_promotion")


def run(program):
    """The program by itself, as the file that its outputs name."""
    namespace = {"__name__": "model"}
    exec(compile(program, "model.py", "exec"), namespace)
    return namespace


def words(text):
    """The text without its line breaks and the line of a file of JAX."""
    return re.sub(r"(jax/\S+:)\d+", r"\1", " ".join(text.split()))


DIAGNOSE, RECORD, CLIP = PROGRAMS


def test_each_program_shows_its_output():
    assert len(OUTPUTS) == 3


def test_it_is_read_in_two_minutes():
    assert len(TEXT.split()) <= 900


def test_each_question_has_one_link():
    table = TEXT.partition("| you ask | read |\n|---|---|\n")[2].partition("\n\n")[0]
    links = [re.findall(r"\]\(", row) for row in table.splitlines()]
    assert 1 <= len(links) <= 13 and all(len(row) == 1 for row in links)


def test_the_first_screen_diagnoses_before_it_installs_anything_else():
    assert TEXT.index("pip install .") < TEXT.index("cg.diagnose(") < TEXT.index("```sh")


def test_both_clips_are_seen_to_act(capsys):
    run(CLIP)
    printed = capsys.readouterr().out
    exploded, one, bounded, clipped = map(float, NUMBER.findall(printed))
    assert exploded > 1000 > 10 > bounded > 1 == one == clipped
    assert NUMBER.sub("", printed) == NUMBER.sub("", OUTPUTS[2])
    shown = [float(number) for number in NUMBER.findall(OUTPUTS[2])]
    assert shown == pytest.approx([exploded, one, bounded, clipped], rel=0.05)


@pytest.mark.parametrize("program, lines", [(DIAGNOSE, 10), (RECORD, 20), (CLIP, 20)])
def test_the_programs_are_short(program, lines):
    assert sum(bool(line.strip()) for line in program.splitlines()) <= lines


def test_the_diagnosis_names_the_line_that_divides(capsys):
    run(DIAGNOSE)
    printed = words(capsys.readouterr().out)
    assert printed == words(OUTPUTS[0])
    line = int(re.match(r"model\.py:(\d+): ", printed)[1])
    assert "jnp.linalg.norm" in DIAGNOSE.splitlines()[line - 1]


@pytest.mark.exhaustive
def test_the_recorder_leads_to_the_step_the_line_and_the_example(capsys, monkeypatch, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    monkeypatch.chdir(tmp_path)
    run(RECORD)
    printed = words(capsys.readouterr().out)
    assert printed == words(OUTPUTS[1])
    step, line = map(int, re.match(r"step (\d+), model\.py:(\d+): ", printed).groups())
    assert "jnp.log" in RECORD.splitlines()[line - 1]
    assert f"batches[{step}, 21] = 0" in RECORD and "example 21" in printed
    assert f"blows up at step {step}." in TEXT and 'pip install ".[recorder]"' in TEXT


def test_the_commands_name_what_there_is():
    commands = re.findall(r"```sh\n(.*?)\n```", TEXT, re.DOTALL)
    assert len(commands) == 2 and all("\n" not in command for command in commands)
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\.\[(\w+)\]", TEXT):
        assert f"\n{extra} = [" in project
    assert 'clipgrad = "clipgrad._commands.cli:main"' in project


def test_the_requirements_are_those_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.11"' in project and "Python 3.11 or newer" in TEXT
    for name, bound in re.findall(r"`(jax|optax)` \(([\d.]+) or newer\)", TEXT):
        assert re.search(rf'"{name}>={re.escape(bound)}(\.0)?"', project)


def test_nothing_shows_an_address_that_does_not_exist():
    paths = [*ROOT.glob("*.md"), *ROOT.glob("*.cff"), *ROOT.glob("docs/**/*.md")]
    paths += [
        ROOT / "pyproject.toml",
        *ROOT.glob("notebooks/*.ipynb"),
        *ROOT.glob("clipgrad/**/*.py"),
    ]
    assert not [path for path in paths if "OWNER" in path.read_text()]


def test_on_a_package_index_a_link_without_an_address_is_its_text():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = TEXT
    for rule in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    assert "Why is my gradient NaN?" in text and "![" not in text
    assert not re.findall(r"\]\((?!http|#)[^)]*\)", text)
    assert set(re.findall(r"\]\((http[^)]*)\)", text)) == set(
        re.findall(r"\]\((http[^)]*)\)", TEXT)
    )


def test_the_citation_and_the_package_agree():
    citation, project = ((ROOT / name).read_text() for name in ("CITATION.cff", "pyproject.toml"))
    for name, text in (("license", "Apache-2.0"), ("cff-version", "1.2.0")):
        assert f"\n{name}: {text}\n" in f"\n{citation}"
    assert 'license = "Apache-2.0"' in project and "(CITATION.cff)" in TEXT
