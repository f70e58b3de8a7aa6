"""How much one example changes the sum of the clipped gradients."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._clip import AutoNorm, ClipByBlockRMS, ClipByGlobalNorm, ClipByNorm
from clipgrad._frameworks import take_apart
from clipgrad._per_example.request import Request

# How many clipped gradients two neighbors differ by, in dp_accounting's names. Padding adds 0.
_RELATIONS = {"add_or_remove_one": 1, "replace_special": 1, "replace_one": 2}


def sensitivity_of(request: Request, relation: Any, params: Any) -> Any:
    """The L2 norm of the difference that one example makes, as `ClipPerExample.sensitivity`."""
    name = str(getattr(relation, "name", relation)).lower()
    if name not in _RELATIONS:
        raise ValueError(
            f"neighboring_relation: got {relation!r}, expected one of {', '.join(_RELATIONS)}"
        )
    if request.nonfinite != "zero":
        raise ValueError(
            f"nonfinite: got {request.nonfinite!r}, with which NaN has no bound; write "
            'nonfinite="zero"'
        )
    if request.where is not None:
        raise ValueError(
            "where: got leaves that are not clipped, whose sum has no bound; leave where out"
        )
    return _RELATIONS[name] * _bound(request, params)


def _bound(request: Request, params: Any) -> Any:
    """The L2 norm of any gradient that the rule has clipped."""
    rule = request.rule
    # A subclass, another order, units and functions may do anything.
    if type(rule) in (ClipByGlobalNorm, AutoNorm) and rule.ord == 2:
        return _number(rule.max_norm)
    if type(rule) is ClipByNorm and rule.ord == 2 and rule.axis is None:
        return _number(rule.max_norm) * math.sqrt(len(_sizes(request, params)))
    if type(rule) is ClipByBlockRMS:
        return _number(rule.threshold) * math.sqrt(sum(_sizes(request, params)))
    raise ValueError(
        f"rule: got {rule!r}, whose results have no bound that is known, expected "
        "ClipByGlobalNorm, AutoNorm, ClipByNorm or ClipByBlockRMS with L2 norms of whole leaves"
    )


def _number(threshold: Any) -> Any:
    """A threshold, which is a number: `clip_per_example` refuses those that need steps."""
    return threshold


def _sizes(request: Request, params: Any) -> list[int]:
    """The numbers of elements of the leaves that are clipped."""
    if params is None:
        raise ValueError(
            f"params: got None, expected the parameters: the bound of {request.measurer} depends"
            " on their shapes; write sensitivity(params=params)"
        )
    leaves = jax.tree.leaves(take_apart(params, request.wrt).trained)
    return [math.prod(jnp.shape(leaf)) for leaf in leaves]
