"""The measured cotangents and ranges of a program, by the equation."""

from typing import Any, NamedTuple

import numpy as np

OPERAND = "operand"


class EdgeValues(NamedTuple):
    """The cotangents of operands and results of a program, and the ranges of values.

    All have leading axes for the scans and the `shard_map`s around the program.
    """

    probes: Any
    notes: Any
    gradients: Any = ()  # of the outermost program: which elements of each axis are not all zero

    def cotangent(self, number: int, kind: str, position: int) -> np.ndarray | None:
        """The largest magnitude of a cotangent; None if it is not measured."""
        return self.probes["own"].get(f"{number} {kind} {position}")

    def result_range(self, number: int, position: int) -> tuple[float, float]:
        """The smallest and the largest element of a result, at all steps."""
        return _over_steps(self.notes["results"][str(number)][position])

    def input_range(self, position: int) -> tuple[float, float]:
        """The smallest and the largest element of an input, at all steps."""
        return _over_steps(self.notes["inputs"][position])

    @property
    def ran(self) -> bool:
        """Whether the program was run at all; a branch may not be."""
        return bool(np.any(np.isfinite(self.notes["ran"][0])))

    def inside(self, number: int) -> list["EdgeValues"]:
        """The measured values of the programs inside of an equation."""
        probes = self.probes["inside"].get(str(number), [])
        notes = self.notes["inside"].get(str(number), [])
        return [EdgeValues(*own) for own in zip(probes, notes, strict=True)]


def _over_steps(noted: Any) -> tuple[float, float]:
    if isinstance(noted, dict):  # the value itself
        whole = np.asarray(noted["whole"], np.float64)
        return float(np.min(whole, initial=np.inf)), float(np.max(whole, initial=-np.inf))
    return float(np.min(noted[..., 0])), float(np.max(noted[..., 1]))
