"""The policies for gradients that contain NaN or inf."""

from typing import Any

import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import checkify

from clipgrad._stats import count_nonfinite
from clipgrad._trees import is_clippable, map_clippable, with_paths

POLICIES = ("propagate", "zero", "error")


def check_policy(nonfinite: str) -> None:
    """Raises `ValueError` for what is not the name of a policy."""
    if nonfinite not in POLICIES:
        raise ValueError(f"nonfinite: got {nonfinite!r}, expected one of {', '.join(POLICIES)}")


def apply_policy(nonfinite: str, tree: Any) -> Any:
    """The tree as it is, or with 0 in place of NaN and inf; an error for ``"error"``."""
    check_policy(nonfinite)
    if nonfinite == "zero":
        return map_clippable(lambda g: jnp.where(jnp.isfinite(g), g, jnp.zeros_like(g)), tree)
    if nonfinite == "error":
        _raise_for_nonfinite(tree)
    return tree


def _raise_for_nonfinite(tree: Any) -> None:
    leaves = {path: leaf for path, leaf in with_paths(tree) if is_clippable(leaf)}
    counts = {path: count_nonfinite(leaf) for path, leaf in leaves.items()}
    if any(isinstance(count, Tracer) for count in counts.values()):
        for path, count in counts.items():
            shown = repr(path).replace("{", "{{").replace("}", "}}")
            message = f"{{count:.0f}} elements of the gradient {shown} are NaN or inf"
            checkify.check(count == 0, message, count=count)
        return
    pairs = {path: f"{k:.0f} of {leaves[path].size}" for path, k in counts.items() if k}
    found = [f"{path!r} ({elements} elements)" for path, elements in pairs.items()]
    if found:
        raise FloatingPointError(
            f"grads: got NaN or inf in {', '.join(found)}, expected finite numbers"
        )
