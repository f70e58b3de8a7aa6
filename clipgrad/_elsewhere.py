"""Names in other libraries for the things that are here, so that an error can say our name."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Spelled = TypeVar("Spelled", bound=Callable[..., Any])

# Names of optax, and of torch.nn.utils, that somebody may look for here.
NAMES = {
    "clip": "clip_by_value(max)",
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
