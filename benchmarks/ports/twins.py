"""What the pairs of models have in common: the form of a twin and of a bug, and helpers."""

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Bug:
    """A mistake of a port, and where a tool should say that it is.

    Attributes:
      modules: the scopes of the JAX side where the first difference arises; each is right.
      what: the mistake in a few words.
      leaves: for mistakes in the weights, the leaves that are wrong; to name one is right too.
    """

    modules: tuple[str, ...]
    what: str
    leaves: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Twin:
    """A torch module beside a JAX loss.

    Attributes:
      name: of the pair.
      torch: makes ``(module, loss_fn, args)``; the arguments are tensors.
      loss: makes the JAX loss ``loss(params, *batch)``, with the mistake that is named.
      carry: ``carry(state, bug, grads)`` turns the arrays of the torch module by name into the
        parameters of the JAX loss, and with ``grads`` gradients into gradients.
      batch: ``batch(arrays, state, bug)``: the other arguments of the JAX loss.
      bugs: the mistakes by name.
    """

    name: str
    torch: Callable
    loss: Callable
    carry: Callable
    batch: Callable
    bugs: dict[str, Bug]


def stirred(module, seed=0):
    """The module with every scale and bias moved off 1 and 0; so none is forgotten unseen."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("running_var"):
                buffer.mul_(0.5 + torch.rand(buffer.shape, generator=generator))
    return module


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def integers(seed, high, *shape):
    return np.random.default_rng(seed).integers(0, high, shape).astype("int32")


def dense(state, name):
    """A torch ``Linear`` as kernel and bias of flax."""
    out = {"kernel": state[name + ".weight"].T}
    if name + ".bias" in state:
        out["bias"] = state[name + ".bias"]
    return out


def norm(state, name):
    """A torch norm as scale and bias of flax."""
    return {"scale": state[name + ".weight"], "bias": state[name + ".bias"]}


def cross_entropy(logits, labels):
    """The mean cross-entropy in float32 or wider."""
    import jax
    import jax.numpy as jnp

    wide = jnp.promote_types(logits.dtype, jnp.float32)
    logp = jax.nn.log_softmax(logits.astype(wide))
    return -jnp.mean(jnp.take_along_axis(logp, labels[..., None], axis=-1))


def torch_cross_entropy(logits, labels):
    """The same in torch."""
    import torch

    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(wide).reshape(-1, logits.shape[-1])
    return torch.nn.functional.cross_entropy(logits, labels.reshape(-1).long())
