"""A version of a loss in JAX beside the run of a model in another framework."""

import dataclasses
import os
from collections.abc import Mapping, Sequence, Set

from clipgrad._compare.closeness import NEAR
from clipgrad._compare.comparison import ComparisonFinding, GradientComparison
from clipgrad._compare.differences import judge, rounding
from clipgrad._compare.gradients import comparison_of
from clipgrad._compare.likeness import Likeness
from clipgrad._compare.places import ComparedLeaf, ComparedPlace, JudgedRuns
from clipgrad._compare.port_leaves import (
    PortLeaves,
    match_leaves,
    parameter_finding,
    parameter_texts,
)
from clipgrad._compare.port_record import PortEntry, PortRun
from clipgrad._compare.port_values import match_values
from clipgrad._compare.sides import Side
from clipgrad._compare.signatures import Signature
from clipgrad._compare.slices import Ancestors

Pairs = Sequence[tuple[ComparedPlace, PortEntry]]


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
    values = match_values(version, run, floor, port.values, like, rtol)
    like.renamed.check(
        [v.name for v in version.values], [e.name.replace(".", "/") for e in port.values]
    )
    eps = rounding(version.loss_dtype, port.loss_dtype)
    loss = judge(run.loss, port.loss, 2 * floor.loss, eps, rtol)
    # If the loss agrees, what is far from all of the other framework's values is cut otherwise.
    pairs = [pair for pair in values.pairs if loss.differs or pair[0].value.difference < NEAR]
    known = {pair.path: pair.gradient for pair in leaves.pairs if pair.gradient is not None}
    compared = [
        ComparedLeaf(leaf.path, leaf.position, known[leaf.path])
        for leaf in version.leaves
        if leaf.path in known
    ]
    unmatched = [*values.unmatched, *_arrays_alone(leaves)]
    judged = JudgedRuns([place for place, _ in pairs], loss, compared, unmatched)
    found = comparison_of(version, None, judged)
    used = _used_arguments(side, judged.places) if found.findings else set()
    return _explained(found, pairs, arguments, used, port)


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
    findings = [parameter_finding(blamed)] if blamed else []
    findings += [_with_other(finding, pairs) for finding in found.findings]
    notes = [*found.notes, *([parameter_finding(others).message] if others else [])]
    if dropped := port.circumstances.get("dropout"):
        notes.append(
            f"torch ran {', '.join(dropped)} in training mode, with random dropout; write "
            "model.eval() before save_run, or set p=0"
        )
    return dataclasses.replace(found, findings=tuple(findings), notes=tuple(notes))


def _with_other(finding: ComparisonFinding, pairs: Pairs) -> ComparisonFinding:
    """A finding with the name and the line of the value in the other framework."""
    bad = next((i for i, (place, _) in enumerate(pairs) if place.value.differs), None)
    if finding.kind != "value" or bad is None:
        return finding
    place, other = pairs[bad]
    verb = "enters" if other.kind == "enters" else "leaves"
    text = f"{finding.message}; in torch it {verb} {other.name or 'the model'} ({other.owner}"
    if other.file is not None:
        text += f", {os.path.basename(other.file)}:{other.line}"
    text += ")"
    if not finding.module:
        before = f"{pairs[bad - 1][0].name} (agrees)" if bad else "the arguments"
        text += f"; it is outside of modules, between {before} and {place.name or 'the end'}"
    return dataclasses.replace(finding, message=text)
