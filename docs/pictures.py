"""Pictures of pages, drawn anew: python docs/pictures.py, or some of them by their names."""

import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from drawing import (
    BLUE,
    DOCS,
    DPI,
    GRAY,
    GREEN,
    ORANGE,
    PINK,
    THEMES,
    YELLOW,
    arrow,
    box,
    canvas,
    faint,
    ink,
    panels,
    programs,
    theme,
)  # fmt: skip
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import clipgrad as cg

WIDTHS = (64, 128, 256, 512, 1024)


def figure_of(panel: Axes) -> Figure:
    """The figure that a panel is in."""
    figure = panel.get_figure(root=True)
    assert figure is not None
    return figure


def normalized(x: jax.Array, one_pass: bool) -> jax.Array:
    """Rows with mean 0 and variance 1; in one pass the variance cancels far from zero."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    square = jnp.square(x) - jnp.square(mean) if one_pass else jnp.square(x - mean)
    return (x - mean) * jax.lax.rsqrt(jnp.mean(square, axis=-1, keepdims=True) + 0.01)


def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Eight layers, of which the fifth has the variance in one pass, of values far from zero."""
    for i, weight in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            with jax.named_scope("norm"):
                y = normalized(x + 12, one_pass=True) if i == 4 else normalized(x, one_pass=False)
            with jax.named_scope("mlp"):
                x = x + jnp.tanh(y @ weight)
    return jnp.mean(x[:, 0] ** 2)


def precision() -> Figure:
    """The error of bfloat16 by depth."""
    keys = jax.random.split(jax.random.key(0), 2)
    weights = jax.random.normal(keys[0], (8, 32, 32), jnp.bfloat16) / 6
    x = jax.random.normal(keys[1], (16, 32), jnp.bfloat16)
    rows = [row for row in cg.compare(loss, "float32", (weights, x)).rows if "/" in row.module]
    (panel,) = panels(3.2)
    for name, color in (("value", BLUE), ("cotangent", ORANGE)):
        panel.plot([getattr(row, name) for row in rows], "o-", color=color, ms=3, label=name)
    panel.set_xticks(range(len(rows)), [row.module.replace("layer_", "") for row in rows])
    panel.tick_params(axis="x", rotation=60)
    panel.set(yscale="log", ylabel="relative error", title="bfloat16 beside float32")
    panel.grid(alpha=0.5)
    panel.legend()
    return figure_of(panel)


def padded(weights: jax.Array, tokens: jax.Array) -> jax.Array:
    """Six blocks, of which the third divides by the norm of each token, also of padding's."""
    is_word = jnp.any(tokens != 0, axis=-1, keepdims=True)
    x = tokens
    for i, weight in enumerate(weights):
        with jax.named_scope(f"block_{i}"):
            with jax.named_scope("attn"):
                size = jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6 if i == 2 else 6
                x = x + is_word * (jax.nn.softmax(x / size @ x.T) @ x)
            with jax.named_scope("mlp"):
                x = x + jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def where_it_breaks() -> Figure:
    """The cotangent at each module, and the module at which the diagnosis says that it breaks."""
    keys = jax.random.split(jax.random.key(0), 2)
    weights = jax.random.normal(keys[0], (6, 32, 32)) / 6
    tokens = jax.random.normal(keys[1], (16, 32)).at[15].set(0)  # the last one is padding
    watched = cg.value_and_grad_with_stats(padded, argnums=(0, 1), watch=["*/*"])
    stats = jax.jit(watched)(weights, tokens)[2]
    (finding,) = cg.diagnose(padded, (weights, tokens)).findings
    names, norms = [*stats], np.array([at.norm for at in stats.values()])
    last = names.index(finding.module)
    (panel,) = panels(3.6)
    panel.barh(range(len(names)), norms, color=BLUE)
    for row in range(last):
        panel.text(0.5, row, "NaN", color=ORANGE, va="center", fontweight="bold")
    panel.annotate(
        f"the VJP of {finding.operation} at 0 makes NaN\nin {finding.module}",
        (norms[last] + 0.5, last), (18, 2.2), color=ORANGE, fontsize=9,
        arrowprops={"arrowstyle": "-|>", "color": ORANGE},
    )  # fmt: skip
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(-0.8, len(names) - 0.4)
    panel.set(xlabel="norm of the cotangent; the backward pass goes down")
    return figure_of(panel)


