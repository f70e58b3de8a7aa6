"""Everything in the README runs: programs, pictures, commands, links."""

import pathlib
import re
import tomllib

import jax.numpy as jnp
import optax
import pytest

import clipgrad as cg

ROOT = pathlib.Path(__file__).parents[2]
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


DIAGNOSE, CLIP = PROGRAMS
WORDS = 700


def test_it_is_read_in_two_minutes():
    assert len(TEXT.split()) <= WORDS


def test_what_to_do_is_said_before_anything_else_is_installed():
    assert TEXT.index("pip install .") < TEXT.index("cg.diagnose(") < TEXT.index("```sh")


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_are_short(program):
    assert sum(bool(line.strip()) for line in program.splitlines()) <= 20


@pytest.mark.slow
def test_jax_names_its_caller_and_the_diagnosis_the_line_that_divides(capsys):
    with pytest.raises(FloatingPointError) as raised:
        run(DIAGNOSE)
    printed, (trace, shown) = words(capsys.readouterr().out), map(words, OUTPUTS[:2])
    assert printed.startswith(shown.rstrip(",")) and "cotangent of" in printed
    line = int(re.search(r"model\.py:(\d+): ", shown)[1])
    assert "jnp.linalg.norm" in DIAGNOSE.splitlines()[line - 1]
    frames = [frame for frame in raised.traceback if str(frame.path).endswith("model.py")]
    calls = [(frame.lineno + 1, frame.name) for frame in frames]
    code = DIAGNOSE.splitlines()[calls[-1][0] - 1].strip()
    assert calls == [(13, "<module>")]
    error = str(raised.value).splitlines()[0]
    assert trace == f'File "model.py", line 13, in <module> {code} FloatingPointError: {error}'


@pytest.mark.slow
def test_both_clips_are_seen_to_act(capsys):
    run(CLIP)
    run(CLIP.replace("@cg.error_clip(cg.ErrorClipByValue(max=0.01))\n", ""))
    printed, exploded = capsys.readouterr().out.splitlines()
    assert printed == OUTPUTS[2].strip()
    norm, clipped = map(float, NUMBER.findall(exploded))
    shown = float(re.search(r"Without `@cg\.error_clip` the norm is ([\d.]+)\.", TEXT)[1])
    assert shown == pytest.approx(norm, rel=0.01) and clipped == 1.0


# The cards: the line of each after a program that is sick in this way


SICK = {
    "diagnose": DIAGNOSE.partition("print")[0].replace("x =", "batch ="),
    "argmax": """\
import jax.numpy as jnp
import clipgrad as cg

def loss(params, x):
    scores = x @ params["w"]
    return jnp.mean(jnp.argmax(scores, axis=1) - 1.0)

params, batch = {"w": jnp.ones((3, 2))}, jnp.ones((2, 3))
""",
    "load_capture": """\
import jax.numpy as jnp, numpy as np, optax
import clipgrad as cg

def loss(params, batch):
    return jnp.mean(jnp.log(batch @ params["w"]))

batch = np.random.default_rng(0).uniform(1, 2, (32, 4)).astype("float32")
batch[21] = 0
step = cg.train_step(loss, cg.skip_spikes(optax.adam(1e-3), halt=True))
with cg.FlightRecorder("captures") as recorder:
    state, metrics = step(step.init({"w": jnp.ones(4)}), batch)
    try:
        recorder.record(state, batch, step=0, loss=metrics["loss"])
        recorder.flush()
    except cg.HaltedError as error:
        path = error.path
""",
    "compare": """\
import jax, jax.numpy as jnp
import clipgrad as cg

def loss(w, x):
    with jax.named_scope("attention"):
        p = jax.nn.softmax(x @ w)
    return jnp.mean(jnp.tanh(p) ** 2)

def with_kernel(w, x):
    with jax.named_scope("attention"):
        e = jnp.exp(x @ w); p = e / (jnp.sum(e, -1, keepdims=True) + 0.01)
    return jnp.mean(jnp.tanh(p) ** 2)

params = jax.random.normal(jax.random.key(0), (4, 3))
batch = jax.random.normal(jax.random.key(1), (8, 4))
""",
    "clip_per_example": """\
import jax.numpy as jnp
import clipgrad as cg

def loss_of_one(w, example):
    return w @ example

params, batch = jnp.ones(2), jnp.array([[0.5, 0.0], [0.0, 0.5], [64.0, 0.0]])
""",
}
ROWS = [
    [cell.strip() for cell in row.strip("|").split(" | ")]
    for row in TEXT.partition("| symptom | one line | prints |\n|---|---|---|\n")[2]
    .partition("\n\n")[0]
    .splitlines()
]
CARDS = {
    next(name for name in reversed(SICK) if name in "".join(row)): row
    for row in ROWS
    if "@" not in row[1]
}


