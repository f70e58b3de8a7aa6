"""Scores clipgrad on 80 programs of somebody who had read the pages and not the code.

    python -m benchmarks.strangers [names ...]

What is expected of each program was written before any of them ran, see `strangers_programs.py`.
The list was scored once as found: benchmarks/RESULTS.md has that score.
"""

import collections
import os
import sys
import time
import traceback
import warnings

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_TRACEBACK_FILTERING"] = "off"


def outcome(program):
    """The verdict, and what the library said."""
    is_right = program["expect"] == "right"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            passed, said = program["run"]()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__} at {last.filename}:{last.lineno}: {error}"
            return "right refused" if is_right else "raw error", said
    heard = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    heard = [text for text in heard if "donated" not in text]
    if passed and not (is_right and heard):
        return "ok", str(said)
    if is_right:
        return "right refused", " | ".join([str(said), *heard])
    kinds = {"RAW error": "raw error", "NOT A SENTENCE": "no sentence"}
    return next((v for k, v in kinds.items() if str(said).startswith(k)), "wrong missed"), str(said)


def main(names):
    from benchmarks.strangers_programs import PROGRAMS

    counts = collections.defaultdict(collections.Counter)
    for name in names or PROGRAMS:
        program, start = PROGRAMS[name], time.process_time()
        verdict, said = outcome(program)
        counts[program["group"]][verdict] += 1
        text = "" if verdict == "ok" else " ".join(said.split())[:300]
        print(f"{name:28} {verdict:14} {time.process_time() - start:6.1f} s  {text}", flush=True)
    for group, found in counts.items():
        print(f"{group:8} {dict(found)}")


if __name__ == "__main__":
    main(sys.argv[1:])
