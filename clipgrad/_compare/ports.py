"""A version of a loss in JAX beside the run of a model in another framework."""

import dataclasses
import os
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np

from clipgrad._compare.ancestors import Ancestors
from clipgrad._compare.closeness import NEAR, Sketched
from clipgrad._compare.comparison import GradientComparison
from clipgrad._compare.differences import judge, rounding
from clipgrad._compare.gradients import comparison_of
from clipgrad._compare.kinship import Kinship
from clipgrad._compare.matching import Instance, Pair, Renamed
from clipgrad._compare.places import ComparedPlace
from clipgrad._compare.port_leaves import (
    PortLeaves,
    compared_leaves,
    match_leaves,
    parameter_finding,
    parameter_texts,
)
from clipgrad._compare.port_names import similarity
from clipgrad._compare.port_record import PortEntry, PortRun
from clipgrad._compare.port_values import PortPair, match_values
from clipgrad._compare.program_record import OperationRecord, ProgramRecord
from clipgrad._compare.records import ComparisonFinding
from clipgrad._compare.sides import Side
from clipgrad._compare.versions import Version, VersionRun, VersionValue
from clipgrad._names import Location


class _Likeness:
    """The likeness of names in JAX and in the other framework; names that a user gave are one.

    Args:
      names: names in the other framework by names in JAX.
      roots: the outermost scopes in JAX; the name of the whole model says nothing.

    Attributes:
      kin: which modules hold the same parameters, as soon as it is known.
    """

    kin: Kinship | None = None

    def __init__(self, names: Mapping[str, str], roots: set[str]) -> None:
        slashed = {own: other.replace(".", "/") for own, other in names.items()}
        self.renamed = Renamed(slashed)
        self._root = f"{roots.pop()}/" if len(roots) == 1 else ""
        self._known: dict[Any, float] = {}

    def __call__(self, name: str, steps: tuple[int, ...], entry: PortEntry) -> float:
        key = name, steps, entry.name, entry.steps
        if key not in self._known:
            other, wanted = entry.name.replace(".", "/"), self.renamed(name)
            own = wanted if wanted != name else name.removeprefix(self._root)
            found = similarity(own, other, (steps, entry.steps))
            shared = self.kin.share(name, steps, entry.name) if self.kin else None
            self._known[key] = found if shared is None else (found + 9 * shared) / 10
        return self._known[key]

    def learn(self, kin: Kinship) -> None:
        """Take into account which modules hold the same parameters."""
        self.kin = kin
        self._known.clear()


def compare_port(
    side: Side, port: PortRun, names: Mapping[str, str] | None, rtol: float | None
) -> GradientComparison:
    """Compare a version in JAX with the run of another framework's model.

    The rounding of the program in JAX is measured; the other's is as large, and is added.
    """
    version = side.version
    run = side.run()
    floor = side.floor()
    assert side.facts is not None  # it is signed, beside a file
    roots = {value.name.split("/")[0] for value in version.values if value.name}
    like = _Likeness(names or {}, roots)
    signed = {**side.facts.params, **side.facts.data}
    leaves = match_leaves(signed, _sketched_gradients(version, run, floor), port.leaves, like, rtol)
    arguments = parameter_texts(leaves, like)
    like.learn(leaves.kin)
    values = match_values(version, run, floor, port.values, like, rtol)
    like.renamed.check(
        [v.name for v in version.values], [e.name.replace(".", "/") for e in port.values]
    )
    eps = rounding(version.loss_dtype, port.loss_dtype)
    loss = judge(run.loss, port.loss, 2 * floor.loss, eps, rtol)
    # If the loss agrees, what is far from all of the other framework's values is cut otherwise.
    pairs = [p for p in values.pairs if loss.differs or p.value.judgment.difference < NEAR]
    places = [_port_place(pair) for pair in pairs]
    other = Version(_NO_PROGRAM, [], [], port.loss_dtype, frozenset())
    compared = compared_leaves(version.leaves, leaves)
    found = comparison_of(
        version, other, places, loss, compared, [*values.unmatched, *_arrays_alone(leaves)]
    )
    used = _used_arguments(side, pairs) if found.findings else set()
    return _explained(found, pairs, arguments, used, port)


