"""A version of a loss in JAX beside the run of a model in another framework."""

import collections
import dataclasses
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from clipgrad._compare.comparison import ComparisonFinding, GradientComparison
from clipgrad._compare.differences import Judgment, judge, rounding
from clipgrad._compare.gradients import comparison_of
from clipgrad._compare.likeness import Kinship, Likeness
from clipgrad._compare.places import ONE_ARGUMENT, ComparedLeaf, ComparedPlace, JudgedRuns
from clipgrad._compare.port_record import PortEntry, PortRun
from clipgrad._compare.port_values import ALIKE, match_values
from clipgrad._compare.sides import Side
from clipgrad._compare.signatures import (
    NEAR,
    Candidates,
    Closest,
    Order,
    Signature,
    best_pairs,
    closest_of,
    is_among,
)
from clipgrad._compare.sketches import ENTERS, LARGEST_AT, NORM_AT
from clipgrad._compare.slices import Ancestors, entered_modules, value_scopes
from clipgrad._compare.versions import VersionValue
from clipgrad._names import common_start

Pairs = Sequence[tuple[ComparedPlace, PortEntry]]
_SAME = 1e-5  # norms of the same numbers in another order
_MOST_SHOWN = 5


class LeafPair(NamedTuple):
    """A parameter of a version, the other framework's of the same numbers, and the gradient."""

    path: str
    other: PortEntry
    orders: tuple[Order, ...]
    gradient: Judgment | None


class PortLeaves(NamedTuple):
    """The parameters.

    Attributes:
      pairs: those that are the same numbers.
      alone: those of the version of whose numbers the other framework has none left.
      others: the parameters of the other framework that no pair has, and stacks of these.
      again: of those alone the other's parameter that has these numbers, but is in a pair already.
      kin: which modules hold the same parameters.
    """

    pairs: list[LeafPair]
    alone: dict[str, Signature]
    others: list[PortEntry]
    again: dict[str, PortEntry]
    kin: Kinship


def compare_port(
    side: Side, port: PortRun, names: Mapping[str, str] | None, rtol: float | None
) -> GradientComparison:
    """Compare a version in JAX with the run of another framework's model.

    The rounding of the program in JAX is measured; the other's is as large, and is added.
    """
    version, run, floor = side.version, side.run(), side.floor()
    assert side.facts is not None  # it is signed, beside a file
    roots = {value.name.split("/")[0] for value in version.values if value.name}
    like = Likeness(names or {}, roots)
    gradients = {
        leaf.path: Signature(leaf.shape, leaf.dtype, grad[None], (), floor=moved)
        for leaf, grad, moved in zip(version.leaves, run.grads, floor.grads, strict=True)
    }
    params = {**side.facts.params, **side.facts.data}
    leaves = match_leaves(params, gradients, port.leaves, like, rtol)
    arguments = parameter_texts(leaves, like)
    like.learn(leaves.kin)
    matched, alone = match_values(version, run, floor, port.values, like, rtol)
    like.renamed.check(
        [v.name for v in version.values], [e.name.replace(".", "/") for e in port.values]
    )
    eps = rounding(version.loss_dtype, port.loss_dtype)
    loss = judge(run.loss, port.loss, 2 * floor.loss, eps, rtol)
    pairs = matched if loss.differs else _not_cut_otherwise(matched)
    known = {pair.path: pair.gradient for pair in leaves.pairs if pair.gradient is not None}
    compared = [
        ComparedLeaf(leaf.path, leaf.position, known[leaf.path])
        for leaf in version.leaves
        if leaf.path in known
    ]
    unmatched = [*alone, *_arrays_alone(leaves)]
    judged = JudgedRuns([place for place, _ in pairs], loss, compared, unmatched)
    found = comparison_of(version, None, judged)
    used = _used_arguments(side, judged.places) if found.findings else set()
    return _explained(found, pairs, arguments, used, port)


def _not_cut_otherwise(pairs: Pairs) -> Pairs:
    """The pairs without those that are far apart, unless one that differs is computed of them.

    If the loss agrees, what is far from all of the other framework's values is cut otherwise; but
    the rounding of a loss in half precision hides much.
    """
    near = [place for place, _ in pairs if place.value.difference < NEAR]
    later = Ancestors([place.pair.own for place in near if place.value.differs])
    return [
        (place, other)
        for place, other in pairs
        if place.value.difference < NEAR or later.has(place.pair.own)
    ]


