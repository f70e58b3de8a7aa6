"""The variables of a program that have names: tags, and what leaves the scopes of modules.

A tag is given by `jax.ad_checkpoint.checkpoint_name`.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from clipgrad._names.modules import exits, is_used, left_unused, users_tag
from clipgrad._names.scopes import ScopePath, is_mapped, path
from clipgrad._programs import (
    entered_programs,
    noun_of,
    opened,
    read_once,
    scan_length,
    value_programs,
)


class NamedSite(NamedTuple):
    """A variable with a name."""

    name: str  # of a module: its scopes in the program that was asked, joined by "/"
    kind: str  # "tag" or "module"
    nest: tuple[int, ...]  # the lengths of the scans around it, outermost first
    shape: tuple[int, ...]
    dtype: str
    used: bool  # whether the program uses it; of a tag: what `checkpoint_name` returned
    within: str | None  # the primitive around it that no cotangent comes through
    mapped: bool  # whether a `vmap` inside the program surrounds it, so that it is a batch
    sealed: str | None  # the primitive around it that no value leaves but its results

    @property
    def is_differentiable(self) -> bool:
        return not self.dtype.startswith("key<") and jnp.issubdtype(self.dtype, jnp.inexact)

    @property
    def has_cotangent(self) -> bool:
        return self.used and self.is_differentiable and self.within is None

    @property
    def has_value(self) -> bool:
        return self.is_differentiable and self.sealed is None

    def below(self, scopes: ScopePath) -> "NamedSite":
        """This site of a program inside of an equation with these scopes around it."""
        return self if self.kind == "tag" else self._replace(name="/".join((*scopes, self.name)))


@read_once
def sites(jaxpr: Any) -> dict[NamedSite, int]:
    """Return the sites of a program and of those inside it, and how many there are of a kind."""
    found: Counter[NamedSite] = Counter()
    for site, count in _find(jaxpr):
        found[site] += count
    return dict(found)


def _find(jaxpr: Any) -> Iterator[tuple[NamedSite, int]]:
    for equation in jaxpr.eqns:
        name, mapped, scopes = noun_of(equation), is_mapped(equation), path(equation)
        if (tag := users_tag(equation)) is not None:
            (tagged,) = equation.outvars
            yield _site(tag, "tag", tagged, is_used(jaxpr, tagged), mapped), 1
        length = scan_length(equation)
        loop = () if length is None else (length,)
        entered, others = entered_programs(equation)
        seen = [opened(program)[0] for program in value_programs(equation)]
        for inner in (*entered, *others):
            around: dict[str, Any] = {} if inner in entered else {"within": name}
            around |= {} if opened(inner)[0] in seen else {"sealed": name}
            for site, count in sites(inner).items():
                around |= {"nest": loop + site.nest, "mapped": mapped or site.mapped}
                yield site.below(scopes)._replace(**around), count
        yield from _of_modules(jaxpr, equation, mapped)


def _of_modules(jaxpr: Any, equation: JaxprEqn, mapped: bool) -> Iterator[tuple[NamedSite, int]]:
    """The scopes that the results of an equation leave; all, if nothing uses a result."""
    for variable in equation.outvars:
        unused = left_unused(jaxpr, equation, variable)
        leaves = exits(jaxpr).get(variable)
        for left in leaves.left if leaves else unused:
            yield _site("/".join(left), "module", variable, not unused, mapped), 1


def _site(name: str, kind: str, variable: Var, used: bool, mapped: bool) -> NamedSite:
    aval: Any = variable.aval
    return NamedSite(name, kind, (), tuple(aval.shape), str(aval.dtype), used, None, mapped, None)
