"""Which objects are optimizers."""

from typing import Any

import optax


def as_optimizer(name: str, optimizer: Any) -> optax.GradientTransformation:
    """``optimizer`` as a gradient transformation, also if it is an ``optax.MultiSteps``.

    Raises:
      TypeError: for any other object; ``name`` is that of the argument.
    """
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"{name}: got {type(optimizer).__name__}, expected an optax.GradientTransformation "
            "such as optax.chain(clipgrad.clip_by_global_norm(1.0), optax.adam(1e-3))"
        )
    return optimizer
