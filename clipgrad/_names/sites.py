"""The variables of a program that have names: tags, and what leaves the scopes of modules.

A tag is given by `jax.ad_checkpoint.checkpoint_name`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from clipgrad._names.lines import OF_LINES, lines_of_program
from clipgrad._names.modules import exits, is_used, left_unused, users_tag
from clipgrad._names.scopes import ScopePath, is_mapped, path
from clipgrad._programs import (
    entered_programs,
    held_programs,
    noun_of,
    opened,
    read_once,
    scan_length,
    value_programs,
)


class NamedSite(NamedTuple):
    """A variable with a name."""

    # Of a module its scopes in the program that was asked, joined by "/"; of a line its key.
    name: str
    kind: str  # "tag" or "module", or the kind of a line
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
        is_module = self.kind == "module"
        return self._replace(name="/".join((*scopes, self.name))) if is_module else self


Sites = dict[NamedSite, int]


@read_once
def sites(jaxpr: Any) -> Sites:
    """Return the sites of a program and of those inside it, and how many there are of a kind."""
    return _counted(jaxpr, sites, _of_tags_and_modules)


@read_once
def line_sites(jaxpr: Any) -> Sites:
    """Return the values of lines in a program and in those inside it, as `sites`."""
    return _counted(jaxpr, line_sites, _of_lines)


def _counted(
    jaxpr: Any,
    of_program: Callable[[Any], Sites],
    of_equation: Callable[[Any, JaxprEqn], Iterator[NamedSite]],
) -> Sites:
    counts: Counter[NamedSite] = Counter()
    for equation in jaxpr.eqns:
        for site, count in _inside(equation, of_program):
            if site.kind not in OF_LINES or site.name != lines_of_program(jaxpr).key(equation):
                counts[site] += count
        counts.update(of_equation(jaxpr, equation))
    return dict(counts)


def _inside(
    equation: JaxprEqn, of_program: Callable[[Any], Sites]
) -> Iterator[tuple[NamedSite, int]]:
    """The sites of the programs inside of an equation, as those of the program around."""
    if held_programs(equation):
        name, mapped, scopes = noun_of(equation), is_mapped(equation), path(equation)
        length = scan_length(equation)
        loop = () if length is None else (length,)
        entered, others = entered_programs(equation)
        seen = [opened(program)[0] for program in value_programs(equation)]
        for inner in (*entered, *others):
            around: dict[str, Any] = {} if inner in entered else {"within": name}
            around |= {} if opened(inner)[0] in seen else {"sealed": name}
            for site, count in of_program(inner).items():
                around |= {"nest": loop + site.nest, "mapped": mapped or site.mapped}
                yield site.below(scopes)._replace(**around), count


def _of_tags_and_modules(jaxpr: Any, equation: JaxprEqn) -> Iterator[NamedSite]:
    """A tag, and the scopes that results of an equation leave; all, if nothing uses a result."""
    mapped = is_mapped(equation)
    if (tag := users_tag(equation)) is not None:
        (tagged,) = equation.outvars
        yield _site(tag, "tag", tagged, is_used(jaxpr, tagged), mapped)
    for variable in equation.outvars:
        unused = left_unused(jaxpr, equation, variable)
        leaves = exits(jaxpr).get(variable)
        for left in leaves.left if leaves else unused:
            yield _site("/".join(left), "module", variable, not unused, mapped)


def _of_lines(jaxpr: Any, equation: JaxprEqn) -> Iterator[NamedSite]:
    """The lines whose value is a result of an equation."""
    runs = lines_of_program(jaxpr).runs
    for variable in equation.outvars:
        for run, kind in runs.get(variable, ()):
            used = is_used(jaxpr, variable)
            yield _site(run.line.key, kind, variable, used, is_mapped(equation))


def _site(name: str, kind: str, variable: Var, used: bool, mapped: bool) -> NamedSite:
    aval: Any = variable.aval
    return NamedSite(name, kind, (), tuple(aval.shape), str(aval.dtype), used, None, mapped, None)
