"""The policies for gradients that contain NaN or inf."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer

from clipgrad._arrays import count_nonfinite, is_clippable, map_clippable, with_paths

NonFinite = Literal["propagate", "zero", "error"]


def check_policy(nonfinite: Any) -> None:
    """Raises `ValueError` for what is not the name of a policy."""
    if nonfinite not in (policies := get_args(NonFinite)):
        raise ValueError(f"nonfinite: got {nonfinite!r}, expected one of {', '.join(policies)}")


def apply_policy(nonfinite: str, tree: Any) -> Any:
    """The tree as it is, or with 0 instead of NaN and inf; an error for ``"error"``."""
    if nonfinite == "zero":
        return map_clippable(lambda g: jnp.where(jnp.isfinite(g), g, jnp.zeros_like(g)), tree)
    if nonfinite == "error":
        sizes = {path: jnp.size(leaf) for path, leaf in with_paths(tree) if is_clippable(leaf)}
        raise_for_counts(nonfinite_counts(tree), sizes)
    return tree


def nonfinite_counts(tree: Any) -> dict[str, jax.Array]:
    """The number of elements that are NaN or inf, of each leaf by path."""
    leaves = ((path, leaf) for path, leaf in with_paths(tree) if is_clippable(leaf))
    return {path: count_nonfinite(jnp.asarray(leaf)) for path, leaf in leaves}


def raise_for_counts(counts: dict[str, jax.Array], sizes: dict[str, int] | None = None) -> None:
    """Raises an error that names the leaves with elements that are NaN or inf.

    It is a `FloatingPointError`, and where the counts are not known yet, as under `jax.jit`, an
    error of `checkify`. A count is a number, or one for each example; ``sizes`` are the numbers of
    all elements, if they are not of examples.
    """
    if any(isinstance(count, Tracer) for count in counts.values()):
        for path, count in counts.items():
            _check_functionally(path, count)
        return
    bad = {path: count for path, count in counts.items() if jnp.any(count)}
    shown = [_shown(path, count, (sizes or {}).get(path)) for path, count in bad.items()]
    if shown:
        raise FloatingPointError(
            f"grads: got NaN or inf in {', '.join(shown)}, expected finite numbers"
        )


def _check_functionally(path: str, count: jax.Array) -> None:
    from jax.experimental import checkify  # a hundredth of a second, which few need

    shown = f" {path!r}".replace("{", "{{").replace("}", "}}") if path else ""
    message, total = f"{{count:.0f}} elements of the gradient{shown} are NaN or inf", jnp.sum(count)
    values: dict[str, Any] = {"count": total}
    if count.ndim:
        message += f", in {{number}} of {count.size} examples, the first with index {{first}}"
        values |= dict(zip(("number", "first"), _bad_examples(count), strict=True))
    checkify.check(total == 0, message, **values)


def _shown(path: str, count: jax.Array, size: int | None) -> str:
    """The leaf, and how much of it is NaN or inf; a single array has no path."""
    elements = f"{float(jnp.sum(count)):.0f}" + (f" of {size} elements" if size else " elements")
    if count.ndim:
        number, first = map(int, _bad_examples(count))
        elements += f" in {number} of {count.size} examples, the first with index {first}"
    return f"{repr(path) if path else 'the gradient'} ({elements})"


def _bad_examples(count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The number of examples with NaN or inf, and the index of the first."""
    return jnp.sum(count > 0), jnp.argmax(count > 0)
