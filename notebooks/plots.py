"""The look of the notebooks' pictures: one style, and one color for each way to clip."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from matplotlib.axes import Axes
from matplotlib.transforms import offset_copy

# Okabe and Ito's colors, which the color-blind can tell apart; the same as those of the demo.
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
_NODES = {"input": "#BFDDF0", "saved": "#F9D9A8", "operation": "#F2F2F2", "output": "#BFE5D8"}

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


def panels(*titles: str, height: float = 3.2, width: float = 4.6, columns: int = 3) -> list[Axes]:
    """One panel for each title, side by side, in rows of at most ``columns``."""
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    _, grid = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    axes = list(grid.flat)
    for ax, title in zip(axes, titles, strict=False):
        ax.set_title(title)
    for ax in axes[len(titles) :]:
        ax.axis("off")
    return axes[: len(titles)]


def curves(
    ax: Axes, lines: Mapping[str, Any], *, x: Any = None, xlabel: str = "step", ylabel: str = ""
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
    """Draws a row of dots for each name, one for each seed; what is not finite is left out."""
    for row, (name, values) in enumerate(rows.items()):
        color = COLORS.get(name, "#777777")
        ax.plot(values, np.full(len(values), row), "o", color=color, markersize=6, alpha=0.75)
    ax.set(xlabel=xlabel, yticks=range(len(rows)), yticklabels=list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.5)


def vectors(ax: Axes, before: Any, after: Any, *, color: str = "#0072B2") -> None:
    """Draws 2-D gradients, shape (n, 2): before a clip in gray, after it in color."""
    for points, style in ((before, {"color": "#BBBBBB"}), (after, {"color": color})):
        x, y = np.asarray(points).T
        zero = np.zeros_like(x)
        ax.quiver(zero, zero, x, y, angles="xy", scale_units="xy", scale=1, width=0.008, **style)
    reach = 1.1 * np.abs(np.asarray(before)).max()
    ax.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")


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


def program(
    ax: Axes,
    closed: ClosedJaxpr,
    inputs: Sequence[str],
    outputs: Sequence[str] = ("result",),
    *,
    saved: str = "saved",
) -> None:
    """Draws the operations of a jaxpr from the top to the bottom.

    Args:
      ax: where to.
      closed: what `jax.make_jaxpr` returns; its constants are what a forward pass saved.
      inputs: the names of its inputs.
      outputs: the names of its results.
      saved: what to call its constants.
    """
    graph = _graph(closed, inputs, outputs, saved)
    position = _positions(graph)
    top, bottom = (offset_copy(ax.transData, ax.figure, y=y, units="points") for y in (8, -8))
    arrow = {"arrowstyle": "-|>", "color": "#888888", "shrinkA": 0, "shrinkB": 0}
    for start, end in graph.edges:
        ends = {"xycoords": top, "textcoords": bottom, "arrowprops": arrow}
        ax.annotate("", position[end], position[start], **ends)
    for node, (x, y) in position.items():
        box = {"facecolor": _NODES[graph.nodes[node]["kind"]], "edgecolor": "#777777"}
        box["boxstyle"] = "round,pad=0.35"
        ax.text(x, y, graph.nodes[node]["label"], ha="center", va="center", fontsize=8, bbox=box)
    across, down = zip(*position.values(), strict=True)
    ax.set(xlim=(min(across) - 0.6, max(across) + 0.6), ylim=(min(down) - 0.5, max(down) + 0.5))
    ax.axis("off")


def _graph(
    closed: ClosedJaxpr, inputs: Sequence[str], outputs: Sequence[str], saved: str
) -> nx.DiGraph:
    graph, producer, jaxpr = nx.DiGraph(), {}, closed.jaxpr
    names = [(name, "input") for name in inputs] + [(saved, "saved")] * len(jaxpr.constvars)
    for number, (variable, (name, kind)) in enumerate(
        zip([*jaxpr.invars, *jaxpr.constvars], names, strict=True)
    ):
        shape = ", ".join(map(str, variable.aval.shape))
        graph.add_node(f"in {number}", label=f"{name} ({shape})", kind=kind)
        producer[variable] = f"in {number}"
    for number, equation in enumerate(jaxpr.eqns):
        graph.add_node(number, label=equation.primitive.name, kind="operation")
        _connect(graph, producer, equation.invars, number)
        producer.update(dict.fromkeys(equation.outvars, number))
    for number, (variable, name) in enumerate(zip(jaxpr.outvars, outputs, strict=True)):
        graph.add_node(f"out {number}", label=name, kind="output")
        _connect(graph, producer, [variable], f"out {number}")
    graph.remove_nodes_from(list(nx.isolates(graph)))
    return graph


def _connect(graph: nx.DiGraph, producer: dict, variables: Sequence[Any], node: Any) -> None:
    sources = [producer[v] for v in variables if not isinstance(v, Literal) and v in producer]
    graph.add_edges_from((source, node) for source in sources)


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
        wanted = {n: np.mean([across[p] for p in graph.predecessors(n)] or [0]) for n in nodes}
        nodes.sort(key=wanted.get)
        middle = np.mean(list(wanted.values()))
        across |= {n: middle + i - (len(nodes) - 1) / 2 for i, n in enumerate(nodes)}
    return {node: (across[node], -depth[node]) for node in graph}
