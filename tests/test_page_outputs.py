"""What a page shows is what its program prints, and its figures are those stored or counted."""

import json
import pathlib
import re

import numpy as np
import pytest

from benchmarks import compiled, multiples, report

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
TIMES = re.compile(r"\(\d+ evaluations, [\d.]+ s,|\+- \S+")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("users_promotion")
@pytest.mark.parametrize("page", ["check", "names", "per_example"])
def test_the_output_on_the_page_is_what_its_first_program_prints(page, capsys):
    text = (DOCS / f"{page}.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    shown = re.search(r"```text\n(.*?)```", text, re.DOTALL)[1]
    exec(compile(program, f"{page}.md", "exec"), {})
    assert TIMES.sub("", capsys.readouterr().out) == TIMES.sub("", shown)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("users_promotion")
def test_the_sizes_of_values_on_the_page_on_names_are_those_of_its_first_program(capsys):
    text = (DOCS / "names.md").read_text()
    names, program = {}, re.compile(r"```python\n(.*?)```", re.DOTALL)
    section = text.split("## The values themselves\n")[1]
    exec(program.search(text)[1], names)
    capsys.readouterr()
    exec(program.search(section)[1], names)
    assert capsys.readouterr().out == re.search(r"```text\n(.*?)```", section, re.DOTALL)[1]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("users_promotion")
def test_the_picture_on_the_page_on_names_shows_what_its_caption_says(
    capsys, monkeypatch, tmp_path
):
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "names.md").read_text()
    program = re.search(r"```py\n(.*?)```", page, re.DOTALL)[1]
    exec(compile(program, "names.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["name", "kind", "shape", "dtype", "scans", "sites", "cotangent"]
    plain, clipped = (line.get_ydata() for line in plt.gca().lines)
    plt.close()
    assert len(plain) == len(clipped) == 50 and "50 time steps" in page
    # 6.0e5 and 5.0e5 with the parameters that two versions of flax start from.
    assert plain[0] / plain[-1] == pytest.approx(5.5e5, rel=0.1)
    assert "half a million" in page
    assert max(clipped) < 0.5 and "below 0.5" in page
    assert (tmp_path / "norm_per_step.png").read_bytes().startswith(b"\x89PNG")


STORED = {
    path.stem: json.loads(path.read_text()) for path in ROOT.glob("benchmarks/results/*.json")
}
RATIOS = [
    ({each[key] for key in ("subject", "work", "ours", "theirs")}, each["ratio"]["median"])
    for each in report.comparisons(STORED)
]


def ratios(subject, work, theirs, ours="clipgrad"):
    """The medians of all rows of a subject whose names begin like this."""
    return [
        median
        for names, median in RATIOS
        if {subject, theirs, ours} <= names and any(name.startswith(work) for name in names)
    ]


EXAMPLES = {
    "clip of each example": "MLP of 0.67M, batch 64",
    "the same in a transformer, batch of 256": "transformer of 0.8M, scan + remat, batch 256",
}
COSTS = {
    "clip by global norm, 128 MB": [
        ("norm", "128 MB in 20 leaves", peer) for peer in ("optax", "torch")
    ],
    "error clip by value, LSTM": [("error_clip", "LSTM, scan of 256", "plain")],
    "error clip by value, unrolled transformer": [
        ("names", "unrolled transformer, all modules", "plain", "clipped")
    ],
    "flight recorder": [
        ("recorder", work, "not recorded", "recorded") for work in ("six layers", "two layers")
    ],
    "check of the gradient": [
        ("checker", "MLP of 5k", peer)
        for peer in (
            "jax.test_util.check_grads",
            "torch gradcheck, fast",
            "torch gradcheck, slow",
        )
    ],
    **{
        start: [("per_example", work, peer) for peer in ("optax, all at once", "jax-privacy")]
        for start, work in EXAMPLES.items()
    },
}


@pytest.mark.parametrize("start", COSTS)
def test_the_costs_on_their_page_are_those_that_were_stored(start):
    text = (DOCS / "costs.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    shown = row.split("|")[3].split(";")
    assert [float(x) for x in shown] == [float(f"{ratios(*each)[0]:.2g}") for each in COSTS[start]]


STEPS = "trace and compile a step of 12 unrolled layers"


def test_the_readme_says_three_of_the_costs():
    text = " ".join((ROOT / "README.md").read_text().split())
    number = r"([\d.]+)"
    sentence = rf"takes {number} of optax's time, and .* LSTM and the recorder take {number} of"
    norm, unchanged = map(float, re.search(sentence, text).groups())
    stored = [
        ratios(*COSTS[start][0])[0]
        for start in ("clip by global norm, 128 MB", "error clip by value, LSTM", "flight recorder")
    ]
    assert [norm, unchanged, unchanged] == [float(f"{ratio:.2g}") for ratio in stored]


def test_what_a_step_takes_to_compile_is_on_the_page_on_costs():
    lines = (DOCS / "costs.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {STEPS}")]
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    results = text.partition("medians of three rounds, later that day on an idle machine:")[2]
    stored = [
        float(re.search(rf"\| {clip}, clipgrad \|.*\| ([\d.]+) \| [\d,]+ \|", results)[1])
        for clip in ("global norm", "block RMS", "adaptive")
    ]
    assert [float(x) for x in row.split("|")[3].split(";")] == [float(f"{x:.2g}") for x in stored]
    assert " * |" not in row  # other programs did not run


def test_the_page_has_at_most_ten_costs_and_marks_those_that_are_uncertain():
    text = (DOCS / "costs.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(COSTS) + 1 <= 10
    starred = [
        any(row.startswith(f"| {start}") for row in rows if " * |" in row) for start in COSTS
    ]
    assert starred == [_load_before(*COSTS[start][0][:2]) > 1 for start in COSTS]


def _load_before(subject, work):
    """The load of the machine before a row was measured, perhaps in an older run."""
    row = next(row for row in STORED[subject]["rows"] if row["name"].startswith(work))
    return report.row_origin(row, STORED[subject])["machine"]["load"]


def test_the_costs_on_the_page_on_examples_are_those_that_were_stored():
    table = multiples.by_method(STORED["per_example"])
    assert len(table.splitlines()) >= 8 and table in (DOCS / "per_example.md").read_text()
    assert table in (ROOT / "benchmarks" / "RESULTS.md").read_text()


def test_the_programs_for_accelerators_are_those_that_were_stored():
    stored = compiled.load()
    examples, clips = stored[compiled.EXAMPLES], stored[compiled.CLIPS]
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    assert compiled.table(examples) in text and len(examples) == 2 * 4 * 7
    assert {row["for"] for row in examples} == {"H200", "1 TPU"}
    assert compiled.clip_table(clips) in text and len(clips) == 4 * 5 * 3
    values = stored[compiled.VALUES]
    assert compiled.value_table(values) in text and len(values) == 3 * 2 * 5
    sizes = compiled.by_size(stored)
    assert compiled.size_table(sizes) in text and {row["for"] for row in sizes} == {
        "CPU",
        "H200",
        "1 TPU",
    }
    # The page quotes these, in the form of its own table.
    temporaries = {(row["for"], row["work"], row["who"]): row["temporaries"] for row in values}
    for work, who in {key[1:] for key in temporaries if key[2] != "plain"}:
        ratios = [
            temporaries[kind, work, who] / temporaries[kind, work, "plain"]
            for kind in ("CPU", "H200", "1 TPU")
        ]
        assert " | ".join(f"{ratio:.3f}" for ratio in ratios) in text, (work, who)


SPANS = {
    "clip by global norm on one CPU device": [
        ratios("leaves", "", "optax") + ratios("norm", "", "optax"),
        [
            r
            for ours in ("clipgrad", "clipgrad, stats=True")
            for r in ratios("steps", "", "optax", ours)
        ],
    ],
    "by leaf, block RMS, adaptive": [
        ratios("clips", work, "optax") for work in ("norm of each leaf", "block RMS", "adaptive")
    ],
}


@pytest.mark.parametrize("start", SPANS)
def test_the_costs_on_the_design_page_span_those_that_were_stored(start):
    (row,) = [
        line for line in (DOCS / "design.md").read_text().splitlines() if f"| {start}" in line
    ]
    shown = [float(number) for number in re.findall(r"\d\.\d+", row)]
    stored = [end(found) for found in SPANS[start] for end in (min, max)]
    assert np.allclose(shown, stored, atol=0.006)


def test_the_time_to_compile_on_the_design_page_is_what_was_stored():
    (row,) = [
        line for line in (DOCS / "design.md").read_text().splitlines() if "to compile" in line
    ]
    shown = [float(number) for number in re.findall(r"\d\.\d+", row)]
    works = ("value", "global norm", "norm of each leaf")
    stored = [ratios("compilation", f"{work}, 1,000 leaves: compile", "optax")[0] for work in works]
    assert np.allclose(shown, stored, atol=0.006)
    assert ratios("compilation", "adaptive, 1,000 leaves: compile", "optax")[0] < stored[2]