def zero() -> Figure:
    """The cotangents in the program of the page, and the operation that cuts them."""
    made = programs("zero", 1)
    params, x = made["params"], made["x"]
    logits = x @ params["gate"]
    best, pull_top = jax.vjp(lambda logits: jax.lax.top_k(logits, 1)[0], logits)
    weight, pull_softmax = jax.vjp(jax.nn.softmax, best)
    experts = params["experts"][jnp.argmax(logits, -1)]
    of_weight = jax.grad(lambda weight: jnp.mean((weight * experts - x) ** 2))(weight)
    (of_best,) = pull_softmax(of_weight)
    cotangents = 1.0, of_weight, of_best, *pull_top(of_best)
    boxes = "loss", "experts", "softmax of one", "top_k", "x @ gate"
    panel = canvas(3.3, "the norm of the cotangent, from the loss back to the gate")
    for i, name in enumerate(boxes):
        cut = i == 2
        box(panel, 35, 8 + 21 * i, name, ORANGE if cut else "", filled=cut)
        if i:
            norm = float(jnp.linalg.norm(cotangents[i - 1]))
            color = BLUE if norm else ORANGE
            arrow(panel, (35, 21 * i - 8), (35, 21 * i + 3), color, f"{norm:.2g}")
    panel.text(
        55, 50, "cut here: a softmax over\none number is always 1", color=ORANGE, va="center"
    )
    return figure_of(panel)


def blew_up() -> Figure:
    """What the host dispatches, the device does and the recorder writes around the bad step."""
    panel = canvas(2.7, "the batch of step 57 is bad")
    steps = range(54, 62)
    for row, name in ((22, "host"), (52, "device"), (84, "recorder")):
        panel.text(0, row, name, va="center", fontweight="bold")
    for i, step in enumerate(steps):
        x = 25 + 10 * i
        box(panel, x, 22, str(step), GRAY)
        color = GREEN if step < 57 else ORANGE if step == 57 else GRAY
        box(panel, x, 52, str(step), color, filled=True)
    panel.text(35, 64, "update", color=GREEN, ha="center", va="center")
    panel.text(55, 64, "halt", color=ORANGE, ha="center", va="center")
    panel.text(80, 64, "zero updates", color=GRAY, ha="center", va="center")
    panel.text(60, 9, "dispatched ahead", color=GRAY, ha="center", va="center")
    box(panel, 60, 85, "captures/step_57: last good params, bad batch", ORANGE)
    arrow(panel, (55, 69), (55, 78), ORANGE)
    return figure_of(panel)


# The ways to train that the bars compare, by color.
BARS = {"no clip": GRAY, "norm": BLUE, "error clip": ORANGE, "error clip + norm": PINK}


def clips() -> Figure:
    """How many of five runs reach the goal of each task, by clip."""
    tasks = json.loads((DOCS / "which_clip.json").read_text())["tasks"]
    shown = {name: task for name, task in tasks.items() if BARS.keys() <= task["ways"].keys()}
    (panel,) = panels(5.2)
    for i, (way, color) in enumerate(BARS.items()):
        reached = [sum(task["ways"][way]["metrics"]["reached"]) for task in shown.values()]
        rows = np.arange(len(shown)) + 0.2 * (i - 1.5)
        panel.barh(rows, np.maximum(reached, 0.04), height=0.18, color=color, label=way)
    panel.set_yticks(range(len(shown)), list(shown))
    panel.set(xlabel="runs of five that reach the goal", xlim=(0, 5))
    panel.invert_yaxis()
    figure_of(panel).legend(loc="outside upper center", ncols=4, columnspacing=0.9, handlelength=1)
    return figure_of(panel)


def exploding() -> Figure:
    """The norm of the cotangent by time step, by the code of the page."""
    made = programs("exploding", 2)
    (panel,) = panels(2.8)
    for scale, color in ((1.5, ORANGE), (1.0, BLUE), (0.5, GREEN)):
        stats = cg.value_and_grad_with_stats(made["rnn"])(made["start"], scale)[2]
        panel.plot(stats["h"].norm, color=color, label=f"singular values {scale}")
    panel.set(yscale="log", xlabel="time step; the backward pass goes left")
    panel.set(title="norm of the cotangent", xlim=(0, 49))
    panel.grid(alpha=0.5)
    panel.legend()
    return figure_of(panel)