def _arrays_alone(leaves: PortLeaves) -> list[str]:
    """The parameters that only one side has."""
    ours = [f"{path} {list(own.shape)}" for path, own in leaves.alone.items()]
    whole = [e for e in leaves.others if e.kind == "parameter" and "*" not in e.name]
    theirs = [f"{e.name} {list(e.value.shape)}" for e in whole]
    rows = (("JAX", ours), ("torch", theirs))
    return [f"arrays only in {where}: {', '.join(names)}" for where, names in rows if names]


def _used_arguments(side: Side, places: Sequence[ComparedPlace]) -> set[str]:
    """The arguments of which the first value that differs is computed, behind those that agree."""
    version, facts = side.version, side.facts
    assert facts is not None  # it is signed, beside a file
    positions = {leaf.path: leaf.position for leaf in version.leaves}
    left = sorted({*range(len(version.program.inputs))} - {*positions.values()})
    positions |= dict(zip(facts.data, left, strict=False))
    bad = [place.pair.own.value for place in places if place.value.differs]
    agreeing = {place.pair.own.value.variable for place in places}
    agreeing -= {value.variable for value in bad}
    used = Ancestors((), agreeing).inputs(bad[0] if bad else version.program)
    return {path for path, i in positions.items() if i in used}


def _explained(
    found: GradientComparison,
    pairs: Pairs,
    arguments: Mapping[str, str],
    used: Set[str],
    port: PortRun,
) -> GradientComparison:
    """A comparison with what the other framework's file says of it.

    Arguments that differ are no finding if what differs first is not computed of them: they fit
    values that have another layout.
    """
    blamed = {path: text for path, text in arguments.items() if path in used}
    others = {path: text for path, text in arguments.items() if path not in used}
    findings = [_parameter_finding(blamed)] if blamed else []
    findings += [_with_other(finding, pairs, port.values) for finding in found.findings]
    notes = [*found.notes, *([_parameter_finding(others).message] if others else [])]
    if dropped := port.circumstances.get("dropout"):
        notes.append(
            f"torch ran {', '.join(dropped)} in training mode, with random dropout; write "
            "model.eval() before save_run, or set p=0"
        )
    return dataclasses.replace(found, findings=tuple(findings), notes=tuple(notes))


def _with_other(
    finding: ComparisonFinding, pairs: Pairs, values: Sequence[PortEntry]
) -> ComparisonFinding:
    """A finding with the name and the line of the value in the other framework."""
    bad = next((i for i, (place, _) in enumerate(pairs) if place.value.differs), None)
    if finding.kind != "value" or bad is None:
        return finding
    place, other = pairs[bad]
    verb = "enters" if other.kind == ENTERS else "leaves"
    text = f"{finding.message}; in torch it {verb} {other.name or 'the model'} ({other.owner}"
    if other.file is not None:
        text += f", {os.path.basename(other.file)}:{other.line}"
    text += ")"
    shape, module = place.pair.own.value.shape, finding.module
    if math.prod(shape) != other.value.size:
        text += f", of shape {list(other.value.shape)} beside {list(shape)}"
    if taken := _taken_instead(pairs, bad, values):
        module, own, its = taken
        text += f"; it is computed of {own}, in torch of {its}"
    if not module:
        before = f"{pairs[bad - 1][0].name} (agrees)" if bad else "the arguments"
        text += f"; it is outside of modules, between {before} and {place.name or 'the end'}"
    return dataclasses.replace(finding, message=text, module=module)


def _taken_instead(
    pairs: Pairs, bad: int, values: Sequence[PortEntry]
) -> tuple[str, str, str] | None:
    """The module that passes on another value than the other framework, to one that differs.

    Returns its name and those of the value and of the other one, which the version does not use: if
    it has that one, the module is the one that it leaves.
    """
    place, other = pairs[bad]
    if ENTERS in (other.kind, place.pair.own.value.kind):
        return None
    now = next(i for i, entry in enumerate(values) if entry is other)
    entering = [e for e in values[:now] if e.kind == ENTERS and e.steps == other.steps]
    into = _last_inputs(other, values[:now])
    steps = place.pair.own.steps
    agreeing = [(p, e) for p, e in pairs if p.pair.own.steps == steps and not p.value.differs]
    later = Ancestors(())
    known = [its.value for own, its in agreeing if later.is_used(own.pair.own.value)]
    missed = [x for x in into if not is_among(x, known)]
    for own, its in agreeing if missed else []:
        enters = place.name in entered_modules(own.pair.own.value)
        if enters and not is_among(its.value, into):
            left = (e.name for e in values if e.kind != ENTERS and is_among(e.value, missed[:1]))
            unused = (p.name for p, e in agreeing if p.name and is_among(e.value, missed[:1]))
            around = [e.value for e in entering if other.name.startswith(f"{e.name}.")]
            source = None if is_among(its.value, around) else own.pair.own.value
            module = next(unused, None) or _module_around(source, place.name)
            return module, own.name or "an argument", next(left, "another value")
    return None


