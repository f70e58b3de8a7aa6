"""Clips of PyTorch on the CPU, in place, as rows of a benchmark."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import timing
from benchmarks.rows import PEER, Absent, Side, optional

Clip = Callable[[Any, list[Any]], None]
# On a CPU torch's float32 norm of 10M elements is off by 4e-4; it also divides by norm + 1e-6.
RTOL = 1e-3


def torch_clip(name: str, clip: Clip, grads: Any, params: Any = None) -> Side | Absent:
    """A clip of the gradients that lie at PyTorch's parameters; outputs come first there."""

    def make(torch: Any) -> Side:
        originals = [_outputs_first(leaf) for leaf in jax.tree.leaves(grads)]
        weights = originals if params is None else map(_outputs_first, jax.tree.leaves(params))
        held = [torch.nn.Parameter(torch.from_numpy(np.array(w))) for w in weights]

        def once() -> Any:
            for parameter, original in zip(held, originals, strict=True):
                parameter.grad = torch.from_numpy(np.array(original))
            clip(torch, held)
            return [_outputs_last(parameter.grad.numpy()) for parameter in held]

        facts = {"threads": torch.get_num_threads()}
        return Side(name, PEER, timing.running(lambda: clip(torch, held)), once, facts, RTOL)

    if jax.default_backend() != "cpu":
        return Absent(name, "torch is timed beside JAX on the CPU only")
    return optional(name, "torch", make)


def _outputs_first(leaf: Any) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(np.asarray(leaf), -1, 0))


def _outputs_last(leaf: np.ndarray) -> np.ndarray:
    return np.moveaxis(leaf, 0, -1)


def by_global_norm(limit: float, foreach: bool | None = None) -> Clip:
    """PyTorch's own; by default it goes leaf by leaf on a CPU."""
    return lambda torch, held: torch.nn.utils.clip_grad_norm_(held, limit, foreach=foreach)


def by_value(limit: float) -> Clip:
    """PyTorch's own."""
    return lambda torch, held: torch.nn.utils.clip_grad_value_(held, limit)


def by_leaf(limit: float) -> Clip:
    """PyTorch's own for each leaf."""

    def clip(torch: Any, held: list[Any]) -> None:
        for parameter in held:
            torch.nn.utils.clip_grad_norm_([parameter], limit)

    return clip


def adaptive(clipping: float, eps: float = 1e-3) -> Clip:
    """The formula of timm's ``adaptive_clip_grad``."""

    def norm(torch: Any, x: Any) -> Any:
        axes = tuple(range(1, x.ndim)) if x.ndim > 1 else None
        return torch.linalg.vector_norm(x, dim=axes, keepdim=x.ndim > 1)

    def clip(torch: Any, held: list[Any]) -> None:
        for parameter in held:
            grad = parameter.grad
            limit = norm(torch, parameter.detach()).clamp_(min=eps).mul_(clipping)
            size = norm(torch, grad)
            clipped = grad * (limit / size.clamp(min=1e-6))
            grad.copy_(torch.where(size < limit, grad, clipped))

    return clip
