"""What a run is asked for, and what it has found so far."""

import dataclasses
from collections.abc import Sequence

from clipgrad._check.report import Failure


@dataclasses.dataclass(frozen=True)
class Options:
    """How to check: the parameters of `check_grads` that choose no leaves."""

    order: int
    mode: str
    delta: float | None
    max_relative_error: float | None
    points: int
    seed: int
    skip: frozenset[str]


@dataclasses.dataclass
class Log:
    """What has been found so far."""

    failures: list[Failure] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    not_run: dict[str, str] = dataclasses.field(default_factory=dict)
    evaluations: int = 0
    verified: int = 0
    precision: str = "no precision"
    devices: list[str] = dataclasses.field(default_factory=list)

    def fail(self, failures: Sequence[Failure], options: Options) -> None:
        """Record failures, but for those of checks that are switched off."""
        self.failures += [f for f in failures if f.check not in options.skip]
