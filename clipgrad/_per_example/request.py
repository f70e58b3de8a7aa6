"""What a caller asks of the examples of a batch: the loss of one, the rule, the leaves, and how."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._arrays import (
    AxisName,
    Where,
    check_scalar,
    check_takes,
    check_tree,
    combine,
    is_array,
    is_none,
    loss_and_aux,
    partition,
    path_string,
    selected,
    warn_of_parts,
)
from clipgrad._clip import is_rule
from clipgrad._frameworks import has_modules, is_model
from clipgrad._per_example import scaling

Method = Literal["auto", "direct"]
METHODS = get_args(Method)


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A loss function, the leaves that are clipped or measured, and how.

    Attributes:
      loss_fn: the loss of one example.
      rule: of `clip_per_example`; ``None`` of `per_example_norms`.
      measurer: whose norms are measured, in warnings; ``None``: no norms are.
      axis_name: the mapped axes that these norms are over.
    """

    loss_fn: Callable[..., Any]
    rule: Any
    microbatch: int | None
    has_aux: bool
    where: Where
    nonfinite: str
    method: str
    wrt: Any
    measurer: str | None
    axis_name: AxisName

    @property
    def why_elements(self) -> str | None:
        """Why the elements of each example's gradient are needed; None if its norms are enough."""
        if self.nonfinite == "error":
            return "nonfinite='error' looks at each element"
        return scaling.why_elements(self.rule)

    def warn_of_split(self, params: Any) -> None:
        """Warns of parameters in parts on several devices, where no gradient meets the rule."""
        if self.measurer is not None and self.why_elements is None:
            warn_of_parts(self.measurer, self.chosen(params), self.axis_name)

    def chosen(self, params: Any) -> list[Any]:
        """The leaves that are clipped or measured."""
        pairs = zip(jax.tree.leaves(params), self.flags(params), strict=True)
        return [leaf for leaf, flag in pairs if flag]

    def flags(self, params: Any) -> list[bool]:
        """Which leaves are clipped or measured."""
        leaves = jax.tree.leaves(params, is_leaf=is_none)
        flags = selected(self.where, params)
        return [flag for flag, leaf in zip(flags, leaves, strict=True) if leaf is not None]


def check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}, expected one of {', '.join(METHODS)}")


def check_params(params: Any, shapes: bool = False) -> None:
    """Refuses parameters that JAX would refuse with less help; ``shapes``: arrays may be shapes."""
    check_tree("params", params)
    if has_modules(params):
        return
    kinds = (bool, int, float, complex, np.generic, *([jax.ShapeDtypeStruct] if shapes else []))
    for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_model)[0]:
        if not (is_model(leaf) or is_array(leaf) or isinstance(leaf, kinds)):
            raise TypeError(
                f"params: got a leaf of type {type(leaf).__name__} at {path_string(path)!r}, "
                "expected arrays; for a model with other leaves write\n"
                "  arrays, rest = eqx.partition(model, eqx.is_inexact_array)\n"
                "  loss = lambda arrays, example: loss_fn(eqx.combine(arrays, rest), example)\n"
                "and pass arrays as the parameters"
            )


_OF_ONE = ", as in\n  lambda params, x: jnp.mean(loss_fn(params, x[None]))"


def scalar_loss(loss_fn: Callable[..., Any], has_aux: bool) -> Callable[[Any, Any], Any]:
    """The loss function, which raises `ValueError` if it returns no loss of one example.

    It is not traced once more for that.
    """
    if is_rule(loss_fn) or isinstance(loss_fn, tuple) or not callable(loss_fn):
        hint = "; write the loss before the rule" if is_rule(loss_fn) else ""
        raise TypeError(
            f"loss_fn: got {loss_fn!r:.60} of type {type(loss_fn).__name__}, expected a function "
            f"of (params, example){hint}"
        )
    check_takes("loss_fn", loss_fn, "params", "example")

    def loss(params: Any, example: Any) -> Any:
        try:
            result = loss_fn(params, example)
        except (IndexError, TypeError, ValueError) as error:
            _check_is_of_one(loss_fn, params, example, error)
            raise
        value = loss_and_aux("loss_fn", result, has_aux)[0]
        check_scalar("loss_fn", value, " for one example", _OF_ONE)
        return result

    return loss


def _check_is_of_one(loss_fn: Any, params: Any, example: Any, error: Exception) -> None:
    """Raises `ValueError` if a loss that failed for one example can be traced for a batch of it."""
    arrays, others = partition(example, is_array)
    try:
        batch = jax.tree.map(lambda x: jnp.asarray(x)[None], arrays)
        jax.eval_shape(
            lambda batch: jax.tree.leaves(loss_fn(params, combine(batch, others))), batch
        )
    except Exception:
        return  # it fails for another reason, which the caller raises
    shapes = [jnp.shape(x) for x in jax.tree.leaves(arrays)]
    raise ValueError(
        f"loss_fn: got {type(error).__name__} from it for one example, of shapes {shapes}, "
        "expected the loss of one example, without an axis for the batch; write "
        "lambda params, example: loss_fn(params, jax.tree.map(lambda x: x[None], example))"
    ) from error
