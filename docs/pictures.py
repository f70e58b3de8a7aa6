"""Pictures of pages, drawn anew: python docs/pictures.py."""

import pathlib
import re
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


PICTURES = {"bfloat16": precision, "coordinates": coordinates}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw().savefig(DOCS / f"{name}.png", dpi=110, metadata={"Software": None})
