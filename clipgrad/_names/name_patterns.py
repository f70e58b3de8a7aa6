"""The variables of a program that names and patterns choose."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from clipgrad._arrays import (
    Pattern,
    check_pattern,
    is_pattern,
    leaves_out,
    matches,
    nearest,
    pattern_text,
    with_paths,
    without_sign,
)
from clipgrad._errors import first_few
from clipgrad._flax import has_nnx
from clipgrad._names.line_names import LineKeys, asked_lines
from clipgrad._names.lines import LINE, is_line_pattern
from clipgrad._names.scopes import common_start
from clipgrad._names.sites import NamedSite, Sites, sites
from clipgrad._programs import WHILES

_WITH_NAMES = (
    "one with tagged variables or modules; tag one with x = jax.ad_checkpoint.checkpoint_name(x, "
    '"x"), or compute it in a module: with jax.named_scope("x"):; an NNX or Equinox model has '
    "names if it is an argument: fun(model, ...)"
)
_WITH_LINES = (
    '; a line is a name, too, such as "model.py:14": list_names(fun, args, lines=True) lists the '
    "lines"
)
_OF_MERGED = (
    "; a model that fun merges has none: write a function of the model for {caller}, and call what "
    "it returns with nnx.merge(graphdef, params, copy=True)"
)


def sites_by_name(program: Any) -> dict[str, Sites]:
    """The sites of each name; a tag hides the module whose path is its name."""
    counts = sites(program)
    tags = {site.name for site in counts if site.kind == "tag"}
    names: dict[str, Sites] = {}
    for site, count in counts.items():
        if site.kind == "tag" or site.name not in tags:
            names.setdefault(site.name, {})[site] = count
    return names


def common_nest(sites: Iterable[NamedSite]) -> tuple[int, ...]:
    """The lengths of the scans around all sites, as far as they agree from the outermost on."""
    return common_start(site.nest for site in sites)


_VERBS = {"tag": "tags", LINE: "computes"}


class Target(NamedTuple):
    """The variables with a name that are clipped or watched."""

    noun: str
    choice: str  # what is given for a name
    has: Callable[[NamedSite], bool]  # a name without such a site is an error
    barrier: Callable[[NamedSite], str | None]  # the primitive that it can't leave
    in_loops: bool = False  # whether a name that is only in while loops may be given

    def lists(self, sites: Iterable[NamedSite]) -> bool:
        """Whether a pattern matches the name of these sites."""
        return any(map(self.has, sites)) and not any(map(self.barrier, sites))

    def counted(self, sites: Sites) -> Sites:
        """Those of the sites of a name that count: if nothing uses some values, the others."""
        there = {site: count for site, count in sites.items() if self.has(site)}
        return {site: count for site, count in there.items() if site.used} or there


class Match(NamedTuple):
    kind: str
    rule: Any


Matches = dict[str, Match]


def resolved(
    program: Any, rules: Mapping[Any, Any], caller: str, target: Target, arguments: Any = ()
) -> Matches:
    """The rule of each name of a program that these names and patterns are, or match.

    What is written out wins over a pattern, and a pattern with ``!`` leaves out what those before
    it match; if it is the first of them, it is for all other names. An error says which one matches
    nothing, or nothing that can be reached, or is the name of a leaf of the arguments.
    """
    others = sites_by_name(program)
    lines = asked_lines(program, rules, others)
    patterns = [pattern for pattern in rules if pattern not in others and is_pattern(pattern)]
    names: Matches = {}
    origin: dict[str, Pattern] = {}
    for key in sorted(rules, key=patterns.__contains__):
        is_line = key not in others and is_line_pattern(key)
        there = lines.sites if is_line else others
        matched = lines.meant(key, caller) if is_line else _meant(key, there, patterns)
        if key in patterns and leaves_out(key):
            _check_found(key, matched, there, caller, target._replace(has=lambda site: True))
            for name in matched.keys() & {name for name in names if origin[name] in patterns}:
                del names[name], origin[name]
            if key != next(iter(rules)):
                _check_after_a_pattern(key, patterns, caller)
                continue
            matched = {name: sites for name, sites in there.items() if name not in matched}
        listed = [name for name, sites in matched.items() if target.lists(sites)]
        if key not in patterns or not listed:
            _check_found(key, matched, there, caller, target, arguments)
        for name in listed if key in patterns else matched:
            first = origin.setdefault(name, key)
            is_double = first in patterns or is_line and key not in patterns
            if is_double and not _is_same_choice(rules[first], rules[key]):
                raise ValueError(
                    f"{caller}: got {first!r} and {key!r} with a {target.choice} each, "
                    f"which both match {name!r}, expected one {target.choice} for it; add one for "
                    f"{name!r} itself"
                )
            names.setdefault(name, Match(next(iter(there[name])).kind, rules[key]))
    return names


def _is_same_choice(choice: Any, other: Any) -> bool:
    """Whether two choices are equal; those that can't be compared, as with arrays, are not."""
    try:
        return choice is other or bool(choice == other)
    except (TypeError, ValueError):
        return False


