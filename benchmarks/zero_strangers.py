"""Scores `clipgrad.diagnose` on 70 gradients of somebody who had read the pages and not the code.

    python -m benchmarks.zero_strangers [names ...]

40 programs have a cut by a mistake: it counts as found if a "zero" finding of the leaf names the
marked line and an acceptable cause, or a note, where docs/zero.md says that it is one. 30 programs
are healthy: no "zero" finding. What is expected was written before any of them was diagnosed, see
`zero_strangers_programs.py`. The first score, as found, is kept in
results/zero_strangers.txt: a run of all programs writes this file only if it is not there.
"""

import os
import re
import sys
import time
import traceback
import warnings
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
MARKS = {"cut": 36, "healthy": 28}
RESULT = Path(__file__).parent / "results" / "zero_strangers.txt"


def diagnosed(make):
    """The diagnosis of a program, or the text of the error that it ended in."""
    import clipgrad as cg

    loss, args, *options = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return cg.diagnose(loss, args, **(options[0] if options else {})), None
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            name = Path(last.filename).name
            return None, f"{type(error).__name__} at {name}:{last.lineno}: {error}"


def names_of(path):
    return Path(path).name if path else ""


def cut_is_found(program, found):
    """Whether a finding, or a note, names leaf, line and cause; and a line of what was found."""
    from benchmarks import zero_strangers_programs

    here = names_of(zero_strangers_programs.__file__)
    right, said = False, []
    for finding in found.findings:
        leaf, place = str(finding.leaf), names_of(finding.file)
        said.append(f"{place}:{finding.line} {finding.kind}, {finding.cause}")
        if finding.kind == "zero" and program.place != "notes":
            right |= (
                any(part in leaf for part in program.leaves)
                and (place == here and finding.line in program.lines)
                and finding.cause in program.causes
            )
    for note in found.notes:
        said.append(f"note: {note}")
        if program.place != "findings":
            right |= (
                any(part in note for part in program.leaves)
                and any(f"{here}:{line}:" in note for line in program.lines)
                and any(cause in note for cause in program.causes)
            )
    return right, said


def scored(names):
    """Prints a row for each program, and returns the rows and the score."""
    from benchmarks.zero_strangers_programs import CUTS, HEALTHY

    rows, score = [], {"cut": [], "healthy": []}
    for name in names or [*CUTS, *HEALTHY]:
        group, start = "cut" if name in CUTS else "healthy", time.process_time()
        found, error = diagnosed(CUTS[name].make if name in CUTS else HEALTHY[name])
        if error is not None:
            right, said, expected = False, [error], "no error"
        elif name in CUTS:
            program = CUTS[name]
            right, said = cut_is_found(program, found)
            lines = "/".join(map(str, program.lines))
            expected = f"{program.place} {lines} {' or '.join(sorted(program.causes))}"
        else:
            zeros = [finding for finding in found.findings if finding.kind == "zero"]
            others = [finding for finding in found.findings if finding.kind != "zero"]
            right, expected = not zeros, "silent or notes"
            said = [finding.message for finding in zeros]
            said += [f"({finding.kind}) {finding.message}" for finding in others]
            said += [f"note: {note}" for note in found.notes]
        if not right and error is None and name in CUTS:
            said += [f"[{finding.leaf}] {finding.message}" for finding in found.findings]
        score[group].append(right)
        text = " | ".join(" ".join(s.split()) for s in said)
        text = re.sub(r"(?<!\w)/\S*/(\w+\.py)", r"\1", text)
        verdict, seconds = "right" if right else "WRONG", time.process_time() - start
        limit = 300 if right else 2000
        row = f"{name:36} {verdict} {seconds:5.1f} s  {expected:44}  {text[:limit] or 'silent'}"
        print(row, flush=True)
        rows.append(row)
    return rows, score


def main(names):
    rows, score = scored(names)
    for group, rights in score.items():
        row = f"{group:8} {sum(rights)} of {len(rights)} right (mark of all: {MARKS[group]})"
        print(row)
        rows.append(row)
    if not names and not RESULT.exists():
        RESULT.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
