"""Which tests notice that the library is broken: 60 breaks, one at a time.

    python -m benchmarks.mutants --only rules      # one room; --tests: other files than those named
    python -m benchmarks.mutants --results before  # under this name in mutants.json
    python -m benchmarks.mutants --results after --since before  # where what caught it is gone

Each mutant replaces one text of one file in a copy of the tree, in a temporary folder; the tree
itself stays as it is. Its tests run in one process: first the rows that run by default, and if none
of them fails those of CI. The result says which file failed first, or that none did.
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

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = pathlib.Path(__file__).with_suffix(".json")
_COPIED = ("clipgrad", "tests", "benchmarks", "docs", "pyproject.toml", "README.md")
_SELECTIONS = {"default": "not exhaustive", "ci": "exhaustive and not product"}
_NOTHING_SELECTED = 5


class Mutant(NamedTuple):
    """A break of the library, and the tests that should notice it, without ``test_``."""

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
    *_of("rules", "laws rules norms",
        ("_rules/norm.py", "return if_else(inverse < 0, leaf, shrunk)", "return shrunk"),
        ("_rules/global_norm.py",
         "shrunk = times(over(wide, norm.divisor), limit)",
         "shrunk = over(times(wide, limit), norm.root)"),
        ("_rules/auto_norm.py",
         "norm.divisor + gamma * norm.scale",
         "norm.divisor + gamma",
         "rules laws norms"),
        ("_rules/units.py",
         "tuple(range(leaf.ndim - 1))",
         "tuple(range(1, leaf.ndim))",
         "units laws"),
        ("_rules/adaptive.py",
         "limit = clipping * jnp.maximum(weights, least)",
         "limit = clipping * weights",
         "units"),
        ("_rules/value.py",
         "upper = _bound(np.maximum(np.asarray(maximum, np.float64), 0), dtype)",
         "upper = _bound(np.asarray(maximum, np.float64) * 0.999, dtype)"),
        ("_rules/drop_tokens.py",
         "drops = (size >= flat[place])",
         "drops = (size > flat[place])",
         "drop_tokens"),
        ("_numerics/ranges.py",
         "is_small = (plain < 2.0 ** (2 * rule.low)) & (up > 0)",
         "is_small = (plain < 0) & (up > 0)",
         "norms stats"),
        ("_numerics/norms.py", "size ** (kind.ord - 1) / n", "size**kind.ord / n", "norms laws"),
        ("_rules/thresholds.py",
         "return jnp.maximum(value.astype(dtype), 0)",
         "return value.astype(dtype)",
         "laws rules"),
    ),
    *_of("thresholds", "adaptive_thresholds",
        ("_thresholds/base.py",
         "jnp.asarray(percentile / 100, ordered.dtype)",
         "jnp.asarray(percentile / 101, ordered.dtype)"),
        ("_thresholds/base.py",
         "clipped = jnp.minimum(norms, thresholds) if",
         "clipped = norms if"),
        ("_thresholds/ema.py", "(1 - self.decay) * entry", "self.decay * entry"),
        ("_thresholds/z_score.py", "return mean, jnp.hypot(old, new)", "return mean, old + new"),
        ("_thresholds/history.py",
         "mean + self.sigma * jnp.maximum",
         "mean - self.sigma * jnp.maximum",
         "adaptive_thresholds skip_spikes"),
    ),
    *_of("gradient clip", "gradient_clip",
        ("_gradient_clip/clip_grads.py",
         "measured = apply_policy(self.nonfinite, chosen)",
         "measured = chosen",
         "groups"),
        ("_gradient_clip/clip_state.py",
         "increment_if(stats.clipped, state.clipped_count)",
         "increment_if(stats.nonfinite > 0, state.clipped_count)"),
        ("_gradient_clip/nonfinite.py",
         "jnp.where(jnp.isfinite(g), g,",
         "jnp.where(~jnp.isnan(g), g,"),
        ("_gradient_clip/skip_spikes.py",
         "again = spike & (state.consecutive >= most)",
         "again = spike & (state.consecutive > most)",
         "skip_spikes"),
        ("_gradient_clip/skip_spikes.py",
         "jnp.where(skip, o, n), state.inner_state",
         "jnp.where(bad, o, n), state.inner_state",
         "skip_spikes"),
        ("_gradient_clip/u_clip.py",
         "jnp.where(jnp.isfinite(rest), rest, before)",
         "jnp.where(jnp.isfinite(rest), rest, 0)",
         "u_clip"),
        ("_gradient_clip/qk_clip.py", "(self.key, 1 - balance)", "(self.key, balance)", "qk_clip"),
        ("_training/train_step.py",
         'skipped = metrics.get("skipped", False)',
         "skipped = False",
         "train_step mutable_state parameters"),
        ("_training/accumulate.py", "(t / parts).astype(s.dtype)", "t / parts", "train_step"),
        ("_training/by_module.py",
         "for depth in range(len(segments)):",
         "for depth in range(1, len(segments)):",
         "scalars"),
    ),
    *_of("error clip", "by_name modules",
        ("_error_clip/cotangent.py",
         "(thresholds, arrays if backward.needs_params else None)",
         "(thresholds, jax.tree.map(jnp.zeros_like, arrays) if backward.needs_params else None)",
         "cotangent laws"),
        ("_error_clip/adapting.py", "/ parts**0.5", "/ parts", "adaptive_error_clip"),
        ("_error_clip/by_name.py",
         "rules=inner.rules | rules)",
         "rules=inner.rules)",
         "adaptive_error_clip"),
        ("_error_clip/everywhere.py",
         "if i >= first and v in self.ends",
         "if v in self.ends",
         "everywhere"),
        ("_error_clip/watch.py",
         "if i == first % len(args) else arg",
         "if i == first else arg",
         "watch"),
        ("_names/modules.py",
         "own.at(used)",
         "own.at([()])",
         "modules"),
        ("_names/attribute_names.py",
         "if around == path:",
         "if around is None:",
         "attribute_names attribute_names_edges"),
        ("_names/wanted.py", "if site.used} or found", "} or found", "names"),
        ("_jaxpr/evaluate.py", "        return hook.flatten\n", "        return True\n", "jaxpr"),
        ("_stats.py",
         "(before != after) & ~(jnp.isnan(before) & jnp.isnan(after))",
         "before != after",
         "stats"),
    ),
    *_of("recorder", "recorder",
        ("_recorder/record.py", "flag.count == flag.halted_at + 1 and", "True and"),
        ("_recorder/recorder.py",
         "records[first].flag.microbatch == 1 if",
         "True if",
         "recorder recorder_trees"),
        ("_recorder/storage.py",
         "if process.isdecimal() and not _is_running(int(process)):",
         "if process.isdecimal():",
         "recorder recorder_trees"),
        ("_recorder/storage.py",
         "leaf.view(np.uint8) if _is_odd(leaf.dtype) else leaf",
         "leaf",
         "recorder recorder_trees"),
        ("_recorder/flag.py",
         "largest(x).astype(jnp.float32)",
         "jnp.min(x).astype(jnp.float32)",
         "recorder recorder_trees"),
    ),
    *_of("per example", "per_example",
        ("_per_example/clip.py",
         "lambda t: t / float(size), total",
         "lambda t: t / float(parts), total"),
        ("_per_example/squares.py",
         "2 * (present - largest)",
         "present - largest",
         "per_example per_example_precision"),
        ("_per_example/scales.py", "norm(max(size, 1.0) if mean else 1.0)", "norm(1.0)"),
        ("_per_example/sums.py",
         "factors = tuple(change(i, factor)",
         "factors = tuple(change(-1, factor)",
         "per_example per_example_products"),
        ("_per_example/batches.py",
         "jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])",
         "x.reshape(-1, *x.shape[2:])"),
    ),
    *_of("check", "check_cases",
        ("_check/differences.py",
         "(ahead - behind) / (2 * step) @ covectors.T",
         "(ahead - self.base) / step @ covectors.T",
         "check_zoo check_numbers"),
        ("_check/behavior.py",
         "anew = differentiated(check.subject, check.subject.inputs)(first)",
         "anew = expected",
         "check_behavior"),
        ("_check/points.py",
         "permutation(rows) < (rows + 1) // 2",
         "permutation(rows) < rows"),
        ("_check/tolerances.py", '"float32": 5e-4,', '"float32": 5e-2,', "check_tolerances"),
        ("_check/verdicts.py",
         "(gap - 3 * noise > KINK_GAP * size)",
         "(gap - 3 * noise > 1e9 * size)",
         "check_verdicts check_search"),
    ),
    *_of("diagnose", "diagnose",
        ("_diagnose/trends.py",
         "self.factor >= _GROWS and self.total >= FAR_IN_ALL",
         "self.total >= FAR_IN_ALL"),
        ("_diagnose/underflow.py",
         "lost = own.zeros - np.maximum(wide.zeros, scaled.zeros)",
         "lost = own.zeros - scaled.zeros"),
        ("_diagnose/causes.py",
         "if source.argument in zero else",
         "if source.argument not in zero else",
         "zeros"),
        ("_diagnose/cotangents.py", "_mean(jnp.abs(jnp.sign(x)))", "_mean(jnp.sign(x))"),
        ("_diagnose/examples.py",
         "np.shape(x)[0] == size",
         "np.shape(x)[0] >= size",
         "diagnose_examples"),
    ),
    *_of("compare", "compare compare_differences",
        ("_compare/differences.py",
         "unequal = ~odd & (own != other)",
         "unequal = ~odd & (own > other)"),
        ("_compare/differences.py",
         "x / math.sqrt(max(1, count))",
         "x / max(1, count)",
         "compare_differences compare_precision"),
        ("_compare/sketches.py",
         "signed = flat * (1 - 2 * (hashes",
         "signed = flat * (1 - 0 * (hashes",
         "compare_sketches"),
        ("_compare/ratios.py",
         "factor = max(ratio, 1 / ratio)",
         "factor = ratio",
         "compare compare_differences"),
        ("_compare/matching.py",
         "sorted(found, key=lambda i: i.time) for g",
         "list(found) for g",
         "compare"),
    ),
]
# fmt: on


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


def _files(mutant: Mutant) -> list[str]:
    return [f"tests/test_{name}.py" for name in mutant.tests]


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
    parser.add_argument("--tests", nargs="*", default=(), metavar="FILE")
    parser.add_argument("--results", default="now", metavar="NAME")
    parser.add_argument("--since", default=None, metavar="NAME")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if given.only is None or m.room in given.only]
    stored = _stored()
    before = stored.get(given.results, [])
    if given.since:
        kept = [row for row in stored[given.since] if row["caught"] and _is_there(row["caught"])]
        before = kept + before
        known = {(row["file"], row["text"]) for row in kept}
        chosen = [m for m in chosen if (m.file, m.text) not in known]
    rows = run(chosen, given.tests)
    found = {(row["file"], row["text"]): row for row in before + rows}
    stored[given.results] = list(found.values())
    _store(stored)
    caught = sum(row["caught"] is not None for row in found.values())
    print(f"{caught} of {len(found)} mutants caught: {RESULTS}")


if __name__ == "__main__":
    main()
