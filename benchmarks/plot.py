"""The picture: the cost of a global norm clip against the number and the size of leaves."""

import pathlib
from typing import Any

COLORS = {
    "clipgrad": "C0",
    "optax": "C1",
    "torch": "C2",
    "torch, foreach": "C3",
    "a copy of the bytes": "0.6",
}
Line = tuple[list[int], list[float], list[float], list[float]]


def lines(rows: list[dict[str, Any]], axis: str, phase: str) -> dict[str, Line]:
    """Name of a program: x, and median and quartiles in milliseconds."""
    found: dict[str, Line] = {}
    for row in sorted(rows, key=lambda row: row[axis]):
        for side in row["sides"]:
            x, *bands = found.setdefault(side["name"], ([], [], [], []))
            x.append(row[axis])
            for band, key in zip(bands, ("median", "low", "high"), strict=True):
                band.append(1e3 * side["seconds"][phase][key])
    return found


def draw(results: dict[str, Any], path: pathlib.Path) -> str | None:
    """Writes the picture, and says why not where it can't."""
    if not {"norm", "leaves", "compilation"} <= results.keys():
        return "the subjects norm, leaves and compilation were not all run"
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = results["norm"]["rows"] + results["leaves"]["rows"]
    counts, sizes = (
        [row for row in rows if row.get("axis") == axis] for axis in ("leaves", "leaf bytes")
    )
    compiled = [r for r in results["compilation"]["rows"] if r["clip"] == "global norm"]
    panels = [
        (lines(counts, "leaves", "run"), "leaves of 4 KB", "run, ms"),
        (lines(sizes, "leaf bytes", "run"), "bytes of each of 8 leaves", "run, ms"),
        (lines(compiled, "leaves", "compile"), "leaves of 4 KB", "compile, ms"),
    ]
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for ax, (found, x_label, y_label) in zip(axes, panels, strict=True):
        for name, (x, median, low, high) in found.items():
            ax.loglog(x, median, marker="o", markersize=4, color=COLORS[name], label=name)
            ax.fill_between(x, low, high, color=COLORS[name], alpha=0.2, linewidth=0)
        ax.set(xlabel=x_label, ylabel=y_label)
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle("Clip by global norm: median and quartiles")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return None
