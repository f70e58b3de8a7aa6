"""The sources of values that are zero throughout."""

from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from clipgrad._diagnose.blocks import LONGER, ZERO, Block
from clipgrad._jaxpr import holds_floats, scan_counts
from clipgrad._names import Place

# If one operand of these is zero, so is the result.
ABSORBING = frozenset({"mul", "dot_general", "conv_general_dilated", "ragged_dot_general"})


class ZeroSource(NamedTuple):
    """An input or the result of an operation that is zero; a constant if both are None."""

    argument: int | None = None
    place: Place | None = None
    is_state: bool = False  # whether a scan begins with it


def zero_source(block: Block, atom: Any, where: Any = None) -> ZeroSource:
    """The first value that is zero, from which a value has its zeros, at some of the steps."""
    if type(atom) is Literal or atom in block.jaxpr.constvars:
        return ZeroSource()
    if atom in block.positions:
        return _of_input(block, atom, where)
    number, equation, position = block.producers[atom]
    if inner := [b for b in block.children.get(number, ()) if b.ran]:
        body = inner[0]
        is_longer = equation.primitive.name in LONGER
        return zero_source(body, body.jaxpr.outvars[position], None if is_longer else where)
    numbers = [v for v in equation.invars if type(v) is Literal or holds_floats(v) or _is_plain(v)]
    zeros = [v for v in numbers if block.range(v, where) == ZERO]
    if not equation.invars:
        return ZeroSource()
    if zeros and (equation.primitive.name in ABSORBING or len(zeros) == len(numbers)):
        return zero_source(block, zeros[0], where)
    if equation.primitive.name == "div" and zeros and zeros[0] is equation.invars[0]:
        return zero_source(block, zeros[0], where)
    if all(type(v) is Literal for v in equation.invars):
        return ZeroSource()
    return ZeroSource(place=block.place(equation))


def _is_plain(v: Any) -> bool:
    return str(getattr(v.aval, "dtype", "")).startswith(("bool", "int", "uint"))


def _of_input(block: Block, atom: Any, where: Any) -> ZeroSource:
    position = block.positions[atom]
    around = block.outside(atom)
    if around is None or block.outer is None or block.parent is None:
        return ZeroSource(argument=position)
    if block.is_carry(position) and block.outer.range(around) != ZERO:
        constants, _ = scan_counts(block.parent.equation)
        return zero_source(block, block.jaxpr.outvars[position - constants])
    if where is not None and block.parent.equation.primitive.name in LONGER:
        where = np.any(where, axis=-1)
    found = zero_source(block.outer, around, where)
    return found._replace(is_state=found.is_state or block.is_carry(position))
