"""The places of a program at which `jax.ad_checkpoint.checkpoint_name` tags a variable."""

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Literal

from clipgrad._jaxpr._programs import entered_programs, opened

# A program called from many places is read once, so that the time is linear in the source.
_SITES: weakref.WeakKeyDictionary[Any, tuple["Site", ...]] = weakref.WeakKeyDictionary()
with source_info_util.transform_name_stack("vmap"):
    (_VMAP,) = source_info_util.current_name_stack().stack


class Site(NamedTuple):
    """A tagged variable."""

    name: str
    nest: tuple[int, ...]  # the lengths of the scans around it, outermost first
    dtype: str
    used: bool  # whether the program uses what `checkpoint_name` returned
    within: str | None  # the primitive around it that no cotangent comes through
    mapped: bool  # whether a `vmap` inside the program surrounds it, so that it is a batch

    @property
    def is_differentiable(self) -> bool:
        """Whether there is a cotangent of its dtype."""
        return not self.dtype.startswith("key<") and jnp.issubdtype(self.dtype, jnp.inexact)

    @property
    def is_out_of_reach(self) -> bool:
        """Whether it may have a cotangent that can't be reached; in a while loop it has none."""
        return self.within not in (None, "while")


def sites(program: Any) -> tuple[Site, ...]:
    """Return the sites of a program and of those inside it, each kind of site once, in order."""
    jaxpr = opened(program)[0]
    if jaxpr not in _SITES:
        _SITES[jaxpr] = tuple(dict.fromkeys(_find(jaxpr)))
    return _SITES[jaxpr]


def _find(jaxpr: Any) -> Iterator[Site]:
    read = [*jaxpr.outvars, *(atom for equation in jaxpr.eqns for atom in equation.invars)]
    used = {atom for atom in read if not isinstance(atom, Literal)}
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        mapped = _is_mapped(equation)
        if name == "name":
            (tagged,) = equation.outvars
            tag, dtype = equation.params["name"], str(tagged.aval.dtype)
            yield Site(tag, (), dtype, tagged in used, None, mapped)
        loop = (equation.params["length"],) if name == "scan" else ()
        entered, others = entered_programs(equation)
        for site in (site for inner in entered for site in sites(inner)):
            yield site._replace(nest=loop + site.nest, mapped=mapped or site.mapped)
        for site in (site for inner in others for site in sites(inner)):
            yield site._replace(within=name, mapped=mapped or site.mapped)


def _is_mapped(equation: Any) -> bool:
    """Whether a `vmap` of this program surrounds an equation; a scope "vmap" has another type."""
    entries = equation.source_info.name_stack.stack
    return any(type(entry) is type(_VMAP) and entry == _VMAP for entry in entries)
