"""The course of the leaves of a gradient, decided once for every pass over its program."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from clipgrad._per_example.terms import Unfollowed
from clipgrad._per_example.wanted import WantedGradient

# The first output of an equation, behind the outputs of the equations around it.
EquationPath = tuple[Any, ...]
Attempted = TypeVar("Attempted")


class Lost(Exception):  # noqa: N818
    """An error while some leaves were followed."""

    def __init__(self, leaves: Iterable[int], reason: str) -> None:
        super().__init__(reason)
        self.leaves, self.reason = frozenset(leaves), reason


@dataclasses.dataclass(eq=False)
class Course:
    """The decisions about each leaf, from shapes alone.

    The program is followed once without arrays, and where that fails, products become arrays.
    Every later pass does the same at the same places; where anything else goes wrong, it raises
    `Lost`.
    """

    direct: Mapping[int, str]  # the leaves that are not followed at all, and why
    # Why the gradient of a leaf, or a part of it, is made for each example.
    notes: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    stops: set[EquationPath] = dataclasses.field(default_factory=set)
    arrays: frozenset[int] = frozenset()  # leaves whose gradient is an array for each example
    copied: int = 0  # the numbers of one example's images, once for each tap of a kernel
    size: int = 0  # of the gradient of one example
    is_settled: bool = False

    @property
    def copies_a_part(self) -> bool:
        """Whether images are copied for some of the examples at a time.

        The gradients of all examples are there twice where each is made, and in one pass once.
        """
        return self.copied > 2 * self.size

    def stop(self, place: EquationPath, leaves: Iterable[int], reason: str) -> None:
        """Notes that products become arrays at an equation."""
        if self.is_settled:
            raise Lost(leaves, reason)
        self.stops.add(place)
        self.note(leaves, reason)

    def note(self, leaves: Iterable[int], reason: str) -> None:
        """Notes why something is an array, once."""
        for leaf in leaves:
            if reason not in self.notes.setdefault(leaf, []):
                self.notes[leaf].append(reason)

    def reason(self, leaf: int) -> str:
        """Why a leaf, or a part of it, is direct."""
        return self.direct.get(leaf) or "; ".join(self.notes.get(leaf, []))


@contextlib.contextmanager
def following(leaves: Iterable[int]) -> Iterator[None]:
    """Whatever goes wrong inside is what went wrong with these leaves."""
    try:
        yield
    except Lost:
        raise
    except Exception as error:
        raise Lost(leaves, why(error)) from error


def why(error: Exception) -> str:
    """The text of an error in the plan."""
    if isinstance(error, Unfollowed):
        return str(error)
    text = " ".join(str(error).split())
    return f"following it failed: {type(error).__name__}: {text:.120}"


def attempted(attempt: Callable[[Mapping[int, str]], Attempted]) -> Attempted:
    """The result of an attempt, which gets the leaves that are direct, and why.

    Each attempt that goes wrong adds one leaf or more. With all of them direct there is nothing to
    follow, and what still goes wrong is an error of the user's program.
    """
    direct: dict[int, str] = {}
    while True:
        try:
            return attempt(direct)
        except Lost as error:
            new = {leaf: error.reason for leaf in error.leaves if leaf not in direct}
            if not new:
                raise (error.__cause__ or error) from None
            direct = {**direct, **new}


def want_leaves(wants: Iterable[WantedGradient | None]) -> frozenset[int]:
    """All leaves that some variables make."""
    return frozenset[int]().union(*(want.leaves for want in wants if want is not None))
