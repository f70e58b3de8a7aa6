"""Facts of programs that were compiled for accelerators, stored and as a table."""

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

Facts = dict[str, Any]
STORED = pathlib.Path(__file__).parent / "compiled.json"
KEY = ("for", "work", "who")
EXAMPLES, CLIPS, VALUES = "each example", "clips", "values"
SIZES, UNROLLED = "values by size", "unrolled"
HEAD = ("compiled for", "work", "by", "kernels", "in loops", "temporaries, MB", "to compile, s")
RULE = ("---", "---", "---", "---:", "---:", "---:", "---:")
VALUE_HEAD = (*HEAD[:-2], "temporaries, MB", "beside plain", HEAD[-1])
VALUE_RULE = (*RULE, "---:")
CLIP_HEAD = ("compiled for", "clip", "kernels", "collectives", "temporaries, MB", "to compile, s")
CLIP_RULE = ("---", "---", "---:", "---:", "---:", "---:")
SIZE_HEAD = (
    "compiled for",
    "size",
    "plain, MB",
    "rms and max used",
    "more, MB",
    "all used",
    "more, MB",
)
SIZE_RULE = ("---", "---", "---:", "---:", "---:", "---:", "---:")
# A callback, a feed, a message to the host, or an array in the host's memory, the fifth space.
HOST = re.compile(
    r"callback|infeed|outfeed|is_host_transfer=true| (?:send|recv)[(]|S\(5\)|MoveToHost"
)


def host_transfers(text: str) -> list[str]:
    """The lines of a compiled program that talk to the host."""
    lines = re.sub(r"metadata={[^}]*}", "", text).splitlines()
    return [line for line in lines if HOST.search(line)]


def load() -> dict[str, list[Facts]]:
    """What was stored of each example and of clips, in the order of their tables."""
    return json.loads(STORED.read_text())


def keep(part: str, facts: Facts, kinds: Sequence[str], works: Sequence[str]) -> None:
    """Stores the facts of a program in place of older ones, in the order of kinds and works."""
    stored = load()
    rows = {tuple(row[k] for k in KEY): row for row in stored.get(part, [])}
    rows[tuple(facts[k] for k in KEY)] = facts
    known = [row for row in rows.values() if row["for"] in kinds and row["work"] in works]
    known.sort(key=lambda row: (kinds.index(row["for"]), works.index(row["work"])))
    STORED.write_text(json.dumps(stored | {part: known}, indent=1) + "\n")


def _lines(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Facts) -> list[str]:
    return [str(row["kernels"]), f"{row['temporaries'] / 1e6:.1f}", f"{row['compile']:.1f}"]


def table(rows: Sequence[Facts]) -> str:
    """A line for each program."""
    lines = [HEAD, RULE]
    for row in rows:
        kernels, temporaries, seconds = _cells(row)
        counts = kernels, str(row["in loops"]), temporaries, seconds
        lines.append((*(row[k] for k in KEY), *counts))
    return _lines(lines)


def value_table(rows: Sequence[Facts]) -> str:
    """A line for each program, with its temporaries beside those of the plain gradient."""
    lines, plain = [VALUE_HEAD, VALUE_RULE], {}
    for row in rows:
        if row["who"] == "plain":
            plain[row["for"], row["work"]] = row["temporaries"]
    for row in rows:
        kernels, temporaries, seconds = _cells(row)
        ratio = f"{row['temporaries'] / plain[row['for'], row['work']]:.3f}"
        counts = kernels, str(row["in loops"]), temporaries, ratio, seconds
        lines.append((*(row[k] for k in KEY), *counts))
    return _lines(lines)


def by_size(stored: dict[str, list[Facts]]) -> list[Facts]:
    """The programs of the unrolled models of each size; one size is in the table above, too."""
    first = [row | {"work": "4 layers, width 256"} for row in stored[VALUES]]
    first = [row for row, own in zip(first, stored[VALUES], strict=True) if own["work"] == UNROLLED]
    rows = [*first, *stored[SIZES]]
    return [
        row for kind in dict.fromkeys(r["for"] for r in rows) for row in rows if row["for"] == kind
    ]


