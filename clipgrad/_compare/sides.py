"""The sides of a comparison: a version that runs now, or the run of one that was saved."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from clipgrad._compare.run_facts import RunFacts, run_facts
from clipgrad._compare.signatures import signature
from clipgrad._compare.versions import Version, VersionProgram, VersionRun


class Side(NamedTuple):
    """A version, and what gives its results.

    Attributes:
      version: the version.
      run: gives the results of a run.
      floor: gives their movement by the rounding of its program.
      facts: its arguments and circumstances beside a run from a file, where gradients are known by
        their sketches; or None.
    """

    version: Version
    run: Callable[[], VersionRun]
    floor: Callable[[], VersionRun]
    facts: RunFacts | None


def live_side(version: Version, signed: bool) -> Side:
    """A version that runs when it is compared; signed beside a run from a file."""
    view = with_signatures if signed else lambda run: run
    program = functools.cache(lambda: VersionProgram(version))
    found = functools.cache(lambda: view(program()()))
    facts = facts_of(version) if signed else None
    return Side(version, found, lambda: program().floor(found(), view), facts)


def facts_of(version: Version) -> RunFacts:
    """The facts of a version that is to run now."""
    given = version.subject
    assert given is not None  # it does not come from a file
    params = {leaf.path: given.inputs[leaf.position] for leaf in version.leaves}
    left = set(range(len(given.inputs))) - set(given.chosen)
    return run_facts(params, {given.names[i]: given.inputs[i] for i in sorted(left)})


def saved_side(version: Version, run: VersionRun, floor: VersionRun, facts: RunFacts) -> Side:
    """The run of a version, from a file."""
    return Side(version, lambda: run, lambda: floor, facts)


def with_signatures(run: VersionRun) -> VersionRun:
    """The run with a sketch in place of each gradient."""
    return run._replace(grads=[signature(x).sketch for x in run.grads])