def rules() -> Figure:
    """Gradients of two numbers before and after four rules."""
    angles = np.linspace(0, 2 * np.pi, 12, endpoint=False) + 0.2
    lengths = np.tile([0.5, 1.2, 1.9], 4)
    before = np.stack([np.cos(angles), np.sin(angles)], -1) * lengths[:, None]
    shown = {
        "ClipByValue(1.0)": cg.ClipByValue(1.0),
        "ClipByNorm(1.0)": cg.ClipByNorm(1.0),
        "ClipByBlockRMS(0.5)": cg.ClipByBlockRMS(0.5),
        "AutoNorm(1.0)": cg.AutoNorm(1.0),
    }
    drawn = panels(4.6, 2, 2)
    for panel, (name, rule) in zip(drawn, shown.items(), strict=True):
        after = np.stack([np.asarray(rule(jnp.asarray(g, jnp.float32))) for g in before])
        for points, color, width in ((before, faint(), 0.011), (after, BLUE, 0.014)):
            zeros = np.zeros(len(points))
            panel.quiver(
                zeros, zeros, *points.T, color=color, width=width,
                angles="xy", scale_units="xy", scale=1,
            )  # fmt: skip
        panel.set(xlim=(-2, 2), ylim=(-2, 2), aspect="equal", title=name)
        panel.set(xticks=[-1, 0, 1], yticks=[-1, 0, 1])
        panel.grid(alpha=0.5)
    return figure_of(drawn[0])


def tap() -> Figure:
    """Where the rows of an example's gradient are read."""
    panel = canvas(2.9)
    box(panel, 8, 45, "x")
    box(panel, 36, 12, "w")
    box(panel, 36, 45, "x @ w")
    box(panel, 62, 45, "tap", BLUE, filled=True)
    box(panel, 88, 45, "loss of\none example")
    arrow(panel, (11, 45), (28, 45))
    arrow(panel, (36, 19), (36, 38))
    arrow(panel, (44, 45), (57, 45))
    arrow(panel, (67, 45), (77, 45))
    arrow(panel, (8, 52), (8, 78), BLUE)
    arrow(panel, (62, 52), (62, 78), ORANGE)
    panel.text(4, 85, "X: what went in", color=BLUE, va="center")
    panel.text(52, 85, "Y: the cotangent\nof what came out", color=ORANGE, va="center")
    panel.text(4, 97, "gradient of the example: $X^T Y$", va="center")
    return figure_of(panel)


def witnesses() -> Figure:
    """Your rule, JAX's own derivative and finite differences of the page's layer, at w and at b."""
    made = programs("check", 1)
    keys = jax.random.split(jax.random.key(2), 3)
    args = jax.random.normal(keys[0], (8, 4)), jax.random.normal(keys[1], (4, 3)), jnp.zeros(3)
    cotangent = jax.random.normal(keys[2], (8, 3))
    plain = jax.vjp(lambda x, w, b: x @ w + b[None], *args)[1](cotangent)
    rule = jax.vjp(made["dense"], *args)[1](cotangent)
    slopes = cg.numerical_grad(made["dense"], args, cotangent=cotangent)
    names = [f"w[{i}, 0]" for i in range(3)] + [f"b[{i}]" for i in range(3)]
    (panel,) = panels(2.8)
    for i, (name, tree, color) in enumerate(
        [("your rule", rule, ORANGE), ("JAX's own", plain, BLUE), ("differences", slopes, GREEN)]
    ):
        heights = [*np.asarray(tree[1])[:3, 0], *np.asarray(tree[2])]
        panel.bar(np.arange(6) + 0.27 * (i - 1), heights, width=0.25, color=color, label=name)
    panel.axhline(0, color=ink(), linewidth=0.8)
    panel.axvspan(2.5, 5.5, color=ORANGE, alpha=0.12)
    panel.set_xticks(range(6), names)
    panel.set(title="at w all three agree, at b the rule is alone")
    panel.legend(ncols=3, loc="upper left")
    low, high = panel.get_ylim()
    panel.set_ylim(low, high + 0.25 * (high - low))
    return figure_of(panel)


