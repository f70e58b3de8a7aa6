"""The look of the pages' pictures: one width, readable on a phone, in a light and a dark theme."""

import contextlib
import functools
import io
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = pathlib.Path(__file__).parent
WIDTH, DPI = 4.4, 180  # inches; on a phone the picture is 400 pixels wide
LEAST = 7.5  # points of a text, which are 9.5 pixels there
# Okabe and Ito's colors, which color-blind readers can tell apart, on both grounds.
BLUE, ORANGE, GREEN, PINK, YELLOW, GRAY = (
    "#3D8FD1", "#E0661A", "#0FA37F", "#CC79A7", "#D9970F", "#8C8C8C",
)  # fmt: skip
THEMES = {
    "": {"ground": "#FFFFFF", "ink": "#222222", "faint": "#DDDDDD"},
    "_dark": {"ground": "#131416", "ink": "#E6E6E6", "faint": "#3A3D42"},
}


@contextlib.contextmanager
def theme(name: str) -> Iterator[None]:
    """Figures that are made inside have this theme: "" or "_dark"."""
    colors = THEMES[name]
    inks = ("text", "axes.label", "axes.title", "xtick", "ytick", "axes.edge")
    keys = [f"{ink}color" if ink.startswith("axes") else f"{ink}.color" for ink in inks]
    keys[2] = "axes.titlecolor"
    settings = dict.fromkeys(keys, colors["ink"])
    settings |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), colors["ground"])
    settings |= {
        "grid.color": colors["faint"], "legend.facecolor": colors["ground"],
        "legend.edgecolor": colors["faint"], "savefig.facecolor": colors["ground"],
        "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
        "axes.titlelocation": "left", "axes.titlesize": 9, "axes.labelsize": 8.5,
        "xtick.labelsize": 8, "ytick.labelsize": 8, "legend.fontsize": 8, "font.size": 8.5,
        "legend.frameon": False, "lines.linewidth": 1.6,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        yield


def ink() -> str:
    """The color of texts in the theme."""
    return matplotlib.rcParams["text.color"]


def faint() -> str:
    """The color of what is hardly to be seen in the theme."""
    return matplotlib.rcParams["grid.color"]


def panels(height: float, rows: int = 1, columns: int = 1, **options: Any) -> list[Axes]:
    """The panels of a new figure of the width of all pictures."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def canvas(height: float, title: str = "") -> Axes:
    """A panel without axes, from 0 to 100 across, and 0 to 100 down."""
    (panel,) = panels(height)
    panel.set(xlim=(0, 100), ylim=(100, 0), title=title)
    panel.axis("off")
    return panel


def box(
    panel: Axes, x: float, y: float, text: str, color: str = "", *, filled: bool = False
) -> None:
    """A text in a rounded box around a point."""
    face = color if filled else panel.get_facecolor()
    style = {"boxstyle": "round,pad=0.4", "edgecolor": color or ink(), "facecolor": face}
    of_text = "#FFFFFF" if filled else ink()
    panel.text(x, y, text, ha="center", va="center", bbox=style, color=of_text)


def arrow(
    panel: Axes, start: Sequence[float], end: Sequence[float], color: str = "", text: str = ""
) -> None:
    """An arrow, with a text to the right of its middle."""
    style = {"arrowstyle": "-|>", "color": color or GRAY, "shrinkA": 0, "shrinkB": 0}
    panel.annotate("", end, start, arrowprops=style)
    middle = (start[0] + end[0]) / 2 + 2, (start[1] + end[1]) / 2
    panel.text(*middle, text, color=color or ink(), va="center")


@functools.cache
def programs(page: str, count: int | None = None) -> dict[str, Any]:
    """The names that the programs of a page make, or the first ``count`` of them."""
    found = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": page}
    with contextlib.redirect_stdout(io.StringIO()):
        for program in found[:count]:
            exec(compile(program, f"{page}.md", "exec"), names)
    return names
