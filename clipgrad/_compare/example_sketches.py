"""The sketches of a value while the examples of a batch are exchanged."""

from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._compare.sketches import LENGTH, MASKED, Sketches, sketch, sketch_dtype
from clipgrad._values import value_hook

MAGNITUDES, LINEAR, SQUARED, REAL = range(4)  # the rows of the notes


@value_hook(data=("real",), choices=("carried",))
class ExampleSketches(Sketches):
    """Notes of each value sketches of it, of its squares, and of its part that is not padded.

    If an element of a value is of one example alone, so is its square. Of a sum over examples the
    square is not. So both say whether an element depends on several examples. The first row has the
    mean magnitude and the mean square, which no order of the examples changes.

    Attributes:
      real: where the batch is not padded, or None.
    """

    carried: int = 0
    real: Any = None

    def sketch_of(self, x: jax.Array) -> jax.Array:
        """The notes of a value, shape (3 or 4, 515)."""
        x = jnp.stack([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x
        wide = x.astype(sketch_dtype(x.dtype))
        sizes = jnp.where(jnp.abs(wide) < MASKED, jnp.abs(wide), 0)
        means = [jnp.sum(sizes**power) / max(1, x.size) for power in (1, 2)]
        first = jnp.pad(jnp.stack(means), (0, LENGTH - 2))
        parts = [wide, wide * wide]
        parts += [] if self.real is None else [_real_part(wide, self.real)]
        return jnp.concatenate([first[None], jax.vmap(sketch)(jnp.stack(parts))])


def _real_part(x: jax.Array, real: jax.Array) -> jax.Array:
    if not has_places(x.shape, real.shape):
        return x
    return jnp.where(real.reshape(real.shape + (1,) * (x.ndim - real.ndim)), x, 0)


def has_places(shape: tuple[int, ...], places: tuple[int, ...]) -> bool:
    """Whether a value of a shape has a part for each place of a batch."""
    return shape[: len(places)] == places
