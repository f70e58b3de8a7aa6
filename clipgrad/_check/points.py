"""Points: the given one and further ones, and the random vectors of a check."""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from clipgrad._check import vectors
from clipgrad._check.checked_function import CheckedFunction
from clipgrad._check.theirs import TheirError
from clipgrad._check.verdict import TIMES, Slack
from clipgrad._check.witnesses import VJP, Witness, Witnesses
from clipgrad._programs import Parts

EIGHTHS = np.concatenate([-np.arange(4, 13), np.arange(4, 13)]) / 8
# The roundings of a gradient as it is computed; of a rule, which may not write off what it reduces;
# of one in float64 with the constants of its own types; and of one in float64.
OWN, OF_RULE = Parts(1.0, 1.0, 1.0), Parts(1.0, 1.0, 0.0)
CONSTANTS, IN_FLOAT64 = Parts(0.0, 1.0), Parts(0.0, 0.0)
# Of more than so many elements one is moved little by chance in all runs, and is off by much.
FEW, TAIL = 64, 1 / 8
# Numbers so much larger than the median of their leaf are the garbage of a padding: a step of a
# part of them would be larger than the others.
GARBAGE = 2.0**24
# By which part of themselves elements move nearer to zero, at least and at most.
LEAST, MOST = 0.02, 0.08


class Point:
    """A point and the gradients there, arrays of shape (cotangents, inputs).

    Attributes:
      xs: the input leaves.
      covectors: the cotangents.
      vjp: the VJP there.
      computed: the gradient as it was computed.
      gradient: the same, 0 where it is not finite.
      finite: which of its elements are finite.
      rule: the rule's in float64, or None.
      plain: plain AD's, or None; the same array where they are one witness.
      scale: of each element, a power of two, about |x|.
      leaf: of each element, the number of its leaf.
    """

    def __init__(
        self,
        of: Witnesses,
        vjp: VJP,
        xs: Sequence[Any],
        covectors: np.ndarray,
        log: Any,
        found: np.ndarray | None = None,
    ):
        self.of, self.vjp, self.xs, self.covectors, self._log = of, vjp, list(xs), covectors, log
        self.ranges = of.function.ranges
        leaves = np.arange(len(self.ranges), dtype=np.int32)
        self.leaf = np.repeat(leaves, [b - a for a, b in self.ranges])
        found = vjp.rows(covectors) if found is None else found
        self.finite: np.ndarray = np.asarray(np.isfinite(found).all(axis=0))
        self.computed = found
        self.gradient = found if self.finite.all() else np.where(self.finite, found, 0.0)
        self.scale = np.concatenate([scale_of(x) for x in xs])
        self.plain = self._exact(of.plain, "plain autodiff")
        self.rule = self.plain if of.rule is of.plain else self._exact(of.rule, "rule")
        self._roundings: dict[tuple[Parts, bool], np.ndarray] = {}
        log.are_zero.append(not found.any())
        log.evaluations += 1 + sum(w is not None for w in {of.plain, of.rule})

    def _exact(self, witness: Witness | None, name: str) -> np.ndarray | None:
        if witness is None or self._log.is_late():
            return None
        try:
            rows = witness.at(self.xs, self.covectors)
        except TheirError as error:
            self._log.note(f"no {name} in float64 ({error})")
            return None
        rows = rows if self.finite.all() else np.where(self.finite, rows, 0.0)
        return rows if np.isfinite(rows).all() else None

    def typical(self, gradient: np.ndarray) -> np.ndarray:
        """The root mean square of each leaf, shape (cotangents, leaves)."""
        sizes = [np.sqrt(np.mean(gradient[:, a:b] ** 2, axis=1)) for a, b in self.ranges]
        return np.stack(sizes, axis=1)

    def excess(self, a: np.ndarray, b: np.ndarray, slack: Slack, typical: Any) -> np.ndarray:
        """The distance of two gradients at each element, in parts of what it may be."""
        found = []  # leaf by leaf, for the memory
        for k, (start, stop) in enumerate(self.ranges):
            x, y = a[:, start:stop], b[:, start:stop]
            allowed = slack(np.fmax(np.abs(x), np.abs(y)), typical[:, k, None])
            found.append((np.abs(x - y) / np.fmax(allowed, 1e-300)).max(axis=0))
        return np.concatenate(found)

    def rounding(self, parts: Parts, plain_alone: bool = False) -> np.ndarray:
        """The distance that roundings explain at each element, of plain AD or of the rule."""
        key = parts, plain_alone
        if key not in self._roundings:
            self._roundings[key] = self._rounding(parts, plain_alone)
        return self._roundings[key]

    def _rounding(self, parts: Parts, plain_alone: bool) -> np.ndarray:
        most = np.zeros(self.gradient.shape[1])
        pairs = [(self.of.plain, self.plain)]
        pairs += [] if plain_alone or self.rule is self.plain else [(self.of.rule, self.rule)]
        for witness, exact in pairs:
            if witness is not None and exact is not None:
                most = np.fmax(most, witness.moved(self.xs, self.covectors, parts, exact))
        for start, stop in self.ranges:
            most[start:stop] += np.median(most[start:stop])
        return TIMES * max(1.0, most.size / FEW) ** TAIL * most

    def is_zero(self, gradients: Sequence[np.ndarray], times: float) -> Any:
        """Whether gradients are less than some of their own roundings in float64."""
        larger = np.max(np.abs(gradients), axis=0)
        return np.all(larger <= times * self.rounding(IN_FLOAT64), axis=0)


