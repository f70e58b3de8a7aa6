"""scikit-learn's handwritten digits, in a fixed order."""

from typing import NamedTuple

import jax
import numpy as np

TRAIN = 1400


class Digits(NamedTuple):
    """Images and labels, the test set's last."""

    images: jax.Array
    labels: jax.Array

    @property
    def test(self) -> "Digits":
        return Digits(self.images[TRAIN:], self.labels[TRAIN:])

    def sample(self, key: jax.Array, size: int) -> "Digits":
        chosen = jax.random.randint(key, (size,), 0, TRAIN)
        return Digits(self.images[chosen], self.labels[chosen])


def load_pixels() -> tuple[np.ndarray, np.ndarray]:
    """1797 images of 64 pixels in [0, 1], and their labels, shuffled once and for all."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
