"""The parts of a comparison: findings and rows."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ComparisonFinding:
    """A place at which two versions differ.

    Attributes:
      kind: "value", "vjp", "grads", "output", "rounding", "argument": of runs in files,
        "neighbors", "place", "padding": of examples, or "not judged": nothing could be.
      message: what differs, and by how much.
      module: the module path, "" outside of modules, None if there is none.
      step: the index in the innermost scan, or None.
      file: the file of the user's line, or None.
      line: its number, or None.
      factor: how much the difference grows there; None where it was 0 before.
      path: the path of the output, of the leaf of the gradient or of the argument, or None.
      ratio: the first version divided by the second, if one factor explains the difference, or
        None; of "rounding" the error of the leaf's gradient divided by its size, inf for an
        overflow.
    """

    kind: str
    message: str
    module: str | None = None
    step: int | None = None
    file: str | None = None
    line: int | None = None
    factor: float | None = None
    path: str | None = None
    ratio: float | None = None


def unjudged(message: str) -> ComparisonFinding:
    """The finding that nothing could be judged, which is no agreement."""
    return ComparisonFinding("not judged", message)


def undecided(name: str, what: str = "it") -> str:
    """The note of a place that is not judged."""
    return f"{name}: rounding decides here, so {what} is not judged"


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """A place of both versions: a named value, at one step of the scans around it, or an output.

    Attributes:
      module: the name of the value, or the path of the output.
      step: the index in the innermost scan, or None.
      value: the relative difference of the values.
      cotangent: the relative difference of their cotangents, or None.
      value_tolerance: what rounding explains of the difference of the values.
      cotangent_tolerance: what rounding explains of the difference of the cotangents, or None.
      steps: the indices in all scans around it, outermost first.
      kind: "tag", "module", "output", "enters" for what enters the module, or "gradient" of a leaf
        beside examples.
    """

    module: str
    step: int | None
    value: float
    cotangent: float | None
    value_tolerance: float
    cotangent_tolerance: float | None = None
    steps: tuple[int, ...] = ()
    kind: str = "module"