def _meant(key: Pattern, there: dict[str, Sites], patterns: Sequence[Pattern]) -> dict[str, Sites]:
    """The names that one written out or a pattern means, or that a pattern leaves out."""
    if key not in patterns:
        return {name: sites for name, sites in there.items() if name == key}
    pattern = without_sign(key)
    return {name: sites for name, sites in there.items() if matches(pattern, name)}


def _check_after_a_pattern(pattern: Pattern, patterns: Sequence[Pattern], caller: str) -> None:
    """Refuses a pattern that leaves out of nothing: names that are written out stay."""
    if pattern == patterns[0]:
        raise ValueError(
            f"{caller}: got {pattern!r} after names alone, expected it after a pattern, such as "
            '"**", whose names it takes away, or first, where it means all other names'
        )


def _check_found(
    name: Pattern,
    matched: dict[str, Sites],
    there: dict[str, Sites],
    caller: str,
    target: Target,
    arguments: Any = (),
) -> None:
    """Raises an error unless what a name or a pattern matches can be clipped or watched."""
    all_sites = [site for sites in matched.values() for site in sites]
    if not all_sites:
        check_pattern(name, caller)
        instead = (
            "* stands for any text within a segment, ** for any number of segments"
            if is_pattern(name)
            else f"tag a variable with x = jax.ad_checkpoint.checkpoint_name(x, {name!r})"
        )
        raise ValueError(
            f"{caller}: got {name!r}, expected a name that is tagged in this function, or the "
            f"path of a module in it (NNX and Equinox: in a model among its arguments); "
            f"{nearest(pattern_text(name), there)}; {instead}{_of_leaf(name, arguments)}"
            f"{'' if there else _of_merged(caller)}"
        )
    got = f"{caller}: got {name!r}, which {_VERBS.get(all_sites[0].kind, 'names')}"
    closed = next(filter(None, map(target.barrier, all_sites)), None)
    if closed:
        inside = [n for n, sites in there.items() if closed in map(target.barrier, sites)]
        advice = "" if target is VALUES else ", or write clip_cotangent in its backward pass"
        raise ValueError(
            f"{got} a variable inside of {closed}, expected one whose {target.noun} can be reached "
            f"from outside, unlike those of {inside}; name an input or an output of it{advice}"
        )
    _check_has(got, all_sites, target)


def _of_leaf(name: Pattern, arguments: Any) -> str:
    """A hint for the name of a parameter, which is no name of a value inside of the function."""
    paths = [path for path, _ in with_paths(arguments)]
    if not any(f"/{name}/" in f"/{path}/" for path in paths):
        return ""
    return (
        "; to clip the gradient of a parameter write clip_by_norm(max_norm, "
        f"where={name!r}) in the optimizer"
    )


