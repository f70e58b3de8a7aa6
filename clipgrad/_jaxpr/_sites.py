"""The places of a program at which `jax.ad_checkpoint.checkpoint_name` tags a variable."""

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from clipgrad._jaxpr._programs import entered_programs, opened

# A program called from many places is read once, so that the time is linear in the source.
_SITES: weakref.WeakKeyDictionary[Any, tuple["Site", ...]] = weakref.WeakKeyDictionary()


class Site(NamedTuple):
    """A tagged variable.

    Attributes:
      name: the tag.
      nest: the lengths of the scans around it, outermost first.
      dtype: its dtype, as a string.
      used: whether the program uses what `checkpoint_name` returned.
      within: the primitive around it that `evaluate` does not enter, or that no cotangent comes
        through; None if it can be clipped.
    """

    name: str
    nest: tuple[int, ...]
    dtype: str
    used: bool
    within: str | None

    @property
    def is_differentiable(self) -> bool:
        """Whether there is a cotangent of its dtype."""
        return not self.dtype.startswith("key<") and jnp.issubdtype(self.dtype, jnp.inexact)


def sites(program: Any) -> tuple[Site, ...]:
    """Return the sites of a program and of those inside it, each kind of site once, in order."""
    jaxpr = opened(program)[0]
    if jaxpr not in _SITES:
        _SITES[jaxpr] = tuple(dict.fromkeys(_find(jaxpr)))
    return _SITES[jaxpr]


def _find(jaxpr: Any) -> Iterator[Site]:
    read = [atom for equation in jaxpr.eqns for atom in equation.invars] + list(jaxpr.outvars)
    used = {atom for atom in read if not isinstance(atom, Literal)}
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "name":
            (tagged,) = equation.outvars
            yield Site(equation.params["name"], (), str(tagged.aval.dtype), tagged in used, None)
        loop = (equation.params["length"],) if name == "scan" else ()
        open_programs, closed_programs = entered_programs(equation)
        for inner in open_programs:
            yield from (site._replace(nest=loop + site.nest) for site in sites(inner))
        for inner in closed_programs:
            yield from (site._replace(within=name) for site in sites(inner))