_NO_PROGRAM = ProgramRecord((), (), (), ())
_MADE = OperationRecord("", (), (), (), saved=(Location(None, None, None), None))


def _sketched_gradients(
    version: Version, run: VersionRun, floor: VersionRun
) -> dict[str, Sketched]:
    rows = zip(version.leaves, run.grads, floor.grads, strict=True)
    return {
        leaf.path: Sketched(np.asarray(g), np.asarray(moved), leaf.shape, leaf.dtype)
        for leaf, g, moved in rows
    }


def _port_place(pair: PortPair) -> ComparedPlace:
    """A pair as a place of a comparison; of the other framework there is no program."""
    other = pair.other
    value = VersionValue(
        (), f"{other.name} ", other.kind, jnp.dtype("float32"), other.value.shape, False, -1,
        _MADE, (), (_NO_PROGRAM,),
    )  # fmt: skip
    return ComparedPlace(
        Pair(pair.own, Instance(value, other.steps, ())), pair.value.judgment, pair.cotangent
    )


def _arrays_alone(leaves: PortLeaves) -> list[str]:
    """The parameters that only one side has."""
    ours = [f"{path} {list(own.shape)}" for path, own in leaves.alone.items()]
    whole = [e for e in leaves.others if e.kind == "parameter" and "*" not in e.name]
    theirs = [f"{e.name} {list(e.value.shape)}" for e in whole]
    rows = (("JAX", ours), ("torch", theirs))
    return [f"arrays only in {where}: {', '.join(names)}" for where, names in rows if names]


def _used_arguments(side: Side, pairs: Sequence[PortPair]) -> set[str]:
    """The arguments of which the first value that differs is computed, behind those that agree."""
    version, facts = side.version, side.facts
    assert facts is not None  # it is signed, beside a file
    positions = {leaf.path: leaf.position for leaf in version.leaves}
    left = sorted({*range(len(version.program.inputs))} - {*positions.values()})
    positions |= dict(zip(facts.data, left, strict=False))
    bad = [pair.own.value for pair in pairs if pair.value.judgment.differs]
    agreeing = {pair.own.value.variable for pair in pairs} - {value.variable for value in bad}
    used = Ancestors((), agreeing).inputs(bad[0] if bad else version.program)
    return {path for path, i in positions.items() if i in used}


def _explained(
    found: GradientComparison,
    pairs: Sequence[PortPair],
    arguments: Mapping[str, str],
    used: Set[str],
    port: PortRun,
) -> GradientComparison:
    """A comparison with what the other framework's file says of it.

    Arguments that differ are no finding if what differs first is not computed of them: they fit
    values that have another layout.
    """
    blamed = {path: text for path, text in arguments.items() if path in used}
    first = [parameter_finding(blamed)] if blamed else []
    others = {path: text for path, text in arguments.items() if path not in used}
    texts = [parameter_finding(others).message] if others else []
    notes = (*found.notes, *texts, *_mode_notes(port))
    findings = [_with_other(finding, pairs) for finding in found.findings]
    return dataclasses.replace(found, findings=(*first, *findings), notes=notes)


def _with_other(finding: ComparisonFinding, pairs: Sequence[PortPair]) -> ComparisonFinding:
    """A finding with the name and the line of the value in the other framework."""
    bad = [i for i, pair in enumerate(pairs) if pair.value.judgment.differs]
    if finding.kind != "value" or not bad:
        return finding
    other = pairs[bad[0]].other
    verb = "enters" if other.kind == "enters" else "leaves"
    text = f"{finding.message}; in torch it {verb} {other.name or 'the model'} ({other.owner}"
    if other.file is not None:
        text += f", {os.path.basename(other.file)}:{other.line}"
    text += ")"
    if not finding.module:
        own = pairs[bad[0]].own.value.name
        before = f"{pairs[bad[0] - 1].own.value.name} (agrees)" if bad[0] else "the arguments"
        text += f"; it is outside of modules, between {before} and {own or 'the end'}"
    return dataclasses.replace(finding, message=text)


def _mode_notes(port: PortRun) -> list[str]:
    dropped = port.circumstances.get("dropout")
    if not dropped:
        return []
    return [
        f"torch ran {', '.join(dropped)} in training mode, with random dropout; write model.eval() "
        "before save_run, or set p=0"
    ]
