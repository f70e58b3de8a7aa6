"""Kinship: modules of two frameworks are the same if they hold the same parameters."""

import collections
import itertools
import re
from collections.abc import Iterable

Module = tuple[str, ...]  # the words and numbers of its path: layers/0 is layer_0
Held = frozenset[tuple[int, int | None]]  # pairs of parameters, each with its layer in a stack
_NONE_HELD: Held = frozenset()


class Kinship:
    """The parameters of each module that pairs of parameters tell.

    Args:
      pairs: the path of a parameter in JAX, such as ``params/layers/q/kernel``, and the names of
        the same numbers in the other framework: one, or of a stack those of its layers.
    """

    def __init__(self, pairs: Iterable[tuple[str, list[str]]]) -> None:
        ours: dict[tuple[Module, int | None], set] = collections.defaultdict(set)
        theirs: dict[str, set] = collections.defaultdict(set)
        for number, (path, names) in enumerate(pairs):
            layers = enumerate(names) if len(names) > 1 else [(None, names[0])]
            for layer, name in layers:
                for module in _modules(path.removeprefix("params/"), "/"):
                    for key in {(_tokens(module), layer), (_tokens(module), None)}:
                        ours[key].add((number, layer))
                for module in _modules(name, "."):
                    theirs[module].add((number, layer))
        self._ours = {key: frozenset(held) for key, held in ours.items()}
        self._theirs = {key: frozenset(held) for key, held in theirs.items()}

    def share(self, name: str, steps: tuple[int, ...], other: str) -> float | None:
        """The share of two modules' parameters that both have; None if one of them has none."""
        own, its = self._held(name, steps), self._theirs.get(other, _NONE_HELD)
        return len(own & its) / len(own | its) if own and its else None

    def _held(self, name: str, steps: tuple[int, ...]) -> Held:
        """The parameters of a module, whose path may begin with the name of the whole model.

        A scope around a call that has the name of the module is one with it.
        """
        segments = [x for x, _ in itertools.groupby(name.removeprefix("params/").split("/"))]
        for start in range(len(segments)):
            module = _tokens("/".join(segments[start:]))
            for layer in (*steps[-1:], None):
                if (module, layer) in self._ours:
                    return self._ours[module, layer]
        return _NONE_HELD


def _modules(path: str, separator: str) -> list[str]:
    """The modules around a parameter, without the whole model."""
    segments = path.split(separator)[:-1]
    return [separator.join(segments[: i + 1]) for i in range(len(segments))]


def _tokens(module: str) -> Module:
    tokens = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", module)
    return tuple(token.lower().removesuffix("s") for token in tokens)
