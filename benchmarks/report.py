"""Results as Markdown: one table of all rows, and above it a short one and what was not run."""

import pathlib
from collections.abc import Iterator
from typing import Any

from benchmarks.rows import FLOOR, PEER

START, END = "<!-- benchmarks: start -->", "<!-- benchmarks: end -->"
# A ratio counts as a loss if three rounds in four were slower by this.
LOSS = 1.05
# Results further apart than this, in parts of the largest element, are remarked on.
APART = 1e-5
# Rows of the short table: subject, row, ours, and beside what.
SHORT = (
    ("norm", "128 MB in 20 leaves", "clipgrad", ("optax", "torch", "torch, foreach")),
    ("norm", "1,000 leaves of 4 KB", "clipgrad", ("optax", "torch, foreach")),
    ("clips", "adaptive, ResNet-50", "clipgrad", ("optax", "torch, timm's formula")),
    ("steps", "transformer, donated", "clipgrad", ("optax", "no clip")),
    ("steps", "transformer, donated", "clipgrad, stats=True", ("optax",)),
    (
        "per_example",
        "MLP of 0.67M, batch 64",
        "clipgrad",
        ("no clip", "optax, all at once", "jax-privacy", "Opacus, ghost", "fastDP"),
    ),
    ("compilation", "global norm, 1,000 leaves", "clipgrad", ("optax",)),
    ("error_clip", "LSTM, scan of 256", "clipgrad", ("plain", "rlax")),
    ("names", "unrolled transformer, all modules", "watched, norms used", ("plain",)),
    (
        "checker",
        "MLP of 5k",
        "clipgrad",
        ("jax.test_util.check_grads", "torch gradcheck, slow", "torch gradcheck, fast"),
    ),
    (
        "thresholds",
        "MLP of 12k, scan of 1,000 steps",
        "skip_spikes(sigma=None)",
        ("optax.apply_if_finite",),
    ),
)
GUIDE = f"""Each row first checks that its programs give the same numbers. Then they take turns.
*Ratio* is the median of the ratios of their times, ours divided by theirs: below 1, clipgrad is
faster. *Quartiles* are the quartiles of these ratios, one for each round. *Once* means that one of
the two takes too long to be run again. Italics mark a program that does less, such as a copy of the
same bytes, or the model without a clip. A bold ratio is a loss: another library is faster, and the
lower quartile is above {LOSS}.
"""


