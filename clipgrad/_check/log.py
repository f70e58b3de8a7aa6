"""What a run has found so far."""

import dataclasses
from collections.abc import Sequence

from clipgrad._check.options import Options
from clipgrad._check.report import Failure


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
