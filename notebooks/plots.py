"""The look of the notebooks' pictures: one style, and one color for each way to clip."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import offset_copy

# Okabe and Ito's colors, which the color-blind can tell apart; the demo has the same.
COLORS = {
    "no clip": "#000000",
    "norm": "#0072B2",
    "value": "#56B4E9",
    "adaptive": "#009E73",
    "error clip": "#D55E00",
    "error clip and norm": "#CC79A7",
    "norm per leaf": "#E69F00",
    "block RMS": "#882255",
    "each example": "#44AA99",
}
_OTHERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_NODES = {
    "input": "#BFDDF0",
    "saved": "#F9D9A8",
    "operation": "#F2F2F2",
    "output": "#BFE5D8",
}

plt.rcParams.update(
    {
        "figure.constrained_layout.use": True,
        "figure.dpi": 110,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.prop_cycle": plt.cycler(color=_OTHERS),
        "grid.color": "#E6E6E6",
        "axes.axisbelow": True,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "lines.linewidth": 1.8,
    }
)


def panels(
    *titles: str, height: float = 3.2, width: float = 4.6, columns: int = 3
) -> list[Axes]:
    """One panel for each title, side by side, in rows of at most ``columns``."""
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    _, grid = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False
    )
    axes = list(grid.flat)
    for ax, title in zip(axes, titles, strict=False):
        ax.set_title(title)
    for ax in axes[len(titles) :]:
        ax.axis("off")
    return axes[: len(titles)]


def curves(
    ax: Axes,
    lines: Mapping[str, Any],
    *,
    x: Any = None,
    xlabel: str = "step",
    ylabel: str = "",
) -> None:
    """Draws lines by name; those of ``COLORS`` always look the same."""
    taken = {COLORS[name] for name in lines if name in COLORS}
    others = iter([color for color in _OTHERS if color not in taken])
    for name, y in lines.items():
        y = np.asarray(y)
        color = COLORS[name] if name in COLORS else next(others)
        ax.plot(np.arange(len(y)) if x is None else x, y, label=name, color=color)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if len(lines) > 1:
        ax.legend()


def dots(ax: Axes, rows: Mapping[str, Any], *, xlabel: str = "") -> None:
    """Draws a row of dots for each name, one for each seed, without what is not finite."""
    for row, (name, values) in enumerate(rows.items()):
        color = COLORS.get(name, "#777777")
        ax.plot(
            values, np.full(len(values), row), "o", color=color, markersize=6, alpha=0.75
        )
    ax.set(xlabel=xlabel, yticks=range(len(rows)), yticklabels=list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.5)


def vectors(ax: Axes, before: Any, after: Any, *, color: str = "#0072B2") -> None:
    """Draws 2-D gradients, shape (n, 2): before a clip in gray, after it in color."""
    for points, style in ((before, {"color": "#BBBBBB"}), (after, {"color": color})):
        x, y = np.asarray(points).T
        zero = np.zeros_like(x)
        ax.quiver(
            zero, zero, x, y, angles="xy", scale_units="xy", scale=1, width=0.008, **style
        )
    reach = 1.1 * np.abs(np.asarray(before)).max()
    ax.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")


def cut(
    ax: Axes,
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    limit: float,
    color: str,
) -> None:
    """Draws norms as bars on a log scale: gray before a clip, in color what is left."""
    for row, name in enumerate(before):
        ax.barh(row, before[name], height=0.6, color="#DDDDDD")
        ax.barh(row, after[name], height=0.6, color=color)
        ax.text(after[name], row, f" {after[name]:.3g}", va="center")
    ax.axvline(limit, color="#000000", linestyle=":", linewidth=1.2)
    ax.set(xscale="log", xlim=(0.01, 40), xlabel="norm (gray: before)")
    ax.set(
        yticks=range(len(before)), yticklabels=list(before), ylim=(len(before) - 0.5, -0.5)
    )


def stacked(ax: Axes, columns: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Draws a bar for each column, of parts with names."""
    below = np.zeros(len(columns))
    for color, (name, heights) in zip(_OTHERS, parts.items(), strict=False):
        ax.bar(columns, heights, bottom=below, label=name, color=color)
        below += np.asarray(heights)
    ax.legend(ncols=len(parts), loc="upper left", fontsize=9)
    ax.set_ylim(0, 1.3 * below.max())


def layout(ax: Axes, array: Any) -> None:
    """Draws which devices hold which block of a vector or a matrix, by their numbers."""
    blocks = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        bounds = [part.indices(n)[:2] for part, n in zip(index, array.shape, strict=True)]
        blocks.setdefault(tuple([(0, 1), *bounds][-2:]), []).append(device.id)
    colors = plt.get_cmap("Set3").colors if len(blocks) > 1 else [_NODES["operation"]]
    for number, (((top, bottom), (left, right)), devices) in enumerate(blocks.items()):
        corners = [left, right, right, left], [top, top, bottom, bottom]
        ax.fill(*corners, facecolor=colors[number % len(colors)], edgecolor="#777777")
        label = ", ".join(map(str, sorted(devices))) if len(blocks) > 1 else "all"
        ax.text((left + right) / 2, (top + bottom) / 2, label, ha="center", va="center")
    rows, columns = (1, *array.shape)[-2:]
    ax.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[])


