"""Parameters without a state: trees of arrays, perhaps with modules of Equinox."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from clipgrad._arrays import combine, is_clippable, is_float_array, partition
from clipgrad._frameworks.equinox import check_no_state, has_modules
from clipgrad._frameworks.nnx import models_in
from clipgrad._frameworks.parameters import Parameters


@dataclasses.dataclass(frozen=True, eq=False)
class TreeParameters(Parameters):
    """A tree of arrays, of which all floating leaves are trained."""

    trained: Any  # the tree with ``None`` instead of all else
    others: list[Any]  # the leaves that are not trained
    state: None = None

    @classmethod
    def fits(cls, params: Any, wrt: Any) -> bool:
        """Any tree."""
        return True

    @classmethod
    def of(cls, params: Any, wrt: Any) -> Self:
        """The tree apart; `ValueError` for a filter, and for an ``equinox.nn.State``."""
        if wrt is not None and not models_in(params):
            raise ValueError(
                f"wrt: got {wrt!r} for parameters without a model of flax NNX, expected None; to "
                "train a part of a tree, write optax.masked or optax.partition"
            )
        check_no_state(params)
        trained, others = partition(params, cls.is_trained)
        return cls(jax.tree.map(_as_array, trained), others)

    @staticmethod
    def is_trained(leaf: Any) -> bool:
        """Whether a leaf is trained."""
        return is_clippable(leaf)

    def whole(self, trained: Any) -> Any:
        """The tree with other trained arrays."""
        return combine(trained, self.others)

    def call(
        self, fun: Callable[..., Any], trained: Any, state: Any, *args: Any
    ) -> tuple[Any, None]:
        """The result of ``fun(tree, *args)``; nothing changes in a tree."""
        return fun(self.whole(trained), *args), None


class EquinoxParameters(TreeParameters):
    """A tree with modules of Equinox, of which all floating arrays are trained.

    As by ``eqx.partition(params, eqx.is_inexact_array)``: numbers of Python are not.
    """

    @classmethod
    def fits(cls, params: Any, wrt: Any) -> bool:
        """A tree with a module of Equinox."""
        return has_modules(params)

    @staticmethod
    def is_trained(leaf: Any) -> bool:
        """Whether a leaf is trained."""
        return is_float_array(leaf)


def _as_array(leaf: Any) -> Any:
    """A leaf as an array; a shape stays one, for a plan."""
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)