def versions() -> Figure:
    """Where the two versions of the page begin to differ."""
    made = programs("two_versions", 2)
    names, (params, x) = ("block_0", "block_1", "block_2", "block_3"), (made["params"], made["x"])

    def deep(params: Any, x: jax.Array, wrong: float = 1.0) -> jax.Array:
        for i, name in enumerate(names):
            with jax.named_scope(name):
                x = x + jnp.tanh(x @ params["up"]) @ params["down"] * (wrong if i == 2 else 1)
        return jnp.mean(x**2)

    found = cg.compare(deep, lambda params, x: deep(params, x, 1.01), (params, x))
    first = [row.module for row in found.rows].index(found.findings[0].module)
    (panel,) = panels(2.5)
    errors = np.array([max(row.value, 1e-9) for row in found.rows])
    limits = [max(row.value_tolerance, 1e-9) for row in found.rows]
    colors = [GREEN if i < first else ORANGE for i in range(len(errors))]
    panel.barh(range(len(errors)), errors, left=1e-9, color=colors)
    panel.plot(limits, range(len(errors)), "|", color=ink(), ms=18, label="what rounding explains")
    panel.set_yticks(range(len(errors)), [row.module for row in found.rows])
    panel.text(errors[first] * 1.6, first, "first finding", color=ORANGE, va="center")
    panel.set(xscale="log", xlim=(1e-9, 10), xlabel="relative difference of the values")
    panel.invert_yaxis()
    figure_of(panel).legend(loc="outside upper right")
    return figure_of(panel)


def spread() -> Figure:
    """Who holds what in a step on four devices, and what a sum for an average does."""
    panel = canvas(3.6)
    colors = BLUE, GREEN, YELLOW, PINK
    for i in range(4):
        x = 40 + 17 * i
        panel.text(x, 4, f"device {i}", ha="center", va="center")
        box(panel, x, 20, "  w  ", GRAY, filled=True)
        box(panel, x, 38, f"x[{i}]", colors[i], filled=True)
        box(panel, x, 56, f" g{i} ", colors[i], filled=True)
        box(panel, x, 74, "  g  ", GRAY, filled=True)
        box(panel, x, 92, " 4 g ", ORANGE, filled=True)
    texts = "parameters", "batch", "own gradient", "pmean: right", "psum: 4 times"
    for row, text in enumerate(texts):
        panel.text(0, 20 + 18 * row, text, va="center", color=ORANGE if row == 4 else ink())
    return figure_of(panel)


def port() -> Figure:
    """Two models that differ in the epsilon of a norm, module by module."""
    x = 0.01 * jax.random.normal(jax.random.key(0), (4, 6))
    weights = [
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(6, 8), (8, 1)])
    ]

    def values(epsilon: float) -> list[jax.Array]:
        h = x @ weights[0]
        h0, centered = h, h - h.mean(-1, keepdims=True)
        h1 = centered * jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + epsilon)
        return [h0, h1, h1 @ weights[1]]

    pairs = zip(values(1e-5), values(1e-6), strict=True)
    apart = [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)) for a, b in pairs]
    panel = canvas(2.9)
    panel.text(24, 5, "PyTorch", ha="center", va="center", fontweight="bold")
    panel.text(76, 5, "JAX", ha="center", va="center", fontweight="bold")
    modules = (
        ["Linear", "LayerNorm\nepsilon 1e-5", "Linear"],
        ["Dense", "LayerNorm\nepsilon 1e-6", "Dense"],
    )
    for row, distance in enumerate(apart):
        y, same = 24 + 32 * row, distance < 1e-6
        color = GREEN if same else ORANGE
        for x_of, names in zip((24, 76), modules, strict=True):
            box(panel, x_of, y, names[row], color if row < 2 else GRAY)
            if row:
                arrow(panel, (x_of, y - 23), (x_of, y - 9 - 2 * (row == 1)))
        text = "equal" if same else f"{distance:.1%} apart"
        panel.text(50, y, text, color=color if row < 2 else GRAY, ha="center", va="center")
    panel.text(50, 66, "first finding", color=ORANGE, ha="center", va="center")
    return figure_of(panel)


def dashboard() -> Figure:
    """What the page's loop logs, at each step."""
    made = programs("logging", 1)
    step = made["step"]
    state, rows = step.init({"in": jnp.ones((3, 8)) / 8, "rec": jnp.eye(8) * 1.2}), []
    for batch in made["batches"]:
        state, metrics = step(state, batch)
        rows.append(jax.device_get(cg.scalars(metrics)))
    drawn = panels(4.0, 2, 2)
    for panel, key in zip(drawn, ("loss", "grad_norm"), strict=False):
        panel.plot([row[key] for row in rows], color=BLUE)
        panel.set(title=key)
        panel.grid(alpha=0.5)
    for panel, key in zip(drawn[2:], ("norm", "clipped_norm"), strict=True):
        image = np.log10([row[f"error_clip/h/{key}"] for row in rows]).T
        panel.imshow(image, aspect="auto", cmap="viridis", origin="lower", vmin=-3.5, vmax=-0.3)
        panel.set(title=f"error_clip/h/{key}", ylabel="time step")
    for panel in drawn[2:]:
        panel.set(xlabel="training step")
    return figure_of(drawn[0])


