"""Names of one module in two frameworks."""

import re
from collections.abc import Set
from typing import NamedTuple

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


class _Parts(NamedTuple):
    """The words of a name, those of its last segment, and its numbers."""

    words: Set[str]
    last: Set[str]
    numbers: tuple[int, ...]


def similarity(own: str, other: str, steps: tuple[tuple[int, ...], tuple[int, ...]]) -> float:
    """From 0 to 1: by the last words, by all words, and by the numbers, steps among them."""
    if own.replace(".", "/") == other.replace(".", "/") and steps[0] == steps[1]:
        return 1.0
    a, b = (_name_parts(name, at) for name, at in zip((own, other), steps, strict=True))
    numbers = 1.0 if a.numbers == b.numbers else 0.5 if not (a.numbers and b.numbers) else 0.0
    return 0.45 * _jaccard(a.last, b.last) + 0.25 * _jaccard(a.words, b.words) + 0.3 * numbers


def _jaccard(a: Set[str], b: Set[str]) -> float:
    return len(a & b) / max(1, len(a | b))


def _name_parts(name: str, steps: tuple[int, ...]) -> _Parts:
    segments = re.split(r"[/.]", re.sub(r"\[.*\]$", "", name))
    found = [re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", segment) for segment in segments]
    every = [token for segment in found for token in segment]
    numbers = tuple(int(token) for token in every if token.isdigit())
    last = next((segment for segment in reversed(found) if _words(segment)), [])
    return _Parts(_words(every), _words(last), (*numbers, *steps))


def _words(tokens: list[str]) -> Set[str]:
    words = {_WORDS.get(token.lower(), token.lower()) for token in tokens if not token.isdigit()}
    return words - {""}
