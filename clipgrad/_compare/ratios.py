"""Factors between two versions of a training step, and the mistakes that make them."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from clipgrad._jaxpr import equations

CLOSE = 1e-3  # a factor explains a difference if it leaves less; a mean of parts is not as exact
NEARLY = 0.9  # norms of parts add up to at most the square root, and to less if they are unequal
EXPLAINED = 0.1  # of the difference; a leaf that moved a little is near to 1.00 times any other


class Counts(NamedTuple):
    """Into how many parts two programs divide their work.

    Attributes:
      devices: the numbers of devices, along each axis of a mesh and in all.
      steps: the lengths of scans, of which one may be over microbatches.
    """

    devices: tuple[int, ...]
    steps: tuple[int, ...]

    def beside(self, other: "Counts") -> "Counts":
        """Those of two programs."""
        return Counts(*(tuple(sorted({*a, *b})) for a, b in zip(self, other, strict=True)))


def part_counts(trees: Any, programs: Iterable[Any]) -> Counts:
    """The devices of arrays and programs, and the lengths of the scans."""
    every = [equation for program in programs for equation in equations(program)]
    steps = {e.params["length"] for e in every if e.primitive.name == "scan"}
    shardings = [x.sharding for x in jax.tree.leaves(trees) if isinstance(x, jax.Array)]
    devices = {len(sharding.device_set) for sharding in shardings}
    holders = [*shardings, *(e.params.get("sharding") for e in every)]
    meshes = [getattr(x, "mesh", None) for x in holders] + [e.params.get("mesh") for e in every]
    for mesh in meshes:
        if sizes := dict(getattr(mesh, "shape", None) or {}).values():
            devices |= {math.prod(sizes), *sizes}
    return Counts(*(tuple(sorted(n for n in found if n > 1)) for found in (devices, steps)))


def ratio(own: np.ndarray, other: np.ndarray, tolerance: float) -> float | None:
    r"""The factor r for which ``own`` is r times ``other``, shape (...); None if none is.

    Of the difference of the two the factor leaves at most a tenth, and of ``own`` at most 0.001.
    Source: the least squares fit, :math:`r = \langle b, a\rangle / \lVert b\rVert^2`.
    """
    a, b = np.ravel(own), np.ravel(other)
    if not (np.all(np.isfinite(a)) and np.all(np.isfinite(b))):
        return None
    scales = [float(np.max(np.abs(x), initial=0)) for x in (a, b)]
    if not all(scales):
        return None
    a, b = a / scales[0], b / scales[1]  # squares of what is left neither over- nor underflow
    found = complex(np.vdot(b, a) / np.vdot(b, b))
    left = np.linalg.norm(a - found * b)
    most = max(CLOSE, tolerance) * np.linalg.norm(a)
    parts = [scale / max(scales) for scale in scales]
    difference = np.linalg.norm(a * parts[0] - b * parts[1])
    explained = left * parts[0] <= EXPLAINED * difference
    if left > most or not explained or abs(found.imag) > CLOSE * abs(found):
        return None
    factor = found.real * (scales[0] / scales[1])
    return factor if math.isfinite(factor) else None


def meaning(ratio: float, known: Counts) -> str | None:
    """The mistakes that would give a factor between two versions of a step, or None."""
    if ratio < 0:
        return "the sign is the opposite" if abs(ratio + 1) < CLOSE else None
    if ratio == 0 or abs(ratio - 1) < CLOSE:
        return None
    large, small = ("fun", "other") if ratio > 1 else ("other", "fun")
    factor = max(ratio, 1 / ratio)
    found = [
        text
        for number, slack, text in _explanations(known, large, small)
        if number * (1 - slack) < factor < number * (1 + CLOSE)
    ]
    return f"this would be what {' or '.join(dict.fromkeys(found))}" if found else None


def _explanations(known: Counts, large: str, small: str) -> Iterator[tuple[float, float, str]]:
    """Factors, by how much less they may be, and the mistakes that make them."""
    mean, squares = f"gives where {small} takes the mean", "gives, not their squares"
    for n in known.devices:
        yield n, CLOSE, f"a sum over the {n} devices in {large} {mean}"
        parts = f"the parts on the {n} devices in {large}"
        often = f"counting squares of replicated leaves {n} times"
        yield math.sqrt(n), 1 - NEARLY, f"adding the norms of {parts} {squares}, or {often}"
        twice = f"two sums over the {n} devices in {large} give where {small} takes means"
        yield n * n, CLOSE, twice
    for k in known.steps:
        parts = f"the {k} microbatches (or steps of a scan) in {large}"
        yield k, CLOSE, f"a sum over {parts} {mean}"
        yield math.sqrt(k), CLOSE, f"adding the norms of {parts} {squares}"
    for n, k in itertools.product(known.devices, known.steps):
        parts = f"the {n} devices and the {k} microbatches"
        yield n * k, CLOSE, f"a sum over {parts} in {large} {mean}"


def repeats(arrays: Sequence[np.ndarray], parts: int) -> bool:
    """Whether the first axis of all arrays is the same rows again and again, in so many parts."""
    found = [x for x in arrays if np.ndim(x) and np.shape(x)[0] and np.shape(x)[0] % parts == 0]
    rows = [np.reshape(x, (parts, -1)) for x in found]
    return bool(rows) and all(np.array_equal(x, np.broadcast_to(x[:1], x.shape)) for x in rows)
