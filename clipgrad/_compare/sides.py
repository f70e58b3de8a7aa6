"""The sides of a comparison: a version that runs now, or the run of one that was saved."""

from collections.abc import Callable

from clipgrad._compare.differences import floor_of
from clipgrad._compare.run_facts import RunFacts, run_facts
from clipgrad._compare.signatures import signature
from clipgrad._compare.versions import SketchedNames, Version, VersionProgram, VersionRun


class LiveSide:
    """A version that runs when it is compared.

    Args:
      version: the version.
      signed: whether arguments and gradients are signed, as beside a run from a file.
    """

    def __init__(self, version: Version, signed: bool = False) -> None:
        self.version = version
        self.facts = facts_of(version) if signed else None
        self._view: Callable[[VersionRun], VersionRun] = with_signatures if signed else _as_it_is

    def run(self, names: SketchedNames) -> VersionRun:
        """Run it, with the sketches of values of these names."""
        self._program = VersionProgram(self.version, names)
        self._found = self._program()
        return self._view(self._found)

    def floor(self) -> VersionRun:
        """The movement of the results of the run by the rounding of its program."""
        return self._program.floor(self._found, self._view)


def facts_of(version: Version) -> RunFacts:
    """The facts of a version that is to run now."""
    given = version.subject
    assert given is not None  # it does not come from a file
    params = {leaf.path: given.inputs[leaf.position] for leaf in version.leaves}
    left = set(range(len(given.inputs))) - set(given.chosen)
    return run_facts(params, {given.names[i]: given.inputs[i] for i in sorted(left)})


class SavedSide:
    """The run of a version, from a file."""

    def __init__(
        self, version: Version, run: VersionRun, floor: VersionRun, facts: RunFacts
    ) -> None:
        self.version, self.facts = version, facts
        self._run, self._floor = run, floor

    def run(self, names: SketchedNames) -> VersionRun:
        """The results, of all names."""
        del names
        return self._run

    def floor(self) -> VersionRun:
        """The movement of the results by rounding."""
        return self._floor


Side = LiveSide | SavedSide


def without_floor(run: VersionRun) -> VersionRun:
    """No movement."""
    return floor_of(run, ())


def with_signatures(run: VersionRun) -> VersionRun:
    """The run with a sketch in place of each gradient."""
    return run._replace(grads=[signature(x).sketch for x in run.grads])


def _as_it_is(run: VersionRun) -> VersionRun:
    return run
