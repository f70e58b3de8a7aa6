"""How the rows of two records were matched, by names or by numbers."""

from collections.abc import Collection
from typing import NamedTuple

from clipgrad._compare.pairs import Pair
from clipgrad._compare.record import Instance
from clipgrad._compare.result import ComparisonFinding

MOST_NAMES = 5  # in a message


class Matching(NamedTuple):
    """How the rows of two records were matched.

    Attributes:
      pairs: the pairs, judged.
      alone: findings of outputs and gradients that were not compared.
      unmatched: texts of other rows left alone.
      copies: the values of lines in each record that have the numbers of an argument.
      arguments: findings of arguments without an equal, which explain a difference.
    """

    pairs: list[Pair]
    alone: list[ComparisonFinding]
    unmatched: list[str]
    copies: tuple[Collection[Instance], Collection[Instance]] = ((), ())
    arguments: tuple[ComparisonFinding, ...] = ()


def alone(kind: str, path: str, text: str) -> ComparisonFinding:
    """The finding of an output or a gradient that was not compared."""
    return ComparisonFinding("grads" if kind == "gradient" else kind, text, path=path)