def _last_inputs(of: PortEntry, values: Sequence[PortEntry]) -> list[Signature]:
    """The values that enter a module at its last call."""
    own = [e for e in reversed(values) if (e.name, e.steps) == (of.name, of.steps)]
    return [e.value for e in itertools.takewhile(lambda e: e.kind == ENTERS, own)]


def _module_around(value: VersionValue | None, name: str) -> str:
    """The module around the one of a name; of a value from outside, what holds both."""
    around = tuple(name.split("/"))[:-1]
    scopes = around if value is None else (*value_scopes(value), *value.maker.scopes)
    return "/".join(common_start([scopes, around]))


def match_leaves(
    params: Mapping[str, Signature],
    gradients: Mapping[str, Signature],
    entries: Sequence[PortEntry],
    likeness: Likeness,
    rtol: float | None,
) -> PortLeaves:
    """Match parameters whose numbers agree; among several of these, by gradients and by names."""
    candidates = Candidates([entry.value for entry in entries])
    table: dict[tuple[str, int], tuple[Closest, Judgment | None]] = {}
    for path, own in params.items():
        for j, close in _same(own, entries, candidates).items():
            its, gradient = entries[j].cotangent, None
            if path in gradients and its is not None:  # in the orders in which parameters agree
                gradient = closest_of(gradients[path], its, close.at, rtol)
            table[path, j] = close, gradient
    counts = [collections.Counter(pair[i] for pair in table) for i in (0, 1)]
    sure = [(path, j) for path, j in table if counts[0][path] == counts[1][j] == 1]
    kin = Kinship((path, _layers(entries[j], entries)) for path, j in sure)

    def score(path: str, j: int) -> float:
        return _score(path, entries[j], likeness, kin)

    def certain(path: str, j: int) -> float:
        gradient = table[path, j][1]
        return score(path, j) + (gradient is not None and not gradient.differs)

    found = best_pairs(list(table), certain)
    pairs = []
    for path, j in ((path, found[path]) for path in params if path in found):
        close, gradient = table[path, j]
        orders = tuple(entries[j].value.orders[i] for i in close.at)
        pairs.append(LeafPair(path, entries[j], orders, gradient))
    alone = {path: own for path, own in params.items() if path not in found}
    same = {path: [j for p, j in table if p == path] for path in alone}
    again = {
        path: entries[max(numbers, key=lambda j: score(path, j))]
        for path, numbers in same.items()
        if numbers
    }
    layers = {pair.path: _layers(pair.other, entries) for pair in pairs}
    covered = {name for names in layers.values() for name in names}
    whole = (e for e in entries if e.kind == "argument" or "[" not in e.name)
    others = [e for e in whole if covered.isdisjoint(_layers(e, entries))]
    return PortLeaves(pairs, alone, others, again, Kinship(layers.items()))


def _same(
    own: Signature, entries: Sequence[PortEntry], candidates: Candidates
) -> dict[int, Closest]:
    """The entries that are the same numbers; integers of the other framework may be longer."""
    if not own.digests:
        return {j: close for j, close in candidates.closest(own).items() if close.agrees}
    (digest,), exact = own.digests, Judgment(0.0, 0.0)
    found = ((j, entry.value.digests) for j, entry in enumerate(entries))
    return {j: Closest(exact, True, (x.index(digest),)) for j, x in found if digest in x}


def _score(path: str, entry: PortEntry, likeness: Likeness, kin: Kinship) -> float:
    """The likeness of two parameters, and the share that the modules around both have."""
    shared = kin.share(path.rpartition("/")[0], (), entry.name.rpartition(".")[0])
    return likeness(path, (), entry) + (shared or 0.0)


