"""What is asked of the examples of a batch, and by which method it is found."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._per_example.scales import why_direct
from clipgrad._trees import Where, check_tree, is_array, is_none, path_string, selected

METHODS = ("auto", "one pass", "two passes", "direct")


@dataclasses.dataclass(frozen=True, eq=False)
class PerExampleSubject:
    """A loss function, the leaves that are clipped, and how."""

    loss_fn: Callable[..., Any]
    rule: Any
    microbatch: int | None
    has_aux: bool
    where: Where
    nonfinite: str
    method: str

    def why_direct(self, params: Any) -> str | None:
        """Why the gradient of each example is made; None if it need not be."""
        if self.method == "direct":
            return "method='direct'"
        if self.nonfinite == "error":
            return "nonfinite='error' looks at each element"
        return why_direct(self.rule)

    def flags(self, params: Any) -> list[bool]:
        """Which leaves are clipped."""
        leaves = jax.tree.leaves(params, is_leaf=is_none)
        flags = selected(self.where, params)
        return [flag for flag, leaf in zip(flags, leaves, strict=True) if leaf is not None]


def check_method(method: str) -> None:
    """Raises `ValueError` for what is not the name of a method."""
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}, expected one of {', '.join(METHODS)}")


def check_params(params: Any) -> None:
    """Refuses parameters that JAX would refuse with less help."""
    check_tree("params", params)
    if not jax.tree.leaves(params):
        raise ValueError(
            f"params: got {params!r:.60}, expected a tree with an array to differentiate with "
            "respect to; write (params, batch), in this order"
        )
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not is_array(leaf) and not isinstance(leaf, (bool, int, float, complex, jnp.generic)):
            raise TypeError(
                f"params: got a leaf of type {type(leaf).__name__} at {path_string(path)!r}, "
                "expected arrays; for a model with other leaves write\n"
                "  arrays, rest = eqx.partition(model, eqx.is_inexact_array)\n"
                "  loss = lambda arrays, example: loss_fn(eqx.combine(arrays, rest), example)\n"
                "and pass arrays as the parameters"
            )
