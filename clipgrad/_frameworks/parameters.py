"""Parameters taken apart: what is differentiated, what is state, and what is neither.

This is the one place that decides it, for trees of arrays and for models of every framework.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._arrays import check_tree, combine, is_clippable, is_float_array, partition
from clipgrad._frameworks.equinox import check_no_state, has_modules
from clipgrad._frameworks.linen import check_no_collections
from clipgrad._frameworks.nnx import models_in
from clipgrad._frameworks.nnx_parameters import NNXParameters, all_trained


@dataclasses.dataclass(frozen=True, eq=False)
class TreeParameters:
    """A tree of arrays, perhaps with modules of Equinox, with the methods of `NNXParameters`."""

    trained: Any  # what is differentiated: the tree with ``None`` instead of all else
    rest: list[Any]  # the leaves that are not
    state: None = None

    def whole(self, trained: Any) -> Any:
        return combine(trained, self.rest)

    def call(
        self, fun: Callable[..., Any], trained: Any, state: Any, *args: Any
    ) -> tuple[Any, None]:
        return fun(self.whole(trained), *args), None

    def _same(self, *_: Any) -> "TreeParameters":
        return self

    after = with_state = unless = _same  # there is no state that changes

    def has_form_of(self, other: Any) -> bool:
        return other is self

    def as_given(self, trained: Any) -> Any:
        return trained

    def random_states(self, fun: Callable[..., Any], example: Any, count: int) -> dict[int, Any]:
        return {}

    def count_random_state(self) -> None:
        """Nothing."""


Parameters = TreeParameters | NNXParameters


def take_apart(params: Any, wrt: Any = None) -> Parameters:
    """The parameters apart.

    Of a model of flax NNX its ``nnx.Param`` are trained, or what the filter ``wrt`` selects; of a
    tree with Equinox modules its floating arrays; of another tree all floating leaves.

    Raises `ValueError` for a filter without an NNX model or that selects nothing, and for what is
    not trained and would not be updated, as an ``equinox.nn.State`` or a state of training.
    """
    check_tree("params", params)
    check_no_collections(params)
    models = models_in(params)
    if models and not all_trained(models, wrt):
        return NNXParameters.of(params, wrt)
    if wrt is not None and not models:
        raise ValueError(
            f"wrt: got {wrt!r} for parameters without a model of flax NNX, expected None; to train "
            "a part of a tree, write optax.masked or optax.partition"
        )
    check_no_state(params)
    # As by ``eqx.partition(params, eqx.is_inexact_array)``; a shape stays one, for a plan.
    trained, rest = partition(params, is_float_array if has_modules(params) else is_clippable)
    as_array = lambda x: x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)  # noqa: E731
    return TreeParameters(jax.tree.map(as_array, trained), rest)