def generator(seed: int, name: str) -> np.random.Generator:
    """A generator of the name's own, so that adding a leaf changes no other leaf's numbers."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def dense_numbers(seed: int, name: str, size: int) -> np.ndarray:
    """Numbers of random sign and magnitude in [0.5, 1.5], in eighths: short in binary."""
    return EIGHTHS[generator(seed, name).integers(0, len(EIGHTHS), size)]


def cotangents(function: CheckedFunction, seed: int) -> np.ndarray:
    """Two random dense cotangents as real vectors, of both signs at each output."""
    pairs = list(zip(function.output_names, function.outputs, strict=True))
    sizes = [(name, vectors.real_size(y)) for name, y in pairs]
    rows = [[dense_numbers(seed, f"{row} {name}", n) for name, n in sizes] for row in (0, 1)]
    found = np.stack([np.concatenate(row) for row in rows])
    firsts = [start for start, stop in vectors.areas(function.outputs) if stop > start]
    found[1, firsts] = -np.sign(found[0, firsts]) * np.abs(found[1, firsts])
    for row in found if found.shape[1] > 1 else ():
        if (row == row[0]).all():
            row[-1] *= -1  # alike they see no more than the sum of the outputs
    return found


def masked_rows(function: CheckedFunction, seed: int) -> np.ndarray:
    """A vector over the outputs, 1 on about half of the rows of each and 0 on the others."""
    masks = []
    for name, leaf in zip(function.output_names, function.outputs, strict=True):
        rows = leaf.shape[0] if leaf.ndim else 1
        kept = generator(seed, f"mask {name}").permutation(rows) < (rows + 1) // 2
        masks.append(np.repeat(kept.astype(float), vectors.real_size(leaf) // max(rows, 1)))
    return np.concatenate(masks)


def scale_of(leaf: Any) -> np.ndarray:
    """The scale of each real number of a leaf: about |x|, at least the leaf's typical one, or 1."""
    size = np.abs(vectors.widened_leaf(leaf)).ravel()
    typical, positive = vectors.root_mean_square(size), size[size > 0]
    if positive.size and typical > GARBAGE * np.median(positive):
        typical = np.median(positive)
    scale = np.maximum(size, typical if typical > 0 else 1.0)
    scale = 2.0 ** np.floor(np.log2(scale) + 0.5)
    return np.repeat(scale, 2) if vectors.is_complex(leaf) else scale


def further(function: CheckedFunction, seed: int, keeps: bool) -> list[jax.Array]:
    """Another point: every element nearer to zero by 2 to 8 percent of itself.

    By how much is each element's own, so that nothing is equal and no matrix symmetric, zeros are
    moved away from zero and no complex number is real. With `keeps` it is a function of the
    element's value, so that what is equal, zero or symmetric stays so; but for leaves of one value
    throughout, which are more often a test's `ones` than a structure.
    """
    shared, found = generator(seed, "nearby").uniform(0, 2 * np.pi), []
    for name, leaf in zip(function.names, function.inputs, strict=True):
        values, rng = vectors.widened_leaf(leaf), generator(seed, f"nearby {name}")
        if keeps and not np.all(values == values.ravel()[0]):
            size = np.where(values == 0, 1.0, np.abs(values))
            middle, swing = (LEAST + MOST) / 2, (MOST - LEAST) / 2
            values = values * (1 - middle - swing * np.sin(shared + np.log(size)))
        else:
            part = rng.uniform(LEAST, MOST, values.shape)
            typical = vectors.root_mean_square(values) or 1.0
            values = np.where(values == 0, part * typical, (1 - part) * values)
            if np.iscomplexobj(values):
                values = values * np.exp(1j * rng.uniform(LEAST, MOST, values.shape))
        found.append(jax.device_put(values.astype(leaf.dtype)))
    return found
