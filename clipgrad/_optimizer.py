"""What optimizers may be handed in as."""

from typing import Any

import optax


def as_optimizer(name: str, optimizer: Any) -> optax.GradientTransformation:
    """The gradient transformation that ``optimizer`` is, or that ``optax.MultiSteps`` holds.

    Raises:
      TypeError: if it is none; ``name`` is what the argument is called.
    """
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"{name}: got {type(optimizer).__name__}, expected an optax.GradientTransformation "
            "such as optax.chain(clipgrad.clip_by_global_norm(1.0), optax.adam(1e-3))"
        )
    return optimizer
