"""What to do about gradients that hold NaN or inf."""

from typing import Any

import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import checkify

from clipgrad._trees import map_taking_part, takes_part, with_paths

POLICIES = ("propagate", "zero", "error")


def check_policy(nonfinite: str) -> None:
    """Refuses an unknown policy.

    Raises:
      ValueError: lists the policies.
    """
    if nonfinite not in POLICIES:
        raise ValueError(f"nonfinite: got {nonfinite!r}, expected one of {', '.join(POLICIES)}")


def apply_policy(nonfinite: str, tree: Any) -> Any:
    """The tree after the policy: as it is, or with 0 for NaN and inf.

    Raises:
      FloatingPointError: for ``"error"``, names the leaves; inside of a traced function it is an
        error of `jax.experimental.checkify` instead.
    """
    check_policy(nonfinite)
    if nonfinite == "zero":
        return map_taking_part(lambda g: jnp.where(jnp.isfinite(g), g, jnp.zeros_like(g)), tree)
    if nonfinite == "error":
        _raise_for_nonfinite(tree)
    return tree


def _raise_for_nonfinite(tree: Any) -> None:
    leaves = {path: leaf for path, leaf in with_paths(tree) if takes_part(leaf)}
    counts = {path: jnp.sum(~jnp.isfinite(x)) for path, x in leaves.items()}
    if any(isinstance(count, Tracer) for count in counts.values()):
        for path, count in counts.items():
            shown = repr(path).replace("{", "{{").replace("}", "}}")
            message = f"{{count}} elements of the gradient {shown} are NaN or inf"
            checkify.check(count == 0, message, count=count)
        return
    found = [
        f"{path!r} ({count} of {jnp.size(leaves[path])} elements)"
        for path, count in counts.items()
        if count
    ]
    if found:
        raise FloatingPointError(f"the gradient is NaN or inf in {', '.join(found)}")