def _layers(entry: PortEntry, entries: Sequence[PortEntry]) -> list[str]:
    """The names of the whole parameters that an entry is, stacks or is a part of."""
    name = entry.name if entry.kind == "argument" else entry.name.split("[")[0]
    if "*" not in name:
        return [name]
    pattern = re.compile(re.escape(name).replace(r"\*", r"\d+"))
    return [other.name for other in entries if pattern.fullmatch(other.name)]


def parameter_texts(found: PortLeaves, likeness: Likeness) -> dict[str, str]:
    """A text for each parameter that holds other numbers or is turned."""
    return dict(_other_numbers(found, likeness)) | dict(_odd_orders(found.pairs))


def _parameter_finding(texts: Mapping[str, str]) -> ComparisonFinding:
    """The finding of parameters of which there are texts."""
    shown = list(texts.values())[:_MOST_SHOWN]
    more = f"; and {len(texts) - _MOST_SHOWN} more" if len(texts) > _MOST_SHOWN else ""
    text = f"{len(texts)} of the arguments differ: {'; '.join(shown)}{more}"
    return ComparisonFinding("argument", text, path=next(iter(texts)))


def _other_numbers(found: PortLeaves, likeness: Likeness) -> Iterator[tuple[str, str]]:
    """The parameters of which the other framework has one with this name, but other numbers."""
    left = list(found.others)
    for path, own in found.alone.items():
        shifts = ((pair.other.name, _shift(pair.path, path)) for pair in found.pairs)
        siblings = [(name, shift) for name, shift in shifts if shift]  # in other layers
        scores = {
            e.name: _score(path, e, likeness, found.kin)
            + any(_shift(name, e.name) == shift for name, shift in siblings)
            for e in left
            if _may_be(own, e.value)
        }
        near = [e for e in left if e.name in scores]
        named = max(near, key=lambda e: scores[e.name], default=None)
        name = path or ONE_ARGUMENT
        if path in found.again and (named is None or found.again[path].name != named.name):
            where = f", not of {named.name}" if named else ""
            yield path, f"{name} has the numbers of {found.again[path].name}{where}"
        elif named is not None and scores[named.name] >= ALIKE:
            yield path, f"{name} is not {named.name}{_same_numbers(own, named.value)}"
        else:
            continue
        if named is not None:
            left.remove(named)


def _shift(first: str, second: str) -> int | None:
    """The difference of the one number that two names differ in, if they do in nothing else."""
    tokens = [re.split(r"(\d+)", name) for name in (first, second)]
    apart = [(a, b) for a, b in zip(*tokens, strict=False) if a != b]
    is_one = len(tokens[0]) == len(tokens[1]) and len(apart) == 1
    numbers = [int(token) for token in apart[0] if token.isdigit()] if is_one else []
    return numbers[1] - numbers[0] if len(numbers) == 2 else None


def _may_be(own: Signature, other: Signature) -> bool:
    """Whether two arrays can be compared at all: digests are of int32."""
    is_kind = str(own.dtype) == "int32" if own.digests else bool(len(other.sketches))
    return is_kind and bool(other.digests) == bool(own.digests) and other.size == own.size


def _same_numbers(own: Signature, other: Signature) -> str:
    """A note that two arrays have the same norm, and so the same numbers in another order."""
    sizes = [x.sketches[:1, [NORM_AT, LARGEST_AT]] for x in (own, other)]
    is_same = sizes[0].size and np.allclose(*sizes, rtol=_SAME, atol=0) and np.all(sizes)
    return ", but has the same numbers in another order" if is_same else ""


def _odd_orders(pairs: Sequence[LeafPair]) -> Iterator[tuple[str, str]]:
    """The parameters whose axes are in another order than those of others of their kind.

    Of those that are not square the shape would say so.
    """
    kinds: dict[tuple, list[LeafPair]] = collections.defaultdict(list)
    for pair in pairs:
        if len(pair.orders[0]) > 1:
            name = pair.other.name.rpartition(".")[2].split("[")[0]
            kinds[pair.other.owner, name, len(pair.orders[0])].append(pair)
    for own in kinds.values():
        counts = collections.Counter(order for pair in own for order in pair.orders)
        most, count = counts.most_common(1)[0]
        for pair in own:
            shape = pair.other.value.shape
            turned = [[shape[i] for i in order] for order in (most, pair.orders[0])]
            if most not in pair.orders and count > 1 and turned[0] == turned[1]:
                text = f"{pair.path} is {pair.other.name} with its axes as {pair.orders[0]}; those "
                text += f"of {count} others are as {most}"
                yield pair.path, text
