"""Public names: in one table, imported when they are used, and hints for names of others.

The table makes the modules. The lines ``from room import name as name`` that type checkers read,
and the pages of the reference, are asserted equal to it.
"""

import difflib
import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

# The names of each public module by the room that they come from, the rooms in their order.
PUBLIC: dict[str, dict[str, tuple[str, ...]]] = {
    "clipgrad": {
        "_arrays": ("global_norm",),
        "_clip": (
            "AdaptiveClip",
            "AdaptiveThreshold",
            "AutoNorm",
            "ClipByBlockRMS",
            "ClipByGlobalNorm",
            "ClipByNorm",
            "ClipByValue",
            "ClipRule",
            "EMAThreshold",
            "ErrorClipByValue",
            "HistoryThreshold",
            "PercentileThreshold",
            "ZScoreThreshold",
            "adaptive_grad_clip",
            "clip_by_block_rms",
            "clip_by_global_norm",
            "clip_by_norm",
            "clip_by_value",
            "clip_grads",
            "gradient_clip",
            "resume",
            "skip_spikes",
        ),
        "_error_clip": (
            "clip_cotangent",
            "error_clip",
            "error_clip_by_name",
            "error_clip_everywhere",
            "list_names",
            "value_and_grad_with_stats",
        ),
        "_values": ("with_value_stats",),
        "_training": ("scalars", "train_step", "watch_updates"),
        "_per_example": ("clip_per_example", "per_example_norms"),
        "_check": ("GradCheckError", "check_grads", "numerical_grad"),
        "_diagnose": ("diagnose",),
        "_recorder": ("FlightRecorder", "HaltedError", "load_capture"),
        "_compare": ("compare", "save_run"),
    },
    "clipgrad.types": {
        "_arrays": ("Patterns", "Where"),
        "_clip": ("ClipStats", "GradientClipState", "SkipSpikesState", "Threshold"),
        "_values": ("ValueStats",),
        "_training": ("TrainState", "TrainStep", "UpdateNorms", "WatchUpdatesState"),
        "_check": ("GradCheckReport",),
        "_diagnose": ("GradientDiagnosis",),
        "_recorder": ("Capture",),
        "_compare": ("GradientComparison",),
    },
    "clipgrad.published": {
        "_clip": (
            "SUGGESTED_THRESHOLDS",
            "SuggestedThreshold",
            "apply_gradient_clipping",
            "gradient_clipping",
            "suggest_threshold",
        ),
    },
}
# A training needs none of these rooms. The others have the types of states, which `jax.export`
# loads only once they are imported.
LATER = ("_per_example", "_check", "_diagnose", "_recorder", "_compare")

# The names of torch and optax that are used most, and of an error clip that is a number now.
NAMES_ELSEWHERE = {
    "adaptive_error_clip": "ErrorClipByValue(max), with a number from value_and_grad_with_stats",
    "apply_if_finite": "skip_spikes(optimizer)",
    "clip": "clip_by_value(max)",
    "clip_grad_norm_": "clip_grads(grads, ClipByGlobalNorm(max_norm)), or clip_by_global_norm",
    "clip_grad_value_": "clip_grads(grads, ClipByValue(max)), or clip_by_value",
    "clip_by_rms": "clip_by_block_rms(threshold)",
    "clip_gradient": "clip_grads(grads, rule), or of a value inside clip_cotangent(x, rule)",
    "error_clip_callback": "error_clip_by_name(fun, rules)",
    "finite_differences": "numerical_grad(fun, args)",
    "get_numerical_gradient": "numerical_grad(fun, args)",
    "get_total_norm": "global_norm(grads)",
    "grad_norm": "global_norm(grads)",
    "gradcheck": "check_grads(fun, args)",
    "gradient_norm": "global_norm(grads)",
    "l2_norm": "global_norm(grads)",
    "norm": "global_norm(grads)",
    "torch": "torch after import clipgrad.torch",
    "tree_norm": "global_norm(grads)",
    "value_clip": "clip_by_value(max)",
    "zero_nans": 'gradient_clip(rule, nonfinite="zero")',
}
# Words of other libraries and papers, for names of theirs that have one: what is here instead.
_TOPICS = {
    "adaptive_grad_clip(clipping)": "agc unitwise",
    "clip_by_global_norm(EMAThreshold())": "ema",
    "clip_by_global_norm(PercentileThreshold(90))": "autoclip percentile quantile",
    "clip_by_global_norm(ZScoreThreshold())": "zclip zscore",
    "clip_cotangent(x, rule)": "hook backward",
    "clip_per_example(loss_fn, rule)": "dp dpsgd private privately privacy sample example",
    "compare(fun, other, args)": "diff difference",
    "diagnose(fun, args)": "anomaly debug nan nans vanishing exploding",
    "FlightRecorder(directory)": "record recorder recording",
    "check_grads(fun, args)": "checker",
    "list_names(fun, args)": "tags names tabulate",
    "load_capture(path)": "replay capture load",
    "save_run(fun, args, path)": "save",
    "scalars(metrics)": "log logs logging metrics scalar",
    "skip_spikes(optimizer)": "finite nonfinite skip spam spike spikes",
    "train_step(loss_fn, optimizer)": "trainer",
    "watch_updates(optimizer)": "ratio ratios dynamics",
    "with_value_stats(fun), value_and_grad_with_stats(fun) or watch_updates(optimizer)": "watch",
}
INSTEAD = {word: written for written, words in _TOPICS.items() for word in words.split()}


def published(
    module: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The ``__getattr__``, ``__dir__`` and ``__all__`` of a public module.

    Names from the rooms in `LATER` are imported when they are used, all others at once.
    """
    homes = {name: room for room, names in PUBLIC[module].items() for name in names}

    def load(name: str) -> Any:
        here = sys.modules[module]
        if name not in homes:
            message = f"module {module!r} has no attribute {name!r}{_hint(name)}"
            raise AttributeError(message, name=name, obj=here)
        value = getattr(importlib.import_module(f"clipgrad.{homes[name]}"), name)
        setattr(here, name, value)
        return value

    for name, room in homes.items():
        if room not in LATER:
            load(name)
    return load, lambda: sorted({*vars(sys.modules[module]), *homes}), sorted(homes)


def _hint(name: str) -> str:
    """A hint for a name that is not there: its name here, or the public name most like it."""
    if name.startswith("_"):
        return ""
    if ours := {_letters(n): ours for n, ours in NAMES_ELSEWHERE.items()}.get(_letters(name)):
        return f"; write clipgrad.{ours}"
    public = {
        ours: module
        for module, rooms in PUBLIC.items()
        for names in rooms.values()
        for ours in names
    }
    letters = difflib.get_close_matches(_letters(name), map(_letters, public), n=1, cutoff=0.8)
    same = [ours for ours in public if _letters(ours) in letters]  # ClipByNorm and clip_by_norm
    near = max(same, key=lambda n: difflib.SequenceMatcher(None, name, n).ratio(), default="")
    topic = next(filter(None, map((INSTEAD | {n: n for n in public}).get, _words(name))), "")
    return f"; write {public[near]}.{near}" if near else f"; write clipgrad.{topic}" * bool(topic)


def _words(name: str) -> list[str]:
    """The words of a name, also of ``AutoClip`` and ``AGC``; and the name as a whole."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)
    return [name.lower(), *(part.lower() for part in parts)]


def _letters(name: str) -> str:
    return name.lower().replace("_", "")