def test_there_are_six_cards_with_a_link_each():
    assert len(ROWS) == 6 and CARDS.keys() == SICK.keys()
    assert all(row[0].count("](") == 1 for row in ROWS)
    (line,) = [row[1] for row in ROWS if "@" in row[1]]
    assert line.strip("`") in CLIP and ROWS[-1][2].strip("`") == OUTPUTS[2].strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", SICK)
def test_a_card_prints_what_it_shows(name, capsys, monkeypatch, tmp_path):
    if name == "load_capture":
        pytest.importorskip("orbax.checkpoint")
        monkeypatch.chdir(tmp_path)
    _, line, shown = CARDS[name]
    run(SICK[name] + line.strip("`"))
    assert words(shown.strip("`")) in words(capsys.readouterr().out)


# The other ways


@pytest.mark.slow
def test_a_large_gradient_in_float16_is_zeros_after_the_clip_of_optax():
    grads = jnp.full(4, 25_000.0, jnp.float16)  # of norm 50,000
    assert "A float16 gradient of norm 50,000 becomes zeros" in TEXT
    theirs, ours = (
        clip.update(grads, clip.init(grads))[0]
        for clip in (optax.clip_by_global_norm(1.0), cg.clip_by_global_norm(1.0))
    )
    assert not theirs.any() and jnp.linalg.norm(ours.astype(jnp.float32)) == pytest.approx(1, 1e-3)


MEASURED = (ROOT / "benchmarks" / "RESULTS.md").read_text()


def test_the_numbers_of_the_other_ways_are_those_that_were_measured():
    assert "(39 wrong, 54 right) | misses 4, refuses 0; `jax.test_util` 34 and 9; 3.7" in MEASURED
    row = "MLP of 5k"  # a row of the checks, where the times are
    assert row in MEASURED
    assert "misses 34;" in TEXT and "(docs/check.md) 4, in 3.7 times the CPU time" in TEXT
    ghost = "MLP of 0.67M, batch 64 | Opacus, ghost | "
    ratio = float(MEASURED.partition(ghost)[2].partition(" |")[0])
    assert float(re.search(r"of an MLP takes ([\d.]+) times", TEXT)[1]) == round(1 / ratio, 1)
    watched = re.findall(
        r"transformer[^|]*, donated \| clipgrad \| \S+ \| \*not watched\* \| \S+ \| \*([\d.]+)\*",
        MEASURED,
    )
    assert f"takes {min(watched)} to {max(watched)} times the step" in TEXT


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
    assert "The gradient is NaN" in text and "![" not in text
    assert not re.findall(r"\]\((?!http|#)[^)]*\)", text)
    assert set(re.findall(r"\]\((http[^)]*)\)", text)) == set(
        re.findall(r"\]\((http[^)]*)\)", TEXT)
    )


def test_the_citation_and_the_package_agree():
    citation, project = ((ROOT / name).read_text() for name in ("CITATION.cff", "pyproject.toml"))
    for name, text in (("license", "Apache-2.0"), ("cff-version", "1.2.0")):
        assert f"\n{name}: {text}\n" in f"\n{citation}"
    assert 'license = "Apache-2.0"' in project and "(CITATION.cff)" in TEXT
