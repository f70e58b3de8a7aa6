"""The names of the variables inside of a function, and the rules for them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

import clipgrad._jaxpr as _jaxpr
from clipgrad._frameworks import Pure, with_models
from clipgrad._rules import as_rule, is_rule
from clipgrad._trees import is_array, matches, nearest

Rules = Mapping[str, Callable[..., Any] | None]


class Name(NamedTuple):
    """A name of variables inside of a function.

    Attributes:
      name: the tag, or the path of the module.
      kind: ``"tag"`` or ``"module"``.
      shape: the shape of the largest of its variables, as it is within one step of a scan.
      dtype: its dtype.
      scans: the lengths of the scans around all of its variables, outermost first: the leading
        axes of its statistics.
      sites: how many variables have the name.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    scans: tuple[int, ...]
    sites: int


class Names(tuple[Name, ...]):
    """The names of a function, in the order of computation; `str` is a table."""

    def __str__(self) -> str:
        """The table."""
        rows = [("name", "kind", "shape", "dtype", "scans", "sites")]
        for name in self:
            shape, scans = (" x ".join(map(str, n)) for n in (name.shape, name.scans))
            rows.append((*name[:2], shape or "scalar", str(name.dtype), scans, str(name.sites)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


def list_names(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Names:
    r"""Lists the values inside a function that can be clipped and watched by name.

    Names are tags, given by `jax.ad_checkpoint.checkpoint_name`, and the paths of modules: the
    `jax.named_scope`\ s around an operation, which flax Linen, Haiku and Keras set for each of
    their modules, and in an NNX or Equinox model among the arguments the attribute paths of its
    submodules. See `error_clip_by_name`.

    Guarantees:
      * The function is traced, not run; arrays may be `jax.ShapeDtypeStruct`.
      * All names that a pattern can match are listed: the names of floating or complex variables
        that are used, and whose cotangents can be reached from outside.
      * The names are in the order of computation, a module after the modules inside it.

    Args:
      fun: a function of pytrees.
      args: its arguments, a tuple.
      kwargs: its keyword arguments.

    Returns:
      A tuple of records with ``name``, ``kind``, ``shape``, ``dtype``, ``scans`` and ``sites``;
      its `str` is a table.

    Raises:
      TypeError: if ``fun`` is not a function, ``args`` not a tuple, or ``kwargs`` not a mapping.

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp
      >>> def model(x):
      ...     with jax.named_scope("encoder"):
      ...         h = jnp.tanh(x)
      ...     return h.sum()
      >>> print(cg.list_names(model, (jnp.ones(3),)))
      name     kind    shape  dtype    scans  sites
      encoder  module  3      float32         1
    """
    check_call(fun, args, kwargs)
    program = program_of(fun, args, kwargs or {})[0].program
    listed = {n: sites for n, sites in _sites_by_name(program).items() if _is_listed(sites)}
    return Names(_name_of_sites(name, listed[name]) for name in _inner_first(listed))


def _inner_first(names: Iterable[str]) -> list[str]:
    """Names in their order, but each after those inside it: some leave a module before its end."""
    last: dict[str, int] = {}
    for i, name in enumerate(names):
        segments = name.split("/")
        last |= {"/".join(segments[:depth]): i for depth in range(1, len(segments) + 1)}
    return sorted(names, key=lambda name: (last[name], -name.count("/")))


def program_of(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[_jaxpr.Traced, bool]:
    """The program of a function, and whether it would change an NNX model; here they stay."""
    traced: list[_jaxpr.Traced] = []
    changes: list[bool] = []

    def read(function: Any, args: Any, kwargs: Any) -> None:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            changes.append(isinstance(function, Pure) and bool(result[0]))
            return result

        traced.append(_jaxpr.trace(noted, args, kwargs))

    with_models(read, fun, args, kwargs)
    return traced[0], changes[0]


def common_nest(sites: Iterable[_jaxpr.NamedSite]) -> tuple[int, ...]:
    """The lengths of the scans around all sites, as far as they agree from the outermost on."""
    shape = []
    for lengths in zip(*(site.nest for site in sites), strict=False):
        if len(set(lengths)) > 1:
            break
        shape.append(lengths[0])
    return tuple(shape)


Sites = dict[_jaxpr.NamedSite, int]


def _sites_by_name(program: Any) -> dict[str, Sites]:
    """The sites of each name; a tag hides the module whose path is its name."""
    found = _jaxpr.sites(program)
    tags = {site.name for site in found if site.kind == "tag"}
    names: dict[str, Sites] = {}
    for site, count in sorted(found.items(), key=lambda item: not item[0].has_cotangent):
        if site.kind == "tag" or site.name not in tags:
            names.setdefault(site.name, {})[site] = count
    return names


def _is_listed(sites: Sites) -> bool:
    return any(s.has_cotangent for s in sites) and not any(site.is_out_of_reach for site in sites)


def _name_of_sites(name: str, sites: Sites) -> Name:
    own = {site: count for site, count in sites.items() if site.has_cotangent}
    largest = max(own, key=lambda site: math.prod(site.shape))
    shape, dtype = largest.shape, np.dtype(largest.dtype)
    return Name(name, largest.kind, shape, dtype, common_nest(own), sum(own.values()))


class Chosen(NamedTuple):
    """What was asked for a name."""

    kind: str
    rule: Any


Resolved = dict[str, Chosen]


def resolved(program: Any, rules: Rules, caller: str) -> Resolved:
    """The rule of each name of a program that these names and patterns are, or match.

    What is written out wins over a pattern. An error says which one matches nothing, or nothing
    whose cotangents can be reached.
    """
    there = _sites_by_name(program)
    exact = {name: rule for name, rule in rules.items() if name in there or "*" not in name}
    for name in exact:
        _check_cotangents(name, {name: there[name]} if name in there else {}, there, caller)
    names = {name: Chosen(_kind_of_sites(there[name]), rule) for name, rule in exact.items()}
    origin: dict[str, str] = {}
    for pattern, rule in rules.items():
        for name in () if pattern in exact else _matched(pattern, there, caller):
            if name in exact:
                continue
            if name in names and not _are_equal(names[name].rule, rule):
                raise ValueError(
                    f"{caller}: got {origin[name]!r} and {pattern!r} with different rules, which "
                    f"both match {name!r}, expected one rule for it; add a rule for {name!r} itself"
                )
            names[name], origin[name] = Chosen(_kind_of_sites(there[name]), rule), pattern
    return names


def _are_equal(first: Any, second: Any) -> bool:
    """Whether two rules are the same, or have the same type and thresholds; tracers are unknown."""
    (ours, structure), (theirs, other) = map(jax.tree.flatten, (first, second))
    return structure == other and all(map(_is_same, ours, theirs))


def _is_same(a: Any, b: Any) -> bool:
    if a is b or isinstance(a, Tracer) or isinstance(b, Tracer):
        return a is b
    if is_array(a) or is_array(b):
        return jnp.result_type(a) == jnp.result_type(b) and bool(np.array_equal(a, b))
    return bool(a == b)


def _kind_of_sites(sites: Sites) -> str:
    return next(iter(sites)).kind


def _matched(pattern: str, there: dict[str, Sites], caller: str) -> Iterator[str]:
    found = {name: sites for name, sites in there.items() if matches(pattern, name)}
    listed = [name for name, sites in found.items() if _is_listed(sites)]
    if not listed:
        _check_cotangents(pattern, found, there, caller)
    yield from listed


def _check_cotangents(
    wanted: str, found: dict[str, Sites], there: dict[str, Sites], caller: str
) -> None:
    """Raises an error if what a name or a pattern matches can't be clipped."""
    own = [site for sites in found.values() for site in sites]
    names = "tags" if own and own[0].kind == "tag" else "names"
    if not own:
        instead = (
            "* stands for any text within a segment, ** for any number of segments"
            if "*" in wanted
            else f"tag a variable with x = jax.ad_checkpoint.checkpoint_name(x, {wanted!r})"
        )
        raise ValueError(
            f"{caller}: got {wanted!r}, expected a name that is tagged in this function, or the "
            f"path of a module in it (NNX and Equinox: in a model among its arguments); "
            f"{nearest(wanted, there)}; {instead}"
        )
    closed = next((site.within for site in own if site.is_out_of_reach), None)
    if closed:
        inside = [name for name, sites in there.items() if any(s.within == closed for s in sites)]
        raise ValueError(
            f"{caller}: got {wanted!r}, which {names} a variable inside of {closed}, expected "
            f"one whose cotangents can be reached from outside, unlike those of {inside}; name an "
            "input or an output of it, or write clip_cotangent in its backward pass"
        )
    if not any(site.is_differentiable for site in own):
        raise TypeError(
            f"{caller}: got {wanted!r}, which {names} {own[0].dtype} values, expected floating or "
            "complex values; others have no cotangents"
        )
    if not any(site.used and site.is_differentiable for site in own):
        raise ValueError(
            f"{caller}: got {wanted!r}, which {names} an unused value, expected one that "
            "the result depends on; with a tag write x = checkpoint_name(x, name), and use that x"
        )


def check_function(fun: Any) -> None:
    """Raises `TypeError` if what is transformed is not a function, or is a rule."""
    if is_rule(fun) or not callable(fun):
        raise TypeError(f"fun: got {fun!r}, expected a function; the rules come second")


def check_call(fun: Any, args: Any, kwargs: Any) -> None:
    """Raises `TypeError` for what is not a function, a tuple of arguments, a mapping of others."""
    check_function(fun)
    if not isinstance(args, tuple):
        raise TypeError(
            f"args: got {type(args).__name__}, expected a tuple; for one argument write (x,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs: got {type(kwargs).__name__}, expected a mapping, such as a dict")


def checked_rules(rules: Any, prefix: Any = "") -> dict[str, Any]:
    """The rules with the prefix before their names; `TypeError` for what is not a mapping."""
    if not isinstance(rules, Mapping) or not all(isinstance(name, str) for name in rules):
        raise TypeError(
            f"rules: got {rules!r}, expected a mapping from names to rules, such as "
            '{"h": ErrorClipByValue(max=5.0)}; for every intermediate value write '
            "error_clip_everywhere(fun, rule)"
        )
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: got {prefix!r}, expected a string to put before each name")
    return {prefix + name: rule_of_variable(rule) for name, rule in rules.items()}


def rule_of_variable(rule: Any) -> Any:
    """The rule of a variable inside of a function; `TypeError` for one that needs parameters."""
    if getattr(as_rule(rule), "needs_params", False):
        raise TypeError(
            f"rule: got {rule!r}, which needs parameters, expected a rule that does not, since a "
            "variable has none; to measure the variable itself write clip_cotangent(x, rule)"
        )
    return rule
