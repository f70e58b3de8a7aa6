"""Public names: imported when they are used, and said where somebody looks for others."""

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

_PUBLIC = ("clipgrad", "clipgrad.types", "clipgrad.published")
# The names of torch and optax that are used most, and of an error clip that is a number now.
NAMES_ELSEWHERE = {
    "adaptive_error_clip": "ErrorClipByValue(max), with a number from value_and_grad_with_stats",
    "apply_if_finite": "skip_spikes(optimizer)",
    "clip": "clip_by_value(max)",
    "clip_grad_norm_": "clip_grads(grads, ClipByGlobalNorm(max_norm)), or clip_by_global_norm",
    "clip_grad_value_": "clip_grads(grads, ClipByValue(max)), or clip_by_value",
    "grad_norm": "global_norm(grads)",
    "gradcheck": "check_grads(fun, args)",
}


def attributes(
    module: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a module; ``homes`` has the room of each of its names."""

    def load(name: str) -> Any:
        here = sys.modules[module]
        if name not in homes:
            message = f"module {module!r} has no attribute {name!r}{_hint(name)}"
            raise AttributeError(message, name=name, obj=here)
        value = getattr(importlib.import_module(f"clipgrad.{homes[name]}"), name)
        setattr(here, name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[module]), *homes})


def _hint(name: str) -> str:
    """A hint for a name that is not there: its name here, or the public name most like it."""
    if name.startswith("_"):
        return ""
    if ours := {_letters(n): ours for n, ours in NAMES_ELSEWHERE.items()}.get(_letters(name)):
        return f"; write clipgrad.{ours}"
    public = {own: module for module in _PUBLIC for own in sys.modules[module].__all__}
    found = difflib.get_close_matches(_letters(name), map(_letters, public), n=1, cutoff=0.8)
    same = [own for own in public if _letters(own) in found]  # ClipByNorm and clip_by_norm
    near = max(same, key=lambda n: difflib.SequenceMatcher(None, name, n).ratio(), default="")
    return f"; write {public[near]}.{near}" if near else ""


def _letters(name: str) -> str:
    return name.lower().replace("_", "")
