"""Which tests notice that the library is broken: breaks of each room, one at a time.

    python -m benchmarks.mutants --only clip       # one room; --tests: other files than those named
    python -m benchmarks.mutants --planted         # the faults of planted.py instead of these
    python -m benchmarks.mutants --results before  # under this name in mutants.json
    python -m benchmarks.mutants --results after --since before  # where what caught it is gone

Each mutant replaces one text of one file in a copy of the tree, in a temporary folder; the tree
itself stays as it is. Its tests run in one process: first the rows that run by default, and if none
of them fails the slow ones. The result says which file failed first, or that none did.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.planted import PLANTED

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = pathlib.Path(__file__).with_suffix(".json")
_COPIED = ("clipgrad", "tests", "benchmarks", "docs", "pyproject.toml", "README.md")
_SELECTIONS = {"default": "not slow", "slow": "slow"}
_NOTHING_SELECTED = 5


class Mutant(NamedTuple):
    """A break of the library, and the tests that should notice it: ``nan`` for ``test_nan.py``.

    ``clips/`` is for all of a folder.
    """

    room: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]


def _of(room: str, tests: str, *rows: tuple[str, ...]) -> list[Mutant]:
    """The mutants of a room; a row may name tests of its own."""
    return [Mutant(room, *row[:3], tuple((row[3] if row[3:] else tests).split())) for row in rows]


# fmt: off
MUTANTS = [
    *_of("clip", "laws rules",
        ("_clip/rules/measuring_rule.py",
         "return if_else(norm.divisor <= limit, leaf, shrunk)",
         "return shrunk"),
        ("_clip/rules/measuring_rule.py",
         "scaled_to(wide, norm.divisor, limit)",
         "scaled_to(wide, norm.root, limit)"),
        ("_clip/skip_spikes.py",
         "kept = _selected(skip | halted, state.inner_state",
         "kept = _selected(nonfinite | halted, state.inner_state",
         "skip_spikes"),
        ("_clip/skip_spikes.py",
         "is_bad = unsound | (number > limit)",
         "is_bad = unsound & (number > limit)",
         "skip_spikes"),
        ("_clip/nonfinite.py",
         "jnp.where(jnp.isfinite(g), g,",
         "jnp.where(~jnp.isnan(g), g,",
         "gradient_clip groups"),
        ("_clip/stats.py",
         "(before != after) & ~(jnp.isnan(before) & jnp.isnan(after))",
         "before != after",
         "stats"),
        ("_clip/thresholds/ema.py",
         "jnp.where(enters, new, state.mean)",
         "new",
         "adaptive_thresholds"),
        ("_clip/thresholds/window.py",
         "return jnp.isfinite(norms) & (norms >=",
         "return (norms >=",
         "adaptive_thresholds"),
        ("_arrays/ranges.py",
         "is_small = lax.lt(plain, number(2.0 ** (2 * rule.low), plain))",
         "is_small = lax.lt(plain, number(0, plain))",
         "norms stats"),
        ("_arrays/norms.py", "size ** (kind.ord - 1) / n", "size**kind.ord / n", "norms laws"),
    ),
    *_of("error clip", "by_name modules",
        ("_error_clip/cotangent.py",
         'params = arrays if getattr(rule, "needs_params", False) else None',
         "params = None",
         "cotangent laws"),
        ("_error_clip/by_name.py",
         "{name: clip for name, clip in self.clips.items() if name in names}",
         "dict(self.clips)"),
        ("_error_clip/watch.py",
         "return [i % count for i in positions]",
         "return positions",
         "watch"),
        ("_error_clip/error_clip.py",
         "_ALL in rules and _has_receiver(bound, wrapped)",
         "False",
         "error_clip"),
        ("_training/accumulate.py",
         "dtype=at_least_float32(jnp.result_type(like))",
         "dtype=jnp.result_type(like)",
         "train_step"),
    ),
    *_of("names", "names modules",
        ("_names/modules.py",
         "return len(common_start([around, *places]))",
         "return len(around)"),
        ("_names/modules.py",
         "if is_move(equation) and moved.issuperset(operands):",
         "if is_move(equation):"),
        ("_frameworks/attribute_names.py",
         "if around == path:",
         "if around is None:",
         "attribute_names attribute_names_edges"),
        ("_programs/evaluate.py",
         "has_way = kind in hook.in_place or kind is not CUSTOM_RULES", "has_way = True", "jaxpr"),
    ),
    *_of("recorder", "recorder recorder_steps",
        ("_recorder/step_record.py",
         "or taken < count or bad < flag.count - count:",
         "or taken < count:"),
        ("_recorder/step_record.py",
         "is_one = self.numbers.is_stacked or taken == 1",
         "is_one = True"),
        ("_recorder/flag.py",
         "largest(x).astype(jnp.float32)",
         "jnp.min(x).astype(jnp.float32)"),
        ("_recorder/flag.py", "if len(flags) != 1:", "if not flags:"),
    ),
    *_of("per example", "per_example per_example_rows",
        ("_per_example/scaling.py",
         "each = jnp.where(ok[:, None], each, 0)",
         "pass"),
        ("_per_example/norms_of_rows.py",
         "return (4 + sum(map(math.sqrt, _lengths(a, b)))) * float(jnp.finfo(dtype).eps) / 2",
         "return 0.0",
         "per_example_precision"),
        ("_per_example/norms_of_arrays.py",
         "scaled = times_power(x, -exponent[(..., *[None] * len(axes))])",
         "scaled, exponent = x, exponent * 0"),
        ("_per_example/norms_of_rows.py",
         "return all(a.key == b.key or a.view.is_apart(b.view) for a, b in pairs)",
         "return True"),
        ("_per_example/norms_of_rows.py",
         "return jnp.sqrt(total), (total >= lost) & (total < jnp.inf)",
         "return jnp.sqrt(total), total < jnp.inf",
         "per_example_ranges"),
        ("_per_example/clipped_sums.py",
         "gradients = gradients.left_out(~padding)",
         "pass",
         "per_example_padding"),
        ("_per_example/uses.py",
         "return Rows(x, ct) if axes.x_is_left else Rows(ct, x)",
         "return Rows(x, ct)",
         "per_example_spellings"),
        ("_per_example/walk.py",
         "if any(map(is_reference, equation.invars)):",
         "if False:",
         "per_example_spellings"),
    ),
    *_of("check", "check_tables",
        ("_check/tolerances.py", "Precision(5e-4,", "Precision(5e-2,", "check_tolerances"),
        ("_check/verdict.py",
         "central = (differences.ahead + differences.behind) / 2",
         "central = differences.ahead"),
        ("_check/verdict.py",
         "> KINK_GAP * np.fmax(np.abs(ahead), np.abs(behind))",
         "> 1e9 * np.fmax(np.abs(ahead), np.abs(behind))"),
        ("_check/points.py",
         "permutation(rows) < (rows + 1) // 2",
         "permutation(rows) < rows"),
    ),
    *_of("diagnose", "diagnose diagnose_zoo",
        ("_diagnose/trends.py",
         "self.factor >= _GROWS and self.total >= FAR_IN_ALL",
         "self.total >= FAR_IN_ALL"),
        ("_diagnose/guilty.py",
         "chosen = [(a, x) for a, x in same if np.any((levels(x, np.ndim(x)) >= wanted) & is_bad)]",
         "chosen = same"),
        ("_diagnose/guilty.py",
         "root = min(roots, key=lambda r: r.entry.order)",
         "root = max(roots, key=lambda r: r.entry.order)",
         "diagnose_zoo diagnose_programs"),
        ("_diagnose/examples.py",
         "np.isfinite(norms) & (norms > 0)",
         "np.isfinite(norms)",
         "diagnose_examples"),
    ),
    *_of("compare", "compare compare_differences",
        ("_compare/judge.py",
         "unequal = ~odd & (a != b)",
         "unequal = ~odd & (a > b)"),
        ("_compare/judge.py",
         "x / math.sqrt(max(1, count))",
         "x / max(1, count)",
         "compare_differences compare_precision"),
        ("_compare/sketches.py",
         "signed = flat * (1 - 2 * (hashes",
         "signed = flat * (1 - 0 * (hashes",
         "compare_sketches"),
        ("_compare/findings.py",
         'findings.append(_cotangent_finding(sides, bad["cotangent"][-1]))',
         'findings.append(_cotangent_finding(sides, bad["cotangent"][0]))'),
    ),
]
# fmt: on
FAULTS = [
    Mutant(folders, *fault, tuple(f"{name}/" for name in folders.split()))
    for folders, faults in PLANTED.items()
    for fault in faults
]


def mutated(mutant: Mutant, folder: pathlib.Path) -> str:
    """The text of a file with the mutant in it."""
    text = (folder / "clipgrad" / mutant.file).read_text()
    if (found := text.count(mutant.text)) != 1:
        raise ValueError(f"{mutant.file}: got {mutant.text!r} {found} times, expected once")
    return text.replace(mutant.text, mutant.instead)


def _copy_of_the_tree(folder: pathlib.Path) -> None:
    for name in _COPIED:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name)
    # Programs that the tests have compiled, and will compile.
    programs = pathlib.Path(".pytest_cache", "d", "jax")
    (ROOT / programs).mkdir(parents=True, exist_ok=True)
    (folder / programs.parent).mkdir(parents=True)
    (folder / programs).symlink_to(ROOT / programs)


def _first_failure(files: Sequence[str], folder: pathlib.Path) -> tuple[str | None, str]:
    """The first test that fails, and in which selection of rows."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    for selection, expression in _SELECTIONS.items():
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", expression, *files]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, _NOTHING_SELECTED):
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            return failed[1] if failed else done.stdout[-300:], selection
    return None, ""


