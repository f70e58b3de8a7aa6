"""Names in other libraries for the things that are here, so that an error can say our name."""

import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Spelled = TypeVar("Spelled", bound=Callable[..., Any])

# Names of optax, of torch.nn.utils and torch.autograd, and of PaddlePaddle and TensorFlow, that
# somebody may look for here.
NAMES = {
    "ClipGradByGlobalNorm": "clip_by_global_norm(max_norm)",
    "ClipGradByNorm": "clip_by_norm(max_norm)",
    "ClipGradByValue": "clip_by_value(max)",
    "clip": "clip_by_value(max)",
    "clip_grad_norm": "clip_grads(grads, ClipByGlobalNorm(max_norm)), or clip_by_global_norm",
    "clip_grad_value": "clip_grads(grads, ClipByValue(max)), or clip_by_value",
    "clip_grads_with_norm_": "clip_grads(grads, ClipByGlobalNorm(max_norm))",
    "detect_anomaly": "diagnose(loss, args)",
    "get_numerical_gradient": "numerical_grad(fun, args)",
    "get_total_norm": "global_norm(grads)",
    "gradcheck": "check_grads(fun, args)",
    "gradgradcheck": "check_grads(fun, args, order=2)",
    "clip_grad_norm_": "clip_grads(grads, ClipByGlobalNorm(max_norm)), or clip_by_global_norm",
    "clip_grad_value_": "clip_grads(grads, ClipByValue(max)), or clip_by_value",
    "differentially_private_aggregate": "clip_per_example(loss, ClipByGlobalNorm(max_norm))",
    "apply_if_finite": "skip_spikes(optimizer)",
    "per_example_global_norm_clip": "clip_per_example(loss, ClipByGlobalNorm(max_norm))",
    "per_example_layer_norm_clip": "clip_per_example(loss, ClipByNorm(max_norm))",
    "unitwise_clip": "AdaptiveClip(clipping)",
    "unitwise_norm": "AdaptiveClip(clipping)",
    "zero_nans": 'gradient_clip(rule, nonfinite="zero")',
}


def hint(name: str, public: Mapping[str, str]) -> str:
    """A hint for a name that is not here: its name here, or the public name most like it.

    Args:
      name: the name that somebody wrote.
      public: the module of each public name.
    """
    if ours := NAMES.get(name):
        return f"; write clipgrad.{ours}"
    known = [*public, *NAMES]
    found = difflib.get_close_matches(_letters(name), map(_letters, known), n=1, cutoff=0.8)
    if not found:
        return ""
    likeness = difflib.SequenceMatcher(None, name)  # such as ClipByNorm and clip_by_norm
    same = [own for own in known if _letters(own) == found[0]]
    near = max(same, key=lambda own: likeness.set_seq2(own) or likeness.ratio())
    place = f"{public[near]}.{near}" if near in public else f"clipgrad.{NAMES[near]}"
    return f"; write {place}"


def _letters(name: str) -> str:
    return name.lower().replace("_", "")


def spelled(**names: str) -> Callable[[Spelled], Spelled]:
    """A decorator: an argument that is called so elsewhere is an error that says its name here."""

    def decorate(function: Spelled) -> Spelled:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for theirs, ours in names.items():
                if theirs in kwargs:
                    raise TypeError(
                        f"{function.__name__}: got {theirs}={kwargs[theirs]!r}, expected "
                        f"{ours}={kwargs[theirs]!r}"
                    )
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate
