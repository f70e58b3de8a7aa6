"""Facts of programs that were compiled for accelerators, stored and as a table."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

Facts = dict[str, Any]
STORED = pathlib.Path(__file__).parent / "compiled.json"
KEY = ("for", "work", "who")
HEAD = ("compiled for", "work", "by", "kernels", "in loops", "temporaries, MB", "to compile, s")
RULE = ("---", "---", "---", "---:", "---:", "---:", "---:")


def load() -> list[Facts]:
    """What was stored, in the order of its table."""
    return json.loads(STORED.read_text())


def keep(facts: Facts, kinds: Sequence[str], works: Sequence[str]) -> None:
    """Stores the facts of a program in place of older ones, in the order of kinds and works."""
    rows = {tuple(row[k] for k in KEY): row for row in (load() if STORED.exists() else [])}
    rows[tuple(facts[k] for k in KEY)] = facts
    known = [row for row in rows.values() if row["for"] in kinds and row["work"] in works]
    known.sort(key=lambda row: (kinds.index(row["for"]), works.index(row["work"])))
    STORED.write_text(json.dumps(known, indent=1) + "\n")


def table(rows: Sequence[Facts]) -> str:
    """A line for each program."""
    lines = [HEAD, RULE]
    for row in rows:
        counts = str(row["kernels"]), str(row["in loops"]), f"{row['temporaries'] / 1e6:.1f}"
        lines.append((*(row[k] for k in KEY), *counts, f"{row['compile']:.1f}"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def origin(rows: Sequence[Facts]) -> str:
    """When the programs were compiled, and by which version."""
    found = dict.fromkeys(f"{row['date']}, jax {row['jax']}" for row in rows)
    return "; ".join(found)


def section(rows: Sequence[Facts]) -> str:
    """What RESULTS.md says of these programs."""
    return f"""### Each example, compiled for accelerators and not run

{origin(rows)}, on a machine with neither a GPU nor a TPU. Command: `JAX_PLATFORMS=cpu python -m
benchmarks.accelerators --per-example`, for one H200 and one TPU of v5e. *Kernels* are those of the
entry computation; *in loops* those of the bodies of loops, once each. *To compile* are CPU seconds.
Temporaries are those that the compiler reports, which on a TPU are 0.0 for some plain gradients.

{table(rows)}

"""