def line(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def milliseconds(seconds: float) -> str:
    """Three digits, without an exponent."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def times_as_much(ratio: float) -> str:
    """Two digits after the point, or two digits that are not 0."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def comparisons(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All ratios, with where they come from."""
    for subject, result in results.items():
        for row in result["rows"]:
            sides = {side["name"]: side for side in row["sides"]}
            for pair in row["ratios"]:
                for phase, ratio in pair["ratio"].items():
                    yield {
                        "subject": subject,
                        "row": row["name"],
                        "work": row["name"] + ("" if phase == "run" else f": {phase}"),
                        "ours": pair["ours"],
                        "theirs": pair["theirs"],
                        "kind": pair["kind"],
                        "ratio": ratio,
                        "seconds": [
                            sides[pair[who]]["seconds"][phase] for who in ("ours", "theirs")
                        ],
                        "remark": _remark(sides[pair["theirs"]]["facts"]),
                    }


def _remark(facts: dict[str, Any]) -> str:
    """What a reader of a peer's time must know about its result."""
    if facts.get("finds a halved element") is False:
        return " (misses a halved element)"
    apart = facts.get("difference", 0)
    return f" (differs by {apart:.0e})" if apart > APART else ""


def _cells(found: dict[str, Any]) -> list[str]:
    """The cells of a comparison after that of the work."""
    ratio, (ours, theirs) = found["ratio"], found["seconds"]
    name = found["theirs"] + found["remark"]
    mark = {PEER: "", FLOOR: "*"}[found["kind"]]
    lost = "**" if is_loss(found) else mark
    low, median, high = (times_as_much(ratio[key]) for key in ("low", "median", "high"))
    quartiles = f"{low} to {high}" if ratio["n"] > 1 else "once"
    times = [milliseconds(seconds["median"]) for seconds in (ours, theirs)]
    shown = f"{lost}{median}{lost}"
    return [found["ours"], times[0], f"{mark}{name}{mark}", times[1], shown, quartiles]


def is_loss(found: dict[str, Any]) -> bool:
    """Whether a peer is clearly faster."""
    return found["kind"] == PEER and found["ratio"]["low"] > LOSS


HEAD = ["ours", "ms", "compared with", "ms", "ratio", "quartiles"]
RULE = ["---", "---:", "---", "---:", "---:", "---:"]


def table(results: dict[str, Any]) -> str:
    """Every comparison."""
    lines, subject, work = [line("work", *HEAD), line("---", *RULE)], None, None
    for found in comparisons(results):
        if found["subject"] != subject:
            subject = found["subject"]
            lines.append(line(f"**{results[subject]['title']}**", *[""] * len(HEAD)))
        lines.append(line("" if found["work"] == work else found["work"], *_cells(found)))
        work = found["work"]
    return "\n".join(lines)


def short(results: dict[str, Any]) -> str:
    """The few rows that the page begins with."""
    every = {
        (f["subject"], f["row"], f["ours"], f["theirs"], f["work"]): f for f in comparisons(results)
    }
    lines = [
        line("work", "compared with", "ratio", "quartiles"),
        line("---", "---", "---:", "---:"),
    ]
    for subject, row, ours, peers in SHORT:
        for (of, name, who, beside, work), found in every.items():
            if (of, name, who) == (subject, row, ours) and beside in peers:
                what = f"{results[of]['title'].lower()}: {work}"
                label = what if who == "clipgrad" else f"{what}, {who}"
                _, _, theirs, _, ratio, quartiles = _cells(found)
                lines.append(line(label, theirs, ratio, quartiles))
    return "\n".join(lines)


def not_run(results: dict[str, Any]) -> str:
    """What was not run and why, each once."""
    found = {}
    for result in results.values():
        for row in result["rows"]:
            for side in row["absent"]:
                found.setdefault((side["name"], side["why"]), []).append(row["name"])
    if not found:
        return "Nothing."
    return "\n".join(
        f"* {name}: {why} ({len(rows)} row{'s' * (len(rows) > 1)})"
        for (name, why), rows in found.items()
    )


def origin(results: dict[str, Any]) -> str:
    """Date, machine, versions, command and load of each run that the results come from.

    Runs that differ in their rows and loads alone are one.
    """
    runs: dict[str, dict[str, list[float]]] = {}
    for subject, result in results.items():
        for row in result["rows"]:
            found = row_origin(row, result)
            run = runs.setdefault(_describe(**found), {})
            run.setdefault(subject, []).append(found["machine"]["load"])
    lines = []
    for run, subjects in runs.items():
        loads = [load for found in subjects.values() for load in found]
        parts = [_part(len(found), name, results[name]) for name, found in subjects.items()]
        lines.append(f"{', '.join(parts)}: {run} {_loads(loads)}")
    return "\n".join(f"* {line}" for line in lines)


def _part(count: int, subject: str, result: dict[str, Any]) -> str:
    """A subject, with the number of its rows if it has others."""
    rows = f" ({count} row{'s' * (count > 1)})"
    return subject if count == len(result["rows"]) else subject + rows


def _loads(loads: list[float]) -> str:
    least, most = min(loads), max(loads)
    found = f"{least}" if least == most else f"{least} to {most}"
    busy = ", so other programs ran and these times are uncertain" if most > 1 else ""
    return f"Load average before: {found}{busy}."


def row_origin(row: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The origin of a row: one that was measured in another run than the result says so itself."""
    return row.get("origin", own_origin(result))


def own_origin(result: dict[str, Any]) -> dict[str, Any]:
    """The machine and the command of the run that a result comes from."""
    return {key: result[key] for key in ("machine", "command")}


def _describe(machine: dict[str, Any], command: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    command = command.partition(" --rows ")[0]
    return (
        f"{machine['date']}, commit {machine['commit']}, {machine['cores']} cores of "
        f"{machine['processor']}, JAX on {machine['device']}; {versions}. Command: `{command}`."
    )


def section(results: dict[str, Any], picture: str | None) -> str:
    """The whole section of RESULTS.md."""
    shown = (
        f"![The global norm clip by number and size of leaves]({picture})\n\n" if picture else ""
    )
    return f"""## Compared with other libraries

{GUIDE}
### In short

{short(results)}

{shown}### Not run

{not_run(results)}

### All rows

{table(results)}

### Runs, machines and versions

<details>
<summary>When each row was measured, on what, and with which command</summary>

{origin(results)}

</details>
"""


def write_section(path: pathlib.Path, text: str) -> None:
    """Puts the section between the markers, or at the end of the file with markers around it."""
    old = path.read_text() if path.exists() else ""
    before, start, rest = old.partition(START)
    after = rest.partition(END)[2] if start else "\n"
    gap = "" if start or not old else "\n"
    path.write_text(f"{before}{gap}{START}\n{text}{END}{after}")