def coordinates() -> Figure:
    """The coordinate check of the recipes, by the code of the page."""
    text = (DOCS / "recipes.md").read_text()
    shared = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    section = text.split("## A coordinate check")[1]
    own = re.search(r"```python\n(.*?)for mup in", section, re.DOTALL)
    names: dict[str, Any] = {}
    for found in (shared, own):
        assert found is not None
        exec(found[1], names)
    titles = "standard parametrization", "muP"
    drawn = panels(2.8, 1, 2, sharey=True)
    for ax, mup, title in zip(drawn, (False, True), titles, strict=True):
        rows = [names["check"](width, mup)[0] for width in WIDTHS]
        for name, color in zip(rows[0], (BLUE, ORANGE, GREEN), strict=False):
            rms = [row[name].rms for row in rows]
            ax.loglog(WIDTHS, rms, marker="o", ms=3, label=name, color=color)
        ax.set_xticks(WIDTHS[::2], WIDTHS[::2])
        ax.set(title=title, xlabel="width")
        ax.minorticks_off()
        ax.grid(alpha=0.5)
    drawn[0].set_ylabel("root mean square after 4 steps")
    drawn[0].legend()
    return figure_of(drawn[0])


def layers() -> Figure:
    """The ratios of update to parameters, and the loss, by the code of the page."""
    program = re.search(
        r"```python\n(.*?)for i in \(40", (DOCS / "which_layer.md").read_text(), re.S
    )
    assert program is not None
    names: dict[str, Any] = {}
    exec(program[1], names)
    losses, ratios = names["losses"], names["ratios"]
    groups = sorted(ratios[0])
    rows = jnp.array([[row[group] for row in ratios] for group in groups])
    top, bottom = panels(3.6, 2, 1, sharex=True, height_ratios=[1, 2])
    top.plot(losses, color=BLUE)
    top.set(ylabel="loss", ylim=(0, 3))
    top.grid(alpha=0.5)
    image = bottom.imshow(jnp.log10(rows), aspect="auto", cmap="viridis", interpolation="nearest")
    bottom.set_yticks(range(len(groups)), groups)
    bottom.set_xlabel("step")
    figure_of(top).colorbar(image, ax=bottom, label="log10 of update / params")
    return figure_of(top)


CONVOLUTIONS = {"norm": BLUE, "value": YELLOW, "adaptive": GREEN}


def convolutions() -> Figure:
    """The accuracy of each clip by learning rate, at the best threshold for it, from the sweep."""
    tasks = json.loads((DOCS / "which_clip.json").read_text())["tasks"]
    drawn = panels(3.4, 1, 2, sharey=True)
    colors = {"no clip": GRAY, "adaptive, not the last layer": PINK} | CONVOLUTIONS
    for panel, size in zip(drawn, ("large", "small"), strict=True):
        for way, task in tasks[f"convolutions, {size} batches"]["ways"].items():
            best: dict[float, float] = {}
            for run in task["sweep"]:
                mean = sum(x or 0.0 for x in run["accuracy"]) / len(run["accuracy"])
                best[run["rate"]] = max(mean, best.get(run["rate"], 0.0))
            panel.plot([*best], [*best.values()], "o-", ms=3, color=colors[way], label=way)
        panel.set(xscale="log", ylim=(0, 1), title=f"{size} batches", xlabel="learning rate")
        panel.grid(alpha=0.5)
    drawn[0].set_ylabel("accuracy of unseen digits")
    figure_of(drawn[0]).legend(
        *drawn[0].get_legend_handles_labels(), loc="outside upper center", ncols=2
    )
    return figure_of(drawn[0])


PICTURES = {
    "bfloat16": precision,
    "check": witnesses,
    "convolutions": convolutions,
    "coordinates": coordinates,
    "diagnose": where_it_breaks,
    "exploding": exploding,
    "layout": spread,
    "logging": dashboard,
    "my_run_blew_up": blew_up,
    "per_example": tap,
    "port": port,
    "rules": rules,
    "two_versions": versions,
    "which_clip": clips,
    "which_layer": layers,
    "zero": zero,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        for suffix in THEMES:
            with theme(suffix):
                figure = PICTURES[name]()
                path = DOCS / f"{name}{suffix}.png"
                figure.savefig(path, dpi=DPI, metadata={"Software": None})
