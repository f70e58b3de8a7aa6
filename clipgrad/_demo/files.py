"""The files of a demo: a figure and all numbers."""

import time
from pathlib import Path

from clipgrad._demo.report import report
from clipgrad._demo.train import Result


def write_demo(out: Path, results: list[Result], start: float) -> list[Path]:
    """Writes the figure (PNG) and the numbers (JSON); needs matplotlib."""
    from clipgrad._demo.figure import demo_figure

    paths = [out / "demo.png", out / "demo.json"]
    demo_figure(results).savefig(paths[0], dpi=130)
    seeds = len(results[0].runs[0].loss)
    paths[1].write_text(report(results, seeds, time.perf_counter() - start), encoding="utf-8")
    return paths
