"""Numbers that a program carries as integers: what it keeps of them, it keeps in steps."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from clipgrad._check.tolerances import narrowest
from clipgrad._jaxpr import CUSTOM_RULES, OWN_TYPES, dtype_of, equations, holds_floats, opened

_FREE: frozenset[str] = frozenset()
CASTS = ("convert_element_type", "bitcast_convert_type")
# A maximum by bits keeps NaN; a `custom_jvp` of it has the slopes of a maximum of floats.
CHOICES = frozenset(("bitcast_convert_type", "max", "reduce_max", "pmax"))


def grain(program: Any) -> str | None:
    """The narrowest type whose bits carry numbers of the program; None if there are none.

    They do where integers made from floats, by their bits or by a cast inside of a custom rule,
    become floats again. What is compared with them or taken at them is no carrier.
    """
    jaxpr, found = opened(program)[0], set()
    _through(jaxpr, [_FREE] * len(jaxpr.invars), False, found)
    return narrowest(found) if found else None


def _through(jaxpr: Any, flags: list, is_ruled: bool, found: set[str]) -> list[frozenset[str]]:
    """The types whose numbers each result carries as integers; floats again, they are `found`."""
    known = dict(zip(jaxpr.invars, flags, strict=True))
    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, equation.invars
        carried = [_FREE if isinstance(v, Literal) else known.get(v, _FREE) for v in inputs]
        every = _FREE.union(*carried)
        is_cast = is_ruled and name in CASTS and _is_integer(equation.outvars[0])
        own = {_name(v) for v in inputs if holds_floats(v)} if name in OWN_TYPES else set()
        own |= {"float32"} if is_cast and holds_floats(inputs[0]) and not own else set()
        results = [every | own] * len(equation.outvars)
        held = [opened(p)[0] for p in jaxprs_in_params(equation.params)]
        only_chooses = name == "custom_jvp_call" and _integer_operations(held) <= CHOICES
        for inner in [] if only_chooses else held:
            given = carried if len(inner.invars) == len(carried) else [every] * len(inner.invars)
            inside = _through(inner, given, is_ruled or name in CUSTOM_RULES, found)
            whole = [_FREE.union(*inside, every)] * len(results)
            results = inside if len(inside) == len(results) else whole
        for variable, types in zip(equation.outvars, results, strict=True):
            if holds_floats(variable) and name in (*CASTS, *OWN_TYPES):
                found |= types
            known[variable] = types if _is_integer(variable) else _FREE
    return [_FREE if isinstance(v, Literal) else known.get(v, _FREE) for v in jaxpr.outvars]


def _integer_operations(programs: list) -> frozenset[str]:
    """The operations, also of programs inside, that make integers."""
    every = (equation for program in programs for equation in equations(program))
    made = (e for e in every if any(map(_is_integer, e.outvars)))
    return frozenset(e.primitive.name for e in made if not list(jaxprs_in_params(e.params)))


def _is_integer(variable: Any) -> bool:
    dtype = dtype_of(variable)
    return dtype is not None and jnp.issubdtype(dtype, jnp.integer)


def _name(variable: Any) -> str:
    return np.dtype(jnp.finfo(dtype_of(variable)).dtype).name
