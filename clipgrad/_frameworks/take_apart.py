"""The one place that decides what parameters are: trees of arrays, or models of a framework."""

from typing import Any

from clipgrad._arrays import check_tree
from clipgrad._frameworks.linen import check_no_collections
from clipgrad._frameworks.nnx_parameters import NNXParameters
from clipgrad._frameworks.parameters import Parameters
from clipgrad._frameworks.tree_parameters import EquinoxParameters, TreeParameters

# The first that fits takes the parameters apart.
KINDS: tuple[type[Parameters], ...] = (NNXParameters, EquinoxParameters, TreeParameters)


def take_apart(params: Any, wrt: Any = None) -> Parameters:
    """The parameters apart.

    Of a model of flax NNX its ``nnx.Param`` are trained, or what the filter ``wrt`` selects; of a
    tree with Equinox modules its floating arrays; of another tree all floating leaves.

    Raises `ValueError` for a filter without an NNX model or that selects nothing, and for what is
    not trained and would not be updated, as an ``equinox.nn.State`` or a state of training.
    """
    check_tree("params", params)
    check_no_collections(params)
    kind = next(kind for kind in KINDS if kind.fits(params, wrt))
    return kind.of(params, wrt)