def run(mutants: Sequence[Mutant], tests: Sequence[str] = ()) -> list[dict]:
    """Which test of the mutant's files, or of these, fails first; ``None``: none does."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        _copy_of_the_tree(folder)
        for mutant in mutants:
            path = folder / "clipgrad" / mutant.file
            whole, start = path.read_text(), time.monotonic()
            path.write_text(mutated(mutant, folder))
            caught, selection = _first_failure(tests or _files(mutant), folder)
            path.write_text(whole)
            seconds = round(time.monotonic() - start)
            which = {"file": mutant.file, "text": mutant.text}
            rows.append({**which, "caught": caught, "by": selection, "s": seconds})
            print(f"{seconds:4} s  {mutant.file:28} {caught or 'missed'}", flush=True)
    return rows


def files_of(mutant: Mutant) -> list[pathlib.Path]:
    """The files of tests that should notice it, or the folders; a file is in any folder."""
    patterns = (n if n.endswith("/") else f"*/test_{n}.py" for n in mutant.tests)
    return [path for pattern in patterns for path in (ROOT / "tests").glob(pattern)]


def _files(mutant: Mutant) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in files_of(mutant)]


def _stored() -> dict[str, list[dict]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _store(results: Mapping[str, Sequence[dict]]) -> None:
    """Writes results, one row a line."""
    lists = {name: ",\n".join(map(json.dumps, rows)) for name, rows in results.items()}
    named = [f"{json.dumps(name)}: [\n{rows}\n]" for name, rows in lists.items()]
    RESULTS.write_text("{" + ",\n".join(named) + "}\n")


def _is_there(node: str) -> bool:
    """Whether the tests still have what caught a mutant."""
    file, _, test = node.partition("[")[0].partition("::")
    return (ROOT / file).exists() and f"def {test}(" in (ROOT / file).read_text()


def main() -> None:
    """Runs the mutants of the rooms, and writes what caught them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=None, metavar="ROOM")
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--tests", nargs="*", default=(), metavar="FILE")
    parser.add_argument("--results", default=None, metavar="NAME")
    parser.add_argument("--since", default=None, metavar="NAME")
    given = parser.parse_args()
    name = given.results or ("planted" if given.planted else "now")
    known = FAULTS if given.planted else MUTANTS
    chosen = [m for m in known if given.only is None or m.room in given.only]
    stored = _stored()
    before = stored.get(name, [])
    if given.since:
        kept = [row for row in stored[given.since] if row["caught"] and _is_there(row["caught"])]
        before = kept + before
        caught = {(row["file"], row["text"]) for row in kept}
        chosen = [m for m in chosen if (m.file, m.text) not in caught]
    rows = run(chosen, given.tests)
    found = {(row["file"], row["text"]): row for row in before + rows}
    stored[name] = list(found.values())
    _store(stored)
    caught = sum(row["caught"] is not None for row in found.values())
    print(f"{caught} of {len(found)} mutants caught: {RESULTS}")


if __name__ == "__main__":
    main()