def flow(
    ax: Axes,
    record: Sequence[tuple[Any, Sequence[Any], Sequence[Any], Any]],
    leaves: Mapping[str, Any],
    cotangents: Mapping[int, Any],
    *,
    marked: Any = None,
) -> None:
    """Draws what notebook 1 records, from top to bottom, with the numbers on each arrow.

    Args:
      ax: where to.
      record: rows of an operation, its inputs, their values and the result.
      leaves: the tracers that are differentiated, by name.
      cotangents: of each value, by the `id` of its tracer.
      marked: an operation in another color.
    """
    graph, made_by = nx.DiGraph(), {id(leaf): name for name, leaf in leaves.items()}
    for name in leaves:
        graph.add_node(name, label=name, kind="input")
    for row, (operation, inputs, _, result) in enumerate(record):
        numbers = [f"{x:g}" for x in inputs if np.isscalar(x)]
        kind = "saved" if operation is marked else "operation"
        graph.add_node(row, label=" ".join([operation.__name__, *numbers]), kind=kind)
        for x in inputs:
            if id(x) in made_by:
                numbers = x.value, cotangents[id(x)]
                graph.add_edge(made_by[id(x)], row, numbers=[f"{n:.3g}" for n in numbers])
        made_by[id(result)] = row
    graph.add_node("loss", label="loss", kind="output")
    graph.add_edge(row, "loss", numbers=[f"{n:.3g}" for n in (result.value, 1.0)])
    _draw(ax, graph)


def pairs(ax: Axes, edges: Mapping[tuple[str, str], Any], *, marked: str) -> None:
    """Draws arrows by their ends, from top to bottom, each with its two numbers."""
    graph = nx.DiGraph()
    for ends, numbers in edges.items():
        graph.add_edge(*ends, numbers=[f"{float(number):g}" for number in numbers])
    for node in graph:
        kind = "saved" if node == marked else "operation"
        graph.nodes[node].update(label=node, kind=kind)
    _draw(ax, graph)


def _draw(ax: Axes, graph: nx.DiGraph) -> None:
    position = _positions(graph)
    top, bottom = (
        offset_copy(ax.transData, ax.figure, y=y, units="points") for y in (9, -9)
    )
    arrow = {"arrowstyle": "-|>", "color": "#888888", "shrinkA": 0, "shrinkB": 0}
    for start, end, numbers in graph.edges.data("numbers"):
        ends = {"xycoords": top, "textcoords": bottom, "arrowprops": arrow}
        ax.annotate("", position[end], position[start], **ends)
        middle = np.mean([position[start], position[end]], axis=0)
        sides = ("right", "#0072B2", -7), ("left", "#D55E00", 7)
        for number, (side, color, away) in zip(numbers, sides, strict=True):
            place = {"xytext": (away, 0), "textcoords": "offset points", "ha": side}
            ax.annotate(number, middle, color=color, va="center", fontsize=11, **place)
    for node, (x, y) in position.items():
        box = {"facecolor": _NODES[graph.nodes[node]["kind"]], "edgecolor": "#777777"}
        box["boxstyle"] = "round,pad=0.35"
        ax.text(
            x,
            y,
            graph.nodes[node]["label"],
            ha="center",
            va="center",
            fontsize=11,
            bbox=box,
        )
    across, down = zip(*position.values(), strict=True)
    ax.set(
        xlim=(min(across) - 0.6, max(across) + 0.6), ylim=(min(down) - 0.5, max(down) + 0.5)
    )
    ax.axis("off")


def cells(ax: Axes, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    """Draws a table; a cell that repeats one to its left has the color of that."""
    colors = list(_NODES.values())
    for down, (name, texts) in enumerate(rows.items()):
        ax.text(0, -down, name, fontweight="bold", va="center")
        for across, column in enumerate(columns):
            text = texts[across] if across < len(texts) else "nothing"
            first = texts.index(text) if text in texts else 2
            box = {"facecolor": colors[(0, 3, 1, 2)[first]], "edgecolor": "none", "pad": 4}
            ax.text(across + 0.9, -down, text, ha="center", va="center", bbox=box)
            ax.text(across + 0.9, 0.9, column, ha="center", va="center", color="#555555")
    ax.set(xlim=(0, len(columns) + 0.45), ylim=(0.6 - len(rows), 1.3))
    ax.axis("off")


def _positions(graph: nx.DiGraph) -> dict[Any, tuple[float, float]]:
    """Rows by depth; within a row, nodes stand near those that they take from."""
    depth = {}
    for row, nodes in enumerate(nx.topological_generations(graph)):
        depth.update(dict.fromkeys(nodes, row))
    for node in [node for node in graph if graph.in_degree(node) == 0]:
        depth[node] = min(depth[user] for user in graph.successors(node)) - 1
    across = {}
    for row in range(max(depth.values()) + 1):
        nodes = [node for node in graph if depth[node] == row]
        wanted = {
            n: np.mean([across[p] for p in graph.predecessors(n)] or [0]) for n in nodes
        }
        nodes.sort(key=wanted.get)
        middle = np.mean(list(wanted.values()))
        across |= {n: middle + i - (len(nodes) - 1) / 2 for i, n in enumerate(nodes)}
    return {node: (across[node], -depth[node]) for node in graph}
