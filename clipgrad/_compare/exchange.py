"""The examples of a batch: exchanged among its places, and the sketches of values meanwhile.

No shape changes, so one program serves all runs.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._compare.sketches import LENGTH, MASKED, Sketches, sketch, sketch_dtype
from clipgrad._diagnose import DiagnosisSubject
from clipgrad._trees import is_array, nearest, with_paths
from clipgrad._values import value_hook

IN_BATCH = "args[1]"  # the name of the inputs that are in the batch begins so
MAGNITUDES, LINEAR, SQUARED, REAL = range(4)  # the rows of the notes


def example_count(batch: Any) -> int:
    """The number of examples: the one leading axis of all arrays."""
    shapes = {path: np.shape(x) for path, x in with_paths(batch) if is_array(x) and np.ndim(x)}
    sizes = {shape[0] for shape in shapes.values()}
    if len(sizes) != 1 or min(sizes) < 2:
        raise ValueError(
            f"batch: got arrays of shapes {list(shapes.values())}, expected one leading axis for "
            "all, of at least two examples"
        )
    return sizes.pop()


def chosen_examples(examples: int | Sequence[int] | None, size: int) -> np.ndarray:
    """Whether each example is one of those that are held beside others; by default half of them."""
    half = np.random.default_rng(0).permutation(size)[: size // 2].tolist()
    wanted = half if examples is None else examples
    numbers = [wanted] if isinstance(wanted, int) else list(wanted)
    known = all(isinstance(i, int | np.integer) and -size <= i < size for i in numbers)
    if not known or not 0 < len({i % size for i in numbers}) < size:
        raise ValueError(
            f"examples: got {examples!r} of {size} examples, expected some of their positions, and "
            "not all"
        )
    chosen = np.zeros(size, bool)
    chosen[numbers] = True
    return chosen


def with_examples_at(given: DiagnosisSubject, numbers: np.ndarray) -> list[Any]:
    """The inputs of a loss with these examples in the places of the batch."""
    found = list(given.inputs)
    for i, x in enumerate(found):
        if _is_cut(given.names[i], x):
            rows = x[numbers]
            found[i] = jax.device_put(rows, x.sharding) if isinstance(x, jax.Array) else rows
    return found


def with_batch(given: DiagnosisSubject, batch: Any) -> list[Any]:
    """The inputs of a loss with another batch of the same types; the weights stay."""
    left = iter([x for x in jax.tree.leaves(batch) if is_array(x)])
    pairs = zip(given.names, given.inputs, strict=True)
    return [next(left) if name.startswith(f"{IN_BATCH}[0]") else x for name, x in pairs]


def check_examples_differ(given: DiagnosisSubject) -> None:
    """Raise `ValueError` if all examples are equal."""
    pairs = zip(given.names[:-1], given.inputs[:-1], strict=True)  # the last are weights
    hosts = [_plain_numbers(x) for name, x in pairs if _is_cut(name, x)]
    if all(np.array_equal(x, np.broadcast_to(x[:1], x.shape)) for x in hosts):
        raise ValueError("batch: got examples that are all equal, expected ones that differ")


def _is_cut(name: str, x: Any) -> bool:
    """Whether an input has the axis of the examples."""
    return name.startswith(IN_BATCH) and np.ndim(x) > 0


def _plain_numbers(x: Any) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def padded_places(batch: Any, other: Any) -> np.ndarray:
    """The places where batches differ, as (examples, positions) of the first array that does."""
    arrays, there = (dict(with_paths(x)) for x in (batch, other))
    types = [{p: (np.shape(x), str(getattr(x, "dtype", ""))) for p, x in t.items()}
             for t in (arrays, there)]  # fmt: skip
    if types[0] != types[1]:
        wrong = next((p for p in there if types[1][p] != types[0].get(p)), "")
        raise ValueError(
            f"padding: got {wrong or 'nothing'} of type {types[1].get(wrong)}, expected the batch "
            f"with other numbers where it is padded; {nearest(wrong, arrays)}; for other shapes "
            "write compare(fun, fun, (params, batch), other_args=(params, longer))"
        )
    for path, x in arrays.items():
        if is_array(x) and np.ndim(x):
            differs = _plain_numbers(x) != _plain_numbers(there[path])
            if np.any(differs):
                return differs.any(axis=tuple(range(2, differs.ndim)))
    raise ValueError("padding: got the batch itself, expected other numbers where it is padded")


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
        if (real := self.real) is not None:
            is_in = has_places(wide.shape, real.shape)
            real = jnp.reshape(real, real.shape + (1,) * (wide.ndim - real.ndim)) if is_in else True
            parts.append(jnp.where(real, wide, 0))
        return jnp.concatenate([first[None], jax.vmap(sketch)(jnp.stack(parts))])


def has_places(shape: tuple[int, ...], places: tuple[int, ...]) -> bool:
    """Whether a value of a shape has a part for each place of a batch."""
    return shape[: len(places)] == places
