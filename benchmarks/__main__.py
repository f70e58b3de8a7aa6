"""Times this library beside its peers, and writes what it found.

    python -m benchmarks [--only SUBJECT ...] [--rows TEXT ...] [--quick] [--long] [--out FOLDER]

Each row first proves that its programs give the same numbers; then they take turns. The results
are a JSON file for each subject, a table in Markdown and a picture. By default they go to
benchmarks/results and between the markers of benchmarks/RESULTS.md, where results of subjects
that are not run again stay, and with ``--rows`` those of other rows. ``--quick`` does a small part
of the work and writes nothing, unless ``--out`` says where. ``--cpu`` measures CPU seconds of one
thread, for a machine on which other programs run. What is not installed is named as not
run: ``pip install ".[benchmarks]"``.
"""

import argparse
import json
import os
import pathlib
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import machine, plot, report, timing
from benchmarks.rows import Row, Scale, left_out, measure
from benchmarks.subjects import SUBJECTS

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results"
QUICK = 1 / 16


def run_row(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Measures a row and says what came out."""
    if row.long and not options.long:
        print(f"  {row.name}: not run without --long", flush=True)
        return left_out(row)
    started, worked = time.perf_counter(), time.process_time()
    result = measure(row._replace(budget=row.budget / 20) if options.quick else row)
    taken, worked = time.perf_counter() - started, time.process_time() - worked
    print(f"  {row.name} ({taken:.1f} s, {worked:.1f} s of CPU)", flush=True)
    for pair in result["ratios"]:
        ratios = ", ".join(
            f"{phase} {r['median']:.2f} [{r['low']:.2f}, {r['high']:.2f}]"
            for phase, r in pair["ratio"].items()
        )
        print(f"    {pair['ours']} / {pair['theirs']}: {ratios}", flush=True)
    for side in result["absent"]:
        print(f"    {side['name']}: not run, {side['why']}", flush=True)
    return result


def run_subject(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All rows of a subject."""
    subject = SUBJECTS[name]
    print(subject.TITLE, flush=True)
    scale = Scale(QUICK if options.quick else 1)
    rows = [row for row in subject.rows(scale) if is_chosen(row.name, options)]
    found = [run_row(row, options) for row in rows]
    jax.clear_caches()
    return {"title": subject.TITLE, "rows": found}


def is_chosen(name: str, options: argparse.Namespace) -> bool:
    """Whether a row is run: without ``--rows`` each one is."""
    return not options.rows or any(text in name for text in options.rows)


def row_names(subjects: Sequence[str]) -> list[str]:
    """The names of all rows of these subjects."""
    return [row.name for subject in subjects for row in SUBJECTS[subject].rows(Scale(1))]


def beside_older(
    result: dict[str, Any], older: dict[str, Any] | None, names: Sequence[str]
) -> dict[str, Any]:
    """A result with the rows of an older one, in the order of these names.

    Rows that were not measured again say where they are from.
    """
    if older is None:
        return result
    origin = {"origin": report.own_origin(older)}
    rows = {row["name"]: origin | row for row in older["rows"]}
    rows |= {row["name"]: row for row in result["rows"]}
    return result | {"rows": [rows[name] for name in names if name in rows]}


def load(folder: pathlib.Path) -> dict[str, Any]:
    """The results that a folder has, in the order of the subjects."""
    files = {name: folder / f"{name}.json" for name in SUBJECTS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def write(folder: pathlib.Path) -> str | None:
    """The table and the picture, from the JSON files of a folder; says why there is no picture."""
    results = load(folder)
    why = plot.draw(results, folder / "leaves.png")
    own = folder.resolve() == RESULTS.resolve()
    picture = None if why else f"{'results/' if own else ''}leaves.png"
    target = HERE / "RESULTS.md" if own else folder / "RESULTS.md"
    report.write_section(target, report.section(results, picture))
    return why


def parsed(arguments: list[str]) -> argparse.Namespace:
    """What the command line says."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks", description=__doc__, formatter_class=style)
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--rows", nargs="+", help="only rows with one of these in their name")
    parser.add_argument("--quick", action="store_true", help="small sizes, in one to two minutes")
    parser.add_argument(
        "--cpu", action="store_true", help="CPU seconds of a thread, for a busy machine"
    )
    parser.add_argument("--long", action="store_true", help="rows that take minutes, too")
    parser.add_argument("--out", type=pathlib.Path, help="folder for JSON, table and picture")
    options = parser.parse_args(arguments)
    if options.rows and not any(is_chosen(row, options) for row in row_names(options.only)):
        parser.error(f"--rows: no row of {', '.join(options.only)} has {options.rows} in its name")
    return options


def use_cpu_seconds() -> None:
    """Times CPU seconds, of one thread: others wait actively, and that would count."""
    timing.Clock.read = time.process_time
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    )
    os.environ["OMP_NUM_THREADS"] = "1"


def main(arguments: list[str]) -> None:
    """Runs the subjects; each is written as soon as it is known."""
    options = parsed(arguments)
    if options.cpu:
        use_cpu_seconds()
    origin = {
        "command": shlex.join(["python", "-m", "benchmarks", *arguments]),
        "machine": machine.facts(),
    }
    folder = options.out or (None if options.quick else RESULTS)
    started, why = time.perf_counter(), None
    for name in options.only:
        result = origin | run_subject(name, options)
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            if options.rows:
                result = beside_older(result, load(folder).get(name), row_names([name]))
            text = json.dumps(result, indent=1)
            (folder / f"{name}.json").write_text(text + "\n")
            why = write(folder)
    if why:
        print(f"no picture: {why}")
    print(f"{time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