def size_table(rows: Sequence[Facts]) -> str:
    """A line for each model, with its temporaries beside those of the plain gradient."""
    lines, models = [SIZE_HEAD, SIZE_RULE], dict[tuple[str, str], dict[str, int]]()
    for row in rows:
        models.setdefault((row["for"], row["work"]), {})[row["who"]] = row["temporaries"]
    for model, found in models.items():
        plain = found["plain"]
        more = [found[who] - plain for who in ("rms and max used", "all used")]
        cells = [(f"{1 + extra / plain:.3f}", f"{extra / 1e6:.1f}") for extra in more]
        lines.append((*model, f"{plain / 1e6:.1f}", *cells[0], *cells[1]))
    return _lines(lines)


def clip_table(rows: Sequence[Facts]) -> str:
    """A line for each clip, whose cells have all that compute it."""
    lines, groups = [CLIP_HEAD, CLIP_RULE], dict[tuple[str, str], list[Facts]]()
    for row in rows:
        groups.setdefault((row["for"], row["work"]), []).append(row)
    for work, group in groups.items():
        kernels, temporaries, seconds = zip(*map(_cells, group), strict=True)
        collectives = [str(row["collectives"]) for row in group]
        lines.append((*work, *map(", ".join, (kernels, collectives, temporaries, seconds))))
    return _lines(lines)


def origin(rows: Sequence[Facts]) -> str:
    """When the programs were compiled, and by which version."""
    found = dict.fromkeys(f"{row['date']}, jax {row['jax']}" for row in rows)
    return "; ".join(found)


def section(stored: dict[str, list[Facts]]) -> str:
    """What RESULTS.md says of these programs."""
    rows, clips, values = stored[EXAMPLES], stored[CLIPS], stored[VALUES]
    sizes = by_size(stored)
    return f"""### Each example, compiled for accelerators and not run

{origin(rows)}, on a machine with neither a GPU nor a TPU. Command: `JAX_PLATFORMS=cpu python -m
benchmarks.accelerators --per-example`, for one H200 and one TPU of v5e. *Kernels* are the
kernels of the entry computation; *in loops* the kernels of the bodies of loops, once each. *To
compile* are CPU seconds.
Temporaries are those that the compiler reports, which on a TPU are 0.0 for some plain gradients.

{table(rows)}

### Clips, compiled for accelerators and not run

{origin(clips)}, on a machine with neither a GPU nor a TPU. Command: `JAX_PLATFORMS=cpu python -m
benchmarks.accelerators`. One update clips the gradients of a transformer of 12 layers, width 1024:
120 float32 leaves with 151 million elements; each device has an equal part of each leaf's first
axis. A cell has the program of optax, of clipgrad, and of clipgrad with statistics. By the norm of
each leaf optax has no clip; its program is `g * minimum(1, c / optax.tree.norm(g))`. *Kernels* are
the kernels of the entry computation, *temporaries* the temporaries of each device, *to compile*
CPU seconds.

{clip_table(clips)}

### Statistics of values by name, compiled for accelerators and not run

{origin(values)}, on a machine with neither a GPU nor a TPU. Command: `JAX_PLATFORMS=cpu python -m
benchmarks.accelerators --values`. The gradient of a flax transformer of 4 layers, width 256, with
128 tokens and 8 rows (64 for a TPU), all of its modules watched by `with_value_stats`; a CPU is
there for its temporaries. *Kernels* are fusions and calls of the entry computation; *in loops* the
same in the bodies of loops, once each. *Beside plain*: temporaries divided by those of the plain
gradient. *To compile* are CPU seconds. The command refuses a program that talks to the host.

{value_table(values)}

By size, unrolled: {origin(sizes)}. Command: `JAX_PLATFORMS=cpu python -m
benchmarks.accelerators --value-sizes`. *More*: temporaries beyond those of the plain gradient.

{size_table(sizes)}

"""
