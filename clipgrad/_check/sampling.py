"""The random vectors of a check: cotangents, directions, steps by scale, nearby points."""

import zlib
from collections.abc import Sequence

import jax
import numpy as np

from clipgrad._check.problem import Problem
from clipgrad._check.real import is_complex, real_size, widen

COTANGENTS = 2
DIRECTIONS = 4


def generator(seed: int, name: str) -> np.random.Generator:
    """A generator of the name's own, so that adding a leaf changes no other leaf's numbers."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def dense(rng: np.random.Generator, size: int) -> np.ndarray:
    """Numbers of random sign and magnitude in [0.5, 1.5], in eighths: short in binary."""
    return rng.choice([-1.0, 1.0], size) * rng.integers(4, 13, size) / 8


def cotangents(problem: Problem, seed: int) -> np.ndarray:
    """Random dense cotangents as real vectors, shape (2, outputs); never ones or one-hot."""
    rows = [
        np.concatenate(
            [
                dense(generator(seed, f"{row} {name}"), real_size(leaf))
                for name, leaf in zip(problem.output_names, problem.outputs, strict=True)
            ]
        )
        for row in range(COTANGENTS)
    ]
    return np.stack(rows)


def directions(problem: Problem, seed: int, row: int) -> np.ndarray:
    """A random dense vector over all inputs, leaf by leaf."""
    parts = [
        dense(generator(seed, f"direction {row} {name}"), real_size(leaf))
        for name, leaf in zip(problem.names, problem.inputs, strict=True)
    ]
    return np.concatenate(parts)


def scales(xs: Sequence[jax.Array]) -> np.ndarray:
    """The scale of each element, a power of two.

    The scale is about |x|, at least the root mean square of the leaf, and 1 for a leaf of zeros.
    """
    return np.concatenate([_leaf_scales(leaf) for leaf in xs])


def _leaf_scales(leaf) -> np.ndarray:
    size = np.abs(widen(leaf)).ravel()
    typical = np.sqrt(np.mean(size**2)) if size.size else 0.0
    if not typical > 0:
        typical = 1.0
    size = np.maximum(size, typical)
    size = np.repeat(size, 2) if is_complex(leaf) else size
    return 2.0 ** np.round(np.log2(size))


def nearby(problem: Problem, seed: int, reach: float = 1.0) -> list[jax.Array]:
    """Another point: every element moved by 2 to 8 percent of itself, times `reach`.

    A leaf of zeros moves by as much of 1; single zeros stay, being masks or padding.
    """
    return [
        _moved(leaf, generator(seed, f"nearby {name}"), reach)
        for name, leaf in zip(problem.names, problem.inputs, strict=True)
    ]


def _moved(leaf, rng, reach):
    part = reach * rng.choice([-1.0, 1.0], leaf.shape) * rng.uniform(0.02, 0.08, leaf.shape)
    values = widen(leaf)
    moved = (1 + part) * values if values.any() else part
    return jax.device_put(moved.astype(leaf.dtype))
