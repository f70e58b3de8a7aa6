"""Names of one module in two frameworks: their words, and the parameters of the modules."""

import collections
import itertools
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

from clipgrad._compare.matching import Renamed
from clipgrad._compare.port_record import PortEntry

Module = tuple[str, ...]  # the words and numbers of its path: layers/0 is layer_0
Held = set[tuple[int, int | None]]  # pairs of parameters, each with its layer in a stack
# The same word in the other framework's modules and parameters; "" says nothing.
_WORDS = {
    "attn": "attention", "self": "", "block": "layer", "blocks": "layer", "layers": "layer",
    "h": "layer", "bn": "norm", "batchnorm": "norm", "cell": "rnn", "dense": "linear",
    "embedder": "embedding", "embed": "embedding", "emb": "embedding", "fc": "linear",
    "ffn": "mlp", "ffw": "mlp", "feed": "mlp", "forward": "", "gamma": "weight", "beta": "bias",
    "groupnorm": "norm", "gru": "rnn", "kernel": "weight", "layernorm": "norm", "ln": "norm",
    "lstm": "rnn", "out": "o", "output": "o", "params": "", "proj": "", "query": "q", "key": "k",
    "value": "v", "wq": "q", "wk": "k", "wv": "v", "wo": "o", "rmsnorm": "norm", "rms": "norm",
    "scale": "weight", "w": "weight", "b": "bias", "wte": "embedding", "wpe": "position",
    "pos": "position", "module": "", "model": "", "head": "head", "lm": "",
}  # fmt: skip


class Likeness:
    """The likeness of names in JAX and in the other framework; names that a user gave are one.

    Args:
      names: names in the other framework by names in JAX.
      roots: the outermost scopes in JAX; the name of the whole model says nothing.
    """

    def __init__(self, names: Mapping[str, str], roots: set[str]) -> None:
        self.renamed = Renamed({own: other.replace(".", "/") for own, other in names.items()})
        self._root = f"{roots.pop()}/" if len(roots) == 1 else ""
        self._kin: Kinship | None = None
        self._known: dict[Any, float] = {}

    def __call__(self, name: str, steps: tuple[int, ...], entry: PortEntry) -> float:
        key = name, steps, entry.name, entry.steps
        if key not in self._known:
            wanted = self.renamed(name)
            own = wanted if wanted != name else name.removeprefix(self._root)
            found = similarity(own, entry.name, (steps, entry.steps))
            shared = self._kin.share(name, steps, entry.name) if self._kin else None
            self._known[key] = found if shared is None else (found + 9 * shared) / 10
        return self._known[key]

    def learn(self, kin: "Kinship") -> None:
        """Take into account which modules hold the same parameters."""
        self._kin = kin
        self._known.clear()


def similarity(own: str, other: str, steps: tuple[tuple[int, ...], tuple[int, ...]]) -> float:
    """From 0 to 1: by the last words, by all words, and by the numbers, steps among them."""
    if own.replace(".", "/") == other.replace(".", "/") and steps[0] == steps[1]:
        return 1.0
    (*ours, here), (*theirs, there) = map(_name_parts, (own, other), steps)
    numbers = 1.0 if here == there else 0.5 if not (here and there) else 0.0
    words, last = (len(a & b) / max(1, len(a | b)) for a, b in zip(ours, theirs, strict=True))
    return 0.45 * last + 0.25 * words + 0.3 * numbers


def _name_parts(name: str, steps: tuple[int, ...]) -> tuple[Set[str], Set[str], tuple[int, ...]]:
    """The words of a name, those of its last segment, and its numbers."""
    found = [_tokens(segment) for segment in re.split(r"[/.]", re.sub(r"\[.*\]$", "", name))]
    every = [token for segment in found for token in segment]
    numbers = tuple(int(token) for token in every if token.isdigit())
    last = next((segment for segment in reversed(found) if _words(segment)), [])
    return _words(every), _words(last), (*numbers, *steps)


def _words(tokens: list[str]) -> Set[str]:
    words = {_WORDS.get(token.lower(), token.lower()) for token in tokens if not token.isdigit()}
    return words - {""}


def _tokens(name: str) -> list[str]:
    return re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)


class Kinship:
    """The parameters of each module that pairs of parameters tell.

    Args:
      pairs: the path of a parameter in JAX, such as ``params/layers/q/kernel``, and the names of
        the same numbers in the other framework: one, or of a stack those of its layers.
    """

    def __init__(self, pairs: Iterable[tuple[str, list[str]]]) -> None:
        self._ours: dict[tuple[Module, int | None], Held] = collections.defaultdict(set)
        self._theirs: dict[str, Held] = collections.defaultdict(set)
        for number, (path, names) in enumerate(pairs):
            layers = enumerate(names) if len(names) > 1 else [(None, names[0])]
            for layer, name in layers:
                for module in _modules(path.removeprefix("params/"), "/"):
                    for key in {(_of_path(module), layer), (_of_path(module), None)}:
                        self._ours[key].add((number, layer))
                for module in _modules(name, "."):
                    self._theirs[module].add((number, layer))

    def share(self, name: str, steps: tuple[int, ...], other: str) -> float | None:
        """The share of two modules' parameters that both have; None if one of them has none."""
        own, its = self._held(name, steps), self._theirs.get(other, set())
        return len(own & its) / len(own | its) if own and its else None

    def _held(self, name: str, steps: tuple[int, ...]) -> Held:
        """The parameters of a module, whose path may begin with the name of the whole model.

        A scope around a call that has the name of the module is one with it.
        """
        segments = [x for x, _ in itertools.groupby(name.removeprefix("params/").split("/"))]
        for start in range(len(segments)):
            module = _of_path("/".join(segments[start:]))
            for layer in (*steps[-1:], None):
                if (module, layer) in self._ours:
                    return self._ours[module, layer]
        return set()


def _modules(path: str, separator: str) -> list[str]:
    """The modules around a parameter, without the whole model."""
    segments = path.split(separator)[:-1]
    return [separator.join(segments[: i + 1]) for i in range(len(segments))]


def _of_path(module: str) -> Module:
    return tuple(token.lower().removesuffix("s") for token in _tokens(module))
