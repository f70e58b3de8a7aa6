"""What a comparison took its time for, and a note of it where that was long."""

import contextlib
import time
from collections.abc import Callable, Iterator

from clipgrad._errors import note_of_time

TRACING, RUNS, ROUNDING, LINES = (
    "tracing",
    "one run of each version, compiled first",
    "measuring what rounding does",
    "one more run of each version, with the lines of a module",
)
_FEWER = "fewer layers, or a layer in a scan, compile faster, and a smaller batch runs faster"
# What makes each of them take less.
SHORTER = {
    TRACING: "a part of the program, such as a few of its layers, takes less",
    RUNS: _FEWER,
    ROUNDING: "with rtol=1e-3, say, nothing is measured; a smaller batch runs faster",
    LINES: _FEWER,
}


class Durations:
    """The seconds that a comparison took for each of its stages.

    Args:
      clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._started = clock, clock()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def of(self, stage: str) -> Iterator[None]:
        """A context whose time is one stage's."""
        started = self._clock()
        yield
        self._seconds[stage] = self._seconds.get(stage, 0.0) + self._clock() - started

    def notes(self) -> list[str]:
        """A note of the stages, the longest first, and of what makes that one shorter."""
        stages = sorted(self._seconds, key=lambda stage: -self._seconds[stage])
        whole = {stage: round(self._seconds[stage]) for stage in stages}
        each = ", ".join(f"{seconds} s for {stage}" for stage, seconds in whole.items() if seconds)
        advice = SHORTER[stages[0]] if stages else ""
        return note_of_time("comparison", self._clock() - self._started, f"{each}; {advice}")