def _check_has(got: str, all_sites: Sequence[NamedSite], target: Target) -> None:
    """Raises an error that says why none of these sites has what the target needs."""
    if any(map(target.has, all_sites)):
        return
    if not any(site.is_differentiable for site in all_sites):
        reason = "" if target is VALUES else "; others have no cotangents"
        raise TypeError(
            f"{got} {all_sites[0].dtype} values, expected floating or complex values{reason}"
        )
    if not any(site.used and site.is_differentiable for site in all_sites):
        raise ValueError(
            f"{got} an unused value, expected one that the result depends on; with a tag write "
            "x = checkpoint_name(x, name), and use that x; with_value_stats measures the value"
        )
    if target.in_loops:
        return
    raise ValueError(
        f"{got} a value in a while loop, expected one with a cotangent, which JAX does not "
        "compute there (but in a scan, and in a fori_loop whose bounds are Python numbers); "
        "with_value_stats measures the value"
    )


CLIPPED = Target(
    "cotangents",
    "rule",
    has=lambda site: site.has_cotangent,
    barrier=lambda site: None if site.within == WHILES.noun else site.within,
)
# Where nothing need be differentiated: such a loop runs, and differentiates forwards.
CLIPPED_IF_DIFFERENTIATED = CLIPPED._replace(in_loops=True)
VALUES = Target(
    "values", "choice", has=lambda site: site.has_value, barrier=lambda site: site.sealed
)


def sites_of(program: Any, names: Matches) -> dict[str, Sites]:
    """The sites of some names of a program."""
    lines = _lines_among(names)
    there = sites_by_name(program)
    of_lines = asked_lines(program, lines, {}).sites
    return {name: of_lines[name] if name in lines else there[name] for name in names}


def line_keys(program: Any, names: Matches) -> LineKeys:
    """The keys of the lines among some names of a program, each with its name."""
    lines = _lines_among(names)
    return asked_lines(program, lines, {}).keys(lines)


def _lines_among(names: Matches) -> Matches:
    return {name: chosen for name, chosen in names.items() if chosen.kind == LINE}


def watched_names(
    program: Any,
    watch: Mapping[str, Any] | None,
    caller: str,
    target: Target,
    clipped: Matches | None = None,
) -> Matches:
    """The names that are watched; without a choice all tags, or if none has any all modules.

    A program of which lines alone are ``clipped`` needs no other names.
    """
    if watch is not None:
        return resolved(program, watch, caller, target)
    all_sites = sites(program)
    tags = (site for site in all_sites if site.kind == "tag")
    with_values = dict.fromkeys(s.name for s in tags if target.barrier(s) or target.has(s))
    if not with_values and not any(map(target.has, all_sites)):
        if clipped:
            return {}
        got = f"whose names have no {target.noun} to watch" if all_sites else "without tags"
        more = _of_merged(caller)
        raise ValueError(
            f"{caller}: got a function {got}, expected {_WITH_NAMES}{_WITH_LINES}{more}"
        )
    return resolved(program, with_values or {"**": None}, caller, target)


def _of_merged(caller: str) -> str:
    """The advice for a function that merges an NNX model; "" where there can be none."""
    return _OF_MERGED.format(caller=caller) if has_nnx() else ""


def why_none(there: Mapping[str, Sites], lines: bool) -> str:
    """The reason why none of some names can be watched; of ``lines`` that none is there."""
    all_sites = [site for sites in there.values() for site in sites]
    advice = "" if lines else _WITH_LINES
    if not all_sites:
        what = "no line computes a floating value, and there" if lines else "there"
        return f"{what} are no tags or modules, expected {_WITH_NAMES}{advice}{_of_merged('this')}"
    closed = sorted({site.sealed for site in all_sites if site.sealed})
    names = first_few([*map(repr, there)], 4)
    if closed:
        return (
            f"the values of {names} are inside of {' and '.join(closed)}, from where they can't be "
            "reached; name an input or an output of it"
        )
    dtypes = ", ".join(sorted({site.dtype for site in all_sites}))
    return f"the values of {names} are {dtypes}, expected floating or complex values"


def checked_watch(watch: Any) -> dict[str, Any] | None:
    """The names to watch; `TypeError` for what is not a collection of names."""
    if watch is None:
        return None
    names = tuple(watch) if isinstance(watch, Iterable) and not isinstance(watch, str) else None
    if names is None or not all(isinstance(name, Pattern) for name in names):
        raise TypeError(
            f'watch: got {watch!r}, expected names such as ["h"], or None for all names'
        )
    return dict.fromkeys(names)
