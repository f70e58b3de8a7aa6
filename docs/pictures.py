"""Pictures of pages, drawn anew: python docs/pictures.py, or some of them by their names."""

import json
import pathlib
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

import clipgrad as cg

DOCS = pathlib.Path(__file__).parent
WIDTHS = (64, 128, 256, 512, 1024)


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
    return cg.compare(loss, "float32", (weights, x)).plot()


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
    names, norms = [*stats], jnp.array([at.norm for at in stats.values()])
    last = names.index(finding.module)
    figure = Figure(figsize=(8, 3), layout="constrained")
    panel = figure.subplots()
    panel.plot(range(len(names)), norms, marker="o")
    panel.plot(range(last), [norms[last]] * last, "x", color="#D55E00")
    panel.annotate("NaN", (0, norms[last]), (0, -12), textcoords="offset points", color="#D55E00")
    panel.axvline(last - 0.5, color="#D55E00", linestyle="--")
    panel.set_title(f"diagnose: the VJP of {finding.operation} in {finding.module} makes NaN")
    panel.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    panel.set(xlabel="the backward pass goes to the left", ylabel="norm of the cotangent")
    panel.set_ylim(bottom=0)
    return figure


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
    figure = Figure(figsize=(8, 3), layout="constrained")
    titles = "standard parametrization", "muP"
    for ax, mup in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
        rows = [names["check"](width, mup)[0] for width in WIDTHS]
        for name in rows[0]:
            ax.loglog(WIDTHS, [row[name].rms for row in rows], marker="o", label=name)
        ax.set(title=titles[mup], xlabel="width", xticks=WIDTHS, xticklabels=WIDTHS)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    figure.axes[0].set_ylabel("root mean square after 4 steps")
    figure.axes[0].legend()
    return figure


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
    figure = Figure(figsize=(8, 4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2])
    top.plot(losses, color="#0072B2")
    top.set(ylabel="loss", ylim=(0, 3))
    top.grid(alpha=0.3)
    image = bottom.imshow(jnp.log10(rows), aspect="auto", cmap="viridis", interpolation="nearest")
    bottom.set_yticks(range(len(groups)), groups, fontsize=8)
    bottom.set_xlabel("step")
    figure.colorbar(image, ax=bottom, label="log10 of update / parameters")
    return figure


# Okabe and Ito's colors, which color-blind readers can tell apart.
COLORS = {
    "no clip": "#000000",
    "norm": "#0072B2",
    "value": "#E69F00",
    "adaptive": "#009E73",
    "adaptive, not the last layer": "#CC79A7",
}


def convolutions() -> Figure:
    """The accuracy of each clip by learning rate, at the best threshold for it, from the sweep."""
    tasks = json.loads((DOCS / "which_clip.json").read_text())["tasks"]
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, size in zip(panels, ("large", "small"), strict=True):
        for way, found in tasks[f"convolutions, {size} batches"]["ways"].items():
            best: dict[float, float] = {}
            for run in found["sweep"]:
                mean = sum(x or 0.0 for x in run["accuracy"]) / len(run["accuracy"])
                best[run["rate"]] = max(mean, best.get(run["rate"], 0.0))
            panel.plot([*best], [*best.values()], marker="o", color=COLORS[way], label=way)
        panel.set(xscale="log", ylim=(0, 1), title=f"{size} batches", xlabel="learning rate")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy of unseen digits")
    panels[0].legend(fontsize=8)
    return figure


PICTURES = {
    "bfloat16": precision,
    "convolutions": convolutions,
    "coordinates": coordinates,
    "diagnose": where_it_breaks,
    "which_layer": layers,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]().savefig(DOCS / f"{name}.png", dpi=110, metadata={"Software": None})
