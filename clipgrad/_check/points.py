"""Points: the one of the user and further ones, and the random vectors of a check."""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._check import vectors
from clipgrad._check.checked_function import CheckedFunction, Range
from clipgrad._check.options import Options
from clipgrad._check.slopes import Neighborhood
from clipgrad._check.tolerances import FEW, GARBAGE, LEAST, MOST, PRECISIONS, TAIL, TIMES, Tolerance
from clipgrad._check.user_code import UserError
from clipgrad._check.vjp import VJP
from clipgrad._check.witnesses import Witness, Witnesses
from clipgrad._programs import Parts

EIGHTHS = np.concatenate([-np.arange(4, 13), np.arange(4, 13)]) / 8
# The roundings of a gradient as it is computed; of a rule, which may not write off what it reduces;
# of one in float64 with the constants of its own types; and of one in float64.
AS_COMPUTED, OF_RULE = Parts(1.0, 1.0, 1.0), Parts(1.0, 1.0, 0.0)
CONSTANTS, IN_FLOAT64 = Parts(0.0, 1.0), Parts(0.0, 0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """A point and the gradients there, arrays of shape (cotangents, inputs). See `point_at`.

    Attributes:
      witnesses: the function and its gradients, as programs.
      vjp: the VJP there.
      nearby: the function's values there and beside it.
      covectors: the cotangents.
      computed: the gradient as it was computed.
      rule: the rule's in float64, or None.
      plain: plain AD's, or None; the same array where they are one witness.
      notes: why one of them is missing.
    """

    witnesses: Witnesses
    vjp: VJP
    nearby: Neighborhood
    covectors: np.ndarray
    computed: np.ndarray
    rule: np.ndarray | None
    plain: np.ndarray | None
    notes: tuple[str, ...] = ()
    _roundings: dict = dataclasses.field(default_factory=dict, init=False, repr=False)

    @property
    def xs(self) -> Sequence[Any]:
        """The input leaves."""
        return self.nearby.xs

    @functools.cached_property
    def ranges(self) -> list[Range]:
        """The range of each leaf in the vector of inputs."""
        return self.witnesses.function.ranges

    @functools.cached_property
    def finite(self) -> np.ndarray:
        """Of which elements the gradient as it was computed is finite."""
        return np.asarray(np.isfinite(self.computed).all(axis=0))

    @functools.cached_property
    def gradient(self) -> np.ndarray:
        """The gradient as it was computed, 0 where it is not finite."""
        return self.computed if self.finite.all() else np.where(self.finite, self.computed, 0.0)

    @property
    def judged(self) -> np.ndarray:
        """The gradient that slopes judge: the rule in float64, or else as it was computed."""
        return self.gradient if self.rule is None else self.rule

    @functools.cached_property
    def scale(self) -> np.ndarray:
        """Of each element a power of two, about |x|."""
        return np.concatenate([scale_of(x) for x in self.xs])

    @functools.cached_property
    def leaf(self) -> np.ndarray:
        """Of each element the number of its leaf."""
        numbers = np.arange(len(self.ranges), dtype=np.int32)
        return np.repeat(numbers, [stop - start for start, stop in self.ranges])

    def typical(self, gradient: np.ndarray) -> np.ndarray:
        """The root mean square of each leaf, shape (cotangents, leaves)."""
        sizes = [np.sqrt(np.mean(gradient[:, a:b] ** 2, axis=1)) for a, b in self.ranges]
        return np.stack(sizes, axis=1)

    def excess(self, a: np.ndarray, b: np.ndarray, tolerance: Tolerance, typical: Any) -> Any:
        """The distance of two gradients at each element, in parts of what it may be."""
        parts = []  # leaf by leaf, for the memory
        for k, (start, stop) in enumerate(self.ranges):
            x, y = a[:, start:stop], b[:, start:stop]
            allowed = tolerance(np.fmax(np.abs(x), np.abs(y)), typical[:, k, None])
            parts.append((np.abs(x - y) / np.fmax(allowed, 1e-300)).max(axis=0))
        return np.concatenate(parts)

    def rounding(self, parts: Parts, plain_alone: bool = False) -> np.ndarray:
        """The distance that roundings explain at each element, of plain AD or of the rule."""
        key = parts, plain_alone or self.rule is self.plain
        if key not in self._roundings:
            self._roundings[key] = self._rounding(*key)
        return self._roundings[key]

    def _rounding(self, parts: Parts, plain_alone: bool) -> np.ndarray:
        moved = [
            witness.moved(self.xs, self.covectors, parts, exact)
            for witness, exact in self._exact(plain_alone)
        ]
        return self._explained_by(moved)

    def _exact(self, plain_alone: bool = False) -> list[tuple[Witness, np.ndarray]]:
        """The witnesses that have a gradient here, and their gradients."""
        pairs = [(self.witnesses.plain, self.plain)]
        if not plain_alone and self.rule is not self.plain:
            pairs.append((self.witnesses.rule, self.rule))
        return [(witness, exact) for witness, exact in pairs if witness and exact is not None]

    def _explained_by(self, moved: Sequence[np.ndarray]) -> np.ndarray:
        """The distance that is explained by what each element was moved by."""
        most = np.max([np.zeros(self.computed.shape[1]), *moved], axis=0)
        for start, stop in self.ranges:
            most[start:stop] += np.median(most[start:stop])
        return TIMES * max(1.0, most.size / FEW) ** TAIL * most

    @functools.cached_property
    def rounding_of_inputs(self) -> np.ndarray:
        """The distance that a rounding of the inputs explains, of the gradient as computed.

        It runs programs that are compiled already. Roundings of all numbers, `rounding`, are a
        program of their own, which is needed where this explains too little. It explains no more
        than some roundings, since inputs that are moved may leave a kink.
        """
        moved = self._explained_by([self.vjp.moved_with_inputs(self.xs, self.covectors)])
        return np.fmin(moved, self.some_roundings(self.witnesses.narrow))

    @functools.cached_property
    def rounding_of_inputs_in_float64(self) -> np.ndarray:
        """The distance that a rounding of the inputs in float64 explains, of the witnesses."""
        pairs = self._exact()
        return self._explained_by(
            [witness.moved_with_inputs(self.xs, self.covectors, exact) for witness, exact in pairs]
        )

    def some_roundings(self, dtype: str) -> np.ndarray:
        """Some roundings of the largest effect of any element; of the value if all are as small."""
        unit = PRECISIONS["float32"].roundings * float(jnp.finfo(dtype).eps)
        largest = np.abs(self.judged * self.scale).max()
        value = np.abs(vectors.to_numpy(self.witnesses.function.outputs))
        value = (np.abs(self.covectors) @ np.nan_to_num(value, posinf=0.0)).max()
        return unit * (value if largest <= unit * value else largest) / self.scale

    def is_zero(self, some: np.ndarray, gradients: Sequence[np.ndarray], times: float) -> Any:
        """Whether gradients at some elements are within so many of their roundings in float64."""
        is_zero = self.is_zero_by_inputs(some, gradients, times)
        if not is_zero.all():
            is_zero |= _are_within(times * self.rounding(IN_FLOAT64), some, gradients)
        return is_zero

    def is_zero_by_inputs(self, some: np.ndarray, gradients: Sequence[np.ndarray], times: float):
        """Whether they are within what so many roundings of the inputs explain."""
        if not len(some):
            return np.zeros(0, bool)
        room = np.fmin(times * self.rounding_of_inputs_in_float64, self.some_roundings("float64"))
        return _are_within(room, some, gradients)


def _are_within(room: np.ndarray, some: np.ndarray, gradients: Sequence[np.ndarray]) -> Any:
    """Whether some elements of gradients are no larger than the room that each has."""
    return np.all([np.abs(gradient[:, some]) <= room[some] for gradient in gradients], axis=(0, 1))


def point_at(
    witnesses: Witnesses,
    vjp: VJP,
    nearby: Neighborhood,
    covectors: np.ndarray,
    options: Options,
    computed: np.ndarray | None = None,
) -> Point:
    """Compute the gradients at a point: as the program does, by the rule, and by plain AD."""
    computed = vjp.rows(covectors) if computed is None else computed
    finite, notes = np.isfinite(computed).all(axis=0), []

    def exact(witness: Witness | None, name: str) -> np.ndarray | None:
        if witness is None or options.is_late():
            return None
        try:
            rows = np.where(finite, witness.at(nearby.xs, covectors), 0.0)
        except UserError as error:
            notes.append(f"no {name} in float64 ({error})")
            return None
        return rows if np.isfinite(rows).all() else None

    plain = exact(witnesses.plain, "plain autodiff")
    rule = plain if witnesses.rule is witnesses.plain else exact(witnesses.rule, "rule")
    return Point(witnesses, vjp, nearby, covectors, computed, rule, plain, tuple(notes))


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
    covectors = np.stack([np.concatenate(row) for row in rows])
    firsts = [start for start, stop in vectors.areas(function.outputs) if stop > start]
    covectors[1, firsts] = -np.sign(covectors[0, firsts]) * np.abs(covectors[1, firsts])
    for row in covectors if covectors.shape[1] > 1 else ():
        if (row == row[0]).all():
            row[-1] *= -1  # alike they see no more than the sum of the outputs
    return np.stack([vectors.as_held(row, function.outputs) for row in covectors])


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
    shared, leaves = generator(seed, "nearby").uniform(0, 2 * np.pi), []
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
        leaves.append(jax.device_put(values.astype(leaf.dtype)))
    return leaves
